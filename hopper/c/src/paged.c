/* Attention of packed queries on a key/value cache in pages, where it lies, in 16 bits. */
#include <inttypes.h>

#include "internal.h"

enum { Q, K, V, OUT, NUM_OPERANDS };

typedef struct plan {
  mask mask;
  double scale;
  const forward_row *row;
  int64_t words; /* of the plan that the GPU makes */
  bool is_empty;
} plan;

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
  ha_status status = ha_check_range("pages", p->pages, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("page_size", p->page_size, 1, MAX_SEQLEN);
  if (status == HA_SUCCESS) {
    status = ha_check_range("pages_of_sequence", p->pages_of_sequence, 1, MAX_SEQLEN / p->page_size);
  }
  const int64_t rows[] = {p->batch, p->page_size, p->pages_of_sequence};
  if (status != HA_SUCCESS || ha_fits(rows, 3, MAX_PACKED_ROWS)) return status;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "batch %" PRId64 " x pages_of_sequence %" PRId64 " x page_size %" PRId64 " are more than %" PRId64
                 " keys: split the batch",
                 p->batch, p->pages_of_sequence, p->page_size, (int64_t)MAX_PACKED_ROWS);
}

static ha_status check_params(const ha_paged_params *p, plan *made) {
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

static ha_status make_plan(ha_paged_params *own, const ha_paged_params *given, plan *made) {
  *own = (ha_paged_params)HA_PAGED_PARAMS_INIT;
  ha_status status = ha_read_params(own, sizeof *own, sizeof *own, given, "HA_PAGED_PARAMS_INIT");
  if (status == HA_SUCCESS) status = check_params(own, made);
  if (status != HA_SUCCESS) return status;
  const forward_kind kind = {own->dtype, LAYOUT_PAGED, {own->head_dim, own->head_dim_v}, page_rows_of(own)};
  if (!kind.page_rows) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "page_size is %" PRId64 ", allowed where a sequence has several pages: multiples of 8", own->page_size);
  }
  made->row = ha_select_forward(&kind, &made->mask, 0);
  if (!made->row) return ha_fail(HA_ERROR_NOT_SUPPORTED, "no kernel takes this problem");
  const packed_rows rows = rows_of(own);
  return ha_count_plan(&rows, own->heads, made->row->tile_m, &made->words);
}

static size_t workspace_size_of(const plan *made) { return WORKSPACE_HEAD_BYTES + sizeof(int32_t) * (size_t)made->words; }

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

static kernel_choice choose(const ha_paged_params *p, const plan *made) {
  return (kernel_choice){made->row->kernel, ha_features_of(&p->scores)};
}

static void add_operands(call *c, const ha_paged_params *p, const operand operands[NUM_OPERANDS]) {
  for (int i = Q; i < NUM_OPERANDS; i++) {
    const int dimensions = i == K || i == V ? 4 : 3;
    ha_add_tensor(c, operands[i].data, ha_element_of(p->dtype), dimensions, operands[i].shape, operands[i].strides);
  }
}

static ha_status plan_and_attend(const ha_paged_params *p, const plan *made, const operand operands[NUM_OPERANDS],
                                 const device *here, bool only_load) {
  const lse_argument lse = {p->lse, 2, {p->heads, p->total_q}};
  const packed_rows rows = rows_of(p);
  const plan_place place = {p->workspace, made->words, made->row->tile_m};
  const int64_t table[] = {p->batch, p->pages_of_sequence}, no_pads = 0;
  const ha_status status = ha_run_planner(&rows, &place, here->index, p->stream, only_load);
  if (status != HA_SUCCESS) return status;
  call c;
  ha_call_begin(&c, here->index);
  add_operands(&c, p, operands);
  ha_add_lse(&c, &lse);
  ha_add_counter(&c, p->workspace);
  ha_add_real(&c, made->scale);
  ha_add_window(&c, &made->mask);
  ha_add_plan(&c, &rows, &place);
  ha_add_tensor(&c, p->page_table, INT32, 2, table, NULL);
  ha_add_tensor(&c, NULL, INT32, 1, &no_pads, NULL);
  ha_add_softcap(&c, &p->scores);
  ha_add_slopes(&c, &p->scores, p->batch, p->heads);
  ha_add_sinks(&c, &p->scores, p->heads);
  ha_add_nothings(&c, DROPOUT_ARGUMENTS);
  ha_add_int(&c, (int64_t)here->multiprocessors * made->row->ctas_per_sm);
  return ha_run(choose(p, made), &c, p->stream, only_load);
}

static ha_status run(const ha_paged_params *given, bool only_load) {
  ha_paged_params own, *const p = &own;
  plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.is_empty) return status;
  const int64_t shapes[NUM_OPERANDS][4] = {[Q] = {p->total_q, p->heads, p->head_dim},
                                           [K] = {p->pages, p->page_size, p->kv_heads, p->head_dim},
                                           [V] = {p->pages, p->page_size, p->kv_heads, p->head_dim_v},
                                           [OUT] = {p->total_q, p->heads, p->head_dim_v}};
  const ha_tensor *tensors[] = {[Q] = &p->q, [K] = &p->k_cache, [V] = &p->v_cache, [OUT] = &p->out};
  static const char *const NAMES[] = {[Q] = "q", [K] = "k_cache", [V] = "v_cache", [OUT] = "out"};
  operand operands[NUM_OPERANDS];
  for (int i = 0; i < NUM_OPERANDS; i++) {
    operands[i] = (operand){.data = tensors[i]->data, .shape = shapes[i]};
    status = ha_check_tensor(NAMES[i], tensors[i], p->dtype, i == K || i == V ? 4 : 3, shapes[i], operands[i].strides);
    if (status != HA_SUCCESS) return status;
  }
  status = check_pages(p, &operands[K], &operands[V]);
  if (status == HA_SUCCESS) status = check_arrays(p);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, workspace_size_of(&made));
  device here;
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  return status == HA_SUCCESS ? plan_and_attend(p, &made, operands, &here, only_load) : status;
}

ha_status ha_paged(const ha_paged_params *params) { return run(params, false); }

ha_status ha_paged_prepare(const ha_paged_params *params) { return run(params, true); }

ha_status ha_paged_kernel(const ha_paged_params *params, const char **name) {
  ha_paged_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose(&own, &made));
  return status;
}

ha_status ha_paged_workspace_size(const ha_paged_params *params, size_t *size) {
  ha_paged_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = workspace_size_of(&made);
  return status;
}
