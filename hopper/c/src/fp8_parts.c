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

void ha_place_parts(fp8_parts *made, size_t begin) {
  const fp8_sizes *s = &made->sizes;
  const int64_t of_q = s->batch * s->heads * s->blocks_q * (int64_t)sizeof(float);
  const int64_t of_k = s->batch * s->kv_heads * s->blocks_k * (int64_t)sizeof(float);
  made->end = (size_t)ha_ceil_div((int64_t)begin, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
  made->q = take(&made->end, s->batch * s->rows_q * s->heads * s->head_dim);
  made->k = take(&made->end, s->batch * s->rows_k * s->kv_heads * s->head_dim);
  made->vt = take(&made->end, s->batch * s->kv_heads * s->head_dim_v * s->keys);
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
  static const int64_t clusters[] = VALUE_MEAN_CLUSTERS;
  const int64_t alone = s->means * s->kv_heads * parts;
  int way = 0;
  while (way < VALUE_MEAN_WAYS - 1 && alone * clusters[way] < VALUE_MEAN_ENOUGH_CTAS) {
    ++way;
  }
  *choice = (kernel_choice){ha_value_mean_kernels[dtype][way][layout], 0};
  return HA_SUCCESS;
}

static const void *at(const void *workspace, size_t byte) { return (const char *)workspace + byte; }

ha_status ha_check_groups(int64_t heads, int64_t of_q, int64_t kv_heads, int64_t of_k) {
  /* Each product is compared by a division, before it could overflow. */
  if (heads <= FP8_MAX_ITEMS / of_q && kv_heads <= FP8_MAX_ITEMS / of_k / 2 &&
      heads * of_q + 2 * kv_heads * of_k <= FP8_MAX_ITEMS) {
    return HA_SUCCESS;
  }
  return ha_fail(HA_ERROR_NOT_SUPPORTED, "the quantizer counts at most %" PRId64 " groups of rows: split the batch",
                 (int64_t)FP8_MAX_ITEMS);
}

void ha_add_codes(call *c, const void *workspace, const fp8_parts *x, int dimensions) {
  const fp8_sizes *s = &x->sizes;
  const int64_t q[] = {s->batch, s->rows_q, s->heads, s->head_dim};
  const int64_t k[] = {s->batch, s->rows_k, s->kv_heads, s->head_dim};
  const int64_t vt[] = {s->batch, s->kv_heads, s->head_dim_v, s->keys};
  const int skipped = 4 - dimensions;
  ha_add_tensor(c, at(workspace, x->q), FLOAT8_E4M3, dimensions, q + skipped, NULL);
  ha_add_tensor(c, at(workspace, x->k), FLOAT8_E4M3, dimensions, k + skipped, NULL);
  ha_add_tensor(c, at(workspace, x->vt), FLOAT8_E4M3, dimensions, vt + skipped, NULL);
}

static void add_scale(call *c, const void *workspace, size_t place, const fp8_sizes *s, bool is_of_q) {
  const int64_t of_q[] = {s->batch, s->heads, s->blocks_q}, of_k[] = {s->batch, s->kv_heads, s->blocks_k};
  ha_add_tensor(c, at(workspace, place), FLOAT32, 3, is_of_q ? of_q : of_k, NULL);
}

void ha_add_mean_v(call *c, const void *workspace, const fp8_parts *x) {
  const int64_t shape[] = {x->sizes.means, x->sizes.kv_heads, x->sizes.head_dim_v};
  ha_add_tensor(c, at(workspace, x->mean_v), FLOAT32, 3, shape, NULL);
}

void ha_add_quantized(call *c, const void *workspace, const fp8_parts *x, const fp8_row *row) {
  const int64_t signs = row->head_dim / 2, none = 0;
  ha_add_codes(c, workspace, x, 4);
  add_scale(c, workspace, x->q_scale, &x->sizes, true);
  add_scale(c, workspace, x->k_scale, &x->sizes, false);
  add_scale(c, workspace, x->v_scale, &x->sizes, false);
  ha_add_tensor(c, at(workspace, (size_t)row->signs_offset), INT32, 1, &signs, NULL);
  /* V is not rotated, and K keeps its mean. */
  for (int i = 0; i < 2; i++) ha_add_tensor(c, NULL, INT32, 1, &none, NULL);
  ha_add_mean_v(c, workspace, x);
}

void ha_add_fp8_scales(call *c, const void *workspace, const fp8_parts *x, bool one_block) {
  const fp8_sizes *s = &x->sizes;
  const int64_t ones[] = {s->means, s->kv_heads, 1}, all_the_same[] = {0, 0, 1};
  add_scale(c, workspace, x->q_scale, s, true);
  add_scale(c, workspace, x->k_scale, s, false);
  /* A lone scale of V is a factor of the output. */
  for (int i = 0; i < 2; i++) {
    if (one_block == (i == 1)) add_scale(c, workspace, x->v_scale, s, false);
    else ha_add_tensor(c, at(workspace, ONE_OFFSET), FLOAT32, 3, ones, all_the_same);
  }
  ha_add_mean_v(c, workspace, x);
}
