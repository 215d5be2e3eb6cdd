// What is added to scores (contract/score_bias.h), and the used part of key sequences: components
// of the schedules that take them.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/attention/time_buckets.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// The keys of a sequence that are used (AttentionParams::kv_lengths), out of `len`.
__device__ __forceinline__ int64_t used_keys(const AttentionParams& params, int64_t seq,
                                             int64_t len) {
  return params.kv_lengths.data == nullptr ? len : clamped_count(params.kv_lengths, seq, len);
}
__device__ __forceinline__ RowRange used_rows(const AttentionParams& params, int64_t seq) {
  RowRange kv = sequence_rows(params.kv_offsets, seq);
  kv.len = used_keys(params, seq, kv.len);
  return kv;
}

// The biases of one head of one sequence. Rows and keys are counted within it, and must be there.
template <typename T>
struct HeadBias {
  const ScoreBias& bias;
  bool any;
  const T* keys;
  const T* times;
  const int64_t* q_time;
  const int64_t* kv_time;
  const T* positions;
  int64_t shift;  // Lk - Lq

  __device__ __forceinline__ HeadBias(const AttentionParams& params, int head,
                                      const RowRange& queries, const RowRange& kv)
      : bias(params.bias),
        any(params.bias.any()),
        keys(nullptr),
        times(nullptr),
        q_time(nullptr),
        kv_time(nullptr),
        positions(nullptr),
        shift(kv.len - queries.len) {
    if (bias.kv_bias != nullptr)
      keys = static_cast<const T*>(bias.kv_bias) + kv.begin * bias.kv_heads +
             head / (params.heads / bias.kv_heads);
    if (bias.time_table != nullptr) {
      times = static_cast<const T*>(bias.time_table) +
              head / (params.heads / bias.time_heads) * bias.time_buckets;
      q_time = bias.q_time + queries.begin;
      kv_time = bias.kv_time + kv.begin;
    }
    if (bias.position_table != nullptr)
      positions = static_cast<const T*>(bias.position_table) +
                  head / (params.heads / bias.position_heads) * bias.position_buckets;
  }

  __device__ __forceinline__ int time_bucket(int64_t row, int64_t key) const {
    return bias.time_bucket(__ldg(q_time + row), __ldg(kv_time + key));
  }
  __device__ __forceinline__ int position_bucket(int64_t row, int64_t key) const {
    return bias.position_bucket(row + shift - key);
  }
  __device__ __forceinline__ T of(int64_t row, int64_t key) const {
    T sum = 0;
    if (keys != nullptr) sum += __ldg(keys + key * bias.kv_heads);
    if (times != nullptr) sum += __ldg(times + time_bucket(row, key));
    if (positions != nullptr) sum += __ldg(positions + position_bucket(row, key));
    return sum;
  }
};

// What a step of kColumns columns brings, beside its operands: copied to shared memory with them. Rows
// and columns of scores are queries and keys, or kTransposed keys and queries.
template <int kRows, int kColumns>
struct StepBias {
  alignas(16) int64_t times[kColumns];  // past the end that of the last column
  alignas(16) float keys[kColumns];     // kv_bias; not kTransposed
  // position_bias of each diagonal, which is column - row + kRows - 1. Twice, the second time one
  // further on, so that of every row the diagonals of columns 2 c and 2 c + 1 lie in one aligned pair.
  alignas(16) float positions[2][kRows + kColumns];
};

// What a CTA of a general kernel has of biases in shared memory.
template <bool kGeneral, int kRows, int kColumns, int kStages>
struct BiasStorage {
  StepBias<kRows, kColumns> steps[kStages];
  TimeCells cells;
};
template <int kRows, int kColumns, int kStages>
struct BiasStorage<false, kRows, kColumns, kStages> {};

