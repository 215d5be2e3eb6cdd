// Moving rows by bulk copies through shared memory (compute capability 9.0): they never pass through
// registers, and a warp has several chunks of them on their way.
//
// The warp is the CTA. It takes a chunk of up to 32 rows of the result at a time; lane i has found
// where the i-th of them is, and rows that lie one after another are one copy. Each chunk passes
// through one stage of a ring, kBulkLead chunks after the copies into it have begun:
//
//   start   waits until the stage's last bytes have left, writes zeros for rows that are nowhere,
//           and begins the copies, which complete on the barrier full[stage]
//   store   waits for that barrier, and sends the stage's bytes to the result in one piece; the
//           stage's next start is kBulkStages - kBulkLead chunks later
//
// | barrier     | arrives                                  | waits                          |
// | full[stage] | lane 0, once per chunk, and its copies   | lane 0; all lanes, to add rows |
//
// Shared memory: kBulkStages stages of 4 KiB, and their barriers.
#pragma once

#include "cuda/kernels/prim/bulk.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/wgmma.cuh"

#include <algorithm>
#include <cstdint>

namespace jagged_cuda::rows {

constexpr int kBulkBytes = 4096;  // of a stage
constexpr int kBulkStages = 4;
constexpr int kBulkLead = 2;
constexpr int kBulkCtas = 12;        // per SM: what its shared memory has room for
constexpr int kBulkRunBytes = 1024;  // on average, from which on copies in one piece are faster

struct BulkStorage {
  alignas(128) unsigned char stages[kBulkStages][kBulkBytes];
  uint64_t full[kBulkStages];
};

class BulkRing {
 public:
  __device__ __forceinline__ explicit BulkRing(BulkStorage& storage) : storage_(storage) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < kBulkStages; ++stage) {
        ptx::mbarrier_init(storage.full[stage], 1);
      }
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  // `rows` <= 32 rows of row_bytes, at most kBulkBytes together; `found` is the lane's, null for zeros.
  __device__ __forceinline__ void start(const char* found, int rows, int row_bytes) {
    constexpr unsigned kAllLanes = 0xffffffffu;
    const int lane = threadIdx.x, stage = started_++ % kBulkStages;
    unsigned char* sRows = storage_.stages[stage];
    const auto before = __shfl_up_sync(kAllLanes, reinterpret_cast<unsigned long long>(found), 1);
    const bool exists = lane < rows && found != nullptr;
    const bool follows =
        lane > 0 && reinterpret_cast<unsigned long long>(found) == before + row_bytes;
    const unsigned copied = __ballot_sync(kAllLanes, exists);
    const unsigned ends = ~__ballot_sync(kAllLanes, exists && follows);
    // With kBulkStages - kBulkLead stages between, only the newest store may still be reading.
    if (lane == 0) ptx::cp_async_bulk_wait_read_but<kBulkStages - kBulkLead - 1>();
    __syncwarp();
    if (copied != (rows < 32 ? (1u << rows) - 1 : kAllLanes)) {
      const int row_chunks = row_bytes / 16;
      for (int i = lane; i < rows * row_chunks; i += 32) {
        if ((copied >> (i / row_chunks) & 1) == 0) reinterpret_cast<uint4*>(sRows)[i] = uint4{};
      }
      ptx::fence_proxy_async();  // the store reads them
    }
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(storage_.full[stage], __popc(copied) * row_bytes);
    }
    __syncwarp();
    if (exists && !follows) {
      const unsigned behind = lane < 31 ? ends >> (lane + 1) : 0;
      const int run = behind != 0 ? __ffs(static_cast<int>(behind)) : 32 - lane;
      ptx::cp_async_bulk(sRows + lane * row_bytes, found, run * row_bytes, storage_.full[stage]);
    }
  }

  // The rows of the oldest chunk, for all lanes.
  __device__ __forceinline__ unsigned char* wait() {
    const int stage = stored_ % kBulkStages;
    ptx::mbarrier_wait(storage_.full[stage], stored_ / kBulkStages % 2);
    return storage_.stages[stage];
  }

  // Sends the oldest chunk to gOut.
  __device__ __forceinline__ void store(void* gOut, int bytes) {
    const int stage = stored_ % kBulkStages;
    if (threadIdx.x == 0) {
      ptx::mbarrier_wait(storage_.full[stage], stored_ / kBulkStages % 2);
      ptx::cp_async_bulk_store(gOut, storage_.stages[stage], bytes);
      ptx::cp_async_bulk_commit();
    }
    ++stored_;
  }

  // Leaves out the oldest chunk, which all lanes have read.
  __device__ __forceinline__ void drop() {
    if (threadIdx.x == 0) ptx::cp_async_bulk_commit();  // an empty group, for start to count
    ++stored_;
  }

  __device__ __forceinline__ int in_flight() const { return started_ - stored_; }

  // Waits until shared memory is not read any more.
  __device__ __forceinline__ void finish() {
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_read_but<0>();
  }

 private:
  BulkStorage& storage_;
  int started_ = 0, stored_ = 0;
};

// How many rows a chunk has.
inline int bulk_rows(int64_t row_bytes) {
  return static_cast<int>(std::clamp<int64_t>(kBulkBytes / std::max<int64_t>(row_bytes, 1), 1, 32));
}

// Whether `rows` rows, aligned to unit_bytes, in about as many `runs`, are moved so.
inline bool moves_in_bulk(int unit_bytes, int64_t row_bytes, int64_t rows, int64_t runs) {
  return unit_bytes == 16 && row_bytes > 0 && row_bytes <= kBulkBytes &&
         rows * row_bytes >= kBulkRunBytes * runs && has_wgmma();
}

// As many CTAs as run at a time, and no more than there are chunks.
inline int64_t bulk_ctas(int64_t chunks) {
  int device = 0, num_sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return chunks;
  }
  return std::min(chunks, int64_t{kBulkCtas} * num_sms);
}

}  // namespace jagged_cuda::rows
