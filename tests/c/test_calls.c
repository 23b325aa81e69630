/* Calls of the C library on a driver without a GPU (fake_cuda.c): what is refused and why, and for the kernels of this
 * build what reaches the driver. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hopper_attention.h"

static int failures;

static void expect(int is_true, const char *what) {
  if (is_true) return;
  failures++;
  printf("failed: %s; the last message: %s\n", what, ha_last_error_message());
}

static void *at(unsigned number) { return (void *)(size_t)(0x700000000000ull + ((unsigned long long)number << 32)); }

static ha_forward_params problem(void) {
  ha_forward_params p = HA_FORWARD_PARAMS_INIT;
  p.dtype = HA_BFLOAT16;
  p.batch = 2, p.seqlen_q = p.seqlen_k = 9000, p.heads = 8, p.kv_heads = 4;
  p.head_dim = p.head_dim_v = 128;
  p.q.data = at(0), p.k.data = at(1), p.v.data = at(2), p.out.data = at(3);
  p.causal = 1;
  p.workspace = at(4), p.workspace_size = 1 << 20;
  return p;
}

static void expect_refused(const ha_forward_params *p, const char *part) {
  char what[200];
  snprintf(what, sizeof what, "an error with: %s", part);
  expect(ha_forward(p) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), part), what);
}

static void test_refusals(void) {
  ha_forward_params p = problem();
  p.struct_size = 0, expect_refused(&p, "HA_FORWARD_PARAMS_INIT");
  p = problem(), p.head_dim = 12, expect_refused(&p, "head_dim is 12, allowed: multiples of 8 from 8 to 256");
  p = problem(), p.heads = 6, expect_refused(&p, "heads is 6, allowed: multiples of kv_heads, 4");
  p = problem(), p.seqlen_k = 0, expect_refused(&p, "seqlen_k is 0, allowed: 1 to ");
  p = problem(), p.softmax_scale = -1, expect_refused(&p, "softmax_scale is -1, allowed: 1e-37 to 100000");
  p = problem(), p.softmax_scale = strtod("nan", NULL), expect_refused(&p, "softmax_scale is nan");
  p = problem(), p.k.data = (char *)at(1) + 8, expect_refused(&p, "k.data is ");
  p = problem(), p.v = (ha_tensor){at(2), 9000 * 512, 4, 128};
  expect_refused(&p, "v.stride_row is 4, allowed: positive multiples of 8");
  p = problem(), p.window_left = -2, expect_refused(&p, "window_left is -2, allowed: -1");
  p = problem(), p.workspace_size = 8, expect_refused(&p, "workspace_size is 8, allowed: 1504 or more");
}

static int is_built(const char *name) {
  int built = 0;
  for (size_t i = 0; ha_kernel_name(i, &built); i++) {
    if (!strcmp(ha_kernel_name(i, NULL), name)) return built;
  }
  return 0;
}

static int *fake(void *driver, const char *name) { return dlsym(driver, name); }

static void test_a_launch(void *driver) {
  ha_forward_params p = problem();
  const char *name = "";
  expect(ha_forward_kernel(&p, &name) == HA_SUCCESS, "a kernel for the problem");
  *fake(driver, "fake_context") = 0;
  expect(ha_forward(&p) == HA_ERROR_NO_DEVICE, "no context is an error");
  *fake(driver, "fake_context") = 1;
  *fake(driver, "fake_capability") = 80;
  expect(ha_forward(&p) == HA_ERROR_NO_DEVICE &&
             !strcmp(ha_last_error_message(), "GPU 0 has compute capability 8.0, allowed: 9.0 (Hopper)"),
         "another GPU is an error");
  *fake(driver, "fake_capability") = 90;
  if (!is_built(name)) {
    expect(ha_forward(&p) == HA_ERROR_NOT_BUILT && strstr(ha_last_error_message(), name), "a kernel that is not built");
    return;
  }
  *fake(driver, "fake_keeps_descriptors") = 1;
  expect(ha_forward_prepare(&p) == HA_SUCCESS, "a kernel is loaded");
  expect(*fake(driver, "fake_loads") == 1 && *fake(driver, "fake_launches") == 0, "loaded, and not launched");
  expect(ha_forward(&p) == HA_SUCCESS && ha_forward(&p) == HA_SUCCESS, "launches succeed");
  expect(*fake(driver, "fake_loads") == 1 && *fake(driver, "fake_launches") == 2, "launched twice, loaded once");
  const unsigned *config = dlsym(driver, "fake_config");
  expect(config[0] == 132 && config[1] == 1 && config[3] == 384, "a CTA of 384 threads for each multiprocessor");
  p.sm_margin = 32;
  expect(ha_forward(&p) == HA_SUCCESS && config[0] == 100, "sm_margin leaves multiprocessors free");
  const unsigned char(*descriptors)[128] = dlsym(driver, "fake_descriptors");
  for (unsigned i = 0; i < 4; i++) {
    const size_t address = (size_t)at(i);
    expect(!memcmp(descriptors[i], &address, sizeof address), "a descriptor of TMA begins with the tensor's address");
  }
  *fake(driver, "fake_result_of_launch") = 719;
  expect(ha_forward(&p) == HA_ERROR_CUDA, "a refused launch is an error");
  expect(!strcmp(ha_last_error_message(), "cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED (719), unspecified launch failure"),
         "the message of the driver");
  *fake(driver, "fake_result_of_launch") = 0;
  *fake(driver, "fake_keeps_descriptors") = 0;
}

/* That a call launches so many kernels, of which the generated host code checks all arguments; or says which of them is
 * not in this build. */
