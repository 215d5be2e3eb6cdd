// jagged2_softmax over the columns of each row or over the rows of each column, forward and
// backward (softmax/lines.cuh: the mathematics). A *line* is what one softmax runs over: a row, or
// a column.
//
// Grid: x, a CTA for each *window* of 2^window_log2 elements of the vector. Its tasks, in order, which a
// warp plans (span_plan.cuh):
//   1. its part of a large matrix that covers the window's begin
//   2. the span: all that begins in the window and is small, copied to shared memory as one piece.
//      Small are rows, over columns, and whole matrices, over rows, of up to kRoom - window elements
//   3. its part of a large matrix that begins in the window
// The windows that a large matrix reaches into share out its lines in groups, in turn:
//   - rows: as many as fit shared memory, one piece
//   - columns: the whole matrix if it fits, else strips of columns, as wide as fits
// Lines of up to kMaxShort elements are computed in registers (short_lines.cuh), longer ones are
// read twice by all threads (long_lines.cuh), from global memory if they do not fit shared memory.
//
// Shared memory: `buffer` elements of each operand, a Partial of each thread, the plan, where the
// lines lie of 32 matrices for each warp. Barriers: the plan is there; the copies have arrived and
// the lines are there; the results are there; all have left the task's memory.
//
// Elements outside every matrix, and those of one that does not fit the vector, become zeros. As in
// torch, a NaN or +inf makes its line NaN, and so does a line of -inf.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/softmax/long_lines.cuh"
#include "cuda/kernels/softmax/pieces.cuh"
#include "cuda/kernels/softmax/span_plan.cuh"

namespace jagged_cuda::softmax {

template <typename Params>
struct SpanLaunch {
  Params params;
  Spans spans;
};

// The lines among these that are too long for registers, all threads of the CTA together.
template <typename Config, typename S>
__device__ __noinline__ void softmax_longer_lines(const LinesOf32& shared, int buffer,
                                                  bool over_rows, Scale<S> scale) {
  using Element = typename Config::Element;
  Element* sX = span_shared<Config>().elems;
#pragma unroll 1
  for (unsigned left = shared.long_ones; left != 0; left &= left - 1) {
    const LinesInShared& lines = shared.lines[__ffs(static_cast<int>(left)) - 1];
    softmax_long_lines<Config>(Place<Element, int>{sX, sX + buffer, sX, S(1)}, over_rows,
                               lines.first, lines.count, lines.len, over_rows ? 1 : lines.pitch,
                               over_rows ? lines.pitch : 1, lines.lanes_log2, scale);
  }
}

template <typename Config, typename S>
__device__ __noinline__ void multiply_shared(int elems, S factor) {
  using Element = typename Config::Element;
  Element* sX = span_shared<Config>().elems;
#pragma unroll 1
  for (int i = threadIdx.x; i < elems; i += Config::kThreads) {
    sX[i] = from_sum<Element>(factor * to_sum(sX[i]));
  }
  __syncthreads();  // all are multiplied
}

// The scale, and what x is multiplied by before. Forward the sign goes to x; a scale of 0 does, too: what
// fills up lines must count for nothing.
template <typename S>
struct SignedScale {
  Scale<S> scale;
  S sign;
};

template <typename Config>
__device__ __forceinline__ SignedScale<Sum<typename Config::Element>> signed_scale(double given) {
  using S = Sum<typename Config::Element>;
  Scale<S> scale{static_cast<S>(given)};
  S sign = S(1);
  if constexpr (!Config::kBackward) {
    scale.exponent = static_cast<S>((given < 0 ? -given : given) * (sizeof(S) == 8 ? 1 : kLog2E));
    if (!(given > 0 && scale.exponent > S(0))) {
      sign = given < 0 ? S(-1) : S(given);
      if (!(scale.exponent > S(0))) {
        sign = scale.exponent;  // 0 or NaN
        scale.exponent = S(1);
      }
    }
  }
  return {scale, sign};
}

// A group of `count` lines of a large matrix from `line` on, as pieces of memory and as lines there.
template <typename Config>
__device__ __forceinline__ void place_group(const LargePlan& large, bool over_rows, int count,
                                            Pieces<Config>& pieces, LinesInShared& lines) {
  lines.len = static_cast<int>(large.len);
  lines.pitch = large.pitch;
  lines.lanes_log2 = choose_lanes_log2<Config>(large.lines, lines.len, over_rows);
  lines.first = static_cast<int>(pieces.first());
  if (threadIdx.x % 32 == 0) lines.count = count;
  pieces.elems = static_cast<unsigned>(count * lines.len);
  if (over_rows && (count != large.columns || large.pitch != count)) {
    pieces.step = large.columns;
    pieces.count = static_cast<unsigned>(lines.len);
    pieces.elems = static_cast<unsigned>(count);
    pieces.pitch = static_cast<unsigned>(large.pitch);
  }
}

// What the plan says, all threads of the CTA together, once the plan is there.
template <typename Config, typename Params>
__device__ __forceinline__ void softmax_spans(const SpanLaunch<Params>& launch) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  using S = Sum<Element>;
  auto& shared = span_shared<Config>();
  const Params& params = launch.params;
  const bool over_rows = params.over_rows;
  const SpanPlan& plan = shared.plan;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    store_zeros(gOut + plan.zeros_begin[i], plan.zeros_end[i] - plan.zeros_begin[i], threadIdx.x,
                Config::kThreads);
  }

  const SignedScale<S> given = signed_scale<Config>(params.scale);
  const Scale<S> scale = given.scale;
  const S sign = given.sign;

  constexpr int kWarps = Config::kWarps;
  constexpr bool kByWindows = Config::kByWindows;
  const int buffer = launch.spans.buffer;
  const auto lines_of_batch = [&](int64_t batch) {
    return lines_of_span<Config>(params.matrices, over_rows,
                                 plan.first_seq + 32 * batch + threadIdx.x % 32, blockIdx.x,
                                 launch.spans.window_log2);
  };
  // Task 0 is the span, the others are the large matrices' parts.
