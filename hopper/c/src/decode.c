/* Attention of a decoding step on a key/value cache. */
#include <inttypes.h>

#include "internal.h"

enum { E4M3_STEP = 16 };

typedef struct plan {
  double scale;
  const decode_row *row;
  mask mask;
  unsigned features; /* of the kernel */
  bool is_empty;
} plan;

static bool is_e4m3(const ha_decode_params *p) { return p->cache_dtype == HA_FLOAT8_E4M3; }

/* The first of `sizes`, ascending, that is not below `size`; `count` if there is none. */
static int cover(const int *sizes, int count, int64_t size) {
  int i = 0;
  while (i < count && sizes[i] < size) i++;
  return i;
}

/* Which rows of a page are known to lie together, from the widest on; their number if too few do. */
static int box_of(const ha_decode_params *p) {
  static const int ROWS[] = DECODE_BOX_ROWS;
  /* The only page of a sequence may end within a box, which TMA clips. */
  if (!p->page_table || p->pages_of_sequence == 1) return 0;
  int i = 0;
  while (i < DECODE_NUM_BOX_ROWS && p->page_size % ROWS[i]) i++;
  return i;
}

static ha_status check_cache(const ha_decode_params *p) {
  const cache_sizes sizes = {p->page_table, p->batch, p->pages, p->page_size, p->pages_of_sequence};
  ha_status status = ha_check_cache(&sizes);
  if (status == HA_SUCCESS) status = ha_check_cache_dtype(p->dtype, p->cache_dtype);
  if (status != HA_SUCCESS) return status;
  if (is_e4m3(p) && (p->head_dim % E4M3_STEP || p->head_dim_v % E4M3_STEP)) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "head_dim is %" PRId64 " and head_dim_v %" PRId64 ", allowed with a cache of e4m3: multiples of %d",
                   p->head_dim, p->head_dim_v, E4M3_STEP);
  }
  return HA_SUCCESS;
}

static int64_t capacity_of(const ha_decode_params *p) {
  return p->page_size * (p->page_table ? p->pages_of_sequence : 1);
}

static ha_status check_params(const ha_decode_params *p, plan *made) {
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_q", p->seqlen_q, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  if (status == HA_SUCCESS) status = ha_check_scores(&p->scores, p->heads);
  if (status == HA_SUCCESS) status = check_cache(p);
  /* A single query is the last one, and sees all keys. */
  const mask given = {p->causal && p->seqlen_q > 1, p->window_left, p->window_right, p->attention_chunk};
  return status == HA_SUCCESS ? ha_canonical_mask(&made->mask, &given, p->seqlen_q, capacity_of(p)) : status;
}

/* What of a sound problem no decode kernel has. */
static ha_status check_features(const ha_decode_params *p) {
  if (p->scores.alibi_slopes) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "scores.alibi_slopes is given, which decode kernels do not have; use ha_paged");
  }
  if (p->cache_leftpad && p->page_table && p->pages_of_sequence > 1) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "cache_leftpad is given with %" PRId64 " pages a sequence, allowed: 1; leave out pages instead",
                   p->pages_of_sequence);
  }
  return HA_SUCCESS;
}

static unsigned features_of(const ha_decode_params *p, const mask *m) {
  return ha_features_of(&p->scores) | (ha_has_window(m) ? FEATURE_WINDOW : 0) | (m->chunk ? FEATURE_CHUNK : 0) |
         (p->cache_leftpad ? FEATURE_LEFTPAD : 0);
}

/* The row of ha_decode_rows for so many rows of queries a K/V head, and a box. */
static const decode_row *row_of(const ha_decode_params *p, bool causal, int64_t rows, int box) {
  static const int HEAD_DIMS[] = DECODE_HEAD_DIMS, ROWS[] = DECODE_ROWS;
  size_t index = p->dtype * 2 + is_e4m3(p);
  index = index * DECODE_NUM_HEAD_DIMS + cover(HEAD_DIMS, DECODE_NUM_HEAD_DIMS, p->head_dim);
  index = index * DECODE_NUM_HEAD_DIMS + cover(HEAD_DIMS, DECODE_NUM_HEAD_DIMS, p->head_dim_v);
  index = (index * 2 + causal) * 2 + (p->page_table != NULL);
  index = index * DECODE_NUM_ROWS + cover(ROWS, DECODE_NUM_ROWS, rows);
  return &ha_decode_rows[index * DECODE_NUM_BOX_ROWS + box];
}

