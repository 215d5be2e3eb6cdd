// jagged2_softmax over the columns of each row or over the rows of each column, forward and
// backward (softmax/lines.cuh: the mathematics). A *line* is what one softmax runs over: a row, or
// a column.
//
// Grid: x, a CTA for each *window* of 2^window_log2 elements of the vector. Its tasks, in order:
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

namespace jagged_cuda::softmax {

template <typename Params>
struct SpanLaunch {
  Params params;
  Spans spans;
};

// The tile with index `tile` of num_tiles(), numbered otherwise than by find_tile: the first tiles of
// all segments, which need no search, then the further ones. Further ones of segment s are bound[s] /
// tile_elems to bound[s + 1] / tile_elems - 1. All 32 lanes of a warp together.
__device__ __forceinline__ JaggedTile find_matrix_tile(const OffsetsView& offsets, int tile_log2,
                                                       int64_t tile) {
  const int64_t further = tile - (offsets.num_seqs + 2);
  if (further < 0) {
    return tile_of(offsets, {tile, segment_bound(offsets, tile), segment_bound(offsets, tile + 1)},
                   0);
  }
  const Segment segment =
      find_segment(offsets, [&](int64_t bound, int64_t) { return bound >> tile_log2 <= further; });
  return tile_of(offsets, segment, (further - (segment.begin >> tile_log2) + 1) << tile_log2);
}

// For each of two elements the first sequence of [0, B] whose matrix begins there or behind it, B + 1
// if none does. All 32 lanes of a warp together; the two searches wait for memory together.
__device__ __forceinline__ void first_matrices_from(const MatricesView& matrices,
                                                    const int64_t (&elements)[2],
                                                    int64_t (&found)[2]) {
  const int lane = threadIdx.x % 32;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  // Begins before it; begins not before it.
  int64_t low[2] = {-1, -1}, high[2] = {matrices.rows.num_seqs + 1, matrices.rows.num_seqs + 1};
  while (high[0] - low[0] > 1 || high[1] - low[1] > 1) {
    bool before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t probe = low[i] + ((high[i] - low[i] + 31) >> 5) * (lane + 1);
      before[i] = probe < high[i] && __ldg(gOffsets + probe) < elements[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t step = (high[i] - low[i] + 31) >> 5;
      // With wrong offsets others may follow the first that is not before it.
      const unsigned stopped = ~__ballot_sync(kAllLanes, before[i]);
      const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
      low[i] += step * passed;
      high[i] = high[i] < low[i] + step ? high[i] : low[i] + step;
    }
  }
  found[0] = high[0];
  found[1] = high[1];
}

// How the windows share out a large matrix, of which this is window `part` of `parts`.
template <typename Config>
__device__ __forceinline__ LargePlan plan_large(const Matrix& matrix, bool over_rows, int room,
                                                int64_t part, int64_t parts) {
  constexpr int kChunk = Config::kChunk;
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len;
  LargePlan plan{};
  plan.begin = matrix.begin;
  plan.columns = columns;
  plan.len = over_rows ? rows : columns;
  plan.lines = over_rows ? columns : rows;
  if (!over_rows) {
    if (columns <= room) {
      const int most = room / static_cast<int>(columns);
      const int64_t even = divide_up(rows, parts);
      plan.pitch = static_cast<int>(columns);
      plan.group_lines = even < most ? static_cast<int>(even) : most;
    } else {
      plan.group_lines = 1;
    }
  } else if (rows * columns <= room) {
    plan.group_lines = plan.pitch = static_cast<int>(columns);
    // Rows that begin in few banks are moved apart.
    const bool in_few_banks = columns * sizeof(typename Config::Element) % 32 == 0;
    if (in_few_banks && rows * (columns + kChunk) <= room) plan.pitch += kChunk;
  } else {
    // The pitch is the vector's, modulo chunks, and no two rows of a strip share a chunk.
    int pitch = rows > room || columns > INT_MAX ? 0 : room / static_cast<int>(rows);
    pitch -= (pitch - static_cast<int>(columns % kChunk)) & (kChunk - 1);
    const int width = pitch - (2 * kChunk - 2);
    if (width >= Config::kMinStrip) {
      const int all = static_cast<int>(columns);
      plan.group_lines = divide_up(all, divide_up(all, width));
      const int taken = plan.group_lines + 2 * kChunk - 2;
      plan.pitch = taken + ((all - taken) & (kChunk - 1));
    } else {
      plan.group_lines = columns < Config::kStrip ? static_cast<int>(columns) : Config::kStrip;
    }
  }
  plan.first_line = part * plan.group_lines;
  plan.next_line = parts * plan.group_lines;
  return plan;
}

// The plan of window `index`, all 32 lanes of a warp together; lane 0 plans the matrix that covers
// the window's begin, lane 1 the one that begins last in it.
template <typename Config>
__device__ __noinline__ void make_plan(const MatricesView& matrices, const Spans& spans,
                                       bool over_rows, int64_t index) {
  SpanPlan& plan = span_shared<Config>().plan;
  const int64_t begin = index << spans.window_log2;
  int64_t end = begin + (int64_t{1} << spans.window_log2);
  if (end > matrices.capacity) end = matrices.capacity;
  int64_t found[2];
  first_matrices_from(matrices, {begin, end}, found);
  const int64_t first = found[0], last = found[1];
  const int lane = threadIdx.x % 32;
  const int64_t num_seqs = matrices.rows.num_seqs;
  const int room = spans.buffer - Config::kChunk, small = room - (1 << spans.window_log2);

  const int64_t seq = (lane == 0 ? first : last) - 1;
  const bool covers = lane == 0, present = lane < 2 && seq >= (covers ? 0 : first);
  Matrix matrix{};
  if (present && seq < num_seqs) matrix = find_matrix(matrices, seq);
  const int64_t rows = matrix.fits ? matrix.rows.len : 0,
                columns = matrix.fits ? matrix.columns.len : 0, elems = rows * columns;
  const bool is_large = over_rows ? elems > small : rows > 0 && columns > small;
  LargePlan large{};
  if (elems > 0 && is_large && matrix.begin + elems > begin) {
    const int64_t first_window = matrix.begin >> spans.window_log2,
                  last_window = (matrix.begin + elems - 1) >> spans.window_log2;
    large = plan_large<Config>(matrix, over_rows, room, index - first_window,
                               last_window - first_window + 1);
  }
  // The rows of it that begin in the window, where these are small.
  int64_t rows_begin = 0, rows_end = 0;
  if (elems > 0 && !is_large) {
    rows_end = rows;
    if (over_rows) {
      if (covers) rows_begin = rows_end;
    } else {
      const int64_t before = begin - matrix.begin;
      if (before > 0) rows_begin = before >= elems ? rows : divide_up(before, columns);
      if (end - matrix.begin < elems) rows_end = divide_up(end - matrix.begin, columns);
    }
  }
  const bool in_span = rows_begin < rows_end;
  const int64_t span_begin = matrix.begin + rows_begin * columns;
  const int64_t span_end = matrix.begin + rows_end * columns;
  // Elements of no matrix that fits: behind all, or of the first that does not fit.
  int64_t zeros_begin = end;
  if (present && (seq >= num_seqs || !matrix.fits)) {
    zeros_begin = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq);
    if (zeros_begin < begin) zeros_begin = begin;
    if (zeros_begin > end) zeros_begin = end;
  }

