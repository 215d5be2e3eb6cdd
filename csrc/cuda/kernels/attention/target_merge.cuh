// Adding up what the chunks of a long sequence have left of jagged_target_attention: forward each part's
// O, not divided yet, its maxima m_i and sums l_i, backward its dQ. With M the maximum over the parts,
//     w_i = exp2(c (m_i - M)),  l = sum l_i w_i,  out = sum O_i w_i / l,  lse = scale M + ln l,
// and dQ = sum dQ_i; over i in order, so that a row has the same bits at every run.
//
// Grid: x = CTAs of kMergeWarps warps, each with `rows_of_warp` rows (sequence, key/value head, row): one, or
// where there are many rows, of whose sequences most are short, up to 32, at which its lanes look together. Of
// a row that is to be merged a lane has 4 of each 128 columns. The first parts are asked for together with the
// statistics, of which a lane has those of every 32nd part; others follow kMergeAhead at a time. No shared
// memory, no barrier. CTAs start while the last ones of the kernel before run, and wait for them only if they
// have something to merge.
#pragma once

#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

constexpr int kMergeWarps = 4, kMergeAhead = 8;
constexpr int64_t kMergedAtOnce = 8192;  // rows that have a warp each: two rounds of an H100

template <typename Target>
struct MergeParams {
  Target target;
  int rows_of_warp;
};

// What a warp merges: a row of one key/value head over `parts` consecutive slots, of which the first has
// it at `first`. No parts: nothing to do.
struct MergeRow {
  int64_t seq;
  int64_t first;
  int parts;
  int stride;  // rows from one part to the next
  int kv_head;
  int row;

  __device__ __forceinline__ MergeRow(const TargetAttentionParams& params, int64_t index) {
    const int rows = params.num_queries * (params.heads / params.kv_heads);
    stride = rows * params.kv_heads;
    parts = 0;
    seq = index < int64_t{1} << 32 ? static_cast<uint32_t>(index) / static_cast<uint32_t>(stride)
                                   : index / stride;
    if (seq >= params.offsets.num_seqs) return;
    const RowRange range = sequence_rows(params.offsets, seq);
    if (range.len <= (1 << params.chunk_log2)) return;
    parts = static_cast<int>(((range.len - 1) >> params.chunk_log2) + 1);
    const int of_sequence = static_cast<int>(index - seq * stride);
    kv_head = of_sequence / rows;
    row = of_sequence % rows;
    first = first_slot(params, seq, range.begin) * stride + of_sequence;
  }
};

// Calls merge(row) for this warp's rows that have parts, behind the kernel that leaves them.
template <typename Target, typename Merge>
__device__ __forceinline__ void for_merged_rows(const MergeParams<Target>& params, Merge merge) {
  if (blockIdx.x == 0) ptx::griddepcontrol_wait();
  const int64_t base = (int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32) * params.rows_of_warp;
  const int lane = threadIdx.x % 32;
  unsigned left = 1;
  if (params.rows_of_warp > 1) {
    left = __ballot_sync(
        0xffffffffu, lane < params.rows_of_warp && MergeRow(params.target, base + lane).parts > 0);
  }
#pragma unroll 1
  for (; left != 0; left &= left - 1) {
    const MergeRow row(params.target, base + __ffs(static_cast<int>(left)) - 1);
    if (row.parts == 0) return;
    ptx::griddepcontrol_wait();
    merge(row);
  }
}

// Sums over a row's parts, in order, of 4 columns times their weights. All lanes; one without columns has
// null for `columns`.
template <typename Weights>
__device__ __forceinline__ float4 sum_parts(const MergeRow& item, const float* columns,
                                            int64_t part_stride, Weights& weights) {
  float4 ahead[kMergeAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kMergeAhead; ++i) {
      ahead[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (columns != nullptr && first + i < item.parts)
        ahead[i] = *reinterpret_cast<const float4*>(columns + (first + i) * part_stride);
    }
  };
  load(0);
  weights.start();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < item.parts; first += kMergeAhead) {
    if (first > 0) load(first);
    if (first % 32 == 0) weights.of_32(first);
#pragma unroll
    for (int i = 0; i < kMergeAhead; ++i) {
      const float factor = weights(first % 32 + i);
      sum.x += ahead[i].x * factor;
      sum.y += ahead[i].y * factor;
      sum.z += ahead[i].z * factor;
      sum.w += ahead[i].w * factor;
    }
  }
  return sum;
}

