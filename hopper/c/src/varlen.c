/* Attention of packed sequences, in 16 bits: the GPU plans the tiles, then the kernel goes by the plan. */
#include <inttypes.h>

#include "internal.h"

enum { TILES_OF_QUERIES = 0 };

typedef struct plan {
  mask mask;
  double scale;
  const forward_row *row;
  int64_t words; /* of the plan that the GPU makes */
  bool is_empty;
} plan;

/* Tiles of one head at most: those of all rows, and one more for each sequence and for the rows of none. */
static int64_t most_tiles(int64_t total, int64_t batch, int64_t tile) { return total / tile + batch + 1; }

static ha_status check_params(const ha_varlen_params *p, plan *made) {
  if (!p || p->struct_size != sizeof *p) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "params is not of this version of the library: initialise it with HA_VARLEN_PARAMS_INIT");
  }
  const problem_sizes sizes = {p->heads, p->kv_heads, p->head_dim, p->head_dim_v};
  ha_status status = ha_check_sizes(p->dtype, &sizes);
  if (status == HA_SUCCESS) status = ha_check_range("batch", p->batch, 0, INT32_MAX - 1);
  if (status == HA_SUCCESS) status = ha_check_range("total_q", p->total_q, 0, MAX_PACKED_ROWS);
  if (status == HA_SUCCESS) status = ha_check_range("total_k", p->total_k, 1, MAX_PACKED_ROWS);
  if (status == HA_SUCCESS) status = ha_check_range("max_seqlen_q", p->max_seqlen_q, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("max_seqlen_k", p->max_seqlen_k, 1, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_range("sm_margin", p->sm_margin, 0, INT32_MAX);
  if (status == HA_SUCCESS) status = ha_check_scale(p->softmax_scale, p->head_dim, &made->scale);
  return status;
}

static ha_status make_plan(const ha_varlen_params *p, plan *made) {
  ha_status status = check_params(p, made);
  if (status != HA_SUCCESS) return status;
  const int64_t sides[] = {p->window_left, p->window_right}, dims[] = {p->head_dim, p->head_dim_v};
  status = ha_canonical_mask(&made->mask, p->causal, sides, p->max_seqlen_q, p->max_seqlen_k);
  if (status != HA_SUCCESS) return status;
  made->is_empty = !p->batch || !p->total_q;
  /* Lengths are not known here: tiles are the same for all. */
  made->row = ha_select_forward(p->dtype, LAYOUT_VARLEN, &made->mask, dims, 0);
  if (!made->row) return ha_fail(HA_ERROR_NOT_SUPPORTED, "no kernel takes this problem");
  const int64_t tiles = most_tiles(p->total_q, p->batch, made->row->tile_m);
  made->words = PLAN_HEADER + PLAN_RECORD * (p->batch + 1) + PLAN_ENTRY * tiles;
  if (tiles <= MAX_TILES / p->heads) return HA_SUCCESS;
  return ha_fail(HA_ERROR_NOT_SUPPORTED,
                 "heads %" PRId64 " x total_q %" PRId64 " in %" PRId64 " sequences may be more than %" PRId64
                 " tiles of %d queries: split the batch",
                 p->heads, p->total_q, p->batch, (int64_t)MAX_TILES, made->row->tile_m);
}

static size_t workspace_size_of(const plan *made) { return WORKSPACE_HEAD_BYTES + sizeof(int32_t) * (size_t)made->words; }

static void *plan_in(const ha_varlen_params *p) { return (char *)p->workspace + WORKSPACE_HEAD_BYTES; }

static ha_status run_planner(const ha_varlen_params *p, const plan *made, int device, bool only_load) {
  const int64_t ends[] = {p->batch + 1}, none[] = {0}, used[] = {p->seqused_k ? p->batch : 0};
  call c;
  ha_call_begin(&c, device);
  ha_add_tensor(&c, p->cu_seqlens_q, INT32, 1, ends, NULL);
  ha_add_tensor(&c, p->cu_seqlens_k, INT32, 1, ends, NULL);
  ha_add_tensor(&c, NULL, INT32, 1, none, NULL);
  ha_add_tensor(&c, p->seqused_k, INT32, 1, used, NULL);
  ha_add_tensor(&c, plan_in(p), INT32, 1, &made->words, NULL);
  ha_add_int(&c, p->total_q);
  ha_add_int(&c, p->total_k);
  ha_add_int(&c, made->row->tile_m);
  ha_add_int(&c, TILES_OF_QUERIES);
  return ha_run(&ha_kernels[ha_plan_kernel], &c, p->stream, only_load);
}

static ha_status check_lengths(const ha_varlen_params *p) {
  if (!p->cu_seqlens_q || !p->cu_seqlens_k) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "cu_seqlens_%c is NULL, allowed: (batch + 1,) int32 on the GPU",
                   p->cu_seqlens_q ? 'k' : 'q');
  }
  return HA_SUCCESS;
}