// The biases of the scores between a tile of kRows rows, of which a warp has kRowBlocks * 16, and
// steps of kColumns columns. Whatever is given is looked up at run time. Scores become logits by one
// multiplication and one addition for the first bias, fused, and one addition for each other: the
// same bits whatever the tile.
template <bool kTransposed, int kRows, int kColumns, int kRowBlocks>
struct TileBias {
  using Step = StepBias<kRows, kColumns>;

  // Columns whose buckets are found together, and the lanes that find them.
  static constexpr int kGroup = 16, kGroups = kColumns / kGroup, kGroupLanes = 32 / kGroups;

  const AttentionParams& params;
  const ScoreBias& bias;
  RowRange queries;
  RowRange kv;
  int64_t first_row;  // of the tile
  int warp_row;
  const float* times;                 // of a head: [time_buckets]
  const float* load_keys;             // of the head that is loaded: kv_bias; not kTransposed
  const float* load_positions;        // [position_buckets]
  TimeSpan span;                      // of the warp's rows
  uint32_t row_times[kRowBlocks][2];  // of the lane's rows, the lower half
  float row_keys[kRowBlocks][2];      // kv_bias of the lane's rows, of a head; kTransposed

  // `first_row` must be there. All 32 lanes of a warp together.
  __device__ __forceinline__ TileBias(const AttentionParams& params, const RowRange& queries,
                                      const RowRange& kv, int64_t first_row, int warp_row)
      : params(params),
        bias(params.bias),
        queries(queries),
        kv(kv),
        first_row(first_row),
        warp_row(warp_row) {
    if (bias.time_table == nullptr) return;
    for_each_row([&](int r, int half, int64_t row) {
      const int64_t time = __ldg(times_of_rows() + row);
      row_times[r][half] = static_cast<uint32_t>(time);
      span.include(time);
    });
    span.combine();
  }

  // What add() is for from now on.
  __device__ __forceinline__ void set_head(int head) {
    if (bias.time_table != nullptr)
      times = static_cast<const float*>(bias.time_table) +
              head / (params.heads / bias.time_heads) * bias.time_buckets;
    if (kTransposed && bias.kv_bias != nullptr) {
      const float* g = key_column(head);
      for_each_row([&](int r, int half, int64_t row) {
        row_keys[r][half] = __ldg(g + row * bias.kv_heads);
      });
    }
  }

  // What load() is for from now on.
  __device__ __forceinline__ void set_load_head(int head) {
    if (!kTransposed && bias.kv_bias != nullptr) load_keys = key_column(head);
    if (bias.position_table != nullptr)
      load_positions = static_cast<const float*>(bias.position_table) +
                       head / (params.heads / bias.position_heads) * bias.position_buckets;
  }

  // Copies a step, of which some columns are there; the caller commits and waits.
  template <int kThreads>
  __device__ __forceinline__ void load(Step& step, int64_t column) const {
    const int last =
        static_cast<int>(min(num_columns() - column, static_cast<int64_t>(kColumns))) - 1;
    const int own = threadIdx.x;
    static_assert(kThreads >= 2 * kColumns);
    if (!kTransposed && bias.kv_bias != nullptr && own < kColumns)
      ptx::cp_async_4(&step.keys[own], load_keys + (column + min(own, last)) * bias.kv_heads, 4);
    if (bias.time_table != nullptr && own < 2 * kColumns) {
      const int64_t* time = times_of_columns() + column + min(own / 2, last);
      ptx::cp_async_4(reinterpret_cast<int*>(step.times) + own,
                      reinterpret_cast<const int*>(time) + own % 2, 4);
    }
    if (bias.position_table != nullptr) {
      const int64_t shift = kv.len - queries.len,
                    middle = (kTransposed ? column - first_row : first_row - column) + shift;
#pragma unroll
      for (int i = own; i < 2 * (kRows + kColumns); i += kThreads) {
        const int copy = i < kRows + kColumns ? 0 : 1;
        const int place = i - copy * (kRows + kColumns), away = place - copy - (kRows - 1);
        ptx::cp_async_4(
            &step.positions[copy][place],
            load_positions + bias.position_bucket(middle + (kTransposed ? away : -away)), 4);
      }
    }
  }

