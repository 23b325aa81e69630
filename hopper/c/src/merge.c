/* Attention to parts of the keys, put together by the LSE of each. */
#include <inttypes.h>

#include "internal.h"

enum { COLUMN_STEP = 8, MOST_COLUMNS = 1 << 20 };

/* Rows of results: their sizes without and with columns, and the strides of an LSE as ha_forward leaves it. */
typedef struct rows {
  int64_t shape[4]; /* batch, seqlen, heads, head_dim_v */
  int64_t lse_strides[3];
} rows;

static ha_status check_rows(const rows *r) {
  static const char *const NAMES[] = {"batch", "seqlen", "heads"};
  for (int i = 0; i < 3; i++) {
    const ha_status status = ha_check_range(NAMES[i], r->shape[i], 0, INT32_MAX);
    if (status != HA_SUCCESS) return status;
  }
  const int64_t columns = r->shape[3];
  if (columns % COLUMN_STEP || columns < COLUMN_STEP || columns > MOST_COLUMNS) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "head_dim_v is %" PRId64 ", allowed: multiples of %d from %d to %d",
                   columns, COLUMN_STEP, COLUMN_STEP, MOST_COLUMNS);
  }
  /* What the kernels count: warps of each part of a row. */
  const int64_t counted[] = {COMBINE_WARPS, ha_ceil_div(columns, COMBINE_COLUMNS), r->shape[0], r->shape[1], r->shape[2]};
  if (ha_fits(counted, 5, MAX_TILES)) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "batch %" PRId64 " x seqlen %" PRId64 " x heads %" PRId64 " are too many rows: split the batch",
                 r->shape[0], r->shape[1], r->shape[2]);
}

static rows rows_of(int64_t batch, int64_t seqlen, int64_t heads, int64_t columns) {
  return (rows){{batch, seqlen, heads, columns}, {heads * seqlen, 1, seqlen}};
}

static bool is_empty(const rows *r) { return !r->shape[0] || !r->shape[1] || !r->shape[2]; }

/* Append a checked tensor of rows. */
static ha_status add_rows(call *c, const char *name, const ha_tensor *t, ha_dtype dtype, const rows *r) {
  int64_t strides[4];
  const ha_status status = ha_check_tensor(name, t, dtype, 4, r->shape, strides);
  if (status == HA_SUCCESS) ha_add_tensor(c, t->data, ha_element_of(dtype), 4, r->shape, strides);
  return status;
}

static ha_status add_lse(call *c, const char *name, const float *lse, const rows *r) {
  const ha_status status = ha_check_array(name, lse, "contiguous (batch, heads, seqlen) float32");
  if (status == HA_SUCCESS) ha_add_tensor(c, lse, FLOAT32, 3, r->shape, r->lse_strides);
  return status;
}

/* ---- several parts at once ---- */

static ha_status check_combine(ha_combine_params *own, const ha_combine_params *given, rows *made) {
  ha_status status = ha_read_params(own, sizeof *own, sizeof *own, given, "HA_COMBINE_PARAMS_INIT");
  if (status != HA_SUCCESS) return status;
  if (own->dtype != HA_FLOAT16 && own->dtype != HA_BFLOAT16 && own->dtype != HA_FLOAT32) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "dtype is %d, allowed: HA_FLOAT16, HA_BFLOAT16 or HA_FLOAT32",
                   (int)own->dtype);
  }
  *made = rows_of(own->batch, own->seqlen, own->heads, own->head_dim_v);
  status = ha_check_range("num_splits", own->num_splits, 1, COMBINE_MAX_SPLITS);
  return status == HA_SUCCESS ? check_rows(made) : status;
}

static kernel_choice choose_combine(const ha_combine_params *p) {
  const int dtype = p->dtype == HA_FLOAT32 ? 2 : (int)p->dtype;
  return (kernel_choice){ha_combine_kernels[dtype][p->num_splits > COMBINE_FEW_SPLITS], 0};
}

