/* What the files of the library share. Nothing here is exported. */
#ifndef HA_INTERNAL_H
#define HA_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "constants.h" /* generated: the numbers of the Python source */
#include "hopper_attention.h"

/* ---- errors (error.c) ---- */

/* Note `status` and a message for this thread; gives `status`. */
ha_status ha_fail(ha_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- the driver (driver.c): the parts of the CUDA driver API that a launch needs, found at run time ---- */

typedef int cu_result;

typedef struct launch_attribute launch_attribute; /* CUlaunchAttribute, only passed on */

/* CUlaunchConfig. */
typedef struct launch_config {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void *stream;
  launch_attribute *attributes;
  unsigned num_attributes;
} launch_config;

typedef struct driver {
  cu_result (*cuInit)(unsigned);
  cu_result (*cuCtxGetDevice)(int *);
  cu_result (*cuDeviceGetAttribute)(int *, int, int);
  cu_result (*cuGetErrorName)(cu_result, const char **);
  cu_result (*cuGetErrorString)(cu_result, const char **);
  cu_result (*cuMemcpyHtoDAsync)(uint64_t, const void *, size_t, void *);
  cu_result (*cuLibraryLoadData)(void **, const void *, const void *, const void *, unsigned, const void *,
                                 const void *, unsigned);
  cu_result (*cuLibraryGetKernel)(void **, void *, const char *);
  cu_result (*cuKernelGetAttribute)(int *, int, void *, int);
  cu_result (*cuKernelSetAttribute)(int, int, void *, int);
  cu_result (*cuLaunchKernelEx)(const launch_config *, void *, void **, void **);
} driver;

/* The driver, or NULL after ha_fail. */
const driver *ha_driver(void);

/* ha_fail with what the driver says about `result` of its `function`; for a result of success, HA_SUCCESS. */
ha_status ha_check_cuda(const char *function, cu_result result);

/* GPUs whose state is kept: a bit each of a word. */
enum { MOST_DEVICES = 64 };

/* A GPU on which kernels can run. */
typedef struct device {
  int index;
  int multiprocessors;
} device;

/* The GPU whose context is current. Fails unless it is a Hopper. */
ha_status ha_current_device(device *found);

/* ---- kernels (the generated table, select.c) ---- */

/* A number, a tensor or nothing, as the entry of a compiled kernel takes it: TVM FFI's convention. */
typedef struct ffi_value {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double real;
    void *pointer;
  } value;
} ffi_value;

typedef int ffi_function(void *self, const ffi_value *arguments, int32_t count, ffi_value *result);

typedef enum layout { LAYOUT_DENSE = 0, LAYOUT_VARLEN = 1, LAYOUT_PAGED = 2 } layout;

/* A kernel of the table. `entry` is NULL where it was left out of the build. Features stand in its name before the last
 * `tail` bytes. */
typedef struct kernel {
  const char *name;
  ffi_function *entry;
  int tail;
} kernel;

/* A kernel of the table with more than that one has. */
typedef struct kernel_choice {
  int kernel;        /* index in ha_kernels */
  unsigned features; /* a bit each, FEATURE_...; they name a kernel in this order */
} kernel_choice;

/* A kernel with features that is in this build. */
typedef struct variant {
  kernel_choice choice;
  kernel own;
} variant;

/* One choice of a 16-bit forward kernel: of the rows with the problem's dtype, layout, causal and window, and with the
 * cheapest head_dims that cover its own, the first serves whose max_seqlen_k is not exceeded, and that has min_tiles. */
typedef struct forward_row {
  ha_dtype dtype;
  layout layout;
  int64_t page_rows; /* one of PAGE_ROWS that divides the size of a page, ONE_PAGE, or 0 without pages */
  bool causal;
  bool window; /* or a chunk */
  bool chunk;
  int head_dim;
  int head_dim_v;
  int64_t max_seqlen_k;
  int64_t min_tiles; /* 0 for any problem */
  int tile_m;
  int ctas_per_sm;
  int kernel; /* index in ha_kernels */
} forward_row;