static void expect_launches(void *driver, const char *what, ha_status status, int launches) {
  int *const count = fake(driver, "fake_launches");
  expect(status == HA_ERROR_NOT_BUILT || (status == HA_SUCCESS && *count == launches), what);
  printf("%s: %s\n", what, status == HA_SUCCESS ? "launched" : ha_last_error_message());
  *count = 0;
}

static void test_launches_with_scores(void *driver) {
  ha_forward_params p = problem();
  p.scores.softcap = 30, p.scores.alibi_slopes = at(5), p.scores.sinks = at(6);
  expect_launches(driver, "softcap, slopes and sinks", ha_forward(&p), 1);
  p.scores = (ha_scores){.sinks = at(6)}, p.attention_chunk = 1000;
  expect_launches(driver, "chunks and sinks", ha_forward(&p), 1);
  p.scores.sinks = NULL;
  expect_launches(driver, "chunks", ha_forward(&p), 1);
  p.lse = at(5);
  expect(ha_forward_fp8_workspace_size(&p, &p.workspace_size) == HA_SUCCESS, "a size of the workspace with chunks");
  expect_launches(driver, "FP8 with chunks", ha_forward_fp8(&p), 3);
  p.scores.softcap = 30;
  expect(ha_forward_fp8(&p) == HA_ERROR_NOT_SUPPORTED, "FP8 has no softcap");
}

static ha_varlen_params packed_problem(void) {
  ha_varlen_params v = HA_VARLEN_PARAMS_INIT;
  v.dtype = HA_BFLOAT16;
  v.batch = 3, v.total_q = v.total_k = 1000, v.max_seqlen_q = v.max_seqlen_k = 500;
  v.heads = 4, v.kv_heads = 2, v.head_dim = v.head_dim_v = 128, v.causal = 1;
  v.q.data = at(0), v.k.data = at(1), v.v.data = at(2), v.out.data = at(3);
  v.cu_seqlens_q = v.cu_seqlens_k = at(4), v.seqused_k = at(5);
  v.workspace = at(6), v.workspace_size = 1 << 24;
  return v;
}

static void test_packed_launches(void *driver) {
  ha_varlen_params v = packed_problem();
  expect_launches(driver, "packed sequences", ha_varlen(&v), 2);
  v.scores.alibi_slopes = at(7), v.scores.alibi_stride_batch = 4, v.scores.sinks = at(8);
  expect_launches(driver, "packed sequences with slopes and sinks", ha_varlen(&v), 2);
  v = packed_problem(), v.lse = at(7);
  expect_launches(driver, "packed sequences in FP8", ha_varlen_fp8(&v), 4);
  v.window_left = 100;
  expect_launches(driver, "packed sequences in FP8 with a window", ha_varlen_fp8(&v), 4);
  v = packed_problem(), v.seqused_k = NULL, v.fp8_two_level = 1;
  expect_launches(driver, "packed sequences in FP8 in two levels", ha_varlen_fp8(&v), 4);
}

