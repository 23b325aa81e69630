/* hopper-attention for C: exact attention on NVIDIA Hopper GPUs (sm_90a), without Python.
 *
 * The library needs the NVIDIA driver (libcuda.so.1, CUDA 12.0 or newer) when a kernel is launched, and nothing else:
 * no CUDA toolkit, no Python, no torch. It loads the driver at the first launch, so programs link and start without one.
 *
 * A call describes its problem in a struct, which is initialised with the macro of its name (C++: hopper_attention.hpp):
 *
 *     ha_forward_params p = HA_FORWARD_PARAMS_INIT;
 *     p.dtype = HA_BFLOAT16;
 *     ...
 *     if (ha_forward(&p) != HA_SUCCESS) puts(ha_last_error_message());
 *
 * Functions that launch queue their work on `stream` in the CUDA context that is current on the calling thread, and
 * return. They can be called from several threads, and captured into CUDA graphs: call the `..._prepare` function of a
 * problem before the capture, since the first launch of a kernel loads it. Pointers are to memory of the GPU unless
 * something else is said. Strides are in elements.
 *
 * docs/c_library.md has an example and what is not there. */
#ifndef HOPPER_ATTENTION_H
#define HOPPER_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HA_API __attribute__((visibility("default")))
#else
#define HA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ha_status {
  HA_SUCCESS = 0,
  HA_ERROR_INVALID_ARGUMENT = 1, /* an argument is not what is allowed */
  HA_ERROR_NOT_SUPPORTED = 2,    /* a sound problem that no kernel of this library takes */
  HA_ERROR_NOT_BUILT = 3,        /* its kernel was left out of this build */
  HA_ERROR_NO_DRIVER = 4,        /* no driver of NVIDIA, or one that is too old */
  HA_ERROR_NO_DEVICE = 5,        /* no context is current, or the GPU is no Hopper */
  HA_ERROR_CUDA = 6              /* the driver refused something; the message says what */
} ha_status;

typedef enum ha_dtype { HA_FLOAT16 = 0, HA_BFLOAT16 = 1, HA_FLOAT8_E4M3 = 2, HA_FLOAT32 = 3 } ha_dtype;

/* Rows of a tensor (batch, rows, heads, columns): its address, a multiple of 16 bytes, and the strides of all but the
 * columns, which lie next to each other. Strides are multiples of 16 bytes, those of dimensions of size 1 of no matter.
 * With three strides of 0 the tensor is contiguous. Packed sequences have no stride of the batch. */
typedef struct ha_tensor {
  void *data;
  int64_t stride_batch;
  int64_t stride_row;
  int64_t stride_head;
} ha_tensor;

/* What is done to scores beside scale and mask. A score s, scaled, becomes softcap tanh(s / softcap), then gets the bias
 * -slope |i + seqlen_k - seqlen_q - j| of query i and key j (ALiBi). A sink is a logit of its head, natural log, that
 * joins the sum of a row and has no value; the LSE includes it. All zeros: nothing is done. */
typedef struct ha_scores {
  double softcap;             /* 1e-30 to 1e30; 0: none */
  const float *alibi_slopes;  /* (heads,), or with a stride (batch, heads); NULL: none */
  int64_t alibi_stride_batch; /* heads or more; 0: all sequences have the same slopes */
  const float *sinks;         /* (heads,); NULL: none */
} ha_scores;

/* A status in words: "invalid argument". */
HA_API const char *ha_status_name(ha_status status);

/* What went wrong in the last call of this thread that did not succeed; empty if none did. It stays valid until the
 * next such call of this thread. */
HA_API const char *ha_last_error_message(void);

/* "major.minor.patch" of the library. */
HA_API const char *ha_version(void);

/* The kernels that this library selects from, by index from 0; NULL past the last one. `is_built`, which may be NULL,
 * gets 1 if the kernel is in this build, else 0. Of kernels with a softcap, slopes, sinks, left pads or, of caches, a
 * window, which come in very many combinations, there are only those of this build. */
HA_API const char *ha_kernel_name(size_t index, int *is_built);

/* Write the head of a new workspace, on `stream`: what kernels read there, and a counter that they leave zero. Once is
 * enough. Calls of all kinds on one stream can share a workspace that is large enough for each. */
HA_API ha_status ha_workspace_init(void *workspace, size_t workspace_size, void *stream);

