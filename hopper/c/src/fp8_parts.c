/* Q, K and V in e4m3 with their scales, in the workspace of an FP8 call. */
#include <inttypes.h>

#include "internal.h"

enum { ONE_OFFSET = 16 }; /* of 1.0f, in the head of a workspace */

int64_t ha_ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

static size_t take(size_t *used, int64_t bytes) {
  const size_t place = *used;
  *used += (size_t)ha_ceil_div(bytes, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
  return place;
}

void ha_place_parts(fp8_parts *made, size_t begin, const fp8_sizes *s) {
  const int64_t of_q = s->scale_batch * s->heads * made->blocks_q * (int64_t)sizeof(float);
  const int64_t of_k = s->scale_batch * s->kv_heads * made->blocks_k * (int64_t)sizeof(float);
  made->end = (size_t)ha_ceil_div((int64_t)begin, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
  made->q = take(&made->end, s->rows_q * s->heads * s->head_dim);
  made->k = take(&made->end, s->rows_k * s->kv_heads * s->head_dim);
  made->vt = take(&made->end, s->scale_batch * s->kv_heads * s->head_dim_v * made->keys);
  made->q_scale = take(&made->end, of_q);
  made->k_scale = take(&made->end, of_k);
  made->v_scale = take(&made->end, of_k);
  made->mean_v = take(&made->end, s->means * s->kv_heads * s->head_dim_v * (int64_t)sizeof(float));
}

ha_status ha_select_value_mean(ha_dtype dtype, layout layout, const fp8_sizes *s, kernel_choice *choice) {
  const int64_t parts = ha_ceil_div(s->head_dim_v, VALUE_MEAN_COLUMNS);
  if (s->means > INT32_MAX / (s->kv_heads * parts)) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED, "%" PRId64 " sequences of %" PRId64 " heads are too many: split the batch",
                   s->means, s->kv_heads);
  }
  const bool clusters = s->means * s->kv_heads * parts < VALUE_MEAN_ENOUGH_CTAS;
  *choice = (kernel_choice){ha_value_mean_kernels[dtype][clusters][layout], 0};
  return HA_SUCCESS;
}

static const void *at(const void *workspace, size_t byte) { return (const char *)workspace + byte; }

void ha_add_mean_v(call *c, const void *workspace, const fp8_parts *x, const fp8_sizes *s) {
  const int64_t shape[] = {s->means, s->kv_heads, s->head_dim_v};
  ha_add_tensor(c, at(workspace, x->mean_v), FLOAT32, 3, shape, NULL);
}

void ha_add_fp8_scales(call *c, const void *workspace, const fp8_parts *x, const fp8_sizes *s, bool one_block) {
  const int64_t of_q[] = {s->scale_batch, s->heads, x->blocks_q}, of_k[] = {s->scale_batch, s->kv_heads, x->blocks_k};
  const int64_t ones[] = {s->means, s->kv_heads, 1}, all_the_same[] = {0, 0, 1};
  ha_add_tensor(c, at(workspace, x->q_scale), FLOAT32, 3, of_q, NULL);
  ha_add_tensor(c, at(workspace, x->k_scale), FLOAT32, 3, of_k, NULL);
  /* A lone scale of V is a factor of the output. */
  for (int i = 0; i < 2; i++) {
    if (one_block == (i == 1)) ha_add_tensor(c, at(workspace, x->v_scale), FLOAT32, 3, of_k, NULL);
    else ha_add_tensor(c, at(workspace, ONE_OFFSET), FLOAT32, 3, ones, all_the_same);
  }
  ha_add_mean_v(c, workspace, x, s);
}

void ha_add_signs(call *c, const void *workspace, const fp8_row *row, const fp8_parts *x, const fp8_sizes *s) {
  const int64_t signs = row->head_dim / 2, none = 0;
  ha_add_tensor(c, at(workspace, (size_t)row->signs_offset), INT32, 1, &signs, NULL);
  /* V is not rotated, and K keeps its mean. */
  for (int i = 0; i < 2; i++) ha_add_tensor(c, NULL, INT32, 1, &none, NULL);
  ha_add_mean_v(c, workspace, x, s);
}
