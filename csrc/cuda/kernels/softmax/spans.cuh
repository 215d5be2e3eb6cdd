// jagged2_softmax over the columns of each row or over the rows of each column, forward and
// backward (softmax/lines.cuh: the mathematics). A *line* is what one softmax runs over: a row, or
// a column.
//
// Grid: x, a CTA for each virtual tile of kTile elements of the vector (prim/jagged.cuh, of which a
// matrix is a segment). The lines of a matrix are cut into groups that fit shared memory, which the
// CTAs of its tiles share out in turn:
//   - rows: a group is a contiguous span of the vector; as many groups as the matrix has tiles
//   - columns: the whole matrix if it fits, else strips of columns, as wide as fits
// Aligned chunks of 16 bytes come to shared memory by cp.async, each line is computed there in
// place, whole chunks go back and the elements at the ragged edges one by one. In shared memory
// element (i, j) of a group lies at i * pitch + j, plus where it begins in its chunk; the pitch
// keeps every chunk aligned, and rows apart that would lie in the same banks.
//
// `phases` threads share a line: each takes every phases-th element, twice. The first time it keeps
// a running maximum and sum (backward: the sum of p dp), which are then combined in shared memory.
// Lines that do not fit are read from global memory, one row or 32 columns at a time, by the same
// code. What is added in which order depends on the matrix's shape alone.
//
// Shared memory: kBuffer elements of each operand, a Partial of each thread, the plan. Barriers: the
// plan is there; the copies have arrived; the partials are there (further ones while more than
// kLinear threads share a line); all have read them; the results are there; all have left the group.
//
// Elements outside every matrix, and those of one that does not fit the vector, become zeros. As in
// torch, a NaN or +inf makes its line NaN, and so does a line of -inf.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/softmax/lines.cuh"

#include <climits>

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_>
struct SpanConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_;
  static constexpr int kThreads = 128;
  static constexpr int kBufferBytes = 24 * 1024;  // for each operand
  static constexpr int kBuffer = kBufferBytes / static_cast<int>(sizeof(Element));
  static constexpr int kTile = kBuffer / 3 * 2;  // room for a row more, or the edges of strips
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kStrip = 32;     // columns at a time that do not fit
  static constexpr int kMinStrip = 16;  // narrower ones are not worth the copy of their edges
  static constexpr int kLinear = 8;     // partials that each thread combines by itself
  static constexpr int kItems = 4;      // elements that a thread loads together
  static constexpr int kMinCtas = kBackward || sizeof(Element) == 8 ? 4 : 8;
};

// What a CTA does.
struct SpanPlan {
  int64_t begin;       // first element of the matrix; of the zeros
  int64_t zeros;       // so many elements belong to no matrix that fits, and nothing else is to do
  int64_t columns;     // of the matrix
  int64_t len;         // elements of a line
  int64_t lines;       // of the matrix
  int64_t first_line;  // of this CTA's first group
  int64_t next_line;   // from group to group of this CTA
  int group_lines;     // of a whole group
  int phases;          // threads that share a line
  int chunks;          // of 16 bytes, at most, in each of several pieces of a group
  unsigned inverse;    // of `chunks`; 0: the group is one piece
  int pitch;           // elements from row to row in shared memory; 0: the lines do not fit there
};

// Maximum and sum of a part of a line; backward the sum alone.
template <typename S, bool kBackward>
struct Partial {
  S sum = S(0);
  S maximum = minus_infinity<S>();
};
template <typename S>
struct Partial<S, true> {
  S sum = S(0);
};

template <typename Config>
struct SpanShared {
  using Element = typename Config::Element;
  alignas(16) Element x[Config::kBuffer];
  alignas(16) Element grad[Config::kBackward ? Config::kBuffer : Config::kChunk];
  Partial<Sum<Element>, Config::kBackward> partials[Config::kThreads];
  SpanPlan plan;
};

