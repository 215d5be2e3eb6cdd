// What the kernels for tiny sequences share: sequences of at most tiny_limit() queries and keys, one
// head of which a warp takes alone, so that nothing waits for another warp.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/attention/window.cuh"

#include <cmath>

namespace jagged_cuda::attention {

// Rows of one sequence, in a tensor of fewer than kMaxRows32.
struct TinyRows {
  unsigned begin;
  int len;
};

struct TinySequence {
  TinyRows queries;
  TinyRows keys;
};

__device__ __forceinline__ TinyRows tiny_rows(const OffsetsView& offsets, unsigned seq) {
  const int total = static_cast<int>(offsets.total);
  int begin, end;
  if (offsets.wide) {
    const auto clamp = [total](long long value) {
      return value < 0 ? 0 : value > total ? total : static_cast<int>(value);
    };
    const auto* data = static_cast<const long long*>(offsets.data) + seq;
    const long long first = __ldg(data), last = __ldg(data + 1);
    begin = clamp(first);
    end = clamp(last);
  } else {
    const auto* data = static_cast<const int*>(offsets.data) + seq;
    const int first = __ldg(data), last = __ldg(data + 1);
    begin = min(max(first, 0), total);
    end = min(max(last, 0), total);
  }
  return {static_cast<unsigned>(begin), max(end - begin, 0)};
}

// Sequence `seq`, or an empty one where it is not tiny, which is left in params.longer.
__device__ __forceinline__ TinySequence tiny_sequence(const AttentionParams& params, unsigned seq) {
  const TinyRows queries = tiny_rows(params.q_offsets, seq);
  const TinyRows keys =
      params.kv_offsets.data == params.q_offsets.data ? queries : tiny_rows(params.kv_offsets, seq);
  if (!is_tiny(params, queries.len, keys.len)) {
    if (params.longer != nullptr) {
      params.longer[0] = params.call_number;
      if (max(queries.len, keys.len) > kShortRows) params.longer[1] = params.call_number;
    }
    return {};
  }
  return {queries, keys};
}

// The sequence and the head of one warp. A grid has a warp for each of num_seqs * heads items, the
// heads of a sequence next to each other, since their rows share lines of memory, and kFillCtas CTAs
// behind them for the rows outside all sequences.
struct TinyItem {
  static constexpr unsigned kFillCtas = 132;  // one per SM of an H100
  unsigned seq;
  unsigned head;

  __host__ __device__ __forceinline__ static unsigned ctas(const AttentionParams& params,
                                                           unsigned heads, unsigned warps) {
    return (static_cast<unsigned>(params.q_offsets.num_seqs) * heads + warps - 1) / warps;
  }
  __device__ __forceinline__ TinyItem(unsigned heads, unsigned warps) {
    const unsigned item = blockIdx.x * warps + threadIdx.x / 32;
    seq = item / heads;
    head = item - seq * heads;
  }
};

// Rows of one head in global memory as a lane reads or writes them, from its own first row and
// column on; elements of two bytes. Host code makes sure that strides fit (launch.h, takes_tiny).
struct LaneRows {
  char* data;
  unsigned row_bytes;

  __device__ __forceinline__ LaneRows(const HeadsView& view, unsigned row, unsigned head,
                                      int column)
      : data(static_cast<char*>(view.data)), row_bytes(static_cast<unsigned>(view.row_stride) * 2) {
    data += static_cast<uint64_t>(row) * row_bytes +
            (head * static_cast<unsigned>(view.head_stride) + column) * 2;
  }
  __device__ __forceinline__ char* row(unsigned rows) const {
    return data + static_cast<uint64_t>(row_bytes) * rows;
  }
};

// The window of a tiny sequence; it cuts if some query may not see some key.
struct TinyWindow : WindowOf<int> {
  __device__ __forceinline__ TinyWindow(const AttentionParams& params, int queries, int keys)
      : WindowOf<int>{keys - queries, window_rows32(params.window_left),
                      window_rows32(params.window_right)} {}
  __device__ __forceinline__ bool cuts() const { return before < kTinyRows || after < kTinyRows; }
};

// Zeros for one head of a sequence.
__device__ __forceinline__ void store_zero_rows(const HeadsView& view, const TinyRows& rows,
                                                unsigned head, int columns, int lane) {
#pragma unroll 1
  for (int row = lane / 4; row < rows.len; row += 8) {
#pragma unroll 1
    for (int column = lane % 4 * 8; column < columns; column += 32)
      ptx::st_global_16(LaneRows(view, rows.begin + row, head, column).data,
                        make_uint4(0, 0, 0, 0));
  }
}

// Writes `value` to what belongs to no sequence, in CTA `cta` of `ctas`: to the rows before the first
// and after the last, of row_words * 4 bytes each.
__device__ __forceinline__ void fill_outside(const OffsetsView& offsets, void* g,
                                             unsigned row_words, float value, unsigned cta,
                                             unsigned ctas = TinyItem::kFillCtas) {
  const int64_t first = clamped_offset(offsets, 0) * row_words,
                last = clamped_offset(offsets, offsets.num_seqs) * row_words,
                outside = first + offsets.total * row_words - last;
#pragma unroll 1
  for (int64_t i = cta * blockDim.x + threadIdx.x; i < outside; i += ctas * blockDim.x) {
    static_cast<float*>(g)[i < first ? i : last + i - first] = value;
  }
}

template <auto kKernel, typename Config, typename Params>
cudaError_t launch_tiny(const Params& params, int heads, int shared_bytes, cudaStream_t stream) {
  const Grid grid{int64_t{TinyItem::ctas(params, heads, Config::kWarps)} + TinyItem::kFillCtas};
  return launch<kKernel>(params, grid, Config::kThreads, shared_bytes, stream, Config::kName);
}

}  // namespace jagged_cuda::attention
