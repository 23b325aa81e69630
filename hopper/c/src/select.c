/* Which kernel serves a problem, by the generated table; no GPU is asked. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

enum { MOST_NAME_BYTES = 256 };

static ha_status check_side(const char *name, int64_t side) {
  if (side >= UNLIMITED) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed: -1, which hides nothing, or more", name, side);
}

static int64_t within_chunk(int64_t side, int64_t chunk) { return chunk && side >= chunk - 1 ? UNLIMITED : side; }

ha_status ha_canonical_mask(mask *made, const mask *given, int64_t seqlen_q, int64_t seqlen_k) {
  ha_status status = check_side("window_left", given->left);
  if (status == HA_SUCCESS) status = check_side("window_right", given->right);
  if (status == HA_SUCCESS) status = ha_check_range("attention_chunk", given->chunk, 0, INT64_MAX);
  if (status != HA_SUCCESS) return status;
  *made = *given;
  /* The last query is the one whose left side hides the most, the first the one whose right side does. */
  if (made->left >= seqlen_k - 1) made->left = UNLIMITED;
  if (made->causal || made->right >= seqlen_q - 1) made->right = UNLIMITED;
  if (made->right == 0) made->causal = true, made->right = UNLIMITED;
  if (made->causal && made->chunk >= seqlen_k) made->chunk = 0;
  made->left = within_chunk(made->left, made->chunk);
  made->right = within_chunk(made->right, made->chunk);
  /* No sequence under a chunk is longer. */
  if (made->chunk > MAX_WINDOW_LENGTH) made->chunk = MAX_WINDOW_LENGTH;
  if (ha_has_window(made) && (seqlen_q > MAX_WINDOW_LENGTH || seqlen_k > MAX_WINDOW_LENGTH)) {
    return ha_fail(HA_ERROR_NOT_SUPPORTED,
                   "a window or a chunk is given for %" PRId64 " queries and %" PRId64 " keys, allowed: up to %" PRId64
                   " of each; use -1 for both sides and an attention_chunk of 0",
                   seqlen_q, seqlen_k, (int64_t)MAX_WINDOW_LENGTH);
  }
  return HA_SUCCESS;
}

bool ha_has_window(const mask *m) { return m->left != UNLIMITED || m->right != UNLIMITED || m->chunk; }

int64_t ha_most_keys(const mask *m, int64_t seqlen_k) {
  const int64_t right = m->causal ? 0 : m->right;
  const int64_t most = m->chunk && m->chunk < seqlen_k ? m->chunk : seqlen_k;
  if (m->left == UNLIMITED || right == UNLIMITED) return most;
  const int64_t seen = m->left + 1 + right;
  return seen < most ? seen : most;
}

/* Whether a problem has as many tiles as a row asks for. */
static bool has_tiles(const forward_kind *kind, const forward_row *row) {
  const int64_t tiles = (kind->seqlen_q + row->tile_m - 1) / row->tile_m, least = row->min_tiles;
  if (!least) return true;
  if (!tiles || !kind->heads) return false;
  return tiles >= least || kind->heads >= least || tiles * kind->heads >= least;
}

/* All that decides on a forward kernel. */
typedef struct forward_question {
  forward_kind kind;
  bool causal, has_window, has_chunk;
  int64_t seen;
} forward_question;

static bool is_same(const forward_question *a, const forward_question *b) {
  return a->kind.dtype == b->kind.dtype && a->kind.layout == b->kind.layout &&
         a->kind.head_dims[0] == b->kind.head_dims[0] && a->kind.head_dims[1] == b->kind.head_dims[1] &&
         a->kind.page_rows == b->kind.page_rows && a->kind.seqlen_q == b->kind.seqlen_q &&
         a->kind.heads == b->kind.heads && a->causal == b->causal && a->has_window == b->has_window &&
         a->has_chunk == b->has_chunk && a->seen == b->seen;
}

static const forward_row *find_forward(const forward_question *asked) {
  const forward_kind *kind = &asked->kind;
  const group rows = ha_forward_groups[kind->dtype][kind->layout];
  const forward_row *best = NULL;
  for (int i = rows.first; i < rows.end; i++) {
    const forward_row *row = &ha_forward_rows[i];
    if (row->page_rows != kind->page_rows || row->causal != asked->causal) continue;
    if (row->window != asked->has_window || row->chunk != asked->has_chunk) continue;
    if (row->head_dim < kind->head_dims[0] || row->head_dim_v < kind->head_dims[1]) continue;
    if (asked->seen > row->max_seqlen_k || !has_tiles(kind, row)) continue;
    /* Rows of the same head_dims come by ascending max_seqlen_k: the first one stays. */
    if (!best || row->head_dim + row->head_dim_v < best->head_dim + best->head_dim_v) best = row;
  }
  return best;
}

