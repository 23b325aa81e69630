/* The CUDA driver, opened when it is first needed. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "internal.h"

#define LIBRARY "libcuda.so.1"

enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MULTIPROCESSOR_COUNT = 16 }; /* CUdevice_attribute */
enum { INVALID_CONTEXT = 201 };                                                   /* CUresult */

static driver functions;
static ha_status status_of_opening;
static char reason[256];
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static void refuse(const char *text, const char *detail) {
  status_of_opening = HA_ERROR_NO_DRIVER;
  snprintf(reason, sizeof reason, "%s%s", text, detail);
}

static void open_driver(void) {
  void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    refuse("the NVIDIA driver cannot be opened: ", dlerror());
    return;
  }
  const struct {
    const char *name;
    void **function;
  } wanted[] = {
#define FUNCTION(name) {#name, (void **)&functions.name}
      FUNCTION(cuInit),
      FUNCTION(cuCtxGetDevice),
      FUNCTION(cuDeviceGetAttribute),
      FUNCTION(cuGetErrorName),
      FUNCTION(cuGetErrorString),
      FUNCTION(cuLibraryLoadData),
      FUNCTION(cuLibraryGetKernel),
      FUNCTION(cuKernelGetAttribute),
      FUNCTION(cuKernelSetAttribute),
      FUNCTION(cuLaunchKernelEx),
#undef FUNCTION
      /* Names of the interface with addresses of 64 bits. */
      {"cuMemcpyHtoDAsync_v2", (void **)&functions.cuMemcpyHtoDAsync},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    *wanted[i].function = dlsym(library, wanted[i].name);
    if (!*wanted[i].function) {
      refuse("the NVIDIA driver is older than CUDA 12.0: it has no ", wanted[i].name);
      return;
    }
  }
  if (functions.cuInit(0)) refuse("the NVIDIA driver cannot be started: ", "cuInit failed");
}

const driver *ha_driver(void) {
  pthread_once(&opened, open_driver);
  if (status_of_opening != HA_SUCCESS) {
    ha_fail(status_of_opening, "%s", reason);
    return NULL;
  }
  return &functions;
}

ha_status ha_check_cuda(const char *function, cu_result result) {
  if (!result) return HA_SUCCESS;
  const char *name = NULL, *text = NULL;
  if (functions.cuGetErrorName) {
    functions.cuGetErrorName(result, &name);
    functions.cuGetErrorString(result, &text);
  }
  return ha_fail(HA_ERROR_CUDA, "%s: %s (%d), %s", function, name ? name : "CUDA error", result, text ? text : "");
}

static ha_status read_device(const driver *d, int index, device *found) {
  int major = 0, minor = 0, count = 0;
  if (d->cuDeviceGetAttribute(&major, CAPABILITY_MAJOR, index) ||
      d->cuDeviceGetAttribute(&minor, CAPABILITY_MINOR, index) ||
      d->cuDeviceGetAttribute(&count, MULTIPROCESSOR_COUNT, index)) {
    return ha_fail(HA_ERROR_CUDA, "cuDeviceGetAttribute failed for GPU %d", index);
  }
  if (major != 9 || minor != 0) {
    return ha_fail(HA_ERROR_NO_DEVICE, "GPU %d has compute capability %d.%d, allowed: 9.0 (Hopper)", index, major,
                   minor);
  }
  *found = (device){index, count};
  return HA_SUCCESS;
}

ha_status ha_current_device(device *found) {
  /* Of GPUs that were read before; 0 for others. */
  static _Atomic int multiprocessors[MOST_DEVICES];
  const driver *d = ha_driver();
  if (!d) return status_of_opening;
  int index = 0;
  cu_result result = d->cuCtxGetDevice(&index);
  if (result == INVALID_CONTEXT) {
    return ha_fail(HA_ERROR_NO_DEVICE, "no CUDA context is current on this thread: call cudaSetDevice or "
                                       "cuCtxSetCurrent before");
  }
  if (result) return ha_check_cuda("cuCtxGetDevice", result);
  const bool is_kept = index >= 0 && index < MOST_DEVICES;
  const int kept = is_kept ? atomic_load_explicit(&multiprocessors[index], memory_order_relaxed) : 0;
  if (kept) {
    *found = (device){index, kept};
    return HA_SUCCESS;
  }
  const ha_status status = read_device(d, index, found);
  if (status == HA_SUCCESS && is_kept) multiprocessors[index] = found->multiprocessors;
  return status;
}

ha_status ha_device_with_margin(int sm_margin, device *found) {
  *found = (device){0};
  ha_status status = ha_current_device(found);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", sm_margin, 0, found->multiprocessors - 1);
  found->multiprocessors -= sm_margin;
  return status;
}

ha_status ha_workspace_init(void *workspace, size_t workspace_size, void *stream) {
  ha_status status = ha_check_workspace(workspace, workspace_size, sizeof ha_workspace_head);
  device here;
  if (status == HA_SUCCESS) status = ha_current_device(&here);
  if (status != HA_SUCCESS) return status;
  const uint64_t address = (uintptr_t)workspace;
  return ha_check_cuda("cuMemcpyHtoDAsync",
                       functions.cuMemcpyHtoDAsync(address, ha_workspace_head, sizeof ha_workspace_head, stream));
}