extern const kernel ha_kernels[];
extern const size_t ha_num_kernels;
extern const variant ha_variants[]; /* by ascending choices */
extern const size_t ha_num_variants;
/* Rows of a table from `first` on, before `end`. */
typedef struct group {
  int first;
  int end;
} group;

extern const forward_row ha_forward_rows[];
extern const group ha_forward_groups[2][3]; /* by dtype and layout */
extern const int ha_plan_kernel; /* index of the kernel that plans packed sequences */

/* One choice of an FP8 kernel and of the quantizer before it: of the rows with what the problem has of the fields before
 * max_seqlen_k, the first where that is not exceeded serves. */
typedef struct fp8_row {
  ha_dtype dtype; /* of the inputs and of the output */
  layout layout;
  int head_dim;
  int head_dim_v;
  bool causal;
  bool window; /* or a chunk */
  bool chunk;
  bool two_level;
  bool one_block; /* all keys share a scale: there are no more of them than block_k */
  int64_t max_seqlen_k;
  int block_k; /* keys that share a scale; the same with one_block and without */
  int tile_m;
  int signs_offset; /* of the rotation's signs, in the head of a workspace */
  int quantizer_rows[2]; /* of Q, and of K and V, that a CTA of the quantizer takes at once */
  int quantizer_ctas_per_sm;
  int quantizer; /* indices in ha_kernels */
  int kernel;
} fp8_row;

extern const fp8_row ha_fp8_rows[];
extern const group ha_fp8_groups[2][3]; /* by dtype and layout */

/* What a workspace begins with: the tile counter, zeros; 1.0f; the signs of the rotation. */
extern const uint32_t ha_workspace_head[WORKSPACE_HEAD_BYTES / sizeof(uint32_t)];

/* The decode kernel for problems of a kind; `kernel` is -1 where there is none. */
typedef struct decode_row {
  int part_floats; /* float32 of a partial result */
  int kernel;
} decode_row;

/* By these, the last one running fastest: dtype; whether the cache is of e4m3; the sizes of head_dim and head_dim_v in
 * DECODE_HEAD_DIMS; causal; whether there is a page table; the rows of queries of a K/V head in DECODE_ROWS; the
 * rows of a page that lie together in DECODE_BOX_ROWS. */
extern const decode_row ha_decode_rows[];

/* Kernels that append to a cache, by dtype, whether the cache is of e4m3, and what is turned, by tables of which dtype:
 * nothing, pairs or halves by tables of dtype, pairs or halves by tables of float32. */
extern const int ha_append_kernels[2][2][5];

/* Kernels that merge parts, by the dtype of the result, float32 behind the 16-bit ones, and whether there are more than
 * COMBINE_FEW_SPLITS of them; and those that add a part of a dtype. */
extern const int ha_combine_kernels[3][2];
extern const int ha_merge_kernels[2];

/* Kernels that find the mean of V, by dtype, how many CTAs share some columns of a head in VALUE_MEAN_CLUSTERS, and layout. */
extern const int ha_value_mean_kernels[2][VALUE_MEAN_WAYS][2];

/* A mask as kernels take it: a causal one; a window with sides of -1 where nothing is hidden; keys of a chunk, or 0. */
typedef struct mask {
  bool causal;
  int64_t left;
  int64_t right;
  int64_t chunk;
} mask;

/* The one form of the mask that a caller describes, on sequences of at most these lengths. */
ha_status ha_canonical_mask(mask *made, const mask *given, int64_t seqlen_q, int64_t seqlen_k);

/* Whether a side of a window hides keys, or a chunk does. */
bool ha_has_window(const mask *m);

/* Of so many keys, those that a query sees at most. */
int64_t ha_most_keys(const mask *m, int64_t seqlen_k);

/* 16-bit problems that differ in masks and numbers of keys alone; `page_rows` are those of a row, `heads` those of all
 * sequences. Without dense queries the last two are 0. */