// |scale|, in the exponent of the function at hand; x is negated for a scale below 0.
template <typename S>
struct Scale {
  S exponent;
  // The maximum is taken off before the scale is multiplied: the difference is exact where it
  // matters, so that parts of a line fit together however large its logits are.
  __device__ __forceinline__ S exponential(S x, S maximum) const {
    const S power = (x - maximum) * exponent;
    if constexpr (std::is_same_v<S, float>) {
      return ptx::ex2_approx(power);
    } else {
      return exp(power);
    }
  }
  // `sum` of exponentials below `maximum`, now below `new_maximum`, which must be finite.
  __device__ __forceinline__ S rescaled(S sum, S maximum, S new_maximum) const {
    return maximum == minus_infinity<S>() ? sum : sum * exponential(maximum, new_maximum);
  }
};

__device__ __forceinline__ int divide_up(int a, int b) {
  return static_cast<int>((static_cast<unsigned>(a) + b - 1) / static_cast<unsigned>(b));
}

// The tile with index `tile` of num_tiles(), numbered otherwise than by find_tile: the first tiles of
// all segments, which need no search, then the further ones. Further ones of segment s are
// bound[s] / kTile to bound[s + 1] / kTile - 1. All 32 lanes of a warp together.
template <int kTile>
__device__ __forceinline__ JaggedTile find_span_tile(const OffsetsView& offsets, int64_t tile) {
  const int64_t further = tile - (offsets.num_seqs + 2);
  if (further < 0) {
    return tile_of(offsets, {tile, segment_bound(offsets, tile), segment_bound(offsets, tile + 1)},
                   0);
  }
  const Segment segment =
      find_segment(offsets, [&](int64_t bound, int64_t) { return bound / kTile <= further; });
  return tile_of(offsets, segment, (further - segment.begin / kTile + 1) * kTile);
}

// The plan of virtual tile `tile_index`, all 32 lanes of a warp together.
template <typename Config>
__device__ __forceinline__ SpanPlan make_plan(const MatricesView& matrices, bool over_rows,
                                              int64_t tile_index) {
  constexpr int kTile = Config::kTile, kChunk = Config::kChunk, kBuffer = Config::kBuffer;
  constexpr int kRoom = kBuffer - kChunk;  // a group begins anywhere in its first chunk
  SpanPlan plan{};
  const JaggedTile tile = find_span_tile<kTile>(elements_of(matrices), tile_index);
  if (tile.row >= tile.rows.len) return plan;
  const Matrix matrix = tile.seq < 0 ? Matrix{} : find_matrix(matrices, tile.seq);
  if (!matrix.fits) {
    plan.begin = tile.rows.begin + tile.row;
    plan.zeros = tile.rows.len - tile.row < kTile ? tile.rows.len - tile.row : kTile;
    return plan;
  }
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len;
  if (rows == 0 || columns == 0) return plan;  // with wrong offsets alone
  const int64_t tiles = (tile.rows.len + kTile - 1) / kTile;
  plan.begin = matrix.begin;
  plan.columns = columns;
  plan.len = over_rows ? rows : columns;
  plan.lines = over_rows ? columns : rows;
  bool whole_rows = !over_rows;
  if (over_rows) {
    // The pitch is the vector's, modulo chunks, and no two rows of a strip share a chunk.
    int pitch = rows > kRoom || columns > INT_MAX ? 0 : kRoom / static_cast<int>(rows);
    pitch -= (pitch - static_cast<int>(columns % kChunk)) & (kChunk - 1);
    const int width = pitch - (2 * kChunk - 2);
    if (rows * columns <= kRoom) {
      whole_rows = true;
      plan.group_lines = plan.pitch = static_cast<int>(columns);
    } else if (width >= Config::kMinStrip) {
      const int all = static_cast<int>(columns);
      plan.group_lines = divide_up(all, divide_up(all, width));
      const int taken = plan.group_lines + 2 * kChunk - 2;
      plan.pitch = taken + ((all - taken) & (kChunk - 1));
    } else {
      plan.group_lines = columns < Config::kStrip ? static_cast<int>(columns) : Config::kStrip;
    }
  } else if (columns <= kRoom - 2 * kChunk) {
    // Rows that begin in the same bank, or in one of two, are moved apart by two chunks.
    plan.pitch = static_cast<int>(columns) + (columns % (4 * kChunk) == 0 ? 2 * kChunk : 0);
    const int64_t even = (rows + tiles - 1) / tiles;
    plan.group_lines = even * plan.pitch <= kRoom ? static_cast<int>(even) : kRoom / plan.pitch;
  } else {
    plan.group_lines = 1;
  }
  if (plan.pitch != 0 && !(whole_rows && plan.pitch == columns)) {
    const int elems = over_rows ? plan.group_lines : static_cast<int>(columns);
    // At least 2, so that the division is one multiplication: exact, as all counts are below 2^16.
    plan.chunks = elems <= kChunk ? 2 : (elems + 2 * kChunk - 2) / kChunk;
    plan.inverse = 0xffffffffu / plan.chunks + 1;
  }
  plan.first_line = tile.row / kTile * plan.group_lines;
  plan.next_line = tiles * plan.group_lines;
  // No more than have eight elements each, so that combining them costs less than the elements.
  const int64_t most = (plan.len + 7) / 8;
  plan.phases = plan.group_lines < Config::kThreads ? Config::kThreads / plan.group_lines : 1;
  if (plan.phases > most) plan.phases = static_cast<int>(most);
  return plan;
}

