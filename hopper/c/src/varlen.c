/* Attention of packed sequences, in 16 bits: the GPU plans the tiles, then the kernel goes by the plan. */
#include <inttypes.h>
#include <string.h>

#include "internal.h"

enum { TILES_OF_QUERIES = 0 };

ha_status ha_read_varlen(ha_varlen_params *own, const ha_varlen_params *given) {
  *own = (ha_varlen_params)HA_VARLEN_PARAMS_INIT;
  return ha_read_params(own, sizeof *own, offsetof(ha_varlen_params, attention_chunk), given, "HA_VARLEN_PARAMS_INIT");
}

int64_t ha_count_units(int64_t total, int64_t batch, int64_t rows) { return total / rows + batch + 1; }

ha_status ha_check_packed(const ha_varlen_params *p, problem *made) {
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX - 1);
  if (status == HA_SUCCESS) status = ha_check_range("total_q", p->total_q, 0, MAX_PACKED_ROWS);
  if (status == HA_SUCCESS) status = ha_check_range("total_k", p->total_k, 1, MAX_PACKED_ROWS);
  if (status == HA_SUCCESS) status = ha_check_range("max_seqlen_q", p->max_seqlen_q, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("max_seqlen_k", p->max_seqlen_k, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  if (status == HA_SUCCESS) status = ha_check_scores(&p->scores, p->heads);
  const mask given = {p->causal, p->window_left, p->window_right, p->attention_chunk};
  if (status == HA_SUCCESS) status = ha_canonical_mask(&made->mask, &given, p->max_seqlen_q, p->max_seqlen_k);
  made->is_empty = status == HA_SUCCESS && (!p->batch || !p->total_q);
  return status;
}

packed_rows ha_rows_of(const ha_varlen_params *p) {
  return (packed_rows){p->cu_seqlens_q, p->cu_seqlens_k, p->seqused_k, p->batch, p->total_q, p->total_k};
}

ha_status ha_count_plan(const packed_rows *rows, int64_t heads, int tile_m, int64_t *words) {
  const int64_t tiles = ha_count_units(rows->total_q, rows->batch, tile_m);
  *words = PLAN_HEADER + PLAN_RECORD * (rows->batch + 1) + PLAN_ENTRY * tiles;
  if (tiles <= MAX_TILES / heads) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "heads %" PRId64 " x total_q %" PRId64 " in %" PRId64 " sequences may be more than %" PRId64
                 " tiles of %d queries: split the batch",
                 heads, rows->total_q, rows->batch, (int64_t)MAX_TILES, tile_m);
}

static ha_status make_plan(ha_varlen_params *own, const ha_varlen_params *given, packed_plan *made) {
  ha_status status = ha_read_varlen(own, given);
  if (status == HA_SUCCESS) status = ha_check_packed(own, &made->problem);
  if (status != HA_SUCCESS) return status;
  const forward_kind kind = {own->dtype, LAYOUT_VARLEN, {own->head_dim, own->head_dim_v}, 0, 0, 0};
  /* Lengths are not known here: tiles are the same for all. */
  made->row = ha_select_forward(&kind, &made->problem.mask, 0);
  if (!made->row) return HA_ERROR_NOT_SUPPORTED;
  const packed_rows rows = ha_rows_of(own);
  return ha_count_plan(&rows, own->heads, made->row->tile_m, &made->words);
}

size_t ha_end_of_plan(int64_t words) { return WORKSPACE_HEAD_BYTES + sizeof(int32_t) * (size_t)words; }

void ha_add_lengths(call *c, const packed_rows *rows) {
  const int64_t ends = rows->batch + 1, none = 0, used = rows->used_k ? rows->batch : 0;
  ha_add_tensor(c, rows->starts_q, INT32, 1, &ends, NULL);
  ha_add_tensor(c, rows->starts_k, INT32, 1, &ends, NULL);
  ha_add_tensor(c, NULL, INT32, 1, &none, NULL);
  ha_add_tensor(c, rows->used_k, INT32, 1, &used, NULL);
}

void ha_add_key_lengths(call *c, const packed_rows *rows) {
  const int64_t ends = rows->batch + 1, used = rows->used_k ? rows->batch : 0;
  ha_add_tensor(c, rows->starts_k, INT32, 1, &ends, NULL);
  ha_add_tensor(c, rows->used_k, INT32, 1, &used, NULL);
}

