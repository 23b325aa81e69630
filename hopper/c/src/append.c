/* New tokens into a key/value cache, and rotary embedding of them and of queries. */
#include <inttypes.h>

#include "internal.h"

enum { TURNED_BY_FLOAT32 = 2 };

static bool is_e4m3(const ha_append_params *p) { return p->cache_dtype == HA_FLOAT8_E4M3; }

static bool turns_queries(const ha_append_params *p) { return p->rotary != HA_ROTARY_NONE && p->seqlen_q; }

static ha_status check_rotary(const ha_append_params *p) {
  if (p->rotary == HA_ROTARY_NONE) return HA_SUCCESS;
  if (p->rotary != HA_ROTARY_INTERLEAVED && p->rotary != HA_ROTARY_HALVES) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "rotary is %d, allowed: HA_ROTARY_NONE, HA_ROTARY_INTERLEAVED or HA_ROTARY_HALVES", (int)p->rotary);
  }
  if (p->rotary_dtype != p->dtype && p->rotary_dtype != HA_FLOAT32) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "rotary_dtype is %d, allowed: dtype, %d, or HA_FLOAT32",
                   (int)p->rotary_dtype, (int)p->dtype);
  }
  if (p->rotary_dim % ROTARY_STEP || p->rotary_dim < ROTARY_STEP || p->rotary_dim > p->head_dim) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "rotary_dim is %" PRId64 ", allowed: multiples of %d from %d to head_dim, %" PRId64, p->rotary_dim,
                   ROTARY_STEP, ROTARY_STEP, p->head_dim);
  }
  ha_status status = ha_check_range("rotary_rows", p->rotary_rows, 1, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_q", p->seqlen_q, 0, MAX_SEQLEN);
  if (status == HA_SUCCESS && turns_queries(p)) status = ha_check_range("heads", p->heads, 1, INT32_MAX);
  return status;
}

static ha_status check_cache(const ha_append_params *p) {
  const cache_sizes sizes = {p->page_table, p->batch, p->pages, p->page_size, p->pages_of_sequence};
  const ha_status status = ha_check_cache_dtype(p->dtype, p->cache_dtype);
  return status == HA_SUCCESS ? ha_check_cache(&sizes) : status;
}

static ha_status check_counts(const ha_append_params *p) {
  const int64_t tokens[] = {p->cu_seqlens_new ? 1 : p->batch, p->seqlen_new};
  const int64_t queries[] = {p->cu_seqlens_q ? 1 : p->batch, turns_queries(p) ? p->seqlen_q : 0};
  if (!ha_fits(tokens, 2, MAX_SEQLEN) || !ha_fits(queries, 2, MAX_SEQLEN)) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED, "there may be at most %" PRId64 " new tokens, and as many queries",
                   (int64_t)MAX_SEQLEN);
  }
  const int64_t columns = p->kv_heads * (p->head_dim + p->head_dim_v) + (turns_queries(p) ? p->heads * p->head_dim : 0);
  if (columns <= APPEND_MOST_COLUMNS) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED, "a token has %" PRId64 " numbers, allowed: up to %" PRId64, columns,
                 (int64_t)APPEND_MOST_COLUMNS);
}

static ha_status check_params(ha_append_params *own, const ha_append_params *given) {
  const ha_append_params *const p = own;
  ha_status status = ha_read_params(own, sizeof *own, sizeof *own, given, "HA_APPEND_PARAMS_INIT");
  if (status != HA_SUCCESS) return status;
  const problem_sizes sizes = {p->kv_heads, p->kv_heads, p->head_dim, p->head_dim_v};
  status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX - 1);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_new", p->seqlen_new, 1, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = check_cache(p);
  if (status == HA_SUCCESS) status = check_rotary(p);
  return status == HA_SUCCESS ? check_counts(p) : status;
}

static kernel_choice choose(const ha_append_params *p) {
  int way = p->rotary;
  if (way && p->rotary_dtype == HA_FLOAT32) way += TURNED_BY_FLOAT32;
  return (kernel_choice){ha_append_kernels[p->dtype][is_e4m3(p)][way], 0};
}

static ha_status check_arrays(const ha_append_params *p) {
  ha_status status = ha_check_array("cache_seqlens", p->cache_seqlens, "(batch,) int32");
  if (status == HA_SUCCESS) status = ha_check_array("new_seqlens", p->new_seqlens, "(batch,) int32");
  if (status == HA_SUCCESS && p->new_seqlens == p->cache_seqlens) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "new_seqlens is cache_seqlens, allowed: other memory");
  }
  if (status == HA_SUCCESS && is_e4m3(p)) status = ha_check_descales(p->k_descale, p->v_descale);
  return status;
}

/* Append rows of a batch, or where they are packed of a batch of one. */
static ha_status add_rows(call *c, operand rows, bool is_packed) {
  ha_tensor given = *rows.given;
  if (is_packed) rows.shape[0] = 1;
  /* The stride of a lone batch entry is of no matter, but has to be told from contiguous rows. */
  if (is_packed && (given.stride_row || given.stride_head)) given.stride_batch = rows.shape[1] * given.stride_row;
  rows.given = &given;
  const ha_status status = ha_check_operands(&rows, 1);
  if (status == HA_SUCCESS) ha_add_operand(c, &rows);
  return status;
}

