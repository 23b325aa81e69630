/* Softcap, ALiBi and sinks. */
#include <inttypes.h>

#include "internal.h"

static ha_status check_pointer(const char *name, const float *data) {
  if ((uintptr_t)data % sizeof *data == 0) return HA_SUCCESS;
  return ha_fail(HA_ERROR_INVALID_ARGUMENT, "scores.%s is %p, allowed: NULL, or float32 on the GPU, at a multiple of 4 bytes",
                 name, (const void *)data);
}

ha_status ha_check_scores(const ha_scores *s, int64_t heads) {
  /* Not "<" and ">", so that NaN is refused. */
  if (s->softcap != 0 && !(s->softcap >= SMALLEST_SOFTCAP && s->softcap <= LARGEST_SOFTCAP)) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT, "scores.softcap is %g, allowed: %g to %g, or 0 for none", s->softcap,
                   SMALLEST_SOFTCAP, LARGEST_SOFTCAP);
  }
  if (s->alibi_stride_batch && s->alibi_stride_batch < heads) {
    return ha_fail(HA_ERROR_INVALID_ARGUMENT,
                   "scores.alibi_stride_batch is %" PRId64 ", allowed: heads, %" PRId64
                   ", or more, or 0 for the same slopes in all sequences",
                   s->alibi_stride_batch, heads);
  }
  const ha_status status = check_pointer("alibi_slopes", s->alibi_slopes);
  return status == HA_SUCCESS ? check_pointer("sinks", s->sinks) : status;
}

ha_status ha_check_no_scores(const char *name, const ha_scores *s) {
  if (!ha_features_of(s)) return HA_SUCCESS;
  const char *what = s->softcap != 0 ? "softcap" : s->alibi_slopes ? "alibi_slopes" : "sinks";
  return ha_fail(HA_ERROR_NOT_SUPPORTED, "scores.%s is given, which %s does not have; use 16 bits", what, name);
}

unsigned ha_features_of(const ha_scores *s) {
  return (s->softcap != 0 ? FEATURE_SOFTCAP : 0) | (s->alibi_slopes ? FEATURE_ALIBI : 0) |
         (s->sinks ? FEATURE_SINKS : 0);
}

void ha_add_softcap(call *c, const ha_scores *s) {
  if (s->softcap != 0) ha_add_real(c, s->softcap);
  else ha_add_nothing(c);
}

static void add_slopes(call *c, const ha_scores *s, int64_t batch, int64_t heads) {
  if (s->alibi_slopes) {
    const int64_t shape[] = {batch, heads}, strides[] = {s->alibi_stride_batch, 1};
    ha_add_tensor(c, s->alibi_slopes, FLOAT32, 2, shape, strides);
  } else {
    ha_add_nothing(c);
  }
}

void ha_add_sinks(call *c, const ha_scores *s, int64_t heads) {
  if (s->sinks) ha_add_tensor(c, s->sinks, FLOAT32, 1, &heads, NULL);
  else ha_add_nothing(c);
}

void ha_add_scores(call *c, const ha_scores *s, int64_t batch, int64_t heads) {
  ha_add_softcap(c, s);
  add_slopes(c, s, batch, heads);
  ha_add_sinks(c, s, heads);
  ha_add_nothings(c, DROPOUT_ARGUMENTS);
}