static void add_words(call *c, const plan_place *place) {
  ha_add_tensor(c, (const char *)place->workspace + WORKSPACE_HEAD_BYTES, INT32, 1, &place->words, NULL);
}

ha_status ha_run_planner(const packed_rows *rows, const plan_place *place, int device, void *stream, bool only_load) {
  call c;
  ha_call_begin(&c, device);
  ha_add_lengths(&c, rows);
  add_words(&c, place);
  ha_add_int(&c, rows->total_q);
  ha_add_int(&c, rows->total_k);
  ha_add_int(&c, place->tile_m);
  ha_add_int(&c, TILES_OF_QUERIES);
  return ha_run((kernel_choice){ha_plan_kernel, 0}, &c, stream, only_load);
}

void ha_add_plan(call *c, const packed_rows *rows, const plan_place *place) {
  add_words(c, place);
  ha_add_int(c, rows->batch + 1);
}

static ha_status check_lengths(const ha_varlen_params *p) {
  ha_status status = ha_check_array("cu_seqlens_q", p->cu_seqlens_q, "(batch + 1,) int32");
  if (status == HA_SUCCESS) status = ha_check_array("cu_seqlens_k", p->cu_seqlens_k, "(batch + 1,) int32");
  if (status == HA_SUCCESS && p->seqused_k) status = ha_check_array("seqused_k", p->seqused_k, "(batch,) int32");
  return status;
}

ha_status ha_read_packed(const ha_varlen_params *p, operand operands[NUM_OPERANDS]) {
  const operand expected[] = {
      [Q] = {"q", &p->q, p->dtype, 3, {p->total_q, p->heads, p->head_dim}, {0}},
      [K] = {"k", &p->k, p->dtype, 3, {p->total_k, p->kv_heads, p->head_dim}, {0}},
      [V] = {"v", &p->v, p->dtype, 3, {p->total_k, p->kv_heads, p->head_dim_v}, {0}},
      [OUT] = {"out", &p->out, p->dtype, 3, {p->total_q, p->heads, p->head_dim_v}, {0}}};
  memcpy(operands, expected, sizeof expected);
  const ha_status status = ha_check_operands(operands, NUM_OPERANDS);
  return status == HA_SUCCESS ? check_lengths(p) : status;
}

static kernel_choice choose(const ha_varlen_params *p, const packed_plan *made) {
  return (kernel_choice){made->row->kernel, ha_features_of(&p->scores)};
}

static ha_status plan_and_attend(const ha_varlen_params *p, const packed_plan *made,
                                 const operand operands[NUM_OPERANDS], const device *here, bool only_load) {
  const lse_argument lse = {p->lse, 2, {p->heads, p->total_q}};
  const packed_rows rows = ha_rows_of(p);
  const plan_place place = {p->workspace, made->words, made->row->tile_m};
  const ha_status status = ha_run_planner(&rows, &place, here->index, p->stream, only_load);
  if (status != HA_SUCCESS) return status;
  call c;
  ha_call_begin(&c, here->index);
  ha_add_operands(&c, operands, &lse, p->workspace, made->problem.scale);
  ha_add_window(&c, &made->problem.mask);
  ha_add_plan(&c, &rows, &place);
  ha_add_nothings(&c, PAGE_ARGUMENTS);
  ha_add_scores(&c, &p->scores, p->batch, p->heads);
  ha_add_int(&c, (int64_t)here->multiprocessors * made->row->ctas_per_sm);
  return ha_run(choose(p, made), &c, p->stream, only_load);
}

static ha_status run(const ha_varlen_params *given, bool only_load) {
  ha_varlen_params own, *const p = &own;
  packed_plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.problem.is_empty) return status;
  operand operands[NUM_OPERANDS];
  device here;
  status = ha_read_packed(p, operands);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, ha_end_of_plan(made.words));
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  return status == HA_SUCCESS ? plan_and_attend(p, &made, operands, &here, only_load) : status;
}

ha_status ha_varlen(const ha_varlen_params *params) { return run(params, false); }

ha_status ha_varlen_prepare(const ha_varlen_params *params) { return run(params, true); }

ha_status ha_varlen_kernel(const ha_varlen_params *params, const char **name) {
  ha_varlen_params own;
  packed_plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose(&own, &made));
  return status;
}

ha_status ha_varlen_workspace_size(const ha_varlen_params *params, size_t *size) {
  ha_varlen_params own;
  packed_plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = ha_end_of_plan(made.words);
  return status;
}