/* Attention of sequences of one length: out = softmax(softmax_scale Q K^T) V, in 16 bits, summed in float32. */
typedef struct ha_forward_params {
  size_t struct_size; /* set by the macro: what a program was compiled with may have fewer fields than the library */
  ha_dtype dtype;     /* of q, k, v and out: HA_FLOAT16 or HA_BFLOAT16 */
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_k;   /* 1 or more */
  int64_t heads;      /* a multiple of kv_heads */
  int64_t kv_heads;
  int64_t head_dim;   /* multiples of 8 from 8 to 256; so is head_dim_v */
  int64_t head_dim_v;
  ha_tensor q;        /* (batch, seqlen_q, heads, head_dim) */
  ha_tensor k;        /* (batch, seqlen_k, kv_heads, head_dim) */
  ha_tensor v;        /* (batch, seqlen_k, kv_heads, head_dim_v) */
  ha_tensor out;      /* (batch, seqlen_q, heads, head_dim_v) */
  float *lse;         /* log-sum-exp, natural, contiguous (batch, heads, seqlen_q); NULL: not wanted */
  double softmax_scale; /* 1e-37 to 1e5; 0: head_dim^-0.5 */
  int causal;         /* the last query sees all keys, the one before it one less, and so on */
  int64_t window_left;  /* keys before its own that a query sees; -1: all */
  int64_t window_right; /* keys after it; -1: all, or with causal none */
  int fp8_two_level;  /* in FP8 alone: sums of P V go to float32 after each key tile, which costs speed; else so anyway */
  int sm_margin;      /* multiprocessors to leave free */
  void *workspace;    /* ha_forward_workspace_size bytes, 16-byte aligned; no two launches at the same time share one */
  size_t workspace_size;
  void *stream;       /* a CUstream or cudaStream_t; NULL: the default stream */
  int64_t attention_chunk; /* keys of a chunk, outside of its own of which a query sees none; 0: there are no chunks */
  ha_scores scores;   /* not in FP8 */
} ha_forward_params;

#define HA_FORWARD_PARAMS_INIT {.struct_size = sizeof(ha_forward_params), .window_left = -1, .window_right = -1}

/* Bytes of the workspace; new memory goes through ha_workspace_init. */
HA_API ha_status ha_forward_workspace_size(const ha_forward_params *params, size_t *size);

/* The kernel that serves a problem, whether it is in this build or not; of one that is not, the name is valid until the
 * next such call of this thread. Needs no GPU: of pointers is only read which are NULL. */
HA_API ha_status ha_forward_kernel(const ha_forward_params *params, const char **name);

/* Load the kernel of a problem to the current GPU, and launch nothing. All arguments are checked as in ha_forward. */
HA_API ha_status ha_forward_prepare(const ha_forward_params *params);

/* Queue attention on params->stream. Rows that see no key get 0, and an LSE of -infinity. */
HA_API ha_status ha_forward(const ha_forward_params *params);

/* The same in FP8: q, k and v, in 16 bits, are rotated and quantized to e4m3 in the workspace, with a scale for each row
 * of q and each block of keys, and both products are of e4m3. head_dim and head_dim_v are (64, 64), (96, 96), (128, 128),
 * (192, 128), (192, 192) or (256, 256). It is flash_attn_fp8_func of Python. */
HA_API ha_status ha_forward_fp8_workspace_size(const ha_forward_params *params, size_t *size);
HA_API ha_status ha_forward_fp8_kernel(const ha_forward_params *params, const char **name);
HA_API ha_status ha_forward_fp8_prepare(const ha_forward_params *params);
HA_API ha_status ha_forward_fp8(const ha_forward_params *params);

/* Attention of sequences of any lengths that lie behind each other in one tensor. Sequence b has the rows
 * cu_seqlens[b] to cu_seqlens[b + 1]. Lengths are read on the GPU alone. Rows behind the last sequence get 0, and an LSE
 * of -infinity, or of their sink. */