static void test_paged_launches(void *driver) {
  ha_paged_params p = HA_PAGED_PARAMS_INIT;
  p.dtype = HA_BFLOAT16;
  p.batch = 3, p.total_q = 1000, p.max_seqlen_q = 500, p.causal = 1;
  p.heads = 4, p.kv_heads = 2, p.head_dim = p.head_dim_v = 128;
  p.pages = 100, p.page_size = 64, p.pages_of_sequence = 20, p.page_table = at(5);
  p.q.data = at(0), p.k_cache.data = at(1), p.v_cache.data = at(2), p.out.data = at(3);
  p.cu_seqlens_q = at(4), p.cache_seqlens = at(6), p.cache_starts = at(7);
  p.workspace = at(8), p.workspace_size = 1 << 20;
  expect_launches(driver, "packed queries on pages", ha_paged(&p), 2);
  p.scores.alibi_slopes = at(9), p.lse = at(10);
  expect_launches(driver, "packed queries on pages with slopes", ha_paged(&p), 2);
  p.k_cache.stride_batch = 2 * 64 * 256, p.k_cache.stride_row = 256, p.k_cache.stride_head = 128;
  expect(ha_paged(&p) == HA_ERROR_NOT_SUPPORTED && strstr(ha_last_error_message(), "the same whole number of rows apart"),
         "pages lie as far apart in both caches");
  p.k_cache.stride_batch = p.k_cache.stride_row = p.k_cache.stride_head = 0, p.cache_starts = NULL;
  expect(ha_paged(&p) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "cache_starts is NULL"),
         "the starts of sequences have to be there");
}

static void test_appends(void *driver) {
  ha_append_params a = HA_APPEND_PARAMS_INIT;
  a.dtype = a.cache_dtype = HA_BFLOAT16;
  a.batch = 2, a.seqlen_new = 1, a.kv_heads = 2, a.head_dim = a.head_dim_v = 128;
  a.pages = 100, a.page_size = 64, a.page_table = at(5), a.pages_of_sequence = 20;
  a.k.data = at(0), a.v.data = at(1), a.k_cache.data = at(2), a.v_cache.data = at(3);
  a.cache_seqlens = at(6), a.new_seqlens = at(7);
  expect_launches(driver, "new tokens", ha_append(&a), 1);
  const unsigned *config = dlsym(driver, "fake_config");
  a.page_table = NULL, a.cu_seqlens_new = at(8), a.seqlen_new = 7;
  a.k.stride_row = 4096, a.k.stride_head = 128;
  const ha_status packed = ha_append(&a);
  expect(packed == HA_ERROR_NOT_BUILT || config[0] == 7 + 1, "a CTA for each new token, and one for lengths");
  expect_launches(driver, "packed new tokens", packed, 1);
  a.rotary = HA_ROTARY_HALVES, a.rotary_dtype = HA_FLOAT32, a.rotary_dim = 64, a.rotary_rows = 1000;
  expect(ha_append(&a) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "rotary_cos is "),
         "tables of a rotation have to be there");
  a.rotary_cos = at(9), a.rotary_sin = at(10);
  expect_launches(driver, "new tokens that are turned", ha_append(&a), 1);
  a.seqlen_q = 3, a.heads = 8, a.q.data = a.q_out.data = at(11);
  expect(ha_append(&a) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "q_out.data is q.data"),
         "queries are turned into other memory");
  a.q_out.data = at(12);
  expect_launches(driver, "new tokens and queries that are turned", ha_append(&a), 1);
  a.rotary = HA_ROTARY_NONE, a.cache_dtype = HA_FLOAT8_E4M3;
  expect(ha_append(&a) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "k_descale is NULL"),
         "a cache of e4m3 has descales");
  a.k_descale = at(13), a.v_descale = at(14);
  expect_launches(driver, "new tokens of a cache of e4m3", ha_append(&a), 1);
}

static void test_merges(void *driver) {
  ha_combine_params p = HA_COMBINE_PARAMS_INIT;
  p.dtype = HA_BFLOAT16, p.num_splits = 4, p.batch = 2, p.seqlen = 100, p.heads = 8, p.head_dim_v = 128;
  p.out_partial.data = at(0), p.lse_partial = at(1), p.out.data = at(2);
  expect(ha_combine(&p) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "lse is NULL"),
         "the LSE has to go somewhere");
  p.lse = at(3);
  expect_launches(driver, "several parts", ha_combine(&p), 1);
  p.out_partial_stride_split = 6;
  expect(ha_combine(&p) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "out_partial_stride_split is 6"),
         "parts lie at multiples of 16 bytes");
  ha_merge_params m = HA_MERGE_PARAMS_INIT;
  m.dtype = HA_BFLOAT16, m.batch = 2, m.seqlen = 100, m.heads = 8, m.head_dim_v = 128;
  m.out.data = at(0), m.lse = at(1), m.part.data = at(2), m.part_lse = at(3);
  expect_launches(driver, "one part more", ha_merge(&m), 1);
  m.head_dim_v = 4;
  expect(ha_merge(&m) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "head_dim_v is 4, allowed"),
         "columns are moved in vectors");
}

