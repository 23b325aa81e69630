/* Attention of sequences of one length in FP8: one kernel quantizes, another attends. */
#include <inttypes.h>

#include "internal.h"

enum { Q, K, V, OUT, NUM_OPERANDS };
enum { ONE_OFFSET = 16 }; /* of 1.0f, in the head of a workspace */

#define ALL_ROWS INT32_MAX /* of a block, where all rows of a head share a scale */

/* What the quantizer leaves in the workspace, behind its head: at which bytes, and how many there are in all. */
typedef struct quantized {
  size_t q, k, vt, q_scale, k_scale, v_scale;
  size_t bytes;
  int64_t keys;   /* of V transposed, in whole steps */
  int64_t blocks; /* of K and V, that have a scale each */
} quantized;

static int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

static size_t take(size_t *used, int64_t bytes) {
  const size_t place = *used;
  *used += (size_t)ceil_div(bytes, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
  return place;
}

static quantized lay_out(const ha_forward_params *p, const fp8_row *row) {
  quantized x = {.bytes = WORKSPACE_HEAD_BYTES};
  const int64_t of_q = p->batch * p->heads * p->seqlen_q, kv_heads = p->batch * p->kv_heads;
  x.keys = ceil_div(p->seqlen_k, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP;
  x.blocks = ceil_div(p->seqlen_k, row->block_k);
  x.q = take(&x.bytes, of_q * p->head_dim);
  x.k = take(&x.bytes, kv_heads * p->seqlen_k * p->head_dim);
  x.vt = take(&x.bytes, kv_heads * p->head_dim_v * x.keys);
  x.q_scale = take(&x.bytes, of_q * (int64_t)sizeof(float));
  x.k_scale = take(&x.bytes, kv_heads * x.blocks * (int64_t)sizeof(float));
  x.v_scale = take(&x.bytes, kv_heads * x.blocks * (int64_t)sizeof(float));
  return x;
}

static const void *at(const ha_forward_params *p, size_t byte) { return (const char *)p->workspace + byte; }

static const fp8_row *find_row(const ha_forward_params *p, const mask *m, bool one_block) {
  const int64_t seen = ha_most_keys(m, p->seqlen_k);
  for (size_t i = 0; i < ha_num_fp8_rows; i++) {
    const fp8_row *row = &ha_fp8_rows[i];
    if (row->dtype != p->dtype || row->head_dim != p->head_dim || row->head_dim_v != p->head_dim_v) continue;
    if (row->causal != m->causal || row->window != ha_has_window(m) || row->one_block != one_block) continue;
    if (row->two_level == (p->fp8_two_level != 0) && seen <= row->max_seqlen_k) return row;
  }
  return NULL;
}

static const fp8_row *select_row(const ha_forward_params *p, const mask *m) {
  const fp8_row *row = find_row(p, m, false);
  return row && p->seqlen_k <= row->block_k ? find_row(p, m, true) : row;
}

static ha_status check_items(const ha_forward_params *p, const fp8_row *row) {
  const int64_t of_q = ceil_div(p->seqlen_q, row->quantizer_rows[0]);
  const int64_t of_k = ceil_div(p->seqlen_k, row->quantizer_rows[1]);
  /* Each product is compared by a division, before it could overflow. */
  const int64_t heads = p->batch * p->heads, kv_heads = p->batch * p->kv_heads;
  if (heads <= FP8_MAX_ITEMS / of_q && kv_heads <= FP8_MAX_ITEMS / of_k / 2 &&
      heads * of_q + 2 * kv_heads * of_k <= FP8_MAX_ITEMS) {
    return HA_SUCCESS;
  }
  return ha_fail(HA_ERROR_NOT_SUPPORTED, "the quantizer counts at most %" PRId64 " groups of rows: split the batch",
                 (int64_t)FP8_MAX_ITEMS);
}

static ha_status make_plan(const ha_forward_params *p, dense_problem *made, const fp8_row **row) {
  const ha_status status = ha_check_dense(p, made);
  if (status != HA_SUCCESS) return status;
  *row = select_row(p, &made->mask);
  if (!*row) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "head_dim is %" PRId64 " and head_dim_v %" PRId64
                   ", allowed in FP8: (64, 64), (96, 96), (128, 128), (192, 128), (192, 192) and (256, 256)",
                   p->head_dim, p->head_dim_v);
  }
  if (made->is_empty) return HA_SUCCESS;
  const ha_status tiles = ha_check_tiles(p, (*row)->tile_m);
  return tiles == HA_SUCCESS ? check_items(p, *row) : tiles;
}

static void add_codes(call *c, const ha_forward_params *p, const quantized *x, const operand operands[NUM_OPERANDS]) {
  const int64_t vt[] = {p->batch, p->kv_heads, p->head_dim_v, x->keys};
  ha_add_tensor(c, at(p, x->q), FLOAT8_E4M3, 4, operands[Q].shape, NULL);
  ha_add_tensor(c, at(p, x->k), FLOAT8_E4M3, 4, operands[K].shape, NULL);
  ha_add_tensor(c, at(p, x->vt), FLOAT8_E4M3, 4, vt, NULL);
}