typedef struct ha_varlen_params {
  size_t struct_size;
  ha_dtype dtype;
  int64_t batch;      /* sequences */
  int64_t total_q;    /* rows of q and out */
  int64_t total_k;    /* rows of k and v */
  int64_t max_seqlen_q; /* at least the longest sequence; only decides whether a window hides anything */
  int64_t max_seqlen_k;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  ha_tensor q;        /* (total_q, heads, head_dim) */
  ha_tensor k;        /* (total_k, kv_heads, head_dim) */
  ha_tensor v;        /* (total_k, kv_heads, head_dim_v) */
  ha_tensor out;      /* (total_q, heads, head_dim_v) */
  float *lse;         /* contiguous (heads, total_q); NULL: not wanted */
  const int32_t *cu_seqlens_q; /* (batch + 1,), from 0, ascending */
  const int32_t *cu_seqlens_k;
  const int32_t *seqused_k; /* (batch,) how many keys of each sequence count; NULL: all */
  double softmax_scale;
  int causal;
  int64_t window_left;
  int64_t window_right;
  int sm_margin;
  void *workspace;    /* ha_varlen_workspace_size bytes, 16-byte aligned */
  size_t workspace_size;
  void *stream;
  int64_t attention_chunk;
  ha_scores scores;   /* not in FP8 */
  int fp8_two_level;
} ha_varlen_params;

#define HA_VARLEN_PARAMS_INIT {.struct_size = sizeof(ha_varlen_params), .window_left = -1, .window_right = -1}

HA_API ha_status ha_varlen_workspace_size(const ha_varlen_params *params, size_t *size);
HA_API ha_status ha_varlen_kernel(const ha_varlen_params *params, const char **name);
HA_API ha_status ha_varlen_prepare(const ha_varlen_params *params);
HA_API ha_status ha_varlen(const ha_varlen_params *params);

/* The same in FP8, as ha_forward_fp8: each sequence has blocks of its own. Rows behind the last sequence get 0. */
HA_API ha_status ha_varlen_fp8_workspace_size(const ha_varlen_params *params, size_t *size);
HA_API ha_status ha_varlen_fp8_kernel(const ha_varlen_params *params, const char **name);
HA_API ha_status ha_varlen_fp8_prepare(const ha_varlen_params *params);
HA_API ha_status ha_varlen_fp8(const ha_varlen_params *params);

/* Attention of packed sequences of queries on a key/value cache in pages of 16 bits: any number of queries, which are the
 * last tokens of their sequences, as when a prompt is read in parts. Few queries are faster with ha_decode. */
typedef struct ha_paged_params {
  size_t struct_size;
  ha_dtype dtype;
  int64_t batch;
  int64_t total_q;    /* rows of q and out */
  int64_t max_seqlen_q;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;   /* multiples of 8 from 8 to 256; so is head_dim_v */
  int64_t head_dim_v;
  int64_t pages;      /* of the cache */
  int64_t page_size;  /* rows of a page: a multiple of 8 where a sequence has several */
  ha_tensor q;        /* (total_q, heads, head_dim) */
  ha_tensor k_cache;  /* (pages, page_size, kv_heads, head_dim) */
  ha_tensor v_cache;  /* (pages, page_size, kv_heads, head_dim_v); its pages lie as many rows apart as those of k_cache */
  ha_tensor out;      /* (total_q, heads, head_dim_v) */
  float *lse;         /* contiguous (heads, total_q); NULL: not wanted */
  const int32_t *cu_seqlens_q;  /* (batch + 1,), from 0, ascending */
  const int32_t *cache_seqlens; /* (batch,) keys of each sequence, the new ones among them */
  const int32_t *cache_starts;  /* (batch + 1,) the multiples of pages_of_sequence x page_size, from 0; made once */
  const int32_t *page_table;    /* (batch, pages_of_sequence), rows contiguous */
  int64_t pages_of_sequence;    /* columns of page_table */
  double softmax_scale; /* this and the rest as in ha_forward_params */
  int causal;
  int64_t window_left;
  int64_t window_right;
  int64_t attention_chunk;
  ha_scores scores;
  int sm_margin;
  void *workspace;    /* ha_paged_workspace_size bytes, 16-byte aligned */
  size_t workspace_size;
  void *stream;
} ha_paged_params;

#define HA_PAGED_PARAMS_INIT {.struct_size = sizeof(ha_paged_params), .window_left = -1, .window_right = -1}

HA_API ha_status ha_paged_workspace_size(const ha_paged_params *params, size_t *size);
HA_API ha_status ha_paged_kernel(const ha_paged_params *params, const char **name);
HA_API ha_status ha_paged_prepare(const ha_paged_params *params);
HA_API ha_status ha_paged(const ha_paged_params *params);

/* Attention of a decoding step on a key/value cache: few queries a sequence, which are its last tokens, and keys and
 * values in pages, or with as many rows for each sequence. The query heads of a K/V head, times seqlen_q, may be 64 at
 * most; more is a problem for ha_paged. New tokens have to be in the cache before: ha_append writes them. A page_table
 * of one column chooses, for each sequence, the row of a cache without pages. */
