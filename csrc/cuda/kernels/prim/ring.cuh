// A ring of stages in shared memory between warps that fill it and warps that read it. Every stage
// has two barriers: `full` completes when what was copied into it has arrived, `empty` when all
// readers are done with it.
#pragma once

#include "cuda/kernels/prim/tma.cuh"

namespace jagged_cuda {

// A place in a ring; `parity` is that of the phase of its barriers.
template <int kStages>
struct RingPosition {
  int stage = 0;
  int parity = 0;
  // Moves on to the next stage; returns the one before.
  __device__ __forceinline__ int advance() {
    const int last = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    return last;
  }
};

template <int kStages_>
struct Ring {
  static constexpr int kStages = kStages_;
  using Position = RingPosition<kStages>;
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // One thread, before all others are let go on. Each filler and each reader arrives once per phase.
  __device__ __forceinline__ void init(int readers, int fillers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full[stage], fillers);
      ptx::mbarrier_init(empty[stage], readers);
    }
  }
  // Waits until a stage may be filled; at once in the first round.
  __device__ __forceinline__ void acquire(Position position) {
    ptx::mbarrier_wait(empty[position.stage], position.parity ^ 1);
  }
  // Waits until a stage may be read.
  __device__ __forceinline__ void wait(Position position) {
    ptx::mbarrier_wait(full[position.stage], position.parity);
  }
  // Whether it can be read already: asked early, the answer is there when it is needed.
  __device__ __forceinline__ bool test(Position position) {
    return ptx::mbarrier_test(full[position.stage], position.parity);
  }
  // One filler has written its part.
  __device__ __forceinline__ void publish(int stage) { ptx::mbarrier_arrive(full[stage]); }
  // One reader is done.
  __device__ __forceinline__ void release(int stage) { ptx::mbarrier_arrive(empty[stage]); }
};

}  // namespace jagged_cuda
