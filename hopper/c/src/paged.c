/* Attention of packed queries on a key/value cache in pages, where it lies, in 16 bits. */
#include <inttypes.h>

#include "internal.h"

static int64_t capacity_of(const ha_paged_params *p) { return p->page_size * p->pages_of_sequence; }

static packed_rows rows_of(const ha_paged_params *p) {
  return (packed_rows){p->cu_seqlens_q, p->cache_starts, p->cache_seqlens,
                       p->batch,        p->total_q,      p->batch * capacity_of(p)};
}

/* Rows of a page that are known to lie together; 0 if too few do. */
static int64_t page_rows_of(const ha_paged_params *p) {
  static const int ROWS[] = PAGE_ROWS;
  if (p->pages_of_sequence == 1) return ONE_PAGE;
  for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
    if (p->page_size % ROWS[i] == 0) return ROWS[i];
  }
  return 0;
}

static ha_status check_cache(const ha_paged_params *p) {
  const cache_sizes sizes = {true, p->batch, p->pages, p->page_size, p->pages_of_sequence};
  const ha_status status = ha_check_cache(&sizes);
  const int64_t rows[] = {p->batch, p->page_size, p->pages_of_sequence};
  if (status != HA_SUCCESS || ha_fits(rows, 3, MAX_PACKED_ROWS)) return status;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "batch %" PRId64 " x pages_of_sequence %" PRId64 " x page_size %" PRId64 " are more than %" PRId64
                 " keys: split the batch",
                 p->batch, p->pages_of_sequence, p->page_size, (int64_t)MAX_PACKED_ROWS);
}

static ha_status check_params(const ha_paged_params *p, problem *made) {
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX - 1);
  if (status == HA_SUCCESS) status = ha_check_range("total_q", p->total_q, 0, MAX_PACKED_ROWS);
  if (status == HA_SUCCESS) status = ha_check_range("max_seqlen_q", p->max_seqlen_q, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  if (status == HA_SUCCESS) status = ha_check_scores(&p->scores, p->heads);
  if (status == HA_SUCCESS) status = check_cache(p);
  /* A single query is the last one, and sees all keys. */
  const mask given = {p->causal && p->max_seqlen_q > 1, p->window_left, p->window_right, p->attention_chunk};
  if (status == HA_SUCCESS) status = ha_canonical_mask(&made->mask, &given, p->max_seqlen_q, capacity_of(p));
  made->is_empty = status == HA_SUCCESS && (!p->batch || !p->total_q);
  return status;
}

static ha_status make_plan(ha_paged_params *own, const ha_paged_params *given, packed_plan *made) {
  *own = (ha_paged_params)HA_PAGED_PARAMS_INIT;
  ha_status status = ha_read_params(own, sizeof *own, sizeof *own, given, "HA_PAGED_PARAMS_INIT");
  if (status == HA_SUCCESS) status = check_params(own, &made->problem);
  if (status != HA_SUCCESS) return status;
  const forward_kind kind = {own->dtype, LAYOUT_PAGED, {own->head_dim, own->head_dim_v}, page_rows_of(own), 0, 0};
  if (!kind.page_rows) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "page_size is %" PRId64 ", allowed where a sequence has several pages: multiples of 8", own->page_size);
  }
  made->row = ha_select_forward(&kind, &made->problem.mask, 0);
  if (!made->row) return HA_ERROR_NOT_SUPPORTED;
  const packed_rows rows = rows_of(own);
  return ha_count_plan(&rows, own->heads, made->row->tile_m, &made->words);
}

/* That pages lie whole rows apart, as many in both caches: kernels count them in rows. */
static ha_status check_pages(const ha_paged_params *p, const operand *k, const operand *v) {
  if (p->pages == 1) return HA_SUCCESS;
  const int64_t of_k = k->strides[0] / k->strides[1], of_v = v->strides[0] / v->strides[1];
  if (of_k != of_v || k->strides[0] % k->strides[1] || v->strides[0] % v->strides[1]) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "pages are %" PRId64 " and %" PRId64 " elements apart, and rows %" PRId64 " and %" PRId64
                   ", allowed: pages the same whole number of rows apart in k_cache and v_cache",
                   k->strides[0], v->strides[0], k->strides[1], v->strides[1]);
  }
  if (of_k <= (INT32_MAX - p->page_size) / (p->pages - 1)) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "the cache has %" PRId64 " pages, %" PRId64 " rows apart, allowed: rows that 32 bits count", p->pages,
                 of_k);
}

