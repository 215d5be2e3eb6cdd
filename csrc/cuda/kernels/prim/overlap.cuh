// Kernels of one operator that share nothing but their inputs, the later of which start while the
// earlier ones still run (launch_overlapping of prim/launch.cuh).
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda {

// Each such kernel calls it first. The next one may start when all CTAs of this one have; and the last
// CTA of this one waits for the kernel before, so that this one does not end, and what follows on the
// stream does not start, before that.
__device__ __forceinline__ void start_overlapping() {
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y) ptx::griddepcontrol_wait();
}

}  // namespace jagged_cuda
