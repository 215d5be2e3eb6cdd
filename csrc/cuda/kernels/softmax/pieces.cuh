// A part of a vector and its copy in shared memory: one contiguous piece, or pieces of equal length
// at equal distances (a strip of a matrix's columns).
//
// Aligned chunks of 16 bytes come by cp.async. Whole chunks go back, and the elements at the ragged
// ends, which share their chunks with others, one by one. Element `global` of the vector has the
// same place within a chunk in both memories. Vectors that do not begin at a chunk are copied by
// single elements.
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>

namespace jagged_cuda::softmax {

template <typename Config>
struct Pieces {
  static constexpr int kThreads = Config::kThreads;
  static constexpr unsigned kChunk = Config::kChunk;
  using Element = typename Config::Element;
  int64_t global;         // element of the vector at which the first piece begins
  int64_t step;           // from piece to piece in the vector
  unsigned count, elems;  // of a piece
  unsigned pitch;         // from piece to piece in shared memory, as `step` modulo kChunk

  // Where the first piece begins in shared memory.
  __device__ __forceinline__ unsigned first() const {
    return static_cast<unsigned>(global) % kChunk;
  }

  // Starts the copies from a vector of `capacity` elements.
  __device__ __forceinline__ void load(Element* sX, const Element* gX, int64_t capacity) const {
    if (!is_chunk_aligned(gX)) {
      for_each_element([&](unsigned i, int64_t element) { sX[i] = gX[element]; });
      return;
    }
    // What is read of other matrices is not used.
    if (count == 1) {
      const unsigned begin = first(), chunks = (begin + elems + kChunk - 1) / kChunk;
      const Element* gChunks = gX + (global - begin);
      const int64_t left = capacity - (global - begin) - static_cast<int64_t>(chunks - 1) * kChunk;
#pragma unroll 4
      for (unsigned i = threadIdx.x; i < chunks; i += kThreads) {
        copy_chunk(sX + i * kChunk, gChunks + i * kChunk, i == chunks - 1 ? left : kChunk);
      }
      return;
    }
    for_each_chunk([&](unsigned chunk, int64_t element, unsigned, unsigned) {
      copy_chunk(sX + chunk, gX + element, capacity - element);
    });
  }

  __device__ __forceinline__ void store(const Element* sX, Element* gOut) const {
    if (!is_chunk_aligned(gOut)) {
      for_each_element([&](unsigned i, int64_t element) { gOut[element] = sX[i]; });
      return;
    }
    if (count == 1) {
      const unsigned begin = first(), whole_end = (begin + elems) / kChunk;
      Element* gChunks = gOut + (global - begin);
      const ptx::SharedAddress shared(sX);
#pragma unroll 4
      for (unsigned i = (begin + kChunk - 1) / kChunk + threadIdx.x; i < whole_end; i += kThreads) {
        ptx::st_global_16(gChunks + i * kChunk, ptx::ld_shared_16(shared.value + 16 * i));
      }
    } else {
      for_each_chunk([&](unsigned chunk, int64_t element, unsigned begin, unsigned end) {
        if (chunk >= begin && chunk + kChunk <= end) {
          ptx::st_global_16(gOut + element, ptx::ld_shared_16(sX + chunk));
        }
      });
    }
    // A thread for each element of the chunks at both ends: several stores of one thread to places
    // of its own would be slow.
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < 2 * kChunk * count; i += kThreads) {
      const unsigned piece = i / (2 * kChunk), begin = first() + piece * pitch, end = begin + elems;
      const bool at_end = i % (2 * kChunk) >= kChunk;
      const unsigned at = ((at_end ? end : begin) & ~(kChunk - 1)) + i % kChunk;
      const unsigned inner = (begin + kChunk - 1) & ~(kChunk - 1);
      if (at >= (at_end ? inner : begin) && at < (at_end ? end : min(inner, end))) {
        gOut[global + piece * step + static_cast<int>(at - begin)] = sX[at];
      }
    }
  }

 private:
  // Starts the copy of a chunk, of which `left` elements exist: the vector's last one may be cut.
  // That one comes by single elements: a copy of fewer bytes would address what lies behind it.
  static __device__ __forceinline__ void copy_chunk(Element* sChunk, const Element* gChunk,
                                                    int64_t left) {
    if (left >= static_cast<int>(kChunk)) {
      ptx::cp_async_16(sChunk, gChunk, 16);
    } else {
#pragma unroll 1
      for (int e = 0; e < static_cast<int>(left); ++e) sChunk[e] = gChunk[e];
    }
  }

  // Calls visit(chunk, element, begin, end) for each chunk that holds elements of a piece: where it
  // begins in shared memory and in the vector, and where in shared memory the piece begins and ends.
  template <typename Visit>
  __device__ __forceinline__ void for_each_chunk(Visit visit) const {
    // At least 2, so that the division is one multiplication: exact, as all counts are below 2^16.
    const unsigned chunks = elems <= kChunk ? 2 : (elems + 2 * kChunk - 2) / kChunk;
    const unsigned inverse = 0xffffffffu / chunks + 1, all = count * chunks;
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < all; i += kThreads) {
      const unsigned piece = __umulhi(i, inverse), begin = first() + piece * pitch;
      const unsigned chunk = (begin & ~(kChunk - 1)) + (i - piece * chunks) * kChunk;
      if (chunk < begin + elems) {
        visit(chunk, global + piece * step + static_cast<int>(chunk - begin), begin, begin + elems);
      }
    }
  }

  // By single elements: visit(shared, element)
  template <typename Visit>
  __device__ __forceinline__ void for_each_element(Visit visit) const {
    const unsigned abreast = count == 1 ? kThreads : 32;
#pragma unroll 1
    for (unsigned piece = threadIdx.x / abreast; piece < count; piece += kThreads / abreast) {
#pragma unroll 4
      for (unsigned i = threadIdx.x % abreast; i < elems; i += abreast) {
        visit(first() + piece * pitch + i, global + piece * step + i);
      }
    }
  }

  static __device__ __forceinline__ bool is_chunk_aligned(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

}  // namespace jagged_cuda::softmax