#pragma unroll 1
  for (int task = kByWindows ? 0 : 1; task < (kByWindows ? 3 : 2); ++task) {
    const LargePlan& large = plan.large[task == 2];
    int64_t line = kByWindows && task == 0 ? 0 : large.first_line;
#pragma unroll 1
    for (; line < (kByWindows && task == 0 ? plan.span_elems > 0 : large.lines);
         line += kByWindows && task == 0 ? 1 : large.next_line) {
      Pieces<Config> pieces{plan.span_begin, 0, 1, static_cast<unsigned>(plan.span_elems), 0};
      LinesInShared lines{};
      if (!kByWindows || task != 0) {
        const int64_t left = large.lines - line;
        const int count = left < large.group_lines ? static_cast<int>(left) : large.group_lines;
        pieces.global = large.begin + line * (over_rows ? 1 : large.columns);
        if (large.pitch == 0) {
          softmax_long_lines<Config>(
              Place<Element, int64_t>{gX + pieces.global, gGrad + pieces.global,
                                      gOut + pieces.global, sign},
              over_rows, 0, count, large.len, over_rows ? 1 : large.columns,
              over_rows ? large.columns : 1, lanes_of_long_lines(large.lines, over_rows), scale);
          continue;
        }
        place_group(large, over_rows, count, pieces, lines);
      }
      pieces.load(shared.elems, gX, params.matrices.capacity);
      if constexpr (Config::kBackward) {
        pieces.load(shared.elems + buffer, gGrad, params.matrices.capacity);
      }
      ptx::cp_async_commit();
      const int warp = threadIdx.x / 32;
      const bool by_warps = kByWindows && task == 0 && plan.end_seq - plan.first_seq > 32;
      if (warp == 0 && !by_warps) {
        if (kByWindows && task == 0) lines = lines_of_batch(0);
        write_lines<Config>(shared.lines[0], lines);
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // the copies of all threads have arrived, and the lines are there
      if (sign != S(1)) multiply_shared<Config>(buffer, sign);
      // Up to 32 matrices are shared out by all warps; of more, each warp takes 32 at a time.
      int first = by_warps ? 0 : warp, step = by_warps ? 1 : kWarps;
      bool any_long = false;
      int64_t batch = warp;
#pragma unroll 1
      do {
        LinesOf32& of_warp = shared.lines[by_warps ? warp : 0];
        if (by_warps) {
          __syncwarp();  // all lanes have left the lines before
          write_lines<Config>(of_warp, lines_of_batch(batch));
          __syncwarp();  // the lines are there
        }
        softmax_short_lines<Config>(of_warp, first, step, buffer, over_rows, scale);
        any_long |= of_warp.long_ones != 0;
        batch += kWarps;
      } while (by_warps && plan.first_seq + 32 * batch < plan.end_seq);
      if (__syncthreads_or(any_long)) {  // the results of short lines are there
        if (by_warps) {
#pragma unroll 1
          for (batch = 0; plan.first_seq + 32 * batch < plan.end_seq; ++batch) {
            if (warp == 0) write_lines<Config>(shared.lines[0], lines_of_batch(batch));
            __syncthreads();  // the lines are there
            softmax_longer_lines<Config>(shared.lines[0], buffer, over_rows, scale);
            __syncthreads();  // all have left the lines
          }
        } else {
          softmax_longer_lines<Config>(shared.lines[0], buffer, over_rows, scale);
        }
      }
      pieces.store(shared.elems, gOut);
      __syncthreads();  // all have left the task's memory
    }
  }
}

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void spans_kernel(
    const __grid_constant__ SpanLaunch<Params> launch) {
  const Params& params = launch.params;
  if (threadIdx.x < 32) {
    if constexpr (Config::kByWindows) {
      make_plan<Config>(params.matrices, launch.spans, params.over_rows, blockIdx.x);
    } else {
      make_tile_plan<Config>(params.matrices, launch.spans, params.over_rows, blockIdx.x, 0, 1);
    }
  }
  __syncthreads();  // the plan is there
  softmax_spans<Config>(launch);
}

