// What a CTA of jagged2_softmax keeps in shared memory (softmax/spans.cuh: how it is used).
#pragma once

#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

// How a launch cuts the vector.
struct Spans {
  int buffer;       // elements of each operand in shared memory, a multiple of a chunk
  int window_log2;  // a window has at most half of these
};

// kByWindows: a CTA for each window of the vector, else for each tile of one matrix.
template <typename Element_, bool kBackward_, bool kByWindows_, int kThreads_>
struct SpanConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_;
  static constexpr bool kByWindows = kByWindows_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kMinCtas = 1024 / kThreads;  // per SM, as registers allow
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  // Of a line that a thread keeps: 24 registers, or 32 of two operands
  static constexpr int kItems = (kBackward ? 16 : 24) / (sizeof(Element) == 8 ? 2 : 1);
  static constexpr int kMaxShort = 32 * kItems;
  static constexpr int kLineSets = kByWindows ? kWarps : 1;  // of the lines of 32 matrices
  static constexpr int kStrip = 32;                          // columns at a time that do not fit
  static constexpr int kMinStrip = 16;  // narrower ones are not worth the copy of their edges
};

// A large matrix, or one that is cut by the window's edges.
struct LargePlan {
  int64_t begin;  // its first element
  int64_t columns;
  int64_t len;         // elements of a line
  int64_t lines;       // of the matrix; 0: nothing is to do
  int64_t first_line;  // of this CTA's first group
  int64_t next_line;   // from group to group of this CTA
  int group_lines;     // of a whole group
  int pitch;           // elements from row to row in shared memory; 0: the lines do not fit there
};

struct SpanPlan {
  LargePlan large[2];  // that covers the window's begin; that begins in the window
  int64_t span_begin;  // elements of the span
  int span_elems;
  int64_t first_seq;  // matrices of the span
  int64_t end_seq;
  int64_t rows_begin[2];   // over columns: those rows of the matrix that covers the window's begin,
  int64_t rows_end[2];     // and of the one that begins last in it, that begin in the window
  int64_t zeros_begin[2];  // elements of no matrix that fits, before the matrices and after
  int64_t zeros_end[2];
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

// Lines of one matrix in shared memory; elements and lines are `pitch` or 1 apart.
struct alignas(16) LinesInShared {
  int first;       // where the first line's first element lies
  int count;       // lines; 0: nothing is to do
  int len;         // elements of a line
  int pitch;       // from one row of the matrix to the next
  int lanes_log2;  // lanes that share a line
  int groups_end;  // groups of lines that warps take, of the matrices up to this one
  int unused[2];
};

// The lines of up to 32 matrices.
struct LinesOf32 {
  LinesInShared lines[32];
  unsigned long_ones;  // bit i: those of matrix i are too long for registers
};

// Ends with `buffer` elements of each operand.
template <typename Config>
struct SpanShared {
  using Element = typename Config::Element;
  alignas(16) Partial<Sum<Element>, Config::kBackward> partials[Config::kThreads];
  SpanPlan plan;
  LinesOf32 lines[Config::kLineSets];
  alignas(16) Element elems[Config::kChunk];

  static constexpr int bytes(int buffer) {
    const int operands = Config::kBackward ? 2 : 1;
    return static_cast<int>(sizeof(SpanShared) +
                            sizeof(Element) * (operands * buffer - Config::kChunk));
  }
};

template <typename Config>
__device__ __forceinline__ SpanShared<Config>& span_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return *reinterpret_cast<SpanShared<Config>*>(dynamic_shared);
}

}  // namespace jagged_cuda::softmax