  // One lane tells the other.
  const auto of_lane = [&](int64_t value, int source) {
    return __shfl_sync(kAllLanes, value, source);
  };
  const bool first_in = of_lane(in_span, 0), last_in = of_lane(in_span, 1);
  const bool last_present = of_lane(present, 1);
  const int64_t last_begin =
      of_lane(last_present ? (matrix.fits ? matrix.begin : zeros_begin) : end, 1);
  const int64_t spans_begin = of_lane(span_begin, 0), end_of_first = of_lane(span_end, 0),
                end_of_last = of_lane(span_end, 1), zeros_last = of_lane(zeros_begin, 1);
  if (lane < 2) {
    plan.large[lane] = large;
    plan.rows_begin[lane] = rows_begin;
    plan.rows_end[lane] = rows_end;
  }
  if (lane == 0) {
    const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
    // Matrices [first, last - 1) begin and end in the window.
    plan.first_seq = first_in ? seq : first;
    plan.end_seq = last_in ? last : last_present ? last - 1 : first;
    plan.span_begin = first_in ? spans_begin : first < last ? __ldg(gOffsets + first) : end;
    const int64_t span_stop = last_in ? end_of_last : last_present ? last_begin : end_of_first;
    const int64_t span_elems = span_stop - plan.span_begin;
    const bool sound = plan.first_seq < plan.end_seq && plan.span_begin >= 0 && span_elems > 0 &&
                       span_elems <= room && span_stop <= matrices.capacity;
    plan.span_elems = sound ? static_cast<int>(span_elems) : 0;
    const int64_t leading = __ldg(gOffsets);
    plan.zeros_begin[0] = begin;
    plan.zeros_end[0] = leading < begin ? begin : leading < end ? leading : end;
    plan.zeros_begin[1] = zeros_begin < zeros_last ? zeros_begin : zeros_last;
    plan.zeros_end[1] = end;
  }
}

