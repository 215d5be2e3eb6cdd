// What a CTA of spans.cuh is to do: its plan, made by one warp, and the lines of a span's matrices.
#pragma once

#include "cuda/kernels/softmax/shares.cuh"
#include "cuda/kernels/softmax/short_lines.cuh"

namespace jagged_cuda::softmax {

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

}  // namespace jagged_cuda::softmax
