// Backward of jagged_flash_attention for short sequences (short_items.cuh says which a CTA takes):
// head dims up to 64, 16-bit elements, as many kv heads as heads, copies by TMA, products by wgmma
// (compute capability 9.0).
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP -
// delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// An item is one head of a sequence. Two warpgroups compute. Of up to 128 queries one takes an item
// alone, so that one's exponentials run beside the other's products; of more each takes half of the
// queries. It computes S^T and dP^T, so that P^T and dS^T are operands in registers:
//     for each 64 keys:
//       for each 64 of its queries (or the 32 that are left):
//         S^T = K Q^T, dP^T = V dO^T
//         P^T = exp2(...), dS^T = P^T * (dP^T - delta)
//         dV += P^T dO, dK += dS^T Q, dQ += dS K, for which dS^T passes through shared memory
//       if both take the item, the first adds the other's dK to its own, the second dV
//       store dK, dV
//     store dQ, which stayed in registers
// No atomics: the same bits at every run, whichever warpgroup takes an item.
//
// Shared memory: a ring of pages of 16 KiB: 64 rows of K and V, or of Q and dO. Pages of keys are
// given back as soon as they have been used, so that parts of the next item come in. A copy reaches
// into the next sequence: rows past the end are overwritten with zeros, since 0 times NaN is NaN:
// of queries up to a multiple of 32, which the last step may be. And 32 KiB for dS^T, twice for
// each warpgroup, so that one product may read it while the next is written; sums of dK or dV, and
// the gradients on their way out, pass through the same place.
//
// Barriers (every lane arrives for what it wrote or read):
//                          arrives                                   waits
//   issued, of an item     copying warp: it is described             all others
//   full, of a page        copying warp, with the bytes of the page  the helping warp that has it
//   ready, of a page       helping warp: zeros, lse and delta are    computing warps
//                          written
//   empty, of a page       computing warps that have read it, the    copying warp, for the next page
//                          copying warp for those that will not
//   sums                   both warpgroups: sums for the other are  both
//                          written; next phase: they are read
//   kOwn + w               warpgroup w: dS is written, or has been   warpgroup w
//                          read
//
// A sequence without keys gives dQ zeros, one without queries dK and dV.
//
// Files: items, the ring of pages, and why it has no deadlock: short_backward_pages.cuh; the warps
// that fill it: short_backward_producer.cuh; those that compute: short_backward_consumer.cuh; the
// kernel and its launch: here.
#pragma once

#include "cuda/kernels/attention/short_backward_consumer.cuh"
#include "cuda/kernels/attention/short_backward_producer.cuh"

namespace jagged_cuda::attention {

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_short(
    const __grid_constant__ ShortBackwardParams params) {
  using Storage = ShortBackwardStorage<Config>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const bool listed = lists_all(params.attention);
  if (listed)
    list_short<ShortBackwardItems<Config>, Config::kThreads>(params.attention, shared.listed);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp > 0) {
      help_short_backward<Config>(params.attention, shared, warp - 1, lane);
    } else {
      ShortBackwardCopier<Config>{params, shared, lane}.run(listed);
    }
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ShortBackwardConsumer<Config>(params.attention, shared, warp / 4 - 1, warp % 4, lane).run();
  }
}

template <typename Element>
cudaError_t launch_backward_short(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Config = ShortBackwardConfig<Element>;
  ShortBackwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int num_sms = 0;
  const auto encode = [&](CUtensorMap& map, const HeadsView& view, int64_t rows, int64_t dim) {
    return encode_heads<typename ShortBackwardStorage<Config>::Rows>(map, attention, view, rows,
                                                                     attention.heads, dim);
  };
  const cudaError_t errors[] = {
      encode(params.keys[0], attention.k, keys, attention.dim_qk),
      encode(params.keys[1], attention.v, keys, attention.dim_v),
      encode(params.queries[0], attention.q, queries, attention.dim_qk),
      encode(params.queries[1], attention.grad_out, queries, attention.dim_v), count_sms(num_sms)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<backward_short<Config>>(attention, params, Grid{num_sms}, Config::kThreads,
                                               sizeof(ShortBackwardStorage<Config>), stream,
                                               Config::kName);
}

}  // namespace jagged_cuda::attention
