// Whether this compilation is for sm_90a, whose instructions prim/wgmma.cuh and prim/tma.cuh wrap.
#pragma once

namespace jagged_cuda::ptx {

// A kernel of sm_90a alone returns at once elsewhere, where it is never launched, so that a library
// for several architectures holds nothing more of it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kIsSm90a = true;
#else
inline constexpr bool kIsSm90a = false;
#endif

}  // namespace jagged_cuda::ptx