const forward_row *ha_select_forward(const forward_kind *kind, const mask *m, int64_t seen) {
  /* What the thread asked before: a model's layers ask the same, and a group has more than a hundred rows. */
  static _Thread_local forward_question before;
  static _Thread_local const forward_row *found;
  const forward_question asked = {*kind, m->causal, ha_has_window(m), m->chunk > 0, seen};
  if (found && is_same(&asked, &before)) return found;
  found = find_forward(&asked);
  before = asked;
  if (!found) ha_fail(HA_ERROR_NOT_SUPPORTED, "no kernel takes this problem");
  return found;
}

static const fp8_row *find_fp8(const fp8_kind *kind, const mask *m, bool one_block, int64_t seen) {
  const group rows = ha_fp8_groups[kind->dtype][kind->layout];
  const bool has_window = ha_has_window(m), has_chunk = m->chunk > 0;
  for (int i = rows.first; i < rows.end; i++) {
    const fp8_row *row = &ha_fp8_rows[i];
    if (row->two_level != kind->two_level) continue;
    if (row->head_dim != kind->head_dims[0] || row->head_dim_v != kind->head_dims[1]) continue;
    if (row->causal != m->causal || row->window != has_window || row->chunk != has_chunk) continue;
    if (row->one_block == one_block && seen <= row->max_seqlen_k) return row;
  }
  return NULL;
}

const fp8_row *ha_select_fp8(const fp8_kind *kind, const mask *m, bool one_block, int64_t seen) {
  const fp8_row *row = find_fp8(kind, m, one_block, seen);
  if (!row) {
    ha_fail(HA_ERROR_NOT_SUPPORTED,
            "head_dim is %" PRId64 " and head_dim_v %" PRId64
            ", allowed in FP8: (64, 64), (96, 96), (128, 128), (192, 128), (192, 192) and (256, 256)",
            kind->head_dims[0], kind->head_dims[1]);
  }
  return row;
}

static const variant *find_variant(kernel_choice choice) {
  size_t first = 0, end = ha_num_variants;
  while (first < end) {
    const size_t middle = first + (end - first) / 2;
    const kernel_choice here = ha_variants[middle].choice;
    if (here.kernel == choice.kernel && here.features == choice.features) return &ha_variants[middle];
    const bool is_before = here.kernel < choice.kernel || (here.kernel == choice.kernel && here.features < choice.features);
    if (is_before) first = middle + 1;
    else end = middle;
  }
  return NULL;
}

ffi_function *ha_entry_of(kernel_choice choice) {
  if (!choice.features) return ha_kernels[choice.kernel].entry;
  const variant *found = find_variant(choice);
  return found ? found->own.entry : NULL;
}

const char *ha_name_of(kernel_choice choice) {
  static _Thread_local char name[MOST_NAME_BYTES];
  static const char *const NAMES[] = FEATURE_NAMES;
  if (!choice.features) return ha_kernels[choice.kernel].name;
  const variant *found = find_variant(choice);
  if (found) return found->own.name;
  const kernel *base = &ha_kernels[choice.kernel];
  const int head = (int)strlen(base->name) - base->tail;
  int used = snprintf(name, sizeof name, "%.*s", head, base->name);
  for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
    if (choice.features >> i & 1) used += snprintf(name + used, sizeof name - (size_t)used, "_%s", NAMES[i]);
  }
  snprintf(name + used, sizeof name - (size_t)used, "%s", base->name + head);
  return name;
}

const char *ha_kernel_name(size_t index, int *is_built) {
  if (index >= ha_num_kernels + ha_num_variants) return NULL;
  const bool is_variant = index >= ha_num_kernels;
  const kernel *k = is_variant ? &ha_variants[index - ha_num_kernels].own : &ha_kernels[index];
  if (is_built) *is_built = k->entry != NULL;
  return k->name;
}

const char *ha_version(void) { return LIBRARY_VERSION; }
