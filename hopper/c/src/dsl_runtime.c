/* What compiled kernels call. Their host code, which the CuTe DSL generates, checks arguments, makes descriptors of
 * TMA and launches; it leaves to its runtime how CUDA is reached, and to TVM FFI errors and the stream. This file is
 * both, on the driver API alone: the names and arguments are those that an object file asks for. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "dsl_runtime.h"

enum { FAILED = -1 };

/* What a launch is told beside its arguments. */
static _Thread_local struct {
  void *stream;
  int device;
  bool only_load;
  ha_status status;
  const char *function; /* of the driver, that was called last */
} now;

void ha_enter(void *stream, int device, bool only_load) {
  now.stream = stream;
  now.device = device;
  now.only_load = only_load;
  now.status = HA_SUCCESS;
  now.function = "";
}

ha_status ha_leave(int result) {
  if (!result) return HA_SUCCESS;
  if (now.status == HA_SUCCESS) return ha_fail(HA_ERROR_CUDA, "a kernel failed with %d", result);
  return now.status;
}

/* ---- TVM FFI ---- */

void *TVMFFIEnvGetStream(int32_t device_type, int32_t device_index) {
  (void)device_type, (void)device_index;
  return now.stream;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  char text[768] = "";
  size_t used = 0;
  for (int32_t i = 0; i < count && used < sizeof text; i++) {
    if (parts[i]) used += (size_t)snprintf(text + used, sizeof text - used, "%s", parts[i]);
  }
  now.status = ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s: %s", kind, text);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_error, int32_t code) {
  (void)set_error;
  now.status = ha_check_cuda(now.function, code);
}

/* ---- a kernel's code, loaded once, and to each GPU when it first runs there ---- */

typedef struct library {
  void *handle; /* CUlibrary; its address is what a kernel's functions take */
  _Atomic uint64_t devices; /* a bit each */
} library;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static int load_here(_Atomic(library *) *slot, library_function *load, load_function *load_to_device) {
  library *loaded = atomic_load(slot);
  if (!loaded) {
    loaded = calloc(1, sizeof *loaded);
    if (!loaded) {
      now.status = ha_fail(HA_ERROR_CUDA, "no memory for a kernel's library");
      return FAILED;
    }
    const int failed = load(&loaded->handle);
    if (failed) {
      free(loaded);
      return failed;
    }
    atomic_store(slot, loaded);
  }
  const uint64_t bit = UINT64_C(1) << now.device;
  if (atomic_load(&loaded->devices) & bit) return 0;
  const int failed = load_to_device(&loaded->handle, now.device);
  if (!failed) atomic_fetch_or(&loaded->devices, bit);
  return failed;
}

int cuda_dialect_init_library_once(void *state, library_function *load, load_function *load_to_device,
                                   void *set_error) {
  (void)set_error;
  _Atomic(library *) *slot = state;
  library *loaded = atomic_load_explicit(slot, memory_order_acquire);
  if (now.device >= MOST_DEVICES) {
    now.status = ha_fail(HA_ERROR_NOT_SUPPORTED, "GPU %d is above %d", now.device, MOST_DEVICES - 1);
    return FAILED;
  }
  if (loaded && atomic_load_explicit(&loaded->devices, memory_order_acquire) >> now.device & 1) return 0;
  pthread_mutex_lock(&loading);
  const int failed = load_here(slot, load, load_to_device);
  pthread_mutex_unlock(&loading);
  if (failed && now.status == HA_SUCCESS) now.status = ha_check_cuda(now.function, failed);
  return failed ? FAILED : 0;
}

/* The driver frees kernels with the context. When this is called, at the end of the process, it may be gone. */
void cuda_dialect_unload_library_once(void *state) { (void)state; }

/* ---- CUDA ---- */

#define DRIVER(name) (now.function = #name, ha_driver()->name)

int _cudaGetDevice(int *index) {
  *index = now.device;
  return 0;
}

/* All tensors of a call are on the GPU that is current. */
int _cudaSetDevice(int index) {
  (void)index;
  return 0;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int index) {
  return DRIVER(cuDeviceGetAttribute)(value, attribute, index);
}

int _cudaLibraryLoadData(void **loaded, const void *code, const void *options, const void *values, unsigned count,
                         const void *library_options, const void *library_values, unsigned library_count) {
  return DRIVER(cuLibraryLoadData)(loaded, code, options, values, count, library_options, library_values,
                                   library_count);
}

int _cudaLibraryGetKernel(void **kernel, void *loaded, const char *name) {
  return DRIVER(cuLibraryGetKernel)(kernel, loaded, name);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int index) {
  return DRIVER(cuKernelGetAttribute)(value, attribute, kernel, index);
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int index) {
  return DRIVER(cuKernelSetAttribute)(attribute, value, kernel, index);
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  return _cudaKernelSetAttributeForDevice(kernel, attribute, value, now.device);
}

int _cudaLaunchKernelEx(const dsl_launch_config *config, void *kernel, void **arguments) {
  if (now.only_load) return 0;
  launch_config launched = {
      .shared_bytes = (unsigned)config->shared_bytes,
      .stream = config->stream,
      .attributes = config->attributes,
      .num_attributes = config->num_attributes,
  };
  memcpy(launched.grid, config->grid, sizeof launched.grid);
  memcpy(launched.block, config->block, sizeof launched.block);
  return DRIVER(cuLaunchKernelEx)(&launched, kernel, arguments, NULL);
}
