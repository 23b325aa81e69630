/* Which kernel serves a problem, by the generated table; no GPU is asked. */
#include <inttypes.h>

#include "internal.h"

static ha_status check_side(const char *name, int64_t side) {
  if (side >= UNLIMITED) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed: -1, which hides nothing, or more", name, side);
}

ha_status ha_canonical_mask(mask *made, bool causal, const int64_t sides[2], int64_t seqlen_q, int64_t seqlen_k) {
  ha_status status = check_side("window_left", sides[0]);
  if (status == HA_SUCCESS) status = check_side("window_right", sides[1]);
  if (status != HA_SUCCESS) return status;
  /* The last query is the one whose left side hides the most, the first the one whose right side does. */
  const int64_t left = sides[0] >= seqlen_k - 1 ? UNLIMITED : sides[0];
  const int64_t right = causal || sides[1] >= seqlen_q - 1 ? UNLIMITED : sides[1];
  *made = right == 0 ? (mask){true, left, UNLIMITED} : (mask){causal, left, right};
  if (ha_has_window(made) && (seqlen_q > MAX_WINDOW_LENGTH || seqlen_k > MAX_WINDOW_LENGTH)) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "a window is given for %" PRId64 " queries and %" PRId64 " keys, allowed: up to %" PRId64
                   " of each; use -1 for both sides",
                   seqlen_q, seqlen_k, (int64_t)MAX_WINDOW_LENGTH);
  }
  return HA_SUCCESS;
}

bool ha_has_window(const mask *m) { return m->left != UNLIMITED || m->right != UNLIMITED; }

int64_t ha_most_keys(const mask *m, int64_t seqlen_k) {
  const int64_t right = m->causal ? 0 : m->right;
  if (m->left == UNLIMITED || right == UNLIMITED) return seqlen_k;
  const int64_t seen = m->left + 1 + right;
  return seen < seqlen_k ? seen : seqlen_k;
}

const forward_row *ha_select_forward(ha_dtype dtype, layout layout, const mask *m, const int64_t head_dims[2],
                                     int64_t seen) {
  const forward_row *best = NULL;
  for (size_t i = 0; i < ha_num_forward_rows; i++) {
    const forward_row *row = &ha_forward_rows[i];
    if (row->dtype != dtype || row->layout != layout || row->causal != m->causal) continue;
    if (row->window != ha_has_window(m) || seen > row->max_seqlen_k) continue;
    if (row->head_dim < head_dims[0] || row->head_dim_v < head_dims[1]) continue;
    /* Rows of the same head_dims come by ascending max_seqlen_k: the first one stays. */
    if (!best || row->head_dim + row->head_dim_v < best->head_dim + best->head_dim_v) best = row;
  }
  return best;
}

const char *ha_kernel_name(size_t index, int *is_built) {
  if (index >= ha_num_kernels) return NULL;
  if (is_built) *is_built = ha_kernels[index].entry != NULL;
  return ha_kernels[index].name;
}

const char *ha_version(void) { return LIBRARY_VERSION; }
