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

typedef enum ha_dtype { HA_FLOAT16 = 0, HA_BFLOAT16 = 1, HA_FLOAT8_E4M3 = 2 } ha_dtype;

/* Rows of a tensor (batch, rows, heads, columns): its address, a multiple of 16 bytes, and the strides of all but the
 * columns, which lie next to each other. Strides are multiples of 16 bytes, those of dimensions of size 1 of no matter.
 * With three strides of 0 the tensor is contiguous. Packed sequences have no stride of the batch. */
typedef struct ha_tensor {
  void *data;
  int64_t stride_batch;
  int64_t stride_row;
  int64_t stride_head;
} ha_tensor;

/* A status in words: "invalid argument". */
HA_API const char *ha_status_name(ha_status status);

/* What went wrong in the last call of this thread that did not succeed; empty if none did. It stays valid until the
 * next such call of this thread. */
HA_API const char *ha_last_error_message(void);

/* "major.minor.patch" of the library. */
HA_API const char *ha_version(void);

/* The kernels that this library selects from, by index from 0; NULL past the last one. `is_built`, which may be NULL,
 * gets 1 if the kernel is in this build, else 0. */
HA_API const char *ha_kernel_name(size_t index, int *is_built);

/* Write the head of a new workspace, on `stream`: what kernels read there, and a counter that they leave zero. Once is
 * enough. Calls of all kinds on one stream can share a workspace that is large enough for each. */
HA_API ha_status ha_workspace_init(void *workspace, size_t workspace_size, void *stream);

/* Attention of sequences of one length: out = softmax(softmax_scale Q K^T) V, in 16 bits, summed in float32. */
typedef struct ha_forward_params {
  size_t struct_size; /* set by the macro; tells library and program of different versions apart */
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
} ha_forward_params;

#define HA_FORWARD_PARAMS_INIT {.struct_size = sizeof(ha_forward_params), .window_left = -1, .window_right = -1}

/* Bytes of the workspace; new memory goes through ha_workspace_init. */
HA_API ha_status ha_forward_workspace_size(const ha_forward_params *params, size_t *size);

/* The kernel that serves a problem, whether it is in this build or not. Reads no pointer and needs no GPU. */
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
 * cu_seqlens[b] to cu_seqlens[b + 1]. Lengths are read on the GPU alone. */
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
} ha_varlen_params;

#define HA_VARLEN_PARAMS_INIT {.struct_size = sizeof(ha_varlen_params), .window_left = -1, .window_right = -1}

HA_API ha_status ha_varlen_workspace_size(const ha_varlen_params *params, size_t *size);
HA_API ha_status ha_varlen_kernel(const ha_varlen_params *params, const char **name);
HA_API ha_status ha_varlen_prepare(const ha_varlen_params *params);
HA_API ha_status ha_varlen(const ha_varlen_params *params);

/* Attention of a decoding step on a key/value cache: few queries a sequence, which are its last tokens, and keys and
 * values in pages, or with as many rows for each sequence. The query heads of a K/V head, times seqlen_q, may be 64 at
 * most; more is a problem for ha_varlen. New tokens have to be in the cache before. */
typedef struct ha_decode_params {
  size_t struct_size;
  ha_dtype dtype;       /* of q and out */
  ha_dtype cache_dtype; /* that of q, or HA_FLOAT8_E4M3, up to head_dims of 192 */
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
} ha_decode_params;

#define HA_DECODE_PARAMS_INIT {.struct_size = sizeof(ha_decode_params)}

HA_API ha_status ha_decode_workspace_size(const ha_decode_params *params, size_t *size);
HA_API ha_status ha_decode_kernel(const ha_decode_params *params, const char **name);
HA_API ha_status ha_decode_prepare(const ha_decode_params *params);
HA_API ha_status ha_decode(const ha_decode_params *params);

#ifdef __cplusplus
}
#endif

#endif
