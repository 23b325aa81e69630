/* Attention of sequences of one length, in 16 bits. */
#include <inttypes.h>

#include "internal.h"

/* What is known of a checked problem before its pointers are looked at. */
typedef struct plan {
  mask mask;
  double scale;
  const forward_row *row;
  bool is_empty;
} plan;

static ha_status check_tiles(const ha_forward_params *p, const forward_row *row) {
  const int64_t blocks = (p->seqlen_q + row->tile_m - 1) / row->tile_m;
  /* None of the factors is above 2^31, and their product is compared before it can overflow. */
  if (p->batch * p->heads <= MAX_TILES / blocks) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "batch %" PRId64 " x heads %" PRId64 " x seqlen_q %" PRId64 " are more than %" PRId64
                 " tiles of %d queries: split the batch",
                 p->batch, p->heads, p->seqlen_q, (int64_t)MAX_TILES, row->tile_m);
}

static ha_status make_plan(const ha_forward_params *p, plan *made) {
  if (!p || p->struct_size != sizeof *p) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "params is not of this version of the library: initialise it with HA_FORWARD_PARAMS_INIT");
  }
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_q", p->seqlen_q, 0, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = ha_check_range("seqlen_k", p->seqlen_k, 1, MAX_SEQLEN);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  const int64_t sides[] = {p->window_left, p->window_right}, dims[] = {p->head_dim, p->head_dim_v};
  if (status == HA_SUCCESS) status = ha_canonical_mask(&made->mask, p->causal, sides, p->seqlen_q, p->seqlen_k);
  if (status != HA_SUCCESS) return status;
  made->is_empty = !p->batch || !p->seqlen_q;
  made->row = ha_select_forward(p->dtype, LAYOUT_DENSE, &made->mask, dims, ha_most_keys(&made->mask, p->seqlen_k));
  if (!made->row) return ha_fail(HA_ERROR_NOT_SUPPORTED, "no kernel takes this problem");
  return made->is_empty ? HA_SUCCESS : check_tiles(p, made->row);
}

static ha_status run(const ha_forward_params *p, bool only_load) {
  plan made;
  ha_status status = make_plan(p, &made);
  if (status != HA_SUCCESS || made.is_empty) return status;
  const int64_t shapes[4][4] = {{p->batch, p->seqlen_q, p->heads, p->head_dim},
                                {p->batch, p->seqlen_k, p->kv_heads, p->head_dim},
                                {p->batch, p->seqlen_k, p->kv_heads, p->head_dim_v},
                                {p->batch, p->seqlen_q, p->heads, p->head_dim_v}};
  const ha_tensor *tensors[] = {&p->q, &p->k, &p->v, &p->out};
  static const char *const NAMES[] = {"q", "k", "v", "out"};
  operand operands[4];
  for (int i = 0; i < 4; i++) {
    operands[i] = (operand){.data = tensors[i]->data, .shape = shapes[i]};
    status = ha_check_tensor(NAMES[i], tensors[i], p->dtype, 4, shapes[i], operands[i].strides);
    if (status != HA_SUCCESS) return status;
  }
  status = ha_check_workspace(p->workspace, p->workspace_size, COUNTER_BYTES);
  device here;
  if (status == HA_SUCCESS) status = ha_current_device(&here);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, here.multiprocessors - 1);
  if (status != HA_SUCCESS) return status;
  const lse_argument lse = {p->lse, 3, {p->batch, p->heads, p->seqlen_q}};
  call c;
  ha_call_begin(&c, here.index);
  ha_add_operands(&c, p->dtype, operands, 4, &lse, p->workspace, made.scale);
  if (ha_has_window(&made.mask)) {
    ha_add_window(&c, &made.mask);
    ha_add_nothings(&c, PLAN_ARGUMENTS + PAGE_ARGUMENTS + SCORE_ARGUMENTS);
  }
  ha_add_int(&c, (int64_t)(here.multiprocessors - p->sm_margin) * made.row->ctas_per_sm);
  return ha_run(&ha_kernels[made.row->kernel], &c, p->stream, only_load);
}

ha_status ha_forward(const ha_forward_params *params) { return run(params, false); }

ha_status ha_forward_prepare(const ha_forward_params *params) { return run(params, true); }

ha_status ha_forward_kernel(const ha_forward_params *params, const char **name) {
  plan made;
  const ha_status status = make_plan(params, &made);
  if (status == HA_SUCCESS && name) *name = ha_kernels[made.row->kernel].name;
  return status;
}

ha_status ha_forward_workspace_size(const ha_forward_params *params, size_t *size) {
  plan made;
  const ha_status status = make_plan(params, &made);
  if (status == HA_SUCCESS && size) *size = COUNTER_BYTES;
  return status;
}