static ha_status add_parts(call *c, const ha_combine_params *p, const rows *r) {
  const int64_t *s = r->shape, *of_lse = r->lse_strides, step = COLUMN_STEP / 2;
  const int64_t parts[] = {p->num_splits, s[0], s[1], s[2], s[3]};
  int64_t strides[5];
  ha_status status = ha_check_tensor("out_partial", &p->out_partial, HA_FLOAT32, 4, s, strides + 1);
  if (status != HA_SUCCESS) return status;
  strides[0] = p->out_partial_stride_split ? p->out_partial_stride_split : s[0] * s[1] * s[2] * s[3];
  if (strides[0] <= 0 || strides[0] % step) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "out_partial_stride_split is %" PRId64 ", allowed: positive multiples of %d elements, or 0 for parts "
                   "without a gap",
                   p->out_partial_stride_split, (int)step);
  }
  status = ha_check_array("lse_partial", p->lse_partial, "contiguous (num_splits, batch, heads, seqlen) float32");
  if (status != HA_SUCCESS) return status;
  const int64_t lse_strides[] = {s[0] * s[1] * s[2], of_lse[0], of_lse[1], of_lse[2]};
  ha_add_tensor(c, p->out_partial.data, FLOAT32, 5, parts, strides);
  ha_add_tensor(c, p->lse_partial, FLOAT32, 4, parts, lse_strides);
  return HA_SUCCESS;
}

static ha_status run_combine(const ha_combine_params *given, bool only_load) {
  ha_combine_params own, *const p = &own;
  rows r;
  ha_status status = check_combine(p, given, &r);
  if (status != HA_SUCCESS || is_empty(&r)) return status;
  device here;
  call c;
  status = ha_current_device(&here);
  if (status != HA_SUCCESS) return status;
  ha_call_begin(&c, here.index);
  status = add_parts(&c, p, &r);
  if (status == HA_SUCCESS) status = add_rows(&c, "out", &p->out, p->dtype, &r);
  if (status == HA_SUCCESS) status = add_lse(&c, "lse", p->lse, &r);
  return status == HA_SUCCESS ? ha_run(choose_combine(p), &c, p->stream, only_load) : status;
}

ha_status ha_combine(const ha_combine_params *params) { return run_combine(params, false); }

ha_status ha_combine_prepare(const ha_combine_params *params) { return run_combine(params, true); }

ha_status ha_combine_kernel(const ha_combine_params *params, const char **name) {
  ha_combine_params own;
  rows r;
  const ha_status status = check_combine(&own, params, &r);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose_combine(&own));
  return status;
}

/* ---- one part more ---- */

static ha_status check_merge(ha_merge_params *own, const ha_merge_params *given, rows *made) {
  const ha_status status = ha_read_params(own, sizeof *own, sizeof *own, given, "HA_MERGE_PARAMS_INIT");
  if (status != HA_SUCCESS) return status;
  if (own->dtype != HA_FLOAT16 && own->dtype != HA_BFLOAT16) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "dtype is %d, allowed: HA_FLOAT16 or HA_BFLOAT16", (int)own->dtype);
  }
  *made = rows_of(own->batch, own->seqlen, own->heads, own->head_dim_v);
  return check_rows(made);
}

static kernel_choice choose_merge(const ha_merge_params *p) { return (kernel_choice){ha_merge_kernels[p->dtype], 0}; }

static ha_status run_merge(const ha_merge_params *given, bool only_load) {
  ha_merge_params own, *const p = &own;
  rows r;
  ha_status status = check_merge(p, given, &r);
  if (status != HA_SUCCESS || is_empty(&r)) return status;
  device here;
  call c;
  status = ha_current_device(&here);
  if (status != HA_SUCCESS) return status;
  ha_call_begin(&c, here.index);
  status = add_rows(&c, "out", &p->out, HA_FLOAT32, &r);
  if (status == HA_SUCCESS) status = add_lse(&c, "lse", p->lse, &r);
  if (status == HA_SUCCESS) status = add_rows(&c, "part", &p->part, p->dtype, &r);
  if (status == HA_SUCCESS) status = add_lse(&c, "part_lse", p->part_lse, &r);
  return status == HA_SUCCESS ? ha_run(choose_merge(p), &c, p->stream, only_load) : status;
}

ha_status ha_merge(const ha_merge_params *params) { return run_merge(params, false); }

ha_status ha_merge_prepare(const ha_merge_params *params) { return run_merge(params, true); }

ha_status ha_merge_kernel(const ha_merge_params *params, const char **name) {
  ha_merge_params own;
  rows r;
  const ha_status status = check_merge(&own, params, &r);
  if (status == HA_SUCCESS && name) *name = ha_name_of(choose_merge(&own));
  return status;
}
