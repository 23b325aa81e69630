/* Attention of sequences of one length, in 16 bits. */
#include <inttypes.h>
#include <string.h>

#include "internal.h"

ha_status ha_check_tiles(const ha_forward_params *p, int tile_m) {
  const int64_t blocks = (p->seqlen_q + tile_m - 1) / tile_m;
  /* None of the factors is above 2^31, so that the product of two does not overflow. */
  if (!blocks || p->batch * p->heads <= MAX_TILES / blocks) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "batch %" PRId64 " x heads %" PRId64 " x seqlen_q %" PRId64 " are more than %" PRId64
                 " tiles of %d queries: split the batch",
                 p->batch, p->heads, p->seqlen_q, (int64_t)MAX_TILES, tile_m);
}

ha_status ha_read_forward(ha_forward_params *own, const ha_forward_params *given) {
  *own = (ha_forward_params)HA_FORWARD_PARAMS_INIT;
  return ha_read_params(own, sizeof *own, offsetof(ha_forward_params, attention_chunk), given, "HA_FORWARD_PARAMS_INIT");
}

ha_status ha_check_dense(const ha_forward_params *p, problem *made) {
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_q", p->seqlen_q, 0, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_k", p->seqlen_k, 1, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  if (status == HA_SUCCESS) status = ha_check_scores(&p->scores, p->heads);
  mask given = {p->causal, p->window_left, p->window_right, p->attention_chunk};
  /* All keys are in a chunk, and so are all queries. */
  if (p->seqlen_q <= p->seqlen_k && p->seqlen_k <= given.chunk) given.chunk = 0;
  if (status == HA_SUCCESS) status = ha_canonical_mask(&made->mask, &given, p->seqlen_q, p->seqlen_k);
  made->is_empty = status == HA_SUCCESS && (!p->batch || !p->seqlen_q);
  return status;
}

ha_status ha_read_operands(const ha_forward_params *p, operand operands[NUM_OPERANDS]) {
  const operand expected[] = {
      [Q] = {"q", &p->q, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim}, {0}},
      [K] = {"k", &p->k, p->dtype, 4, {p->batch, p->seqlen_k, p->kv_heads, p->head_dim}, {0}},
      [V] = {"v", &p->v, p->dtype, 4, {p->batch, p->seqlen_k, p->kv_heads, p->head_dim_v}, {0}},
      [OUT] = {"out", &p->out, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim_v}, {0}}};
  memcpy(operands, expected, sizeof expected);
  return ha_check_operands(operands, NUM_OPERANDS);
}

static ha_status make_plan(ha_forward_params *own, const ha_forward_params *given, problem *made,
                           const forward_row **row) {
  ha_status status = ha_read_forward(own, given);
  if (status == HA_SUCCESS) status = ha_check_dense(own, made);
  if (status != HA_SUCCESS) return status;
  const int64_t heads = own->batch * own->heads;
  const forward_kind kind = {own->dtype, LAYOUT_DENSE, {own->head_dim, own->head_dim_v}, 0, own->seqlen_q, heads};
  *row = ha_select_forward(&kind, &made->mask, ha_most_keys(&made->mask, own->seqlen_k));
  return *row ? ha_check_tiles(own, (*row)->tile_m) : HA_ERROR_NOT_SUPPORTED;
}

static kernel_choice choose(const ha_forward_params *p, const forward_row *row) {
  return (kernel_choice){row->kernel, ha_features_of(&p->scores)};
}

static ha_status run(const ha_forward_params *given, bool only_load) {
  ha_forward_params own, *const p = &own;
  problem made;
  const forward_row *row;
  ha_status status = make_plan(p, given, &made, &row);
  if (status != HA_SUCCESS || made.is_empty) return status;
  operand operands[NUM_OPERANDS];
  device here;
  status = ha_read_operands(p, operands);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, WORKSPACE_HEAD_BYTES);
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  if (status != HA_SUCCESS) return status;
  const lse_argument lse = {p->lse, 3, {p->batch, p->heads, p->seqlen_q}};
  const kernel_choice choice = choose(p, row);
  call c;
  ha_call_begin(&c, here.index);
  ha_add_operands(&c, operands, &lse, p->workspace, made.scale);
  if (choice.features || ha_has_window(&made.mask)) {
    ha_add_window(&c, &made.mask);
    ha_add_nothings(&c, PLAN_ARGUMENTS + PAGE_ARGUMENTS);
    ha_add_scores(&c, &p->scores, p->batch, p->heads);
  }
  ha_add_int(&c, (int64_t)here.multiprocessors * row->ctas_per_sm);
  return ha_run(choice, &c, p->stream, only_load);
}

ha_status ha_forward(const ha_forward_params *params) { return run(params, false); }

ha_status ha_forward_prepare(const ha_forward_params *params) { return run(params, true); }

ha_status ha_forward_kernel(const ha_forward_params *params, const char **name) {
  ha_forward_params own;
  problem made;
  const forward_row *row;
  const ha_status status = make_plan(&own, params, &made, &row);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose(&own, row));
  return status;
}

ha_status ha_forward_workspace_size(const ha_forward_params *params, size_t *size) {
  ha_forward_params own;
  problem made;
  const forward_row *row;
  const ha_status status = make_plan(&own, params, &made, &row);
  if (status == HA_SUCCESS && size) *size = WORKSPACE_HEAD_BYTES;
  return status;
}