  // `column` is the first of the step.
  template <int kBlocks>
  __device__ __forceinline__ void scale_and_add(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                                const Step& step, const TimeCells& cells,
                                                int64_t column, int lane) const {
    static_assert(kBlocks * 8 == kColumns);
    if (!bias.any()) {
      for_each_score(s, [&](float& score) { score *= scale; });
      return;
    }
    if (bias.kv_bias != nullptr) {
      add_keys(s, scale, step, lane);
      scale = 1.0f;
    }
    if (bias.time_table != nullptr) {
      add_times(s, scale, step, cells, column, lane);
      scale = 1.0f;
    }
    if (bias.position_table != nullptr) add_positions(s, scale, step, lane);
  }

  // The distance in rows between the warp's first row and `column`; not kTransposed.
  __device__ __forceinline__ int64_t distance(int64_t column) const {
    return first_row + warp_row + kv.len - queries.len - column;
  }

  // The buckets that each group of columns can have, in all lanes of the group; of narrow times alone.
  struct TimeGroups {
    bool narrow;
    int first;
    int last;

    // All 32 lanes of a warp together.
    __device__ __forceinline__ bool are_one() const {
      const int one = __shfl_sync(0xffffffffu, first, 0);
      return __all_sync(0xffffffffu, first == one && last == one);
    }
    __device__ __forceinline__ int first_of(int group) const {
      return __shfl_sync(0xffffffffu, first, group * kGroupLanes);
    }
    __device__ __forceinline__ int last_of(int group) const {
      return __shfl_sync(0xffffffffu, last, group * kGroupLanes);
    }
  };