static ha_status make_plan(ha_decode_params *own, const ha_decode_params *given, plan *made) {
  const ha_decode_params *const p = own;
  *own = (ha_decode_params)HA_DECODE_PARAMS_INIT;
  ha_status status = ha_read_params(own, sizeof *own, offsetof(ha_decode_params, window_left), given,
                                    "HA_DECODE_PARAMS_INIT");
  if (status == HA_SUCCESS) status = check_params(p, made);
  if (status == HA_SUCCESS) status = check_features(p);
  if (status != HA_SUCCESS) return status;
  made->features = features_of(p, &made->mask);
  made->is_empty = !p->batch || !p->seqlen_q;
  const int64_t rows = p->seqlen_q * (p->heads / p->kv_heads);
  if (rows > DECODE_MOST_ROWS) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "%" PRId64 " query rows share a K/V head, allowed: up to %d; use ha_paged", rows, DECODE_MOST_ROWS);
  }
  const int box = box_of(p);
  if (box == DECODE_NUM_BOX_ROWS) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "page_size is %" PRId64 ", allowed where a sequence has several pages: multiples of 8",
                   p->page_size);
  }
  made->row = row_of(p, made->mask.causal, rows, box);
  if (made->row->kernel >= 0) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "head_dim is %" PRId64 " and head_dim_v %" PRId64 ", and %" PRId64
                 " query rows share a K/V head, allowed with a cache of e4m3: up to %d, or any head_dims with bfloat16 "
                 "and up to %d query rows; use a cache of 16 bits",
                 p->head_dim, p->head_dim_v, rows, DECODE_WIDENED_COLUMNS, DECODE_SWAPPED_ROWS);
}

static int64_t lse_floats(const ha_decode_params *p) { return p->batch * p->heads * p->seqlen_q; }

/* CTAs whose pieces begin at like keys in every head, on a GPU of so many multiprocessors. */
static int64_t even_ctas(const ha_decode_params *p, int multiprocessors) {
  const int heads = (int)p->kv_heads;
  const int step = heads < DECODE_CTA_STEP && DECODE_CTA_STEP % heads ? heads : DECODE_CTA_STEP;
  const int whole = multiprocessors / step * step;
  const int64_t most = whole ? whole : multiprocessors, useful = DECODE_MAX_PARTS * p->batch * p->kv_heads;
  return useful < most ? useful : most;
}

/* CTAs among which the keys are shared out: those that have whole tiles, if they are nearly as many or more. */
static int64_t count_ctas(const ha_decode_params *p, int multiprocessors) {
  const int64_t even = even_ctas(p, multiprocessors), tiles = p->batch * p->kv_heads;
  const int64_t of_a_cta = tiles > multiprocessors ? (tiles + multiprocessors - 1) / multiprocessors : 1;
  if (p->kv_heads > DECODE_WHOLE_HEADS || of_a_cta > DECODE_WHOLE_TILES || tiles % of_a_cta) return even;
  return 128 * (tiles / of_a_cta) >= DECODE_WHOLE_FROM * even ? tiles / of_a_cta : even;
}

/* Partial results, and an LSE that nobody wants, for the largest GPU. */
static size_t workspace_size_of(const ha_decode_params *p, const plan *made) {
  const int64_t parts = DECODE_PARTS_PER_CTA * count_ctas(p, MOST_MULTIPROCESSORS);
  return WORKSPACE_HEAD_BYTES + sizeof(float) * (size_t)(parts * made->row->part_floats + lse_floats(p));
}

static void add_tables(call *c, const ha_decode_params *p) {
  ha_add_tensor(c, p->cache_seqlens, INT32, 1, (const int64_t[]){p->batch}, NULL);
  if (p->page_table) {
    ha_add_tensor(c, p->page_table, INT32, 2, (const int64_t[]){p->batch, p->pages_of_sequence}, NULL);
  } else {
    ha_add_nothing(c);
  }
  if (p->cache_leftpad) ha_add_tensor(c, p->cache_leftpad, INT32, 1, (const int64_t[]){p->batch}, NULL);
  else ha_add_nothing(c);
  ha_add_nothing(c); /* cu_seqlens_q */
}

