// Adds the parts of long sequences (gemm/row_parts.cuh): z_b = sum_p partial[slot(b, p)].
//
// Grid: x, a CTA for kAddWarps slabs, each searched by a warp, which need not wait for the product: is
// there a sequence whose second part begins here; y, runs of kAddRunElems elements of the matrices. The
// warps share out the sequences found, 128 elements at a time, 16 bytes for a lane, and add a
// sequence's parts in order. Of a sequence of more than kManyParts the parts are dealt out among the
// warps, whose sums are then added in order of the warps.
//
// Shared memory: what the warps found, and sums of 128 elements of all warps (4 KiB). Barriers:
// __syncthreads, once the warps have searched, and around the sums.
#pragma once

#include "cuda/kernels/gemm/row_parts.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::gemm {

constexpr int kAddWarps = 8, kAddThreads = kAddWarps * 32;
constexpr int kAddElems = 128;       // of a warp
constexpr int kAddRunElems = 2048;   // of a CTA
constexpr int kAddItems = 8;         // loads that a lane has in flight
constexpr uint32_t kManyParts = 32;  // of a sequence for one warp

struct AddRowPartsParams {
  const float* partial;  // [slots, elems]
  void* out;             // [B, elems], contiguous, 16-byte aligned
  OffsetsView offsets;   // [B + 1]
  RowCuts cuts;
};

// Parts first, first + step, ... of a sequence whose second part begins in slab `slab`, 4 elements.
__device__ __forceinline__ float4 add_parts(const float* gPartial, int64_t elems, uint32_t slab,
                                            uint32_t first, uint32_t step, uint32_t parts) {
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (uint32_t part = first; part < parts; part += kAddItems * step) {
    float4 rPart[kAddItems];
#pragma unroll
    for (int i = 0; i < kAddItems; ++i) {  // past the end the last part again, so that all load
      const uint32_t index = min(part + i * step, parts - 1);
      const uint32_t slot = index == 0 ? 2 * slab : 2 * (slab + index) - 1;
      rPart[i] = __ldcg(reinterpret_cast<const float4*>(gPartial + slot * elems));
    }
#pragma unroll
    for (int i = 0; i < kAddItems; ++i) {
      if (part + i * step < parts) {
        sum.x += rPart[i].x, sum.y += rPart[i].y, sum.z += rPart[i].z, sum.w += rPart[i].w;
      }
    }
  }
  return sum;
}

template <typename Element>
__global__ __launch_bounds__(kAddThreads) void add_row_parts_kernel(
    const __grid_constant__ AddRowPartsParams params) {
  struct Found {
    int64_t seq;
    uint32_t slab, parts;  // parts are 0 where there is none
  };
  __shared__ Found sFound[kAddWarps];
  __shared__ float4 sSums[kAddWarps][32];
  const uint32_t each = static_cast<uint32_t>(params.cuts.rows_each),
                 slabs = static_cast<uint32_t>(params.cuts.slabs);
  const int64_t elems = params.cuts.elems;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::griddepcontrol_launch_dependents();  // the product behind it in a backward pass
  {
    const uint32_t slab = blockIdx.x * kAddWarps + warp, row = slab * each;
    Found found = {-1, slab, 0};
    if (slab > 0 && slab < slabs) {
      const OwnerOfRow owner = find_owner_narrow(params.offsets, row);
      const bool is_second = row > owner.begin && row - owner.begin <= each;
      if (owner.seq >= 0 && is_second && owner.end > owner.begin + each) {
        found.seq = owner.seq;
        // Wrong offsets must not lead behind the slots.
        found.parts = min((owner.end - owner.begin + each - 1) / each, slabs - slab + 1);
      }
    }
    if (lane == 0) sFound[warp] = found;
  }
  ptx::griddepcontrol_wait();
  __syncthreads();  // all have searched

  const int64_t run = int64_t{blockIdx.y} * kAddRunElems;
  const int run_elems = static_cast<int>(min(elems - run, int64_t{kAddRunElems}));
  const int chunks = (run_elems + kAddElems - 1) / kAddElems;
  const float* gPartial = params.partial + run;
  const auto store = [&](int64_t seq, int elem, const float4& sum) {
    *reinterpret_cast<uint2*>(static_cast<Element*>(params.out) + seq * elems + run + elem) =
        make_uint2(pack<Element>(sum.x, sum.y), pack<Element>(sum.z, sum.w));
  };
  for (int item = warp; item < kAddWarps * chunks; item += kAddWarps) {
    const Found& found = sFound[item / chunks];
    const int elem = item % chunks * kAddElems + lane * 4;
    if (found.parts == 0 || found.parts > kManyParts || elem >= run_elems) continue;
    store(found.seq, elem, add_parts(gPartial + elem, elems, found.slab, 0, 1, found.parts));
  }
  for (int i = 0; i < kAddWarps; ++i) {
    const Found& found = sFound[i];
    if (found.parts <= kManyParts) continue;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int elem = chunk * kAddElems + lane * 4;
      const bool exists = elem < run_elems;
      if (exists) {
        sSums[warp][lane] =
            add_parts(gPartial + elem, elems, found.slab, warp, kAddWarps, found.parts);
      }
      __syncthreads();  // the sums of all warps are there
      if (exists && warp == 0) {
        float4 sum = sSums[0][lane];
#pragma unroll
        for (int w = 1; w < kAddWarps; ++w) {
          const float4 other = sSums[w][lane];
          sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
        }
        store(found.seq, elem, sum);
      }
      __syncthreads();  // they have been read
    }
  }
}

// The kernel before on `stream` is the one that leaves the parts.
template <typename Element>
cudaError_t launch_add_row_parts(const AddRowPartsParams& params, cudaStream_t stream) {
  const Grid grid{(params.cuts.slabs + kAddWarps - 1) / kAddWarps,
                  (params.cuts.elems + kAddRunElems - 1) / kAddRunElems};
  return launch_dependent<add_row_parts_kernel<Element>>(params, grid, kAddThreads, 0, stream);
}

}  // namespace jagged_cuda::gemm