// A group in the vector and in shared memory: its rows, or the parts of them that are in its strip,
// or one piece of whole rows without a gap.
template <typename Config>
struct Pieces {
  static constexpr int kThreads = Config::kThreads;
  static constexpr unsigned kChunk = Config::kChunk;
  using Element = typename Config::Element;
  int64_t global;         // element of the vector at which the first piece begins
  unsigned step;          // from piece to piece in the vector
  unsigned count, elems;  // of a piece
  unsigned first, pitch;  // where the first begins in shared memory, and from piece to piece
  unsigned chunks, inverse;

  __device__ __forceinline__ Pieces(const SpanPlan& plan, bool over_rows, int64_t line, int lines)
      : global(plan.begin + line * (over_rows ? 1 : plan.columns)),
        step(static_cast<unsigned>(plan.columns)),
        count(over_rows ? static_cast<unsigned>(plan.len) : lines),
        elems(over_rows ? lines : static_cast<unsigned>(plan.len)),
        first(static_cast<unsigned>(global) % kChunk),
        pitch(plan.pitch),
        chunks(plan.chunks),
        inverse(plan.inverse) {
    if (inverse == 0) {
      elems *= count;
      count = 1;
      chunks = (elems + 2 * kChunk - 2) / kChunk;
    }
  }