// The plan of CTA `rank` of the `ranks` that share tile `index` of one matrix, all 32 lanes of a warp
// together.
template <typename Config>
__device__ __noinline__ void make_tile_plan(const MatricesView& matrices, const Spans& spans,
                                            bool over_rows, int64_t index, int rank, int ranks) {
  SpanPlan& plan = span_shared<Config>().plan;
  const int tile_elems = 1 << spans.window_log2;
  const JaggedTile tile = find_matrix_tile(elements_of(matrices), spans.window_log2, index);
  const bool present = tile.row < tile.rows.len;
  Matrix matrix{};
  if (present && tile.seq >= 0) matrix = find_matrix(matrices, tile.seq);
  LargePlan large{};
  int64_t zeros_begin = 0, zeros = 0;
  if (present && !matrix.fits) {
    const int64_t left = tile.rows.len - tile.row, own = rank * (tile_elems / ranks);
    zeros_begin = tile.rows.begin + tile.row + own;
    zeros = left - own < tile_elems / ranks ? left - own : tile_elems / ranks;
    if (zeros < 0) zeros = 0;
  } else if (present && matrix.rows.len > 0 && matrix.columns.len > 0) {
    const int64_t tiles = (tile.rows.len + tile_elems - 1) >> spans.window_log2;
    large = plan_large<Config>(matrix, over_rows, spans.buffer - Config::kChunk,
                               (tile.row >> spans.window_log2) * ranks + rank, tiles * ranks);
  }
  if (threadIdx.x == 0) {
    plan.large[0] = large;
    plan.large[1].first_line = plan.large[1].lines = 0;
    plan.span_elems = 0;
    plan.zeros_begin[0] = zeros_begin;
    plan.zeros_end[0] = zeros_begin + zeros;
    plan.zeros_begin[1] = plan.zeros_end[1] = 0;
  }
}

// The lines of matrix `seq` of the span; none with wrong offsets.
template <typename Config>
__device__ __noinline__ LinesInShared lines_of_span(const MatricesView& matrices, bool over_rows,
                                                    int64_t seq, int64_t window, int window_log2) {
  const SpanPlan& plan = span_shared<Config>().plan;
  LinesInShared lines{};
  if (seq >= plan.end_seq || seq >= matrices.rows.num_seqs) return lines;
  const Matrix matrix = find_matrix(matrices, seq);
  int64_t rows_begin = 0, rows = matrix.rows.len;
  const int64_t columns = matrix.columns.len;
  if (!matrix.fits) return lines;
  const int64_t all_lines = over_rows ? columns : rows;
  if (!over_rows) {
    // The first may begin before the window, the last may end behind it.
    const int64_t begin = window << window_log2;
    if (matrix.begin < begin) {
      rows_begin = plan.rows_begin[0];
      rows = plan.rows_end[0];
    } else if (seq + 1 == plan.end_seq && plan.rows_end[1] != 0) {
      rows = plan.rows_end[1];
    }
  }
  rows -= rows_begin;
  const int64_t first = matrix.begin + rows_begin * columns - plan.span_begin;
  if (rows <= 0 || columns <= 0 || rows > plan.span_elems || columns > plan.span_elems ||
      first < 0 || first + rows * columns > plan.span_elems) {
    return lines;
  }
  lines.first = static_cast<int>(first) + static_cast<int>(plan.span_begin % Config::kChunk);
  lines.count = static_cast<int>(over_rows ? columns : rows);
  lines.len = static_cast<int>(over_rows ? rows : columns);
  lines.pitch = static_cast<int>(columns);
  lines.lanes_log2 = choose_lanes_log2<Config>(all_lines, lines.len, over_rows);
  return lines;
}

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

// What the plan says, all threads of the CTA together, once the plan is there.
template <typename Config, typename Params>
__device__ __forceinline__ void softmax_spans(const SpanLaunch<Params>& launch) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  using S = Sum<Element>;
  constexpr double kLog2E = 1.4426950408889634;
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

  // Forward the sign goes to x; a scale of 0 does, too: what fills up lines must count for nothing.
  Scale<S> scale{static_cast<S>(params.scale)};
  S sign = S(1);
  if constexpr (!Config::kBackward) {
    scale.exponent = static_cast<S>((params.scale < 0 ? -params.scale : params.scale) *
                                    (sizeof(S) == 8 ? 1 : kLog2E));
    if (!(params.scale > 0 && scale.exponent > S(0))) {
      sign = params.scale < 0 ? S(-1) : S(params.scale);
      if (!(scale.exponent > S(0))) {
        sign = scale.exponent;  // 0 or NaN
        scale.exponent = S(1);
      }
    }
  }

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
