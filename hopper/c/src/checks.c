/* What arguments have to be, whatever the kernel. */
#include <inttypes.h>
#include <string.h>

#include "internal.h"

enum { TMA_BYTES = 16 };

ha_status ha_read_params(void *own, size_t size, size_t least, const void *given, const char *initialiser) {
  size_t given_size = 0;
  if (given) memcpy(&given_size, given, sizeof given_size);
  if (given_size < least || given_size > size) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "params is not of this version of the library, struct_size is %zu, allowed: %zu to %zu; initialise "
                   "it with %s",
                   given_size, least, size, initialiser);
  }
  memcpy(own, given, given_size);
  return HA_SUCCESS;
}

ha_status ha_check_range(const char *name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed: %" PRId64 " to %" PRId64, name, value, least,
                 most);
}

static ha_status check_head_dim(const char *name, int64_t value) {
  if (value % HEAD_DIM_STEP == 0 && value >= HEAD_DIM_STEP && value <= MAX_HEAD_DIM) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed: multiples of %d from %d to %d", name, value,
                 HEAD_DIM_STEP, HEAD_DIM_STEP, MAX_HEAD_DIM);
}

ha_status ha_check_sizes(ha_dtype dtype, const problem_sizes *sizes) {
  if (dtype != HA_FLOAT16 && dtype != HA_BFLOAT16) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "dtype is %d, allowed: HA_FLOAT16 or HA_BFLOAT16", (int)dtype);
  }
  ha_status status = check_head_dim("head_dim", sizes->head_dim);
  if (status == HA_SUCCESS) status = check_head_dim("head_dim_v", sizes->head_dim_v);
  if (status == HA_SUCCESS) status = ha_check_range("kv_heads", sizes->kv_heads, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("heads", sizes->heads, 1, INT32_MAX);
  if (status != HA_SUCCESS) return status;
  if (sizes->heads % sizes->kv_heads) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "heads is %" PRId64 ", allowed: multiples of kv_heads, %" PRId64,
                   sizes->heads, sizes->kv_heads);
  }
  return HA_SUCCESS;
}

ha_status ha_check_scale(double given, int64_t head_dim, double *scale) {
  /* Not "<" and ">", so that NaN is refused. */
  if (given != 0 && !(given >= SMALLEST_SCALE && given <= LARGEST_SCALE)) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "softmax_scale is %g, allowed: %g to %g, or 0 for head_dim^-0.5", given,
                   SMALLEST_SCALE, LARGEST_SCALE);
  }
  *scale = given != 0 ? given : __builtin_pow((double)head_dim, -0.5);
  return HA_SUCCESS;
}

ha_status ha_check_workspace(const void *workspace, size_t size, size_t needed) {
  if (!workspace || (uintptr_t)workspace % WORKSPACE_ALIGNMENT) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "workspace is %p, allowed: memory of the GPU at a multiple of %d bytes",
                   workspace, WORKSPACE_ALIGNMENT);
  }
  if (size < needed) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "workspace_size is %zu, allowed: %zu or more", size, needed);
  }
  return HA_SUCCESS;
}

bool ha_fits(const int64_t *sizes, int count, int64_t most) {
  int64_t product = 1;
  for (int i = 0; i < count; i++) {
    if (sizes[i] && product > most / sizes[i]) return false;
    product *= sizes[i];
  }
  return true;
}

ha_status ha_check_cache(const cache_sizes *s) {
  ha_status status = ha_check_range("pages", s->pages, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("page_size", s->page_size, 1, MAX_SEQLEN);
  if (status != HA_SUCCESS) return status;
  if (s->has_table) return ha_check_range("pages_of_sequence", s->pages_of_sequence, 1, MAX_SEQLEN / s->page_size);
  if (s->pages >= s->batch) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                 "pages is %" PRId64 ", allowed without a page_table: batch, %" PRId64 ", or more", s->pages, s->batch);
}

ha_status ha_check_cache_dtype(ha_dtype dtype, ha_dtype cache_dtype) {
  if (cache_dtype == dtype || cache_dtype == HA_FLOAT8_E4M3) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "cache_dtype is %d, allowed: dtype, %d, or HA_FLOAT8_E4M3",
                 (int)cache_dtype, (int)dtype);
}

ha_status ha_check_descales(const float *k_descale, const float *v_descale) {
  static const char WHAT[] = "with a cache of e4m3 (batch, kv_heads) float32";
  const ha_status status = ha_check_array("k_descale", k_descale, WHAT);
  return status == HA_SUCCESS ? ha_check_array("v_descale", v_descale, WHAT) : status;
}

ha_status ha_check_array(const char *name, const void *data, const char *what) {
  if (!data) return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is NULL, allowed: %s on the GPU", name, what);
  if ((uintptr_t)data % sizeof(int32_t) == 0) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %p, allowed: %s on the GPU, at a multiple of 4 bytes", name, data,
                 what);
}

ha_status ha_check_tensor(const char *name, const ha_tensor *t, ha_dtype dtype, int dimensions, const int64_t *shape,
                          int64_t *strides) {
  static const int STEPS[] = {[HA_FLOAT16] = TMA_BYTES / 2, [HA_BFLOAT16] = TMA_BYTES / 2,
                              [HA_FLOAT8_E4M3] = TMA_BYTES, [HA_FLOAT32] = TMA_BYTES / 4};
  const int step = STEPS[dtype];
  static const char *const PLACES[] = {"batch", "row", "head"};
  const int64_t given[] = {t->stride_batch, t->stride_row, t->stride_head};
  const int first = 4 - dimensions; /* packed tensors have no batch */
  const bool is_contiguous = !given[0] && !given[1] && !given[2];
  if (!t->data || (uintptr_t)t->data % TMA_BYTES) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s.data is %p, allowed: memory of the GPU at a multiple of %d bytes",
                   name, t->data, TMA_BYTES);
  }
  int64_t contiguous = 1;
  for (int i = dimensions - 1; i >= 0; contiguous *= shape[i--]) {
    strides[i] = contiguous;
    if (i == dimensions - 1 || is_contiguous) continue;
    const int64_t stride = given[first + i];
    const bool is_good = stride > 0 && stride % step == 0;
    if (!is_good && shape[i] > 1) {
      return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                     "%s.stride_%s is %" PRId64 ", allowed: positive multiples of %d elements, or all strides 0 for a "
                     "contiguous tensor",
                     name, PLACES[first + i], stride, step);
    }
    strides[i] = is_good ? stride : step;
  }
  return HA_SUCCESS;
}

ha_status ha_check_operands(operand *operands, int count) {
  ha_status status = HA_SUCCESS;
  for (operand *o = operands; status == HA_SUCCESS && o < operands + count; o++) {
    status = ha_check_tensor(o->name, o->given, o->dtype, o->dimensions, o->shape, o->strides);
  }
  return status;
}