  // Calls visit(chunk, element, begin, end) for each chunk that holds elements of a piece: where it
  // begins in shared memory and, counted from `global`, in the vector, and where in shared memory
  // the piece begins and ends.
  template <typename Visit>
  __device__ __forceinline__ void for_each_chunk(Visit visit) const {
    const unsigned all = count * chunks;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < all; i += kThreads) {
      const unsigned piece = __umulhi(i, inverse), begin = first + piece * pitch;
      const unsigned chunk = (begin & ~(kChunk - 1)) + (i - piece * chunks) * kChunk;
      if (chunk < begin + elems) {
        visit(chunk, static_cast<int64_t>(uint64_t{piece} * step) + static_cast<int>(chunk - begin),
              begin, begin + elems);
      }
    }
  }

  // By single elements, where a vector does not begin at a chunk: visit(shared, element)
  template <typename Visit>
  __device__ __forceinline__ void for_each_element(Visit visit) const {
    const unsigned abreast = count == 1 ? kThreads : 32;
#pragma unroll 1
    for (unsigned piece = threadIdx.x / abreast; piece < count; piece += kThreads / abreast) {
#pragma unroll 1
      for (unsigned i = threadIdx.x % abreast; i < elems; i += abreast) {
        visit(first + piece * pitch + i, static_cast<int64_t>(uint64_t{piece} * step + i));
      }
    }
  }

  // Starts the copies from a vector of `capacity` elements.
  __device__ __forceinline__ void load(Element* shared, const Element* gX, int64_t capacity) const {
    const Element* gFirst = gX + global;
    if (is_chunk_aligned(gX)) {
      const int64_t left = capacity - global - kChunk;
      for_each_chunk([&](unsigned chunk, int64_t element, unsigned begin, unsigned end) {
        if (element <= left) {
          ptx::cp_async_16(shared + chunk, gFirst + element, 16);
        } else {
#pragma unroll 1
          for (; chunk < end; ++chunk, ++element) {
            if (chunk >= begin) shared[chunk] = gFirst[element];
          }
        }
      });
    } else {
      for_each_element([&](unsigned i, int64_t element) { shared[i] = gFirst[element]; });
    }
  }

  __device__ __forceinline__ void store(const Element* shared, Element* gOut) const {
    Element* gFirst = gOut + global;
    if (!is_chunk_aligned(gOut)) {
      for_each_element([&](unsigned i, int64_t element) { gFirst[element] = shared[i]; });
      return;
    }
    for_each_chunk([&](unsigned chunk, int64_t element, unsigned begin, unsigned end) {
      if (chunk >= begin && chunk + kChunk <= end) {
        ptx::st_global_16(gFirst + element, ptx::ld_shared_16(shared + chunk));
      }
    });
    // The two ends of each piece, which share their chunks with others: a thread for each element of
    // these chunks, as stores to many places at once are slow.
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < 2 * kChunk * count; i += kThreads) {
      const unsigned piece = i / (2 * kChunk), start = first + piece * pitch, stop = start + elems;
      const bool at_end = i % (2 * kChunk) >= kChunk;
      const unsigned at = ((at_end ? stop : start) & ~(kChunk - 1)) + i % kChunk;
      const unsigned inner = (start + kChunk - 1) & ~(kChunk - 1);
      if (at >= (at_end ? inner : start) && at < (at_end ? stop : min(inner, stop))) {
        gFirst[uint64_t{piece} * step + (at - start)] = shared[at];
      }
    }
  }

  static __device__ __forceinline__ bool is_chunk_aligned(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

template <typename Element, typename Index>
__device__ __forceinline__ Element* advance(Element* pointer, Index bytes) {
  using Byte = std::conditional_t<std::is_const_v<Element>, const char, char>;
  return reinterpret_cast<Element*>(reinterpret_cast<Byte*>(pointer) + bytes);
}

// Where a group's operands lie. In shared memory, where the result replaces an operand:
template <typename Config>
struct InShared {
  using Element = typename Config::Element;
  using Index = int;
  Element* x;
  __device__ __forceinline__ const Element* grad(const Element* own) const {
    return own + Config::kBuffer;
  }
  __device__ __forceinline__ Element* out(const Element* own) const {
    return const_cast<Element*>(own);
  }
  __device__ __forceinline__ Sum<Element> value(const Element* own) const { return to_sum(*own); }
};
// In global memory, where x is not negated yet for a scale below 0:
template <typename Config>
struct InGlobal {
  using Element = typename Config::Element;
  using Index = int64_t;
  const Element* x;
  const Element* gGrad;
  Element* gOut;
  Sum<Element> sign;
  __device__ __forceinline__ const Element* grad(const Element* own) const {
    return gGrad + (own - x);
  }
  __device__ __forceinline__ Element* out(const Element* own) const { return gOut + (own - x); }
  __device__ __forceinline__ Sum<Element> value(const Element* own) const {
    return sign * to_sum(*own);
  }
};

// A thread's part of a line: elements phase, phase + phases, ...
template <typename Element, typename Index>
struct LinePart {
  const Element* x;
  Index phase, phases, len;
  Index step;  // bytes to the thread's next element
};

// Calls visit(pointers), some elements at a time.
template <int kItems, typename Element, typename Index, typename Visit>
__device__ __forceinline__ void for_each_item(const LinePart<Element, Index>& part, Visit visit) {
  const Element* x = part.x;
  Index i = part.phase;
  const Index last = part.len - (kItems - 1) * part.phases, phases = kItems * part.phases;
#pragma unroll 1
  for (; i < last; i += phases) {
    const Element* items[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item, x = advance(x, part.step)) items[item] = x;
    visit(items);
  }
#pragma unroll 1
  for (; i < part.len; i += part.phases, x = advance(x, part.step)) {
    const Element* items[1] = {x};
    visit(items);
  }
}

// What a thread's part of a line adds up to.
template <typename Config, typename Place, typename S, typename Part>
__device__ __forceinline__ Partial<S, Config::kBackward> partial_of(const Place& place,
                                                                    const Part& part,
                                                                    const Scale<S>& scale) {
  using Element = typename Config::Element;
  Partial<S, Config::kBackward> own;
  for_each_item<Config::kItems>(part, [&](auto& items) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(items)>>;
    S rX[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) rX[i] = place.value(items[i]);
    if constexpr (Config::kBackward) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        own.sum = fma(rX[i], to_sum(*place.grad(items[i])), own.sum);
      }
    } else {
      S greatest = own.maximum;
#pragma unroll
      for (int i = 0; i < kItems; ++i) greatest = largest(greatest, rX[i]);
      const S shift = finite(greatest);
      own.sum = scale.rescaled(own.sum, own.maximum, shift);
#pragma unroll
      for (int i = 0; i < kItems; ++i) own.sum += scale.exponential(rX[i], shift);
      own.maximum = greatest;
    }
  });
  return own;
}