static ha_status quantize(const ha_forward_params *p, const fp8_row *row, const quantized *x,
                          const operand operands[NUM_OPERANDS], const device *here, bool only_load) {
  const int64_t of_q[] = {p->batch, p->heads, p->seqlen_q}, of_k[] = {p->batch, p->kv_heads, x->blocks};
  const int64_t signs[] = {p->head_dim / 2}, none[] = {0};
  call c;
  ha_call_begin(&c, here->index);
  for (int i = Q; i <= V; i++) {
    ha_add_tensor(&c, operands[i].data, ha_element_of(p->dtype), 4, operands[i].shape, operands[i].strides);
  }
  add_codes(&c, p, x, operands);
  ha_add_tensor(&c, at(p, x->q_scale), FLOAT32, 3, of_q, NULL);
  ha_add_tensor(&c, at(p, x->k_scale), FLOAT32, 3, of_k, NULL);
  ha_add_tensor(&c, at(p, x->v_scale), FLOAT32, 3, of_k, NULL);
  ha_add_tensor(&c, at(p, (size_t)row->signs_offset), INT32, 1, signs, NULL);
  /* V is not rotated, and no mean is subtracted. */
  for (int i = 0; i < 3; i++) ha_add_tensor(&c, NULL, INT32, 1, none, NULL);
  ha_add_int(&c, (int64_t)here->multiprocessors * row->quantizer_ctas_per_sm);
  return ha_run(&ha_kernels[row->quantizer], &c, p->stream, only_load);
}

static void add_scales(call *c, const ha_forward_params *p, const fp8_row *row, const quantized *x) {
  const int64_t of_q[] = {p->batch, p->heads, p->seqlen_q}, of_k[] = {p->batch, p->kv_heads, x->blocks};
  const int64_t ones[] = {p->batch, p->kv_heads, 1}, all_the_same[] = {0, 0, 1};
  const int64_t no_mean[] = {p->batch, p->kv_heads, 0}, vectors[] = {4 * p->kv_heads, 4, 1};
  ha_add_tensor(c, at(p, x->q_scale), FLOAT32, 3, of_q, NULL);
  ha_add_tensor(c, at(p, x->k_scale), FLOAT32, 3, of_k, NULL);
  /* A lone scale of V is a factor of the output. */
  for (int i = 0; i < 2; i++) {
    if (row->one_block == (i == 1)) ha_add_tensor(c, at(p, x->v_scale), FLOAT32, 3, of_k, NULL);
    else ha_add_tensor(c, at(p, ONE_OFFSET), FLOAT32, 3, ones, all_the_same);
  }
  ha_add_tensor(c, NULL, FLOAT32, 3, no_mean, vectors);
}

static ha_status attend(const ha_forward_params *p, const fp8_row *row, const quantized *x, const dense_problem *made,
                        const operand operands[NUM_OPERANDS], const device *here, bool only_load) {
  const lse_argument lse = {p->lse, 3, {p->batch, p->heads, p->seqlen_q}};
  call c;
  ha_call_begin(&c, here->index);
  add_codes(&c, p, x, operands);
  ha_add_tensor(&c, operands[OUT].data, ha_element_of(p->dtype), 4, operands[OUT].shape, operands[OUT].strides);
  ha_add_lse(&c, &lse);
  ha_add_counter(&c, p->workspace);
  add_scales(&c, p, row, x);
  ha_add_int(&c, p->seqlen_q > 1 ? 1 : ALL_ROWS);
  ha_add_int(&c, row->one_block ? ALL_ROWS : row->block_k);
  ha_add_real(&c, made->scale);
  if (row->window) {
    ha_add_window(&c, &made->mask);
    ha_add_nothings(&c, PLAN_ARGUMENTS);
  }
  ha_add_int(&c, here->multiprocessors);
  return ha_run(&ha_kernels[row->kernel], &c, p->stream, only_load);
}

static ha_status run(const ha_forward_params *p, bool only_load) {
  dense_problem made;
  const fp8_row *row;
  ha_status status = make_plan(p, &made, &row);
  if (status != HA_SUCCESS || made.is_empty) return status;
  int64_t shapes[NUM_OPERANDS][4];
  operand operands[NUM_OPERANDS];
  device here;
  const quantized x = lay_out(p, row);
  status = ha_read_operands(p, shapes, operands);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, x.bytes);
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  if (status == HA_SUCCESS) status = quantize(p, row, &x, operands, &here, only_load);
  return status == HA_SUCCESS ? attend(p, row, &x, &made, operands, &here, only_load) : status;
}

ha_status ha_forward_fp8(const ha_forward_params *params) { return run(params, false); }

ha_status ha_forward_fp8_prepare(const ha_forward_params *params) { return run(params, true); }

ha_status ha_forward_fp8_kernel(const ha_forward_params *params, const char **name) {
  dense_problem made;
  const fp8_row *row;
  const ha_status status = make_plan(params, &made, &row);
  if (status == HA_SUCCESS && name) *name = ha_kernels[row->kernel].name;
  return status;
}

ha_status ha_forward_fp8_workspace_size(const ha_forward_params *params, size_t *size) {
  dense_problem made;
  const fp8_row *row;
  const ha_status status = make_plan(params, &made, &row);
  if (status == HA_SUCCESS && size) *size = lay_out(params, row).bytes;
  return status;
}
