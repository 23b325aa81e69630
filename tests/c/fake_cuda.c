/* A driver without a GPU, for tests: it stands in for libcuda.so.1, says that there is a Hopper, and keeps the last
 * launch for the test to look at. */
#include <stddef.h>
#include <string.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201 };

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned num_attributes;
} launch_config;

/* What a test reads and sets. */
int fake_context = 1, fake_capability = 90, fake_multiprocessors = 132, fake_result_of_launch = 0, fake_keeps_descriptors = 0;
int fake_launches, fake_loads, fake_shared_limit, fake_copied;
char fake_kernel[512];
launch_config fake_config;
unsigned char fake_descriptors[4][128];

static char loaded_name[512];
static int library, kernel;

int cuInit(unsigned flags) { return (int)flags; }

int cuCtxGetDevice(int *device) {
  *device = 0;
  return fake_context ? 0 : INVALID_CONTEXT;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = fake_multiprocessors; return 0;
    case 75: *value = fake_capability / 10; return 0;
    case 76: *value = fake_capability % 10; return 0;
    case 97: *value = 232448; return 0;
  }
  return INVALID_VALUE;
}

int cuGetErrorName(int code, const char **name) {
  *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OTHER";
  return 0;
}

int cuGetErrorString(int code, const char **text) {
  *text = code == 719 ? "unspecified launch failure" : "another error";
  return 0;
}

int cuMemcpyHtoDAsync_v2(unsigned long long address, const void *from, size_t count, void *stream) {
  (void)address, (void)from, (void)stream;
  fake_copied += (int)count;
  return 0;
}

int cuLibraryLoadData(void **loaded, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  (void)code, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  fake_loads++;
  *loaded = &library;
  return 0;
}

int cuLibraryGetKernel(void **found, void *loaded, const char *name) {
  if (loaded != &library) return INVALID_VALUE;
  strncpy(loaded_name, name, sizeof loaded_name - 1);
  *found = &kernel;
  return 0;
}

int cuKernelGetAttribute(int *value, int attribute, void *of, int device) {
  (void)attribute, (void)device;
  *value = 0;
  return of == &kernel ? 0 : INVALID_VALUE;
}

int cuKernelSetAttribute(int attribute, int value, void *of, int device) {
  (void)device;
  if (attribute == 8) fake_shared_limit = value;
  return of == &kernel ? 0 : INVALID_VALUE;
}

int cuLaunchKernelEx(const launch_config *config, void *of, void **arguments, void **extra) {
  (void)extra;
  if (of != &kernel) return INVALID_VALUE;
  fake_launches++;
  fake_config = *config;
  memcpy(fake_kernel, loaded_name, sizeof fake_kernel);
  for (int i = 0; i < 4 && fake_keeps_descriptors; i++) memcpy(fake_descriptors[i], arguments[i], sizeof fake_descriptors[i]);
  return fake_result_of_launch;
}