template <typename S>
__device__ __forceinline__ void combine(Partial<S, true>& own, const Partial<S, true>& other,
                                        const Scale<S>&) {
  own.sum += other.sum;
}
template <typename S>
__device__ __forceinline__ void combine(Partial<S, false>& own, const Partial<S, false>& other,
                                        const Scale<S>& scale) {
  const S greatest = largest(own.maximum, other.maximum), shift = finite(greatest);
  own.sum =
      scale.rescaled(own.sum, own.maximum, shift) + scale.rescaled(other.sum, other.maximum, shift);
  own.maximum = greatest;
}

// The partials of the `phases` threads of a line, `step` apart from sLine on, in an order that
// depends on their number alone; a thread without a line has phase = phases. All threads of the CTA
// call it together, and none writes to the partials after the last barrier.
template <typename Config, typename P, typename S>
__device__ __forceinline__ P combine_phases(P own, P* sLine, int phase, int phases, int step,
                                            const Scale<S>& scale) {
  if (phase < phases) sLine[phase * step] = own;
  __syncthreads();  // the partials are there
#pragma unroll 1
  while (phases > Config::kLinear) {
    const int half = (phases + 1) / 2;
    if (phase + half < phases) {
      combine(own, sLine[(phase + half) * step], scale);
      sLine[phase * step] = own;
    }
    phases = half;
    __syncthreads();  // those of half as many
  }
  own = sLine[0];
#pragma unroll 1
  for (int i = 1; i < phases; ++i) combine(own, sLine[i * step], scale);
  return own;
}

template <typename Config, typename Place, typename P, typename S, typename Part>
__device__ __forceinline__ void finish_part(const Place& place, const Part& part, const P& line,
                                            const Scale<S>& scale) {
  using Element = typename Config::Element;
  S inverse, shift;
  if constexpr (Config::kBackward) {
    shift = line.sum;
  } else {
    shift = finite(line.maximum);
    inverse = S(1) / line.sum;
  }
  for_each_item<Config::kItems>(part, [&](auto& items) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(items)>>;
    S rX[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rX[i] = place.value(items[i]);
      if constexpr (Config::kBackward) {
        rX[i] *= scale.exponent * (to_sum(*place.grad(items[i])) - shift);
      } else {
        rX[i] = scale.exponential(rX[i], shift) * inverse;
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) *place.out(items[i]) = from_sum<Element>(rX[i]);
  });
}

