/* The functions that object files of kernels ask for (dsl_runtime.c), and what stands around a launch. */
#ifndef HA_DSL_RUNTIME_H
#define HA_DSL_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "internal.h"

/* cudaLaunchConfig_t. */
typedef struct dsl_launch_config {
  unsigned grid[3];
  unsigned block[3];
  size_t shared_bytes;
  void *stream;
  launch_attribute *attributes;
  unsigned num_attributes;
} dsl_launch_config;

typedef int library_function(void **library);
typedef int load_function(void **library, int device);

/* What launches of this thread are to use. */
void ha_enter(void *stream, int device, bool only_load);

/* What became of one, by the result of its entry. */
ha_status ha_leave(int result);

void *TVMFFIEnvGetStream(int32_t device_type, int32_t device_index);
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text);
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_error, int32_t code);
int cuda_dialect_init_library_once(void *state, library_function *load, load_function *load_to_device,
                                   void *set_error);
void cuda_dialect_unload_library_once(void *state);
int _cudaGetDevice(int *index);
int _cudaSetDevice(int index);
int _cudaDeviceGetAttribute(int *value, int attribute, int index);
int _cudaLibraryLoadData(void **loaded, const void *code, const void *options, const void *values, unsigned count,
                         const void *library_options, const void *library_values, unsigned library_count);
int _cudaLibraryGetKernel(void **kernel, void *loaded, const char *name);
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int index);
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int index);
int _cudaFuncSetAttribute(void *kernel, int attribute, int value);
int _cudaLaunchKernelEx(const dsl_launch_config *config, void *kernel, void **arguments);

#endif