typedef struct ha_decode_params {
  size_t struct_size;
  ha_dtype dtype;       /* of q and out */
  ha_dtype cache_dtype; /* that of q, or HA_FLOAT8_E4M3: up to head_dims of 192, and of 256 with q of
                           bfloat16 and up to 16 rows of queries a K/V head */
  int64_t batch;
  int64_t seqlen_q;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;     /* multiples of 8, with a cache of e4m3 of 16; so is head_dim_v */
  int64_t head_dim_v;
  int64_t pages;        /* of the cache; without a page table, sequences that it has room for */
  int64_t page_size;    /* rows of a page: a multiple of 8 where a sequence has several */
  ha_tensor q;          /* (batch, seqlen_q, heads, head_dim) */
  ha_tensor k_cache;    /* (pages, page_size, kv_heads, head_dim) */
  ha_tensor v_cache;    /* (pages, page_size, kv_heads, head_dim_v) */
  ha_tensor out;        /* (batch, seqlen_q, heads, head_dim_v) */
  float *lse;           /* contiguous (batch, heads, seqlen_q); NULL: not wanted */
  const int32_t *cache_seqlens; /* (batch,) keys of each sequence, the new ones among them */
  const int32_t *page_table;    /* (batch, pages_of_sequence), rows contiguous; NULL: page b is that of sequence b */
  int64_t pages_of_sequence;    /* columns of page_table */
  const float *k_descale;       /* contiguous (batch, kv_heads), with a cache of e4m3, else NULL */
  const float *v_descale;
  double softmax_scale;
  int causal;
  int sm_margin;
  void *workspace;      /* ha_decode_workspace_size bytes, 16-byte aligned */
  size_t workspace_size;
  void *stream;
  int64_t window_left;  /* as in ha_forward_params; the last query stands at the last key */
  int64_t window_right;
  int64_t attention_chunk;
  ha_scores scores;     /* no slopes */
  const int32_t *cache_leftpad; /* (batch,) rows of the cache before the first key, which cache_seqlens counts; where a
                                   sequence has one page; NULL: none */
} ha_decode_params;

#define HA_DECODE_PARAMS_INIT {.struct_size = sizeof(ha_decode_params), .window_left = -1, .window_right = -1}

HA_API ha_status ha_decode_workspace_size(const ha_decode_params *params, size_t *size);
HA_API ha_status ha_decode_kernel(const ha_decode_params *params, const char **name);
HA_API ha_status ha_decode_prepare(const ha_decode_params *params);
HA_API ha_status ha_decode(const ha_decode_params *params);

/* Columns that rotary embedding turns together: 2i and 2i + 1, or i and i + rotary_dim / 2. */
typedef enum ha_rotary { HA_ROTARY_NONE = 0, HA_ROTARY_INTERLEAVED = 1, HA_ROTARY_HALVES = 2 } ha_rotary;

/* Write new tokens into a key/value cache, in place, and with rotary embedding turn K on the way, and Q. Token i of
 * sequence b goes to position cache_seqlens[b] + i, and nowhere if the sequence has no room for it. */