  __device__ __forceinline__ TimeGroups time_groups(const Step& step, const TimeCells& cells,
                                                    int lane) const {
    constexpr int kEach = kColumns >= 32 ? kColumns / 32 : 1;
    constexpr int64_t kWidest = TimeCells::kLimit / 2;
    const auto width = static_cast<uint64_t>(span.latest) - static_cast<uint64_t>(span.soonest);
    bool narrow = width < kWidest;
    int low = INT_MAX, high = INT_MIN;  // less the soonest of the warp's rows
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t time = step.times[kColumns >= 32 ? lane * kEach + i : lane % kColumns];
      const auto later =
          static_cast<int64_t>(static_cast<uint64_t>(time) - static_cast<uint64_t>(span.soonest));
      narrow =
          narrow && later > -kWidest && later < kWidest && (time >= span.soonest) == (later >= 0);
      low = min(low, static_cast<int>(later));
      high = max(high, static_cast<int>(later));
    }
    TimeGroups groups{};
    groups.narrow = __all_sync(0xffffffffu, narrow);
    if (!groups.narrow) return groups;
#pragma unroll
    for (int distance = kGroupLanes / 2; distance > 0; distance /= 2) {
      low = min(low, __shfl_xor_sync(0xffffffffu, low, distance));
      high = max(high, __shfl_xor_sync(0xffffffffu, high, distance));
    }
    // A query's time less a key's.
    const int rows = static_cast<int>(width), least = kTransposed ? low - rows : -high,
              most = kTransposed ? high : rows - low;
    const int behind = bias.symmetric ? -least : 0;
    const int nearest = max(max(least, bias.symmetric ? -most : 0), 0),
              farthest = max(max(most, behind), 0);
    groups.first = cells.bucket(bias, static_cast<uint32_t>(nearest));
    groups.last = cells.bucket(bias, static_cast<uint32_t>(farthest));
    return groups;
  }

  // Calls use(r, block, i, of(its bucket)) for each score of a group of columns, which has the buckets
  // [first, last]. Loops stay loops: unrolled they would not fit into the instruction cache.
  template <typename Of, typename Use>
  __device__ __forceinline__ void for_each_of_group(int group, int first, int last,
                                                    const Step& step, int lane, Of of,
                                                    Use use) const {
    constexpr int kGroupBlocks = kGroup / 8;
    const auto for_each = [&](auto visit) {
#pragma unroll
      for (int i = 0; i < kRowBlocks * kGroupBlocks * 4; ++i)
        visit(i / (kGroupBlocks * 4), i / 4 % kGroupBlocks, i % 4);
    };
    if (first == last) {
      const auto one = of(first);
      for_each([&](int r, int b, int i) { use(r, group * kGroupBlocks + b, i, one); });
      return;
    }
    const int mirrored = bias.symmetric ? -1 : 0;
    uint32_t away[kRowBlocks][kGroupBlocks][4];
#pragma unroll
    for (int b = 0; b < kGroupBlocks; ++b) {
      const auto pair =
          *reinterpret_cast<const uint4*>(&step.times[group * kGroup + b * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < kRowBlocks * 4; ++i) {
        const uint32_t other = i % 2 == 0 ? pair.x : pair.z, row = row_times[i / 4][i % 4 / 2];
        const auto difference = static_cast<int>(kTransposed ? other - row : row - other);
        away[i / 4][b][i % 4] = static_cast<uint32_t>(max(difference, difference * mirrored));
      }
    }
    decltype(of(0)) found[kRowBlocks][kGroupBlocks][4];
    const auto nearest = of(first);
    for_each([&](int r, int b, int i) { found[r][b][i] = nearest; });
#pragma unroll 1
    for (int next = first; next < last; ++next) {
      const auto boundary = static_cast<uint32_t>(__ldg(bias.boundaries + next));
      const auto behind = of(next + 1);
      for_each([&](int r, int b, int i) {
        found[r][b][i] = away[r][b][i] >= boundary ? behind : found[r][b][i];
      });
    }
    for_each([&](int r, int b, int i) { use(r, group * kGroupBlocks + b, i, found[r][b][i]); });
  }

  __device__ __forceinline__ TimeRange time_range(const Step& step, int lane) const {
    TimeSpan columns;
    for (int i = lane; i < kColumns; i += 32) columns.include(step.times[i]);
    columns.combine();
    return kTransposed ? TimeRange(bias, columns, span) : TimeRange(bias, span, columns);
  }

  // Calls use(r, block, i, its bucket) for each score of the step, whose range is given.
  template <int kBlocks, typename Use>
  __device__ __forceinline__ void for_each_bucket(const TimeRange& range, const Step& step,
                                                  int64_t column, int lane, Use use) const {
    // One element after another, of all in registers.
#pragma unroll 1
    for (int element = 0; element < kRowBlocks * kBlocks * 4; ++element) {
      const int i = element % 4;
      const int64_t row = first_row + row_in_tile(element / (4 * kBlocks), i / 2, lane),
                    row_time = __ldg(times_of_rows() + min(row, num_rows() - 1)),
                    other = step.times[element / 4 % kBlocks * 8 + 2 * (lane % 4) + i % 2];
      const int64_t query = kTransposed ? other : row_time, key = kTransposed ? row_time : other;
      const uint64_t away = !bias.symmetric && query < key ? 0 : time_between(query, key);
      const int bucket = bucket_of(bias, away, range.first, range.last);
#pragma unroll
      for (int e = 0; e < kRowBlocks * kBlocks * 4; ++e) {
        if (e == element) use(e / (4 * kBlocks), e / 4 % kBlocks, e % 4, bucket);
      }
    }
  }

 private:
  __device__ __forceinline__ int64_t num_rows() const { return kTransposed ? kv.len : queries.len; }
  __device__ __forceinline__ int64_t num_columns() const {
    return kTransposed ? queries.len : kv.len;
  }
  __device__ __forceinline__ const int64_t* times_of_rows() const {
    return kTransposed ? bias.kv_time + kv.begin : bias.q_time + queries.begin;
  }
  __device__ __forceinline__ const int64_t* times_of_columns() const {
    return kTransposed ? bias.q_time + queries.begin : bias.kv_time + kv.begin;
  }
  __device__ __forceinline__ const float* key_column(int head) const {
    const int column = head / (params.heads / bias.kv_heads);
    return static_cast<const float*>(bias.kv_bias) + kv.begin * bias.kv_heads + column;
  }
  __device__ __forceinline__ int row_in_tile(int r, int half, int lane) const {
    return warp_row + 16 * r + 8 * half + lane / 4;
  }
  // Calls visit(r, half, the row in the sequence) for the lane's rows, or the last one there is.
  template <typename Visit>
  __device__ __forceinline__ void for_each_row(Visit visit) const {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(r, half, min(first_row + row_in_tile(r, half, threadIdx.x % 32), num_rows() - 1));
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void add_keys(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                           const Step& step, int lane) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float2 added;
      if constexpr (!kTransposed)
        added = *reinterpret_cast<const float2*>(&step.keys[block * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[r][block][i] = __fmaf_rn(s[r][block][i], scale,
                                     kTransposed  ? row_keys[r][i / 2]
                                     : i % 2 == 0 ? added.x
                                                  : added.y);
        }
      }
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void add_positions(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                                const Step& step, int lane) const {
    const int diagonal = 2 * (lane % 4) - row_in_tile(0, 0, lane) + kRows - 1, copy = diagonal % 2;
    const float* pairs = &step.positions[copy][diagonal + copy];
    // Rows and columns 8 further on have the same diagonals.
#pragma unroll
    for (int step8 = 1 - 2 * kRowBlocks; step8 < kBlocks; ++step8) {
      const float2 added = *reinterpret_cast<const float2*>(pairs + 8 * step8);
#pragma unroll
      for (int row8 = 0; row8 < 2 * kRowBlocks; ++row8) {
        const int block = step8 + row8;
        if (block < 0 || block >= kBlocks) continue;
        float* two = &s[row8 / 2][block][row8 % 2 * 2];
        two[0] = __fmaf_rn(two[0], scale, added.x);
        two[1] = __fmaf_rn(two[1], scale, added.y);
      }
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void add_times(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                            const Step& step, const TimeCells& cells,
                                            int64_t column, int lane) const {
    const auto of = [&](int bucket) { return __ldg(times + bucket); };
    const auto add = [&](int r, int block, int i, float added) {
      s[r][block][i] = __fmaf_rn(s[r][block][i], scale, added);
    };
    const TimeGroups groups = time_groups(step, cells, lane);
    if (!groups.narrow) {
      for_each_bucket<kBlocks>(
          time_range(step, lane), step, column, lane,
          [&](int r, int block, int i, int bucket) { add(r, block, i, of(bucket)); });
    } else if (groups.are_one()) {
      const float added = of(groups.first);
      for_each_score(s, [&](float& score) { score = __fmaf_rn(score, scale, added); });
    } else {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int first = groups.first_of(group), last = groups.last_of(group);
        for_each_of_group(group, first, last, step, lane, of, add);
      }
    }
  }
};

// In place of TileBias where there are none.
struct Unbiased {
  __device__ __forceinline__ Unbiased(const AttentionParams&, const RowRange&, const RowRange&,
                                      int64_t, int) {}
};

// --- the gradients of kv_bias

// Adds up rows of dS^T.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_rows(const Accumulator<kRowBlocks, kBlocks>& ds,
                                         float (&sums)[kRowBlocks][2]) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) sums[r][i % 4 / 2] += ds[r][i / 4][i % 4];
  }
}

// Writes the sums of a head, and begins anew. `rows` are those of the tile at global_row.
template <int kRowBlocks>
__device__ __forceinline__ void store_key_sums(const AttentionBackwardParams& params,
                                               float (&sums)[kRowBlocks][2], int64_t global_row,
                                               int warp_row, int rows, int head, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[r][half]);
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows)
        static_cast<float*>(params.key_sums)[(global_row + row) * params.heads + head] = sum;
      sums[r][half] = 0.0f;
    }
  }
}

}  // namespace jagged_cuda::attention