typedef struct forward_kind {
  ha_dtype dtype;
  layout layout;
  int64_t head_dims[2];
  int64_t page_rows;
  int64_t seqlen_q;
  int64_t heads;
} forward_kind;

/* The row for a problem with legal head_dims, or NULL after ha_fail; `seen` are the keys that a query sees at most. */
const forward_row *ha_select_forward(const forward_kind *kind, const mask *m, int64_t seen);

/* FP8 problems that differ in lengths alone. */
typedef struct fp8_kind {
  ha_dtype dtype;
  layout layout;
  int64_t head_dims[2];
  bool two_level;
} fp8_kind;

/* The same for FP8. All keys of a row with one_block are of a block. */
const fp8_row *ha_select_fp8(const fp8_kind *kind, const mask *m, bool one_block, int64_t seen);

/* The name of a kernel; of one that is not built, valid until the next such call of this thread. */
const char *ha_name_of(kernel_choice choice);

/* Its entry; NULL if it is not built. */
ffi_function *ha_entry_of(kernel_choice choice);

/* ---- calls (call.c) ---- */

enum { MOST_DIMENSIONS = 5, MOST_ARGUMENTS = 32 };

/* Arguments of a general forward kernel: a plan and its sequences; a table of pages and left pads; and after softcap,
 * slopes and sinks two of dropout. */
enum { PLAN_ARGUMENTS = 2, PAGE_ARGUMENTS = 2, DROPOUT_ARGUMENTS = 2 };

typedef enum element { FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT32, INT32 } element;

/* The arguments of a kernel, in order. */
typedef struct call call;

/* A DLTensor and its sizes. */
typedef struct tensor_argument {
  struct {
    void *data;
    int32_t device_type;
    int32_t device_index;
    int32_t dimensions;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
  } dl;
  int64_t shape[MOST_DIMENSIONS];
  int64_t strides[MOST_DIMENSIONS];
} tensor_argument;

struct call {
  int device;
  int count;
  int num_tensors;
  ffi_value values[MOST_ARGUMENTS];
  tensor_argument tensors[MOST_ARGUMENTS];
};

void ha_call_begin(call *c, int device);
void ha_add_nothing(call *c);
void ha_add_nothings(call *c, int count);
void ha_add_int(call *c, int64_t value);
void ha_add_real(call *c, double value);

/* `strides` NULL: contiguous. */
void ha_add_tensor(call *c, const void *data, element type, int dimensions, const int64_t *shape,
                   const int64_t *strides);

/* A tensor of a problem: what it has to be, and the strides that ha_check_operands finds. */
typedef struct operand {
  const char *name;
  const ha_tensor *given;
  ha_dtype dtype;
  int dimensions;
  int64_t shape[4];
  int64_t strides[4];
} operand;

enum { Q, K, V, OUT, NUM_OPERANDS };

/* Where the LSE goes: `rows` are 0 where it is not wanted. */
typedef struct lse_argument {
  float *data;
  int dimensions;
  int64_t shape[3];
} lse_argument;

/* Run a kernel on `stream` of the current GPU, or with `only_load` load it. */
ha_status ha_run(kernel_choice choice, const call *c, void *stream, bool only_load);

/* The element of a tensor. */
element ha_element_of(ha_dtype dtype);

/* Append a checked operand. */
void ha_add_operand(call *c, const operand *o);

/* Append q, k, v, out and lse of a 16-bit kernel, the tile counter at the start of a workspace, and the scale. */
void ha_add_operands(call *c, const operand operands[NUM_OPERANDS], const lse_argument *lse, const void *workspace,
                     double scale);

/* Append where the LSE goes, and the tile counter. */
void ha_add_lse(call *c, const lse_argument *lse);
void ha_add_counter(call *c, const void *workspace);

/* Append the sides of a window and a chunk, with nothing for what there is not. */
void ha_add_window(call *c, const mask *m);

/* ---- what is done to scores (scores.c) ---- */

ha_status ha_check_scores(const ha_scores *s, int64_t heads);

