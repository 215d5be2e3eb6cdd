// Storing bands of 16 rows of a matrix whose pitch is any number of elements, so that its rows
// begin anywhere.
//
// A warp writes its band to shared memory as it will lie in global memory: as far from a multiple of
// 16 bytes, and, where all columns are there, with the matrix's own pitch, so that the whole band is
// one run of bytes. Whole chunks of 16 bytes leave by one bulk copy; what the first and the last chunk
// share with others leaves element by element. Of a part of the columns, and where rows would lie in
// the same banks, each row is a run of its own.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

template <typename Element_, int kColumns_>
struct RaggedBand {
  using Element = Element_;
  static constexpr int kRows = 16, kColumns = kColumns_;  // at most
  static constexpr int kChunkBytes = 16, kChunk = kChunkBytes / sizeof(Element);
  // Of 8 rows with a pitch of a multiple of as many bytes, four or more begin in the same banks.
  static constexpr int kSharedBanksBytes = 64;
  // Of a row that is a run of its own; rows begin in different banks.
  static constexpr int kLineBytes = kColumns * sizeof(Element) + kChunkBytes;
  static_assert(kLineBytes / kChunkBytes % 2 == 1);

  alignas(128) char bytes[kRows * kLineBytes];

  // Stores [rows, columns] of a warp's band: `global` is the first element, `pitch` elements lead to
  // the next row. All lanes call it together, and end_store() before `bytes` are written again.
  template <int kBlocks>
  __device__ __forceinline__ void store(const float (&sum)[kBlocks][4], Element* global,
                                        int64_t pitch, int rows, int columns) {
    static_assert(kBlocks * 8 <= kColumns);
    rows = min(rows, kRows);
    if (rows <= 0) return;
    const int lane = threadIdx.x % 32, line = columns * static_cast<int>(sizeof(Element));
    const uint32_t shared = ptx::shared_address(bytes);
    const bool is_run = columns == pitch && line % kSharedBanksBytes != 0;
    // Of a run all rows lie as far from a chunk as the first; else each as far as it is itself.
    const int line_bytes = is_run ? line : kLineBytes;
    uint32_t rows_of_lane[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      rows_of_lane[half] =
          shared + row * line_bytes + phase_of(is_run ? global : global + row * pitch);
    }
    write(sum, rows_of_lane, columns);
    ptx::fence_proxy_async();
    __syncwarp();  // the band is there for all lanes, and for bulk copies
    // Lanes in groups, one for each run: a lane for each element of its edges.
    constexpr int kRunsAtOnce = 32 / (2 * kChunk);
#pragma unroll 1
    for (int i = lane / (2 * kChunk); i < (is_run ? 1 : rows); i += kRunsAtOnce) {
      Element* to = global + i * pitch;
      store_run(shared + i * kLineBytes + phase_of(to), to, is_run ? rows * columns : columns,
                lane % (2 * kChunk));
    }
  }

  // Waits until what this thread has stored is read.
  __device__ __forceinline__ static void end_store() { ptx::cp_async_bulk_wait_read(); }

 private:
  __device__ __forceinline__ static int phase_of(const Element* global) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(global) % kChunkBytes);
  }

  // This lane's elements of two rows.
  template <int kBlocks>
  __device__ __forceinline__ static void write(const float (&sum)[kBlocks][4],
                                               const uint32_t (&lane_rows)[2], int columns) {
    const int first = threadIdx.x % 4 * 2;
    const uint32_t rows[2] = {lane_rows[0] + first * static_cast<int>(sizeof(Element)),
                              lane_rows[1] + first * static_cast<int>(sizeof(Element))};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (8 * block >= columns) break;
      const bool exists[2] = {8 * block + first < columns, 8 * block + first + 1 < columns};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (exists[i % 2]) {
          const uint32_t address = rows[i / 2] + (8 * block + i % 2) * sizeof(Element);
          if constexpr (sizeof(Element) == 2) {
            const Element value = from_sum<Element>(sum[block][i]);
            ptx::st_shared_2(address, *reinterpret_cast<const uint16_t*>(&value));
          } else {
            ptx::st_shared_4(address, __float_as_uint(sum[block][i]));
          }
        }
      }
    }
  }

  // `count` elements at `shared` to `global`: the chunks by one lane, and `edge` is which of the first
  // and the last kChunk elements is this lane's.
  __device__ __forceinline__ static void store_run(uint32_t shared, Element* global, int count,
                                                   int edge) {
    const int before = (kChunkBytes - phase_of(global)) % kChunkBytes / sizeof(Element);
    const int chunks = max(count - before, 0) / kChunk * kChunk;
    if (edge == 0 && chunks > 0) {
      const uint32_t first = shared + before * static_cast<int>(sizeof(Element));
      ptx::cp_async_bulk_store(global + before,
                               reinterpret_cast<const void*>(__cvta_shared_to_generic(first)),
                               chunks * static_cast<int>(sizeof(Element)));
      ptx::cp_async_bulk_commit();
    }
    const bool is_tail = edge >= kChunk;
    const int elem = is_tail ? before + chunks + edge - kChunk : edge;
    if (elem < (is_tail ? count : min(before, count))) {
      const uint32_t address = shared + elem * static_cast<int>(sizeof(Element));
      if constexpr (sizeof(Element) == 2) {
        const auto bits = static_cast<uint16_t>(ptx::ld_shared_2(address));
        global[elem] = *reinterpret_cast<const Element*>(&bits);
      } else {
        global[elem] = __uint_as_float(ptx::ld_shared_4(address));
      }
    }
  }
};

}  // namespace jagged_cuda::gemm