// Each kernel is launched with one `spans`, since it is allowed its shared memory once.
template <typename Element, bool kByWindows, int kThreads, typename Params>
cudaError_t launch_spans(const Params& params, const Spans& spans, cudaStream_t stream) {
  using Config = SpanConfig<Element, Operands<Params>::kBackward, kByWindows, kThreads>;
  constexpr auto kKernel = spans_kernel<Config, Params>;
  constexpr const char* kOperator =
      Config::kBackward ? "cuda.jagged2_softmax_backward" : "cuda.jagged2_softmax";
  constexpr bool kIsLarge = kThreads == 256;
  const int64_t window = int64_t{1} << spans.window_log2;
  const int64_t tiles = kByWindows
                            ? (params.matrices.capacity + window - 1) / window
                            : num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs,
                                        1 << spans.window_log2);
  const char* path = nullptr;
  if constexpr (kIsLarge) {  // over rows alone
    static constexpr PathName kRows = PathName(kOperator) + ".rows.large_tiles";
    path = kRows;
  } else {
    constexpr const char* kCut = kByWindows ? ".windows" : ".tiles";
    static constexpr PathName kColumns = PathName(kOperator) + ".columns" + kCut,
                              kRows = PathName(kOperator) + ".rows" + kCut;
    path = params.over_rows ? kRows : kColumns;
  }
  return launch<kKernel>(SpanLaunch<Params>{params, spans}, {tiles}, Config::kThreads,
                         SpanShared<Config>::bytes(spans.buffer), stream, path);
}

}  // namespace jagged_cuda::softmax