static void add_words(call *c, const int32_t *data, int64_t count) {
  const int64_t there = data ? count : 0;
  ha_add_tensor(c, data, INT32, 1, &there, NULL);
}

static ha_status add_new_and_caches(call *c, const ha_append_params *p) {
  const ha_dtype cached = p->cache_dtype;
  operand rows[] = {{"k", &p->k, p->dtype, 4, {p->batch, p->seqlen_new, p->kv_heads, p->head_dim}, {0}},
                    {"v", &p->v, p->dtype, 4, {p->batch, p->seqlen_new, p->kv_heads, p->head_dim_v}, {0}},
                    {"k_cache", &p->k_cache, cached, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim}, {0}},
                    {"v_cache", &p->v_cache, cached, 4, {p->pages, p->page_size, p->kv_heads, p->head_dim_v}, {0}}};
  ha_status status = HA_SUCCESS;
  for (int i = 0; status == HA_SUCCESS && i < 4; i++) status = add_rows(c, rows[i], i < 2 && p->cu_seqlens_new);
  return status;
}

static void add_places(call *c, const ha_append_params *p) {
  const int64_t table[] = {p->page_table ? p->batch : 0, p->page_table ? p->pages_of_sequence : 0};
  const int64_t of_heads[] = {p->batch, p->kv_heads};
  add_words(c, p->cache_seqlens, p->batch);
  add_words(c, p->cu_seqlens_new, p->batch + 1);
  add_words(c, NULL, 0); /* which entry of the table a sequence has */
  ha_add_tensor(c, p->page_table, INT32, 2, table, NULL);
  add_words(c, p->new_seqlens, p->batch);
  if (is_e4m3(p)) {
    ha_add_tensor(c, p->k_descale, FLOAT32, 2, of_heads, NULL);
    ha_add_tensor(c, p->v_descale, FLOAT32, 2, of_heads, NULL);
  } else {
    ha_add_nothings(c, 2);
  }
}

static ha_status add_queries(call *c, const ha_append_params *p) {
  if (!turns_queries(p)) {
    const int64_t none[] = {0, 0, 0, p->head_dim}, strides[] = {p->head_dim, p->head_dim, p->head_dim, 1};
    for (int i = 0; i < 2; i++) ha_add_tensor(c, NULL, ha_element_of(p->dtype), 4, none, strides);
    add_words(c, NULL, 0);
    ha_add_int(c, 0);
    return HA_SUCCESS;
  }
  if (p->q_out.data == p->q.data) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "q_out.data is q.data, allowed: other memory");
  }
  operand rows[] = {{"q", &p->q, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim}, {0}},
                    {"q_out", &p->q_out, p->dtype, 4, {p->batch, p->seqlen_q, p->heads, p->head_dim}, {0}}};
  for (int i = 0; i < 2; i++) {
    const ha_status status = add_rows(c, rows[i], p->cu_seqlens_q);
    if (status != HA_SUCCESS) return status;
  }
  add_words(c, p->cu_seqlens_q, p->batch + 1);
  ha_add_int(c, p->same_position ? 0 : 1);
  return HA_SUCCESS;
}

static ha_status add_rotary(call *c, const ha_append_params *p) {
  if (p->rotary == HA_ROTARY_NONE) {
    ha_add_nothings(c, 7);
    return HA_SUCCESS;
  }
  const void *tables[] = {p->rotary_cos, p->rotary_sin};
  static const char *const NAMES[] = {"rotary_cos", "rotary_sin"};
  const int64_t shape[] = {p->rotary_rows, p->rotary_dim / 2};
  for (int i = 0; i < 2; i++) {
    if (!tables[i] || (uintptr_t)tables[i] % WORKSPACE_ALIGNMENT) {
      return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %p, allowed: memory of the GPU at a multiple of %d bytes",
                     NAMES[i], tables[i], WORKSPACE_ALIGNMENT);
    }
    ha_add_tensor(c, tables[i], ha_element_of(p->rotary_dtype), 2, shape, NULL);
  }
  add_words(c, p->rotary_seqlens, p->batch);
  return add_queries(c, p);
}

static ha_status run(const ha_append_params *given, bool only_load) {
  ha_append_params own, *const p = &own;
  ha_status status = check_params(p, given);
  if (status != HA_SUCCESS || !p->batch) return status;
  device here;
  call c;
  ha_call_begin(&c, 0);
  status = check_arrays(p);
  if (status == HA_SUCCESS) status = ha_current_device(&here);
  if (status == HA_SUCCESS) c.device = here.index;
  if (status == HA_SUCCESS) status = add_new_and_caches(&c, p);
  if (status != HA_SUCCESS) return status;
  add_places(&c, p);
  status = add_rotary(&c, p);
  return status == HA_SUCCESS ? ha_run(choose(p), &c, p->stream, only_load) : status;
}

ha_status ha_append(const ha_append_params *params) { return run(params, false); }

ha_status ha_append_prepare(const ha_append_params *params) { return run(params, true); }

ha_status ha_append_kernel(const ha_append_params *params, const char **name) {
  ha_append_params own;
  const ha_status status = check_params(&own, params);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose(&own));
  return status;
}