// The values of all lanes, combined.
template <typename Combine>
__device__ __forceinline__ float over_lanes(float value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

// Calls visit(first of a lane's 4 columns) for each 128 of a row. All lanes.
template <typename Visit>
__device__ __forceinline__ void for_merged_columns(int columns, Visit visit) {
#pragma unroll 1
  for (int first = 0; first < columns; first += 128)
    visit(first + static_cast<int>(threadIdx.x) % 32 * 4);
}

template <typename Element>
__device__ __forceinline__ void store_merged(Element* row, const float4& sum, float factor,
                                             int column, int columns) {
  const bool paired = columns % 2 == 0;
  store_pair(row + column, sum.x * factor, sum.y * factor, column, columns, paired);
  store_pair(row + column + 2, sum.z * factor, sum.w * factor, column + 2, columns, paired);
}

// w_i, of which a lane holds that of one of 32 parts.
class PartWeights {
 public:
  __device__ __forceinline__ PartWeights(const TargetAttentionParams& params, const MergeRow& item)
      : stats_(reinterpret_cast<const float2*>(params.part_stats) + item.first),
        parts_(item.parts),
        stride_(item.stride),
        scale_log2_(fmaxf(fabsf(params.scale) * kLog2E, 1e-30f)) {}

  __device__ __forceinline__ void start() {
    float largest = -INFINITY;
    for (int first = 0; first < parts_; first += 32) largest = fmaxf(largest, stat_of(first).x);
    maximum = over_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
    shift_ = maximum == -INFINITY ? 0.0f : maximum * scale_log2_;
    own_sum_ = 0.0f;
  }
  __device__ __forceinline__ void of_32(int first) {
    const float2 stat = stat_of(first);
    weight_ = ptx::ex2_approx(stat.x * scale_log2_ - shift_);
    own_sum_ += stat.y * weight_;
  }
  __device__ __forceinline__ float operator()(int lane) const {
    return __shfl_sync(0xffffffffu, weight_, lane);
  }
  // l, behind the last part.
  __device__ __forceinline__ float sum() const {
    return over_lanes(own_sum_, [](float a, float b) { return a + b; });
  }

  float maximum;  // M

 private:
  // Of this lane's part among those from `first` on. A part that does not exist weighs nothing.
  __device__ __forceinline__ float2 stat_of(int first) const {
    const int part = first + static_cast<int>(threadIdx.x) % 32;
    return part < parts_ ? stats_[int64_t{part} * stride_] : make_float2(-INFINITY, 0.0f);
  }

  const float2* stats_;
  int parts_, stride_;
  float scale_log2_, shift_, weight_, own_sum_;
};

// Of dQ.
struct NoWeights {
  __device__ __forceinline__ static void start() {}
  __device__ __forceinline__ static void of_32(int /*first*/) {}
  __device__ __forceinline__ float operator()(int /*lane*/) const { return 1.0f; }
};

template <typename Element>
__global__ __launch_bounds__(kMergeWarps * 32) void merge_forward(
    const __grid_constant__ MergeParams<TargetAttentionParams> merge) {
  const TargetAttentionParams& params = merge.target;
  const int columns = round_up_to_8(params.dim_v);
  for_merged_rows(merge, [&](const MergeRow& item) {
    const int64_t index = TargetRows(params, item.seq, item.kv_head).index(item.row);
    PartWeights weights(params, item);
    for_merged_columns(columns, [&](int column) {
      const float* first =
          column < columns ? params.parts + item.first * columns + column : nullptr;
      const float4 out = sum_parts(item, first, int64_t{item.stride} * columns, weights);
      const float sum = weights.sum();
      store_merged(static_cast<Element*>(params.out) + index * params.dim_v, out,
                   sum == 0.0f ? 0.0f : 1.0f / sum, column, params.dim_v);
      if (column == 0) {
        params.lse[index] =
            sum == 0.0f ? -INFINITY : weights.maximum * fabsf(params.scale) + logf(sum);
      }
    });
  });
}

template <typename Element>
__global__ __launch_bounds__(kMergeWarps * 32) void merge_backward(
    const __grid_constant__ MergeParams<TargetAttentionBackwardParams> merge) {
  const TargetAttentionBackwardParams& params = merge.target;
  const int columns = round_up_to_8(params.dim_qk);
  for_merged_rows(merge, [&](const MergeRow& item) {
    const int64_t index = TargetRows(params, item.seq, item.kv_head).index(item.row);
    for_merged_columns(columns, [&](int column) {
      const float* first =
          column < columns ? params.parts + item.first * columns + column : nullptr;
      NoWeights weights;
      const float4 sum = sum_parts(item, first, int64_t{item.stride} * columns, weights);
      store_merged(static_cast<Element*>(params.grad_q) + index * params.dim_qk, sum, 1.0f, column,
                   params.dim_qk);
    });
  });
}

// Merges the parts of long sequences, if there may be any.
template <auto kKernel, typename Target>
cudaError_t launch_merge(const Target& target, cudaStream_t stream) {
  if (target.parts == nullptr) return cudaSuccess;
  const int64_t rows = target.offsets.num_seqs * target_rows(target) * target.kv_heads,
                of_warp = (rows + kMergedAtOnce - 1) / kMergedAtOnce;
  MergeParams<Target> params{target, static_cast<int>(of_warp < 32 ? of_warp : 32)};
  const int64_t of_cta = kMergeWarps * params.rows_of_warp;
  return launch_dependent<kKernel>(params, {(rows + of_cta - 1) / of_cta}, kMergeWarps * 32, 0,
                                   stream);
}

}  // namespace jagged_cuda::attention