static ha_status check_arrays(const ha_paged_params *p) {
  ha_status status = ha_check_array("cu_seqlens_q", p->cu_seqlens_q, "(batch + 1,) int32");
  if (status == HA_SUCCESS) status = ha_check_array("cache_seqlens", p->cache_seqlens, "(batch,) int32");
  if (status == HA_SUCCESS) status = ha_check_array("cache_starts", p->cache_starts, "(batch + 1,) int32");
  if (status == HA_SUCCESS) status = ha_check_array("page_table", p->page_table, "(batch, pages_of_sequence) int32");
  return status;
}

static kernel_choice choose(const ha_paged_params *p, const packed_plan *made) {
  return (kernel_choice){made->row->kernel, ha_features_of(&p->scores)};
}

static ha_status plan_and_attend(const ha_paged_params *p, const packed_plan *made,
                                 const operand operands[NUM_OPERANDS], const device *here, bool only_load) {
  const lse_argument lse = {p->lse, 2, {p->heads, p->total_q}};
  const packed_rows rows = rows_of(p);
  const plan_place place = {p->workspace, made->words, made->row->tile_m};
  const int64_t table[] = {p->batch, p->pages_of_sequence}, no_pads = 0;
  const ha_status status = ha_run_planner(&rows, &place, here->index, p->stream, only_load);
  if (status != HA_SUCCESS) return status;
  call c;
  ha_call_begin(&c, here->index);
  ha_add_operands(&c, operands, &lse, p->workspace, made->problem.scale);
  ha_add_window(&c, &made->problem.mask);
  ha_add_plan(&c, &rows, &place);
  ha_add_tensor(&c, p->page_table, INT32, 2, table, NULL);
  ha_add_tensor(&c, NULL, INT32, 1, &no_pads, NULL);
  ha_add_scores(&c, &p->scores, p->batch, p->heads);
  ha_add_int(&c, (int64_t)here->multiprocessors * made->row->ctas_per_sm);
  return ha_run(choose(p, made), &c, p->stream, only_load);
}

static ha_status run(const ha_paged_params *given, bool only_load) {
  ha_paged_params own, *const p = &own;
  packed_plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.problem.is_empty) return status;
  operand operands[] = {
      [Q] = {"q", &p->q, p->dtype, 3, {p->total_q, p->heads, p->head_dim}, {0}},
      [K] = {"k_cache", &p->k_cache, p->dtype, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim}, {0}},
      [V] = {"v_cache", &p->v_cache, p->dtype, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim_v}, {0}},
      [OUT] = {"out", &p->out, p->dtype, 3, {p->total_q, p->heads, p->head_dim_v}, {0}}};
  status = ha_check_operands(operands, NUM_OPERANDS);
  if (status == HA_SUCCESS) status = check_pages(p, &operands[K], &operands[V]);
  if (status == HA_SUCCESS) status = check_arrays(p);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, ha_end_of_plan(made.words));
  device here;
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  return status == HA_SUCCESS ? plan_and_attend(p, &made, operands, &here, only_load) : status;
}

ha_status ha_paged(const ha_paged_params *params) { return run(params, false); }

ha_status ha_paged_prepare(const ha_paged_params *params) { return run(params, true); }

ha_status ha_paged_kernel(const ha_paged_params *params, const char **name) {
  ha_paged_params own;
  packed_plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose(&own, &made));
  return status;
}

ha_status ha_paged_workspace_size(const ha_paged_params *params, size_t *size) {
  ha_paged_params own;
  packed_plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = ha_end_of_plan(made.words);
  return status;
}
