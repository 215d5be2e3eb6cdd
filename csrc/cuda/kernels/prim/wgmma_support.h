// Whether kernels of prim/wgmma.cuh can run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jagged_cuda {

// True if the current device has compute capability 9.0 and runs machine code that was compiled for
// sm_90a: a library without it falls back to the code of an older architecture there, in which
// wgmma is missing.
bool has_wgmma();

}  // namespace jagged_cuda
