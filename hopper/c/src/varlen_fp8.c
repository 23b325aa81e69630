/* Attention of packed sequences in FP8: a kernel finds their means of V, one quantizes, one plans the tiles, another
 * attends. */
#include "internal.h"

enum { BLOCK_Q = 1 };

typedef struct plan {
  problem problem;
  const fp8_row *row;
  kernel_choice mean;
  int64_t words; /* of the plan that the GPU makes, behind the head of the workspace */
  fp8_parts parts;
} plan;

static ha_status check_groups(const ha_varlen_params *p, const fp8_row *row) {
  const int64_t of_q = ha_count_units(p->total_q, p->batch, row->quantizer_rows[0]);
  const int64_t of_k = ha_count_units(p->total_k, p->batch, row->quantizer_rows[1]);
  return ha_check_groups(p->heads, of_q, p->kv_heads, of_k);
}

static void lay_out(const ha_varlen_params *p, plan *made) {
  const int64_t keys = ha_count_units(p->total_k, p->batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP;
  const int64_t blocks_q = ha_count_units(p->total_q, p->batch, BLOCK_Q);
  const int64_t blocks_k = ha_count_units(p->total_k, p->batch, made->row->block_k);
  made->parts.sizes = (fp8_sizes){1,    p->total_q, p->total_k, p->heads,    p->kv_heads, p->head_dim, p->head_dim_v,
                                  keys, blocks_q,   blocks_k,   p->batch + 1};
  ha_place_parts(&made->parts, ha_end_of_plan(made->words));
}

static ha_status make_plan(ha_varlen_params *own, const ha_varlen_params *given, plan *made) {
  ha_status status = ha_read_varlen(own, given);
  if (status == HA_SUCCESS) status = ha_check_packed(own, &made->problem);
  if (status == HA_SUCCESS) status = ha_check_no_scores("ha_varlen_fp8", &own->scores);
  if (status != HA_SUCCESS) return status;
  const fp8_kind kind = {own->dtype, LAYOUT_VARLEN, {own->head_dim, own->head_dim_v}, own->fp8_two_level != 0};
  const int64_t seen = ha_most_keys(&made->problem.mask, own->max_seqlen_k);
  made->row = ha_select_fp8(&kind, &made->problem.mask, false, seen);
  if (!made->row) return HA_ERROR_NOT_SUPPORTED;
  const packed_rows rows = ha_rows_of(own);
  status = ha_count_plan(&rows, own->heads, made->row->tile_m, &made->words);
  if (status == HA_SUCCESS) status = check_groups(own, made->row);
  if (status != HA_SUCCESS) return status;
  lay_out(own, made);
  return ha_select_value_mean(own->dtype, LAYOUT_VARLEN, &made->parts.sizes, &made->mean);
}

/* Append Q, K or V, for a kernel that takes a batch of one. */
static void add_source(call *c, const operand *o) {
  const int64_t shape[] = {1, o->shape[0], o->shape[1], o->shape[2]};
  const int64_t strides[] = {o->shape[0] * o->strides[0], o->strides[0], o->strides[1], o->strides[2]};
  ha_add_tensor(c, o->given->data, ha_element_of(o->dtype), 4, shape, strides);
}

static ha_status find_means(const ha_varlen_params *p, const plan *made, const operand *v, const device *here,
                            bool only_load) {
  const packed_rows rows = ha_rows_of(p);
  call c;
  ha_call_begin(&c, here->index);
  add_source(&c, v);
  ha_add_mean_v(&c, p->workspace, &made->parts);
  ha_add_key_lengths(&c, &rows);
  return ha_run(made->mean, &c, p->stream, only_load);
}

static ha_status quantize(const ha_varlen_params *p, const plan *made, const operand operands[NUM_OPERANDS],
                          const device *here, bool only_load) {
  const packed_rows rows = ha_rows_of(p);
  call c;
  ha_call_begin(&c, here->index);
  for (int i = Q; i <= V; i++) add_source(&c, &operands[i]);
  ha_add_quantized(&c, p->workspace, &made->parts, made->row);
  ha_add_lengths(&c, &rows);
  ha_add_int(&c, (int64_t)here->multiprocessors * made->row->quantizer_ctas_per_sm);
  return ha_run((kernel_choice){made->row->quantizer, 0}, &c, p->stream, only_load);
}

static ha_status plan_and_attend(const ha_varlen_params *p, const plan *made, const operand *out, const device *here,
                                 bool only_load) {
  const lse_argument lse = {p->lse, 2, {p->heads, p->total_q}};
  const packed_rows rows = ha_rows_of(p);
  const plan_place place = {p->workspace, made->words, made->row->tile_m};
  const ha_status status = ha_run_planner(&rows, &place, here->index, p->stream, only_load);
  if (status != HA_SUCCESS) return status;
  call c;
  ha_call_begin(&c, here->index);
  ha_add_codes(&c, p->workspace, &made->parts, out->dimensions);
  ha_add_operand(&c, out);
  ha_add_lse(&c, &lse);
  ha_add_counter(&c, p->workspace);
  ha_add_fp8_scales(&c, p->workspace, &made->parts, false);
  ha_add_int(&c, BLOCK_Q);
  ha_add_int(&c, made->row->block_k);
  ha_add_real(&c, made->problem.scale);
  ha_add_window(&c, &made->problem.mask);
  ha_add_plan(&c, &rows, &place);
  ha_add_int(&c, here->multiprocessors);
  return ha_run((kernel_choice){made->row->kernel, 0}, &c, p->stream, only_load);
}

static ha_status run(const ha_varlen_params *given, bool only_load) {
  ha_varlen_params own, *const p = &own;
  plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.problem.is_empty) return status;
  operand operands[NUM_OPERANDS];
  device here;
  status = ha_read_packed(p, operands);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, made.parts.end);
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  if (status == HA_SUCCESS) status = find_means(p, &made, &operands[V], &here, only_load);
  if (status == HA_SUCCESS) status = quantize(p, &made, operands, &here, only_load);
  return status == HA_SUCCESS ? plan_and_attend(p, &made, &operands[OUT], &here, only_load) : status;
}

ha_status ha_varlen_fp8(const ha_varlen_params *params) { return run(params, false); }

ha_status ha_varlen_fp8_prepare(const ha_varlen_params *params) { return run(params, true); }

ha_status ha_varlen_fp8_kernel(const ha_varlen_params *params, const char **name) {
  ha_varlen_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_kernels[made.row->kernel].name;
  return status;
}

ha_status ha_varlen_fp8_workspace_size(const ha_varlen_params *params, size_t *size) {
  ha_varlen_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = made.parts.end;
  return status;
}