static ha_status run(const ha_varlen_params *p, bool only_load) {
  plan made;
  ha_status status = make_plan(p, &made);
  if (status != HA_SUCCESS || made.is_empty) return status;
  const int64_t shapes[4][3] = {{p->total_q, p->heads, p->head_dim},
                                {p->total_k, p->kv_heads, p->head_dim},
                                {p->total_k, p->kv_heads, p->head_dim_v},
                                {p->total_q, p->heads, p->head_dim_v}};
  const ha_tensor *tensors[] = {&p->q, &p->k, &p->v, &p->out};
  static const char *const NAMES[] = {"q", "k", "v", "out"};
  operand operands[4];
  for (int i = 0; i < 4; i++) {
    operands[i] = (operand){.data = tensors[i]->data, .shape = shapes[i]};
    status = ha_check_tensor(NAMES[i], tensors[i], p->dtype, 3, shapes[i], operands[i].strides);
    if (status != HA_SUCCESS) return status;
  }
  status = check_lengths(p);
  if (status == HA_SUCCESS) status = ha_check_workspace(p->workspace, p->workspace_size, workspace_size_of(&made));
  device here;
  if (status == HA_SUCCESS) status = ha_device_with_margin(p->sm_margin, &here);
  if (status == HA_SUCCESS) status = run_planner(p, &made, here.index, only_load);
  if (status != HA_SUCCESS) return status;
  const lse_argument lse = {p->lse, 2, {p->heads, p->total_q}};
  call c;
  ha_call_begin(&c, here.index);
  ha_add_operands(&c, p->dtype, operands, 3, &lse, p->workspace, made.scale);
  ha_add_window(&c, &made.mask);
  ha_add_tensor(&c, plan_in(p), INT32, 1, &made.words, NULL);
  ha_add_int(&c, p->batch + 1);
  ha_add_nothings(&c, PAGE_ARGUMENTS + SCORE_ARGUMENTS);
  ha_add_int(&c, (int64_t)here.multiprocessors * made.row->ctas_per_sm);
  return ha_run(&ha_kernels[made.row->kernel], &c, p->stream, only_load);
}

ha_status ha_varlen(const ha_varlen_params *params) { return run(params, false); }

ha_status ha_varlen_prepare(const ha_varlen_params *params) { return run(params, true); }

ha_status ha_varlen_kernel(const ha_varlen_params *params, const char **name) {
  plan made;
  const ha_status status = make_plan(params, &made);
  if (status == HA_SUCCESS && name) *name = ha_kernels[made.row->kernel].name;
  return status;
}

ha_status ha_varlen_workspace_size(const ha_varlen_params *params, size_t *size) {
  plan made;
  const ha_status status = make_plan(params, &made);
  if (status == HA_SUCCESS && size) *size = workspace_size_of(&made);
  return status;
}