// `lines` lines, `line_step` elements apart, of elements `elem_step` apart.
template <typename Config, typename Place, typename P, typename S>
__device__ __forceinline__ void softmax_lines(const Place& place, P* sPartials, bool over_rows,
                                              const SpanPlan& plan, int lines,
                                              typename Place::Index line_step,
                                              typename Place::Index elem_step,
                                              const Scale<S>& scale) {
  using Index = typename Place::Index;
  using Element = typename Config::Element;
  constexpr int kThreads = Config::kThreads, kElemBytes = sizeof(Element);
  const int thread = threadIdx.x;
  const Index phases = ptx::in_register(static_cast<Index>(plan.phases));
  const Index step = ptx::in_register(phases * elem_step * kElemBytes);
  // Beside each other in a warp are columns, or elements of a row.
  const int abreast = over_rows ? min(plan.group_lines, kThreads) : kThreads / plan.phases;
  const int divisor = over_rows ? abreast : plan.phases;
  const int quotient = thread / divisor, remainder = thread - quotient * divisor;
  const int own_line = over_rows ? remainder : quotient;
  const int phase = over_rows ? quotient : remainder;
  const bool works = over_rows ? phase < plan.phases : own_line < abreast;
  P* sLine = sPartials + (over_rows ? own_line : thread - phase);
#pragma unroll 1
  for (int line = own_line; line - own_line < lines; line += abreast) {
    const LinePart<Element, Index> part{
        place.x + (line * line_step + phase * elem_step), phase, phases,
        works && line < lines ? static_cast<Index>(plan.len) : 0, step};
    P own = partial_of<Config>(place, part, scale);
    own = combine_phases<Config>(own, sLine, works ? phase : plan.phases, plan.phases,
                                 over_rows ? abreast : 1, scale);
    finish_part<Config>(place, part, own, scale);
    __syncthreads();  // all have read the partials; the results are there
  }
}

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void spans_kernel(
    const __grid_constant__ Params params) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  using S = Sum<Element>;
  constexpr double kLog2E = 1.4426950408889634;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<SpanShared<Config>*>(dynamic_shared);
  const bool over_rows = params.over_rows;
  if (threadIdx.x < 32) {
    const SpanPlan plan = make_plan<Config>(params.matrices, over_rows, blockIdx.x);
    if (threadIdx.x == 0) shared.plan = plan;
  }
  __syncthreads();  // the plan is there
  const SpanPlan plan = shared.plan;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
  store_zeros(gOut + plan.begin, plan.zeros, threadIdx.x, Config::kThreads);

  const bool negate = !Config::kBackward && params.scale < 0;
  const Scale<S> scale{static_cast<S>((negate ? -params.scale : params.scale) *
                                      (Config::kBackward || sizeof(S) == 8 ? 1 : kLog2E))};
#pragma unroll 1
  for (int64_t line = plan.first_line; line < plan.lines; line += plan.next_line) {
    const int64_t left = plan.lines - line;
    const int lines = left < plan.group_lines ? static_cast<int>(left) : plan.group_lines;
    if (plan.pitch == 0) {
      const int64_t start = plan.begin + line * (over_rows ? 1 : plan.columns);
      softmax_lines<Config>(
          InGlobal<Config>{gX + start, gGrad + start, gOut + start, S(negate ? -1 : 1)},
          shared.partials, over_rows, plan, lines, over_rows ? 1 : plan.columns,
          over_rows ? plan.columns : 1, scale);
      continue;
    }
    const Pieces<Config> pieces(plan, over_rows, line, lines);
    pieces.load(shared.x, gX, params.matrices.capacity);
    if constexpr (Config::kBackward) pieces.load(shared.grad, gGrad, params.matrices.capacity);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // the copies of all threads have arrived
    if (negate) {
#pragma unroll 1
      for (int i = threadIdx.x; i < Config::kBuffer; i += Config::kThreads) {
        shared.x[i] = from_sum<Element>(-to_sum(shared.x[i]));
      }
      __syncthreads();  // all are negated
    }
    softmax_lines<Config>(InShared<Config>{shared.x + pieces.first}, shared.partials, over_rows,
                          plan, lines, over_rows ? 1 : plan.pitch, over_rows ? plan.pitch : 1,
                          scale);
    pieces.store(shared.x, gOut);
    __syncthreads();  // all have left the group
  }
}

template <typename Element, typename Params>
cudaError_t launch_spans(const Params& params, cudaStream_t stream) {
  using Config = SpanConfig<Element, Operands<Params>::kBackward>;
  const int64_t tiles =
      num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs, Config::kTile);
  const char* path =
      Config::kBackward
          ? (params.over_rows ? "cuda.jagged2_softmax_backward.rows"
                              : "cuda.jagged2_softmax_backward.columns")
          : (params.over_rows ? "cuda.jagged2_softmax.rows" : "cuda.jagged2_softmax.columns");
  return launch<spans_kernel<Config, Params>>(params, {tiles}, Config::kThreads,
                                              static_cast<int>(sizeof(SpanShared<Config>)), stream,
                                              path);
}

}  // namespace jagged_cuda::softmax
