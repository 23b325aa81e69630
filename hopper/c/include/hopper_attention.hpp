// hopper-attention for C++: hopper_attention.h with exceptions, and structs that initialise themselves.
//
//     hopper_attention::forward_params p;
//     p.dtype = HA_BFLOAT16;
//     ...
//     hopper_attention::forward(p);
#ifndef HOPPER_ATTENTION_HPP
#define HOPPER_ATTENTION_HPP

#include <cstddef>
#include <stdexcept>
#include <string>

#include "hopper_attention.h"

namespace hopper_attention {

// What a call that did not succeed throws.
class error : public std::runtime_error {
 public:
  error(ha_status status, const std::string &message) : std::runtime_error(message), status_(status) {}
  ha_status status() const noexcept { return status_; }

 private:
  ha_status status_;
};

// Throw unless a function of hopper_attention.h succeeded.
inline void check(ha_status status) {
  if (status != HA_SUCCESS) throw error(status, ha_last_error_message());
}

struct forward_params : ha_forward_params {
  forward_params() : ha_forward_params() {
    struct_size = sizeof(ha_forward_params);
    window_left = window_right = -1;
  }
};

struct varlen_params : ha_varlen_params {
  varlen_params() : ha_varlen_params() {
    struct_size = sizeof(ha_varlen_params);
    window_left = window_right = -1;
  }
};

struct decode_params : ha_decode_params {
  decode_params() : ha_decode_params() {
    struct_size = sizeof(ha_decode_params);
    window_left = window_right = -1;
  }
};

struct paged_params : ha_paged_params {
  paged_params() : ha_paged_params() {
    struct_size = sizeof(ha_paged_params);
    window_left = window_right = -1;
  }
};

struct append_params : ha_append_params {
  append_params() : ha_append_params() { struct_size = sizeof(ha_append_params); }
};

struct combine_params : ha_combine_params {
  combine_params() : ha_combine_params() { struct_size = sizeof(ha_combine_params); }
};

struct merge_params : ha_merge_params {
  merge_params() : ha_merge_params() { struct_size = sizeof(ha_merge_params); }
};

inline void forward(const ha_forward_params &p) { check(ha_forward(&p)); }
inline void prepare(const ha_forward_params &p) { check(ha_forward_prepare(&p)); }

inline void forward_fp8(const ha_forward_params &p) { check(ha_forward_fp8(&p)); }
inline void prepare_fp8(const ha_forward_params &p) { check(ha_forward_fp8_prepare(&p)); }

inline std::size_t workspace_size_fp8(const ha_forward_params &p) {
  std::size_t size = 0;
  check(ha_forward_fp8_workspace_size(&p, &size));
  return size;
}

inline void forward(const ha_varlen_params &p) { check(ha_varlen(&p)); }
inline void prepare(const ha_varlen_params &p) { check(ha_varlen_prepare(&p)); }

inline void forward_fp8(const ha_varlen_params &p) { check(ha_varlen_fp8(&p)); }
inline void prepare_fp8(const ha_varlen_params &p) { check(ha_varlen_fp8_prepare(&p)); }

inline std::size_t workspace_size_fp8(const ha_varlen_params &p) {
  std::size_t size = 0;
  check(ha_varlen_fp8_workspace_size(&p, &size));
  return size;
}

inline void forward(const ha_paged_params &p) { check(ha_paged(&p)); }
inline void prepare(const ha_paged_params &p) { check(ha_paged_prepare(&p)); }

inline std::size_t workspace_size(const ha_paged_params &p) {
  std::size_t size = 0;
  check(ha_paged_workspace_size(&p, &size));
  return size;
}

inline void append(const ha_append_params &p) { check(ha_append(&p)); }
inline void prepare(const ha_append_params &p) { check(ha_append_prepare(&p)); }

inline void combine(const ha_combine_params &p) { check(ha_combine(&p)); }
inline void prepare(const ha_combine_params &p) { check(ha_combine_prepare(&p)); }

inline void merge(const ha_merge_params &p) { check(ha_merge(&p)); }
inline void prepare(const ha_merge_params &p) { check(ha_merge_prepare(&p)); }

inline void forward(const ha_decode_params &p) { check(ha_decode(&p)); }
inline void prepare(const ha_decode_params &p) { check(ha_decode_prepare(&p)); }

inline std::size_t workspace_size(const ha_forward_params &p) {
  std::size_t size = 0;
  check(ha_forward_workspace_size(&p, &size));
  return size;
}

inline std::size_t workspace_size(const ha_varlen_params &p) {
  std::size_t size = 0;
  check(ha_varlen_workspace_size(&p, &size));
  return size;
}

inline std::size_t workspace_size(const ha_decode_params &p) {
  std::size_t size = 0;
  check(ha_decode_workspace_size(&p, &size));
  return size;
}

inline std::string kernel_of(const ha_forward_params &p) {
  const char *name = "";
  check(ha_forward_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_varlen_params &p) {
  const char *name = "";
  check(ha_varlen_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_decode_params &p) {
  const char *name = "";
  check(ha_decode_kernel(&p, &name));
  return name;
}

inline std::string kernel_of_fp8(const ha_forward_params &p) {
  const char *name = "";
  check(ha_forward_fp8_kernel(&p, &name));
  return name;
}

inline std::string kernel_of_fp8(const ha_varlen_params &p) {
  const char *name = "";
  check(ha_varlen_fp8_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_paged_params &p) {
  const char *name = "";
  check(ha_paged_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_append_params &p) {
  const char *name = "";
  check(ha_append_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_combine_params &p) {
  const char *name = "";
  check(ha_combine_kernel(&p, &name));
  return name;
}

inline std::string kernel_of(const ha_merge_params &p) {
  const char *name = "";
  check(ha_merge_kernel(&p, &name));
  return name;
}

inline void init_workspace(void *workspace, std::size_t size, void *stream = nullptr) {
  check(ha_workspace_init(workspace, size, stream));
}

}  // namespace hopper_attention

#endif
