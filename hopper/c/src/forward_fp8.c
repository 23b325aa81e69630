/* Attention of sequences of one length in FP8: a kernel finds the mean of V, one quantizes, another attends. */
#include "internal.h"

#define ALL_ROWS INT32_MAX /* of a block, where all rows of a head share a scale */

typedef struct plan {
  problem problem;
  const fp8_row *row;
  kernel_choice mean;
  fp8_parts parts;
} plan;

static void lay_out(const ha_forward_params *p, plan *made) {
  const int64_t keys = ha_ceil_div(p->seqlen_k, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP;
  const int64_t blocks_k = ha_ceil_div(p->seqlen_k, made->row->block_k);
  made->parts.sizes = (fp8_sizes){p->batch,      p->seqlen_q, p->seqlen_k, p->heads, p->kv_heads, p->head_dim,
                                  p->head_dim_v, keys,        p->seqlen_q, blocks_k, p->batch};
  ha_place_parts(&made->parts, WORKSPACE_HEAD_BYTES);
}

static const fp8_row *select_row(const ha_forward_params *p, const mask *m) {
  const fp8_kind kind = {p->dtype, LAYOUT_DENSE, {p->head_dim, p->head_dim_v}, p->fp8_two_level != 0};
  const int64_t seen = ha_most_keys(m, p->seqlen_k);
  const fp8_row *row = ha_select_fp8(&kind, m, false, seen);
  return row && p->seqlen_k <= row->block_k ? ha_select_fp8(&kind, m, true, seen) : row;
}

static ha_status check_groups(const ha_forward_params *p, const fp8_row *row) {
  const int64_t of_q = ha_ceil_div(p->seqlen_q, row->quantizer_rows[0]);
  const int64_t of_k = ha_ceil_div(p->seqlen_k, row->quantizer_rows[1]);
  return ha_check_groups(p->batch * p->heads, of_q, p->batch * p->kv_heads, of_k);
}

static ha_status make_plan(ha_forward_params *own, const ha_forward_params *given, plan *made) {
  ha_status status = ha_read_forward(own, given);
  if (status == HA_SUCCESS) status = ha_check_dense(own, &made->problem);
  if (status == HA_SUCCESS) status = ha_check_no_scores("ha_forward_fp8", &own->scores);
  if (status != HA_SUCCESS) return status;
  made->row = select_row(own, &made->problem.mask);
  if (!made->row) return HA_ERROR_NOT_SUPPORTED;
  made->parts.end = WORKSPACE_HEAD_BYTES;
  if (made->problem.is_empty) return HA_SUCCESS;
  status = ha_check_tiles(own, made->row->tile_m);
  if (status == HA_SUCCESS) status = check_groups(own, made->row);
  if (status != HA_SUCCESS) return status;
  lay_out(own, made);
  return ha_select_value_mean(own->dtype, LAYOUT_DENSE, &made->parts.sizes, &made->mean);
}

static ha_status find_mean(const ha_forward_params *p, const plan *made, const operand *v, const device *here,
                           bool only_load) {
  call c;
  ha_call_begin(&c, here->index);
  ha_add_operand(&c, v);
  ha_add_mean_v(&c, p->workspace, &made->parts);
  return ha_run(made->mean, &c, p->stream, only_load);
}

static ha_status quantize(const ha_forward_params *p, const plan *made, const operand operands[NUM_OPERANDS],
                          const device *here, bool only_load) {
  call c;
  ha_call_begin(&c, here->index);
  for (int i = Q; i <= V; i++) ha_add_operand(&c, &operands[i]);
  ha_add_quantized(&c, p->workspace, &made->parts, made->row);
  ha_add_int(&c, (int64_t)here->multiprocessors * made->row->quantizer_ctas_per_sm);
  return ha_run((kernel_choice){made->row->quantizer, 0}, &c, p->stream, only_load);
}

static ha_status attend(const ha_forward_params *p, const plan *made, const operand *out, const device *here,
                        bool only_load) {
  const lse_argument lse = {p->lse, 3, {p->batch, p->heads, p->seqlen_q}};
  const fp8_row *row = made->row;
  call c;
  ha_call_begin(&c, here->index);
  ha_add_codes(&c, p->workspace, &made->parts, out->dimensions);
  ha_add_operand(&c, out);
  ha_add_lse(&c, &lse);
  ha_add_counter(&c, p->workspace);
  ha_add_fp8_scales(&c, p->workspace, &made->parts, row->one_block);
  ha_add_int(&c, p->seqlen_q > 1 ? 1 : ALL_ROWS);
  ha_add_int(&c, row->one_block ? ALL_ROWS : row->block_k);
  ha_add_real(&c, made->problem.scale);
  if (row->window) {
    ha_add_window(&c, &made->problem.mask);
    ha_add_nothings(&c, PLAN_ARGUMENTS);
  }
  ha_add_int(&c, here->multiprocessors);
  return ha_run((kernel_choice){row->kernel, 0}, &c, p->stream, only_load);
}

static ha_status run(const ha_forward_params *given, bool only_load) {
  ha_forward_params own, *const p = &own;
  plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.problem.is_empty) return status;
  operand operands[NUM_OPERANDS];
  device here;
  status = ha_read_operands(p, operands);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, made.parts.end);
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  if (status == HA_SUCCESS) status = find_mean(p, &made, &operands[V], &here, only_load);
  if (status == HA_SUCCESS) status = quantize(p, &made, operands, &here, only_load);
  return status == HA_SUCCESS ? attend(p, &made, &operands[OUT], &here, only_load) : status;
}

ha_status ha_forward_fp8(const ha_forward_params *params) { return run(params, false); }

ha_status ha_forward_fp8_prepare(const ha_forward_params *params) { return run(params, true); }

ha_status ha_forward_fp8_kernel(const ha_forward_params *params, const char **name) {
  ha_forward_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_kernels[made.row->kernel].name;
  return status;
}

ha_status ha_forward_fp8_workspace_size(const ha_forward_params *params, size_t *size) {
  ha_forward_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = made.parts.end;
  return status;
}