/* That nothing is done, which a kernel, whose `name` this is, cannot do. */
ha_status ha_check_no_scores(const char *name, const ha_scores *s);

/* What a kernel has for it. */
unsigned ha_features_of(const ha_scores *s);

void ha_add_softcap(call *c, const ha_scores *s);
void ha_add_sinks(call *c, const ha_scores *s, int64_t heads);

/* Append what a forward kernel takes: softcap, slopes, sinks, and no dropout. */
void ha_add_scores(call *c, const ha_scores *s, int64_t batch, int64_t heads);

/* ---- memory of FP8 parts (fp8_parts.c) ---- */

/* Sizes of Q, K and V in e4m3. Packed sequences are a batch of one. */
typedef struct fp8_sizes {
  int64_t batch, rows_q, rows_k, heads, kv_heads, head_dim, head_dim_v;
  int64_t keys;               /* of V transposed, in whole steps */
  int64_t blocks_q, blocks_k; /* of Q, and of K and V, that have a scale each */
  int64_t means;              /* of V: one a sequence, and where they are packed of the rows behind the last */
} fp8_sizes;

/* What the quantizer leaves in the workspace: at which bytes, and where they end. */
typedef struct fp8_parts {
  fp8_sizes sizes;
  size_t q, k, vt, q_scale, k_scale, v_scale, mean_v;
  size_t end;
} fp8_parts;

/* Places from `begin` on, for the sizes that `made` has. */
void ha_place_parts(fp8_parts *made, size_t begin);

int64_t ha_ceil_div(int64_t x, int64_t y);

/* That the quantizer counts these groups of rows: of Q, and of each of K and V, so many for each head. */
ha_status ha_check_groups(int64_t heads, int64_t of_q, int64_t kv_heads, int64_t of_k);

/* Append Q, K and V transposed in e4m3; with three dimensions those of packed sequences, without a batch. */
void ha_add_codes(call *c, const void *workspace, const fp8_parts *x, int dimensions);

/* Append what the quantizer writes, codes and their scales; the signs of the rotation; nothing for those of V and for the
 * mean of K; and the mean of V. */
void ha_add_quantized(call *c, const void *workspace, const fp8_parts *x, const fp8_row *row);

/* Append scales of Q and K, of V and of the output, and the mean of V. */
void ha_add_fp8_scales(call *c, const void *workspace, const fp8_parts *x, bool one_block);

/* Append float32 (means, kv_heads, head_dim_v). */
void ha_add_mean_v(call *c, const void *workspace, const fp8_parts *x);

/* The kernel that finds the mean of V; fails if it would take more CTAs than there may be. */
ha_status ha_select_value_mean(ha_dtype dtype, layout layout, const fp8_sizes *sizes, kernel_choice *choice);

/* ---- problems ---- */

/* What is known of a checked problem before its pointers are looked at. */
typedef struct problem {
  mask mask;
  double scale;
  bool is_empty;
} problem;

/* ---- problems of sequences of one length (forward.c) ---- */

/* The caller's struct, with defaults for fields that it does not have. */
ha_status ha_read_forward(ha_forward_params *own, const ha_forward_params *given);

ha_status ha_check_dense(const ha_forward_params *p, problem *made);

/* That there are no more tiles of so many queries than a kernel counts. */
ha_status ha_check_tiles(const ha_forward_params *p, int tile_m);

ha_status ha_read_operands(const ha_forward_params *p, operand operands[NUM_OPERANDS]);

/* The GPU that is current, with sm_margin multiprocessors taken from it. */
ha_status ha_device_with_margin(int sm_margin, device *found);

/* ---- packed sequences (varlen.c) ---- */

ha_status ha_read_varlen(ha_varlen_params *own, const ha_varlen_params *given);
ha_status ha_check_packed(const ha_varlen_params *p, problem *made);

/* What the GPU plans: int32 on the GPU of batch + 1 starts of Q and of K, and of the keys of each sequence that count, or
 * NULL for all; and rows of Q and of K. */
