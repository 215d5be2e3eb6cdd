// What the kernels of jagged_softmax share: which threads hold a sequence's rows, and sums over them.
#pragma once

#include "cuda/kernels/jagged_softmax.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/jagged.cuh"

namespace jagged_cuda::sequence_softmax {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kItems = 4;        // vectors that a thread keeps in registers
constexpr int kGroupBytes = 64;  // of a row beside each other: what DRAM reads at a time

struct SharedStorage {
  alignas(16) unsigned char partial[2][kWarps * kGroupBytes * 2];
};
static_assert(sizeof(SharedStorage) == 1024, "as the header says");

// What the compiler knows of the values is of no use to it afterwards.
template <typename Element, int kVector>
__device__ __forceinline__ void forget(Vector<Element, kVector>& vector) {
  if constexpr (sizeof(vector) % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(vector.elems);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(vector) / 4); ++i) asm("" : "+r"(words[i]));
  }
}

// The place of a thread among those that share a sequence: a warp, or the whole CTA.
struct Place {
  bool in_cta;
  int row;  // first row; the others follow at row_step
  int row_step;
  int lanes;       // vectors beside each other, a power of two
  int64_t column;  // of the thread's vector
  bool exists;     // column < columns

  __device__ __forceinline__ Place(bool in_cta, int lanes_log2, int64_t first_vector, int vector,
                                   int64_t columns)
      : in_cta(in_cta) {
    const int thread = in_cta ? threadIdx.x : threadIdx.x % 32;
    lanes = 1 << lanes_log2;
    row = thread >> lanes_log2;
    row_step = (in_cta ? kThreads : 32) >> lanes_log2;
    column = (first_vector + (thread & (lanes - 1))) * vector;
    exists = column < columns;
  }
};

// Combines value[] of all threads at the place that hold the same columns; every thread gets the
// result. `buffer` is 0 and 1 in turn.
template <int kCount, typename Value, typename Combine>
__device__ __forceinline__ void reduce_rows(Value (&value)[kCount], const Place& place,
                                            SharedStorage& shared, int buffer, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < place.lanes) break;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      value[e] = combine(value[e], __shfl_xor_sync(0xffffffffu, value[e], offset));
    }
  }
  if (place.in_cta) {
    // [kWarps, place.lanes, kCount]
    auto* sPartial = reinterpret_cast<Value*>(shared.partial[buffer]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = place.lanes * kCount;
    if (lane < place.lanes) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sPartial[warp * all + lane * kCount + e] = value[e];
    }
    __syncthreads();
    const int own = (lane & (place.lanes - 1)) * kCount;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      Value result = sPartial[own + e];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) result = combine(result, sPartial[w * all + own + e]);
      value[e] = result;
    }
  }
}

__device__ __forceinline__ void* result_of(const JaggedSoftmaxParams& params) { return params.out; }
__device__ __forceinline__ void* result_of(const JaggedSoftmaxBackwardParams& params) {
  return params.grad_x;
}

template <typename Params>
struct SoftmaxLaunch {
  Params params;
  int lanes_log2;  // vectors of a row that a group of columns holds
  int seqs_each;   // sequences of a CTA
};

template <typename Element>
__device__ __forceinline__ void store_zeros(Element* global, int64_t begin, int64_t end) {
  const int64_t cta = blockIdx.y * int64_t{gridDim.x} + blockIdx.x;
  const int64_t step = int64_t{gridDim.x} * gridDim.y * kThreads;
  for (int64_t i = begin + cta * kThreads + threadIdx.x; i < end; i += step) {
    global[i] = from_sum<Element>(0);
  }
}

// Rows before the first and after the last sequence.
template <typename Element, typename Params>
__device__ __forceinline__ void store_zeros_outside(const Params& params) {
  const OffsetsView& offsets = params.offsets;
  Element* gResult = static_cast<Element*>(result_of(params));
  store_zeros(gResult, 0, clamped_offset(offsets, 0) * params.columns);
  store_zeros(gResult, clamped_offset(offsets, offsets.num_seqs) * params.columns,
              offsets.total * params.columns);
}

}  // namespace jagged_cuda::sequence_softmax