static void test_other_launches(void *driver) {
  *fake(driver, "fake_launches") = 0;
  ha_forward_params p = problem();
  p.window_left = 100;
  expect_launches(driver, "a window", ha_forward(&p), 1);
  p = problem();
  size_t size = 0;
  expect(ha_forward_fp8_workspace_size(&p, &size) == HA_SUCCESS, "a size of the workspace in FP8");
  p.workspace_size = size, p.lse = at(5);
  expect_launches(driver, "FP8", ha_forward_fp8(&p), 3);
  p.window_left = 3000;
  expect_launches(driver, "FP8 with a window", ha_forward_fp8(&p), 3);
  p.window_left = -1, p.fp8_two_level = 1;
  expect(ha_forward_fp8_workspace_size(&p, &p.workspace_size) == HA_SUCCESS, "a size of the workspace in two levels");
  expect_launches(driver, "FP8 in two levels", ha_forward_fp8(&p), 3);
  p.fp8_two_level = 0, p.seqlen_k = 100, p.seqlen_q = 1;
  expect_launches(driver, "FP8 of one block", ha_forward_fp8(&p), 3);

  ha_decode_params d = HA_DECODE_PARAMS_INIT;
  d.dtype = d.cache_dtype = HA_BFLOAT16;
  d.batch = 2, d.seqlen_q = 1, d.heads = 8, d.kv_heads = 2, d.head_dim = d.head_dim_v = 128;
  d.pages = 100, d.page_size = 64, d.pages_of_sequence = 20, d.page_table = at(5), d.cache_seqlens = at(6);
  d.q.data = at(0), d.k_cache.data = at(1), d.v_cache.data = at(2), d.out.data = at(3);
  d.workspace = at(4), d.workspace_size = 1 << 23;
  expect_launches(driver, "a decoding step on pages", ha_decode(&d), 2);
  d.window_left = 100, d.scores.sinks = at(8), d.scores.softcap = 30;
  expect_launches(driver, "a decoding step with a window, a softcap and sinks", ha_decode(&d), 2);
  d.window_left = -1, d.scores = (ha_scores){0};
  d.page_table = NULL, d.cache_leftpad = at(8);
  expect_launches(driver, "a decoding step with left pads", ha_decode(&d), 2);
  d.cache_leftpad = NULL, d.lse = at(7);
  expect_launches(driver, "a decoding step without pages", ha_decode(&d), 2);
  d.cache_dtype = HA_FLOAT8_E4M3;
  expect(ha_decode(&d) == HA_ERROR_INVALID_ARGUMENT && strstr(ha_last_error_message(), "k_descale is NULL"),
         "a cache of e4m3 has descales");
  d.k_descale = at(8), d.v_descale = at(9);
  expect_launches(driver, "a decoding step on a cache of e4m3", ha_decode(&d), 2);
  d.seqlen_q = 20;
  expect(ha_decode(&d) == HA_ERROR_NOT_SUPPORTED && strstr(ha_last_error_message(), "80 query rows share a K/V head"),
         "too many queries");
}

static void test_varlen(void) {
  ha_varlen_params p = HA_VARLEN_PARAMS_INIT;
  p.dtype = HA_FLOAT16;
  p.batch = 3, p.total_q = p.total_k = 1000, p.max_seqlen_q = p.max_seqlen_k = 500;
  p.heads = p.kv_heads = 2, p.head_dim = p.head_dim_v = 64;
  size_t size = 0;
  /* The counter; the head of the plan; a record for each sequence and one more; an entry for each tile. */
  expect(ha_varlen_workspace_size(&p, &size) == HA_SUCCESS, "a size of the workspace");
  expect(size == 1504 + 4 * (4 + 4 * 4 + 2 * (1000 / 64 + 4)), "the size of the workspace");
  p.max_seqlen_q = 0;
  expect(ha_varlen_workspace_size(&p, &size) == HA_ERROR_INVALID_ARGUMENT, "the longest sequence has to be given");
}

int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  test_refusals();
  test_varlen();
  if (!driver || !dlsym(driver, "fake_launches")) {
    printf("the driver that is found is not the one of the test: LD_LIBRARY_PATH\n");
    return 1;
  }
  test_a_launch(driver);
  test_other_launches(driver);
  test_launches_with_scores(driver);
  test_packed_launches(driver);
  test_paged_launches(driver);
  test_appends(driver);
  test_merges(driver);
  return failures != 0;
}