typedef struct packed_rows {
  const int32_t *starts_q, *starts_k, *used_k;
  int64_t batch, total_q, total_k;
} packed_rows;

packed_rows ha_rows_of(const ha_varlen_params *p);

/* int32 of a plan for tiles of so many queries; fails if there are more than a kernel counts. */
ha_status ha_count_plan(const packed_rows *rows, int64_t heads, int tile_m, int64_t *words);

/* Units of so many rows at most, each of one sequence: those of all rows, and one more for each sequence and for rows of
 * none. */
int64_t ha_count_units(int64_t total, int64_t batch, int64_t rows);

/* q, k, v and out of a problem; cu_seqlens are checked too. */
ha_status ha_read_packed(const ha_varlen_params *p, operand operands[NUM_OPERANDS]);

/* The 16-bit kernel of packed queries, whether their keys are packed or in the pages of a cache. */
typedef struct packed_plan {
  problem problem;
  const forward_row *row;
  int64_t words; /* of the plan that the GPU makes */
} packed_plan;

/* Bytes of a workspace up to the end of such a plan. */
size_t ha_end_of_plan(int64_t words);

/* Append starts of Q and K, nothing of which queries count, and which keys do. */
void ha_add_lengths(call *c, const packed_rows *rows);

/* Append where the keys of packed sequences begin, and how many of them count. */
void ha_add_key_lengths(call *c, const packed_rows *rows);

/* A plan, behind the head of a workspace. */
typedef struct plan_place {
  void *workspace;
  int64_t words;
  int tile_m;
} plan_place;

/* Have it made on `stream`. */
ha_status ha_run_planner(const packed_rows *rows, const plan_place *place, int device, void *stream, bool only_load);

/* Append it and the number of its sequences. */
void ha_add_plan(call *c, const packed_rows *rows, const plan_place *place);

/* ---- checks (checks.c) ---- */

/* Copy the struct that a caller gave to `own`, which has defaults. Structs of older versions are shorter, and have at
 * least the fields of the first one. */
ha_status ha_read_params(void *own, size_t size, size_t least, const void *given, const char *initialiser);

typedef struct problem_sizes {
  int64_t heads, kv_heads, head_dim, head_dim_v;
} problem_sizes;

/* Dtype, heads and head_dims. */
ha_status ha_check_sizes(ha_dtype dtype, const problem_sizes *sizes);

ha_status ha_check_range(const char *name, int64_t value, int64_t least, int64_t most);

/* The scale that is meant. */
ha_status ha_check_scale(double given, int64_t head_dim, double *scale);

ha_status ha_check_workspace(const void *workspace, size_t size, size_t needed);

/* Sizes of a cache; without a table each sequence has a page of its own. */
typedef struct cache_sizes {
  bool has_table;
  int64_t batch, pages, page_size, pages_of_sequence;
} cache_sizes;

ha_status ha_check_cache(const cache_sizes *sizes);

/* That a cache is of dtype or of e4m3. */
ha_status ha_check_cache_dtype(ha_dtype dtype, ha_dtype cache_dtype);

/* Those of a cache of e4m3. */
ha_status ha_check_descales(const float *k_descale, const float *v_descale);

/* That sizes, each up to INT32_MAX, have a product of at most `most`. */
bool ha_fits(const int64_t *sizes, int count, int64_t most);

/* That an array of the GPU is there, and begins where its elements of 4 bytes may. */
ha_status ha_check_array(const char *name, const void *data, const char *what);

/* The strides of a tensor whose `dimensions` sizes are `shape`, the last one the columns; fails unless a kernel can
 * address it. `dtype` is that of its elements. */
ha_status ha_check_tensor(const char *name, const ha_tensor *t, ha_dtype dtype, int dimensions, const int64_t *shape,
                          int64_t *strides);

/* The strides of operands. */
ha_status ha_check_operands(operand *operands, int count);

enum { WORKSPACE_ALIGNMENT = 16 };

#endif