static void add_descales(call *c, const ha_decode_params *p) {
  ha_add_nothing(c); /* q_descale */
  if (!is_e4m3(p)) {
    ha_add_nothings(c, 2);
    return;
  }
  const int64_t shape[] = {p->batch, p->kv_heads};
  ha_add_tensor(c, p->k_descale, FLOAT32, 2, shape, NULL);
  ha_add_tensor(c, p->v_descale, FLOAT32, 2, shape, NULL);
}

static ha_status check_pointers(const ha_decode_params *p, const plan *made) {
  ha_status status = ha_check_array("cache_seqlens", p->cache_seqlens, "(batch,) int32");
  if (status == HA_SUCCESS && is_e4m3(p)) status = ha_check_descales(p->k_descale, p->v_descale);
  if (status != HA_SUCCESS) return status;
  return ha_check_workspace(p->workspace, p->workspace_size, workspace_size_of(p, made));
}

static ha_status launch(const ha_decode_params *p, const plan *made, const operand *operands, const device *here,
                        bool only_load) {
  const int most = here->multiprocessors;
  const int64_t num_ctas = count_ctas(p, most < MOST_MULTIPROCESSORS ? most : MOST_MULTIPROCESSORS);
  const int64_t lse[] = {p->batch, p->heads, p->seqlen_q};
  const int64_t parts[] = {DECODE_PARTS_PER_CTA * num_ctas, made->row->part_floats};
  float *const memory = (float *)((char *)p->workspace + WORKSPACE_HEAD_BYTES);
  call c;
  ha_call_begin(&c, here->index);
  for (int i = 0; i < NUM_OPERANDS; i++) ha_add_operand(&c, &operands[i]);
  ha_add_tensor(&c, p->lse ? p->lse : memory + parts[0] * parts[1], FLOAT32, 3, lse, NULL);
  add_tables(&c, p);
  ha_add_tensor(&c, memory, FLOAT32, 2, parts, NULL);
  ha_add_real(&c, made->scale);
  ha_add_nothing(&c); /* most splits */
  ha_add_window(&c, &made->mask);
  ha_add_softcap(&c, &p->scores);
  ha_add_sinks(&c, &p->scores, p->heads);
  add_descales(&c, p);
  ha_add_int(&c, num_ctas);
  return ha_run((kernel_choice){made->row->kernel, made->features}, &c, p->stream, only_load);
}

static ha_status run(const ha_decode_params *given, bool only_load) {
  ha_decode_params own, *const p = &own;
  plan made;
  ha_status status = make_plan(p, given, &made);
  if (status != HA_SUCCESS || made.is_empty) return status;
  const ha_dtype cached = p->cache_dtype;
  operand operands[] = {
      [Q] = {"q", &p->q, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim}, {0}},
      [K] = {"k_cache", &p->k_cache, cached, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim}, {0}},
      [V] = {"v_cache", &p->v_cache, cached, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim_v}, {0}},
      [OUT] = {"out", &p->out, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim_v}, {0}}};
  status = ha_check_operands(operands, NUM_OPERANDS);
  if (status == HA_SUCCESS) status = check_pointers(p, &made);
  device here;
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  return status == HA_SUCCESS ? launch(p, &made, operands, &here, only_load) : status;
}

ha_status ha_decode(const ha_decode_params *params) { return run(params, false); }

ha_status ha_decode_prepare(const ha_decode_params *params) { return run(params, true); }

ha_status ha_decode_kernel(const ha_decode_params *params, const char **name) {
  ha_decode_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && name) *name = ha_name_of((kernel_choice){made.row->kernel, made.features});
  return status;
}

ha_status ha_decode_workspace_size(const ha_decode_params *params, size_t *size) {
  ha_decode_params own;
  plan made;
  const ha_status status = make_plan(&own, params, &made);
  if (status == HA_SUCCESS && size) *size = workspace_size_of(&own, &made);
  return status;
}