typedef struct ha_append_params {
  size_t struct_size;
  ha_dtype dtype;       /* of k, v, q and q_out: HA_FLOAT16 or HA_BFLOAT16 */
  ha_dtype cache_dtype; /* the same, or HA_FLOAT8_E4M3, for which K and V are divided by the descales */
  int64_t batch;
  int64_t seqlen_new;   /* new tokens of a sequence; with cu_seqlens_new of all together */
  int64_t kv_heads;
  int64_t head_dim;     /* multiples of 8 from 8 to 256; so is head_dim_v */
  int64_t head_dim_v;
  int64_t pages;        /* these, and page_table, as for ha_decode */
  int64_t page_size;
  ha_tensor k;          /* (batch, seqlen_new, kv_heads, head_dim), packed (seqlen_new, kv_heads, head_dim) */
  ha_tensor v;          /* likewise with head_dim_v */
  ha_tensor k_cache;    /* (pages, page_size, kv_heads, head_dim) */
  ha_tensor v_cache;    /* (pages, page_size, kv_heads, head_dim_v) */
  const int32_t *cache_seqlens;  /* (batch,) tokens that are in the cache */
  int32_t *new_seqlens;          /* (batch,) those that are there then: the cache_seqlens of ha_decode; other memory */
  const int32_t *cu_seqlens_new; /* (batch + 1,), from 0, ascending: new tokens are packed; NULL: they are not */
  const int32_t *page_table;     /* (batch, pages_of_sequence); NULL: page b is that of sequence b */
  int64_t pages_of_sequence;
  const float *k_descale;        /* contiguous (batch, kv_heads), with a cache of e4m3, else NULL */
  const float *v_descale;
  ha_rotary rotary;     /* the rest but the stream is for rotary embedding */
  ha_dtype rotary_dtype; /* of the tables: dtype, or HA_FLOAT32 */
  int64_t rotary_dim;   /* columns that are turned, the first of a row: multiples of 16 up to head_dim */
  int64_t rotary_rows;  /* positions that the tables have */
  const void *rotary_cos; /* contiguous (rotary_rows, rotary_dim / 2), 16-byte aligned */
  const void *rotary_sin;
  const int32_t *rotary_seqlens; /* (batch,) the position of the first new token, and of the first query; NULL:
                                    cache_seqlens */
  int64_t seqlen_q;     /* queries of a sequence; with cu_seqlens_q of all together; 0: no query is turned */
  int64_t heads;
  ha_tensor q;          /* (batch, seqlen_q, heads, head_dim), packed (seqlen_q, heads, head_dim) */
  ha_tensor q_out;      /* the same, turned; other memory */
  const int32_t *cu_seqlens_q; /* (batch + 1,) */
  int same_position;    /* all queries of a sequence have the position of the first: for attention without a mask */
  void *stream;
} ha_append_params;

#define HA_APPEND_PARAMS_INIT {.struct_size = sizeof(ha_append_params)}

HA_API ha_status ha_append_kernel(const ha_append_params *params, const char **name);
HA_API ha_status ha_append_prepare(const ha_append_params *params);
HA_API ha_status ha_append(const ha_append_params *params);

/* Merge attention to several parts of the keys into that to all of them, by the LSE of each: out = sum of
 * exp(lse_i - lse) out_i. Where no part has a key, out is 0 and lse -infinity. */
typedef struct ha_combine_params {
  size_t struct_size;
  ha_dtype dtype;        /* of out: HA_FLOAT16, HA_BFLOAT16 or HA_FLOAT32 */
  int64_t num_splits;    /* parts, 1 to 256 */
  int64_t batch;
  int64_t seqlen;
  int64_t heads;
  int64_t head_dim_v;    /* a multiple of 8 */
  ha_tensor out_partial; /* float32 (num_splits, batch, seqlen, heads, head_dim_v) */
  int64_t out_partial_stride_split; /* 0: parts follow each other without a gap; then the tensor is contiguous */
  const float *lse_partial; /* contiguous (num_splits, batch, heads, seqlen) */
  ha_tensor out;         /* (batch, seqlen, heads, head_dim_v) */
  float *lse;            /* contiguous (batch, heads, seqlen) */
  void *stream;
} ha_combine_params;

#define HA_COMBINE_PARAMS_INIT {.struct_size = sizeof(ha_combine_params)}

HA_API ha_status ha_combine_kernel(const ha_combine_params *params, const char **name);
HA_API ha_status ha_combine_prepare(const ha_combine_params *params);
HA_API ha_status ha_combine(const ha_combine_params *params);

/* Add attention to one more part of the keys to a sum of such, in place: a step of ring attention. The sum begins with
 * zeros and an LSE of -infinity. Rows of the part whose LSE is -infinity change nothing. */
typedef struct ha_merge_params {
  size_t struct_size;
  ha_dtype dtype;        /* of the part: HA_FLOAT16 or HA_BFLOAT16 */
  int64_t batch;
  int64_t seqlen;
  int64_t heads;
  int64_t head_dim_v;    /* a multiple of 8 */
  ha_tensor out;         /* float32 (batch, seqlen, heads, head_dim_v), read and written */
  float *lse;            /* contiguous (batch, heads, seqlen), read and written */
  ha_tensor part;        /* (batch, seqlen, heads, head_dim_v) */
  const float *part_lse; /* contiguous (batch, heads, seqlen) */
  void *stream;
} ha_merge_params;

#define HA_MERGE_PARAMS_INIT {.struct_size = sizeof(ha_merge_params)}

HA_API ha_status ha_merge_kernel(const ha_merge_params *params, const char **name);
HA_API ha_status ha_merge_prepare(const ha_merge_params *params);
HA_API ha_status ha_merge(const ha_merge_params *params);

#ifdef __cplusplus
}
#endif

#endif
