// Which keys a row sees under HSTU's masks: one rule for the CPU and for the kernel. Free of torch
// headers, since nvcc compiles it too.
//
// The keys of a sequence count in steps: all contextual keys are one step, then each key of the
// history is one, and all targets together are the last. A row sees the keys of earlier steps
// (without causality those of other steps), at most max_attn_len away, unless it belongs to the
// last min_full_attn_len steps; contextual rows see everything before the targets; a target sees
// the targets of its group up to itself, and every other row sees itself.
#pragma once

#include "contract/key_interval.h"
#include "contract/offsets_rule.h"

#include <cstdint>

namespace jagged_cuda {

struct KeyIntervals {
  KeyInterval first;
  KeyInterval second;
};

struct HstuRule {
  int64_t max_attn_len;  // 0: unlimited
  int64_t min_full_attn_len;
  int64_t target_group;  // at least 1
  bool causal;

  // What the row at `position` of a sequence of `len` keys sees, of which the first `contextual` are
  // contextual and the last `targets` are targets; these two may be wrong. A negative position sees
  // nothing.
  JAGGED_CUDA_HOST_DEVICE KeyIntervals at(int64_t position, int64_t len, int64_t targets,
                                          int64_t contextual) const {
    if (position < 0) return {};
    targets = targets < 0 ? 0 : targets > len ? len : targets;
    const int64_t history = len - targets;  // keys before the targets
    const bool is_target = position >= history;
    const int64_t in_group = is_target ? (position - history) % target_group : 0;
    const KeyInterval own = interval(position - in_group, position + 1);
    // Step s > 0 is key s + shared, and step 0 keys 0 to `shared`.
    const int64_t shared = contextual > 0 ? contextual - 1 : 0;
    const int64_t last_step = history - shared;  // of the targets
    if (last_step <= 0) return is_target ? KeyIntervals{{}, own} : KeyIntervals{own, {}};

    const int64_t step = is_target ? last_step : position > shared ? position - shared : 0;
    const bool sees_all =
        max_attn_len == 0 || (min_full_attn_len > 0 && min_full_attn_len >= last_step - step);
    const int64_t begin = sees_all || step <= max_attn_len ? 0 : step - max_attn_len + shared;
    if (is_target) return {interval(begin, history), own};

    int64_t end = position + 1;
    if (!causal) {
      const bool to_the_last = sees_all || max_attn_len >= last_step - step;
      end = to_the_last ? len : step + max_attn_len + shared + 1;
    }
    if (contextual > 0 && step == 0 && end < history) end = history;
    return {interval(begin, end), {}};
  }

 private:
  JAGGED_CUDA_HOST_DEVICE static KeyInterval interval(int64_t begin, int64_t end) {
    return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
  }
};

}  // namespace jagged_cuda
