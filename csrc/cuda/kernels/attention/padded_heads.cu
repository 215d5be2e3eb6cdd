// Heads copied to rows with zeros behind their columns, and back: what the wgmma kernels take rows
// that are no whole vectors by, head dims of 25 and 50 for instance.
//
//   out[row, head, c] = c < dim ? in[row, head, c] : 0    for c < out_dim
//
// Grid: x, a thread for each 16 bytes of the largest result; y, a copy each. A thread reads single
// elements, since nothing of `in` need be aligned: those of a warp lie side by side, so that all but
// the first read of a line meet it in L1.
#include "cuda/kernels/attention/padded_heads.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <algorithm>

namespace jagged_cuda::attention {
namespace {

constexpr int kThreads = 256, kElems = 8;  // of 16 bytes

__host__ __device__ inline int64_t num_elems(const HeadsCopy& copy) {
  return copy.rows * copy.heads * copy.out_dim;
}

// Index counts the elements of a copy: 32 bits where they suffice, since it is divided twice.
template <typename Index>
__global__ __launch_bounds__(kThreads) void copy_heads(const __grid_constant__ HeadsCopies copies) {
  const HeadsCopy& copy = copies.copies[blockIdx.y];
  const auto total = static_cast<Index>(num_elems(copy));
  const Index first = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) * kElems;
  if (first >= total) return;
  const auto out_dim = static_cast<Index>(copy.out_dim), heads = static_cast<Index>(copy.heads);
  Index line = first / out_dim;
  int column = static_cast<int>(first - line * out_dim);
  Index row = line / heads, head = line - row * heads;
  const auto* gIn = static_cast<const uint16_t*>(copy.in);
  const uint16_t* in = gIn + static_cast<int64_t>(row) * copy.row_stride +
                       static_cast<int64_t>(head) * copy.head_stride;
  const int valid = static_cast<int>(min(static_cast<Index>(kElems), total - first));
  uint32_t words[kElems / 2] = {};
#pragma unroll
  for (int i = 0; i < kElems; ++i) {
    if (i < valid && column < copy.dim)
      words[i / 2] |= static_cast<uint32_t>(__ldg(in + column)) << (i % 2 * 16);
    if (++column == copy.out_dim) {
      column = 0;
      if (++head == heads) {
        head = 0;
        ++row;
      }
      in = gIn + static_cast<int64_t>(row) * copy.row_stride +
           static_cast<int64_t>(head) * copy.head_stride;
    }
  }
  auto* out = static_cast<uint16_t*>(copy.out) + first;
  if (valid == kElems) {
    ptx::st_global_16(out, make_uint4(words[0], words[1], words[2], words[3]));
  } else {
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (i < valid) out[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  }
}

}  // namespace

cudaError_t launch_copy_heads(const HeadsCopies& copies, cudaStream_t stream) {
  int64_t most = 0;
  for (int i = 0; i < copies.count; ++i) most = std::max(most, num_elems(copies.copies[i]));
  if (most == 0) return cudaSuccess;
  constexpr int64_t kCtaElems = kThreads * kElems, kMost32 = int64_t{1} << 31;
  const Grid grid{(most + kCtaElems - 1) / kCtaElems, copies.count};
  return most < kMost32 ? launch<copy_heads<uint32_t>>(copies, grid, kThreads, 0, stream, nullptr)
                        : launch<copy_heads<uint64_t>>(copies, grid, kThreads, 0, stream, nullptr);
}

}  // namespace jagged_cuda::attention
