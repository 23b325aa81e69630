// The C++ header: structs initialise themselves, and a refused call throws.
#include <cstdio>
#include <cstring>

#include "hopper_attention.hpp"

int main() {
  hopper_attention::forward_params p;
  p.batch = p.seqlen_q = p.seqlen_k = p.heads = p.kv_heads = 1;
  p.head_dim = p.head_dim_v = 64;
  if (hopper_attention::kernel_of(p).find("hopper_fwd_fp16_d64_full") != 0) return 1;
  if (hopper_attention::workspace_size(p) % 16) return 2;
  p.scores.softcap = 30;
  if (hopper_attention::kernel_of(p).find("_softcap") == std::string::npos) return 5;
  hopper_attention::append_params a;
  a.dtype = a.cache_dtype = HA_BFLOAT16;
  a.batch = a.seqlen_new = a.kv_heads = a.pages = a.page_size = 1;
  a.head_dim = a.head_dim_v = 64;
  if (hopper_attention::kernel_of(a) != "append_sm_90a_bf16_bf16") return 6;
  hopper_attention::merge_params m;
  m.dtype = HA_FLOAT16, m.head_dim_v = 64;
  hopper_attention::merge(m);  // of no rows
  p.head_dim = 7;
  try {
    hopper_attention::forward(p);
  } catch (const hopper_attention::error &error) {
    return error.status() == HA_ERROR_INVALID_ARGUMENT && std::strstr(error.what(), "head_dim is 7") ? 0 : 3;
  }
  return 4;
}
