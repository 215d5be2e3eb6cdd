// Backward of jagged_flash_attention for long sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements. With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and
// dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// Kernels behind the plan (long_plan.cuh), whose items are tiles of kTileN keys; of those for other
// sequences (backward_wgmma.cuh) that for dQ comes before them, and that for dK and dV before or behind
// (dkdv_comes_last):
//     prepare_long     lse and delta of all queries; zeros for the tickets, or the sums of dQ
//     long_backward    the five products; dK and dV leave it, dQ is added to sums in f32
//     finish_long      the sums, rounded, to dQ; not where tiles of keys add in order
//
// long_backward, grid: one CTA per SM, which takes items (tile of keys, kv head) until there are no
// more. A CTA has a warpgroup of producers and two that compute 64 keys each. They work on S^T and
// dP^T, so that P^T and dS^T are operands in registers:
//
//     scheduler (one warp)     copier (one thread)         each computing warpgroup
//     for each item:           for each item:              for each item:
//       take it, publish it      K, V                        for each step:
//                                for each step (head of        dS^T to shared memory
//     in order: a sender         the group, kStep queries):    start dV += P^T dO, dK += dS^T Q
//     (a thread) for each          Q, dO, lse, delta           start dQ = dS K of the step before
//     warpgroup, each step:                                    start S^T = K Q^T of the next step
//       wait for its turn                                      dQ to shared memory, add to sums
//       add dQ to its sums                                     start dP^T = V dO^T of the next step
//       let the next tile                                      P^T = exp2(...)
//                                                              dS^T = P^T * (dP^T - delta)
//                                                            store dK, dV
//
// A step's dQ, over all keys of the tile, is shared between the warpgroups: at 128 dims each takes
// half of the columns, at 64 half of the queries. That it comes one step late is why they need not
// keep step with each other: one is at its exponentials while the other has the tensor cores.
//
// What a step needs from shared memory outside of its products is loaded long before its use, and
// what it writes there is waited for as late as registers allow: while the tensor cores read their
// operands, both take hundreds of cycles.
//
// The sums of dQ lie in memory as the accumulators do in registers, in chunks of 16 queries and 64
// columns, each of which one warp adds in one piece (cp.reduce.async.bulk). Their order is that of
// arrival, so dQ may differ in its last bits from run to run; dK and dV do not.
//
// Where all queries see the first tile of keys (first_tile_stores), that tile stores its dQ in place of
// adding, and nothing is cleared. The others begin once its ticket says that all of it is there: the
// copier waits for that. So first tiles are taken long before the others of their sequence
// (PlannedItems::next_first_ahead). A tile waits only for one that was taken before it.
//
// kOrdered: a sender adds a warpgroup's part of a step in one piece. Tiles of keys add in order:
// the part's ticket counts those that have. The first tile stores in place of adding, so nothing is
// cleared; for the last one what the others have added comes to shared memory, so that the
// warpgroup adds its own in registers and writes dQ. The bits are the same at every run. A tile
// waits only for those that were taken before it, so some tile can always go on. Tiles are taken in
// the order in which they add, heads fastest, and walk over the queries the other way, so that the
// tile before is ahead.
//
// dK and dV leave as bulk copies of 16 rows of a warp: dV by way of the warp's own rows of V, of which the
// last product has been waited for, beside the last dQ; dK by way of the place from which dQ is sent, or in
// order, where senders still read that, by V's, too. So the next K is on its way while they are written.
//
// Shared memory, in rows of 2 kDim bytes: K and V kTileN rows each; Q and dO kStep rows in kStages
// stages; dS [kTileN, kStep], kScoreStages times; 32 KiB through which dQ leaves. 195, 226 KiB for
// kDim 64, 128.
//
// Barriers:           arrives                              waits
//     items.full      scheduler                            copier, senders, computing warps
//     items.empty     copier, senders, computing threads   scheduler
//     wanted          copier, near the end of an item      scheduler, before it takes one in order
//     keys_full       copier, with the bytes of K          computing warps
//     keys_empty      computing warps, after the last dQ   copier
//     values_full     copier, with the bytes of V          computing warps, before the first dP
//     values_empty    computing warps, when dV (in order:  copier
//                     and dK) has been read there
//     ring.full       copier, with the bytes of a step     computing warps
//     ring.empty      computing threads, after its         copier
//                     products
//     scores_full     both warpgroups, dS is written       the same, before dQ
//     scores_empty    both warpgroups, dQ is computed      the same, before they write dS
//     sums_ready[w]   sender w: room for dQ, or the sum    warpgroup w
//                     of the other tiles is there
//     sums_full[w]    warpgroup w, dQ is there or done     sender w
//     tickets         computing warps, after a first item  copiers of other CTAs
//     kZeroed + w     warpgroup w                          the same, after it has written zeros
//
// A copy may reach into the next sequence: rows past the end are overwritten with zeros, since 0
// times NaN is NaN. Queries past the end, or that see nothing, have lse inf, so that P is 0.
// Queries that no key sees are in no step: the kernels beside give them zeros. Keys that no query
// sees have no steps, and get zeros. Sequences of length 0 are not planned.
//
// Files: the workspaces, and the kernels before and behind: long_workspace.cuh; items, steps and
// shared memory: long_backward_steps.cuh; the warpgroup of producers: long_backward_producer.cuh;
// those that compute: long_backward_consumer.cuh; the kernel and its launch: here.
#pragma once

#include "cuda/kernels/attention/long_backward_consumer.cuh"
#include "cuda/kernels/attention/long_backward_producer.cuh"

namespace jagged_cuda::attention {

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void long_backward(
    const __grid_constant__ LongBackwardOperands params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<LongBackwardStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    ptx::prefetch_tensormap(params.grad_out);
    // Every lane arrives for what it has read, as racecheck follows it.
    shared.items.init(kConsumerWarps * 32 + 1 + (Config::kOrdered ? Config::kWarpgroups : 0));
    shared.ring.init(kConsumerWarps * 32);
    ptx::mbarrier_init(shared.keys_full, 1);
    ptx::mbarrier_init(shared.keys_empty, kConsumerWarps);
    ptx::mbarrier_init(shared.values_full, 1);
    ptx::mbarrier_init(shared.values_empty, kConsumerWarps);
    ptx::mbarrier_init(shared.wanted, 1);
    for (int i = 0; i < Config::kWarpgroups; ++i) {
      ptx::mbarrier_init(shared.sums_full[i], 4 * 32);
      ptx::mbarrier_init(shared.sums_ready[i], 1);
    }
    for (int i = 0; i < Config::kScoreStages; ++i) {
      ptx::mbarrier_init(shared.scores_full[i], kConsumerWarps);
      ptx::mbarrier_init(shared.scores_empty[i], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  // Of finish_long, which waits for all of this; of dk and dv only behind those that leave delta.
  if (!params.attention.dkdv_is_last) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (params.attention.dkdv_is_last) ptx::griddepcontrol_launch_dependents();
  __syncthreads();
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) schedule_keys<Config>(params, shared);
    if (threadIdx.x == 32) copy_steps<Config>(params, shared);
    if (Config::kOrdered && (threadIdx.x == 64 || threadIdx.x == 96))
      LongSender<Config>(params.attention, shared, static_cast<int>(threadIdx.x) / 32 - 2).run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    LongBackwardConsumer<Config>(params, shared, warpgroup - 1).run();
  }
}

// Whether of the kernels for other sequences that for dk and dv comes last: beside the last items and
// finish_long, where the GPU would be idle. Where by the mean of lengths most rows are of one kind it comes
// first, since what finds next to nothing is over sooner by itself.
inline bool dkdv_comes_last(const AttentionBackwardParams& attention) {
  const int64_t enough = (long_rows(attention) + 1) * 3 / 4;
  return !attention.longer_in_slabs && !most_are_long(attention) &&
         attention.q_offsets.total >= enough * attention.q_offsets.num_seqs;
}

template <typename Config>
cudaError_t launch_long_backward(const AttentionBackwardParams& given, cudaStream_t stream) {
  using Storage = LongBackwardStorage<Config>;
  LongBackwardOperands params;
  params.attention = given;
  AttentionBackwardParams& attention = params.attention;
  attention.dkdv_is_last = dkdv_comes_last(given);
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int num_sms = 0;
  cudaError_t error =
      params.template encode<typename Storage::QueryRows, typename Storage::KeyRows>();
  if (error == cudaSuccess)
    error = encode_heads<typename Storage::StagedRows>(params.grad_k, attention, attention.grad_k,
                                                       keys, attention.kv_heads, attention.dim_qk);
  if (error == cudaSuccess)
    error = encode_heads<typename Storage::StagedRows>(params.grad_v, attention, attention.grad_v,
                                                       keys, attention.kv_heads, attention.dim_v);
  if (error == cudaSuccess) error = count_sms(num_sms);
  if (error != cudaSuccess) return error;
  const int64_t items =
      num_tiles(keys, attention.kv_offsets.num_seqs, Config::kTileN) * attention.kv_heads;
  const bool is_last = attention.dkdv_is_last;
  // Several CTAs per SM, but no more, since often there is nothing to do.
  const auto rows = [&](int ctas_of_sm) {
    const int64_t tiles = num_longer_tiles(queries, kPreparedRows),
                  slots = ctas_of_sm * num_sms / attention.heads + 1;
    return Grid{tiles < slots ? tiles : slots, attention.heads};
  };
  const bool many_long = is_last || most_are_long(attention);
  using Element = typename Config::Element;
  error = launch_backward_wgmma<Element>(attention,
                                         is_last ? BackwardPart::kDq : BackwardPart::kAll, stream);
  if (error == cudaSuccess)
    error = launch_plan<Config::kTileN, AttentionBackwardParams>(true, attention, stream);
  if (error == cudaSuccess)
    error = launch_dependent<prepare_long<Config>>(attention, rows(many_long ? 4 : 2),
                                                   kPrepareThreads, 0, stream);
  if (error == cudaSuccess)
    error = launch_dependent<long_backward<Config>>(params, Grid{items < num_sms ? items : num_sms},
                                                    Config::kThreads, sizeof(Storage), stream,
                                                    Config::kName);
  if constexpr (!Config::kOrdered) {
    if (error == cudaSuccess)  // few CTAs, if others run beside them
      error = launch_dependent<finish_long<Config>>(attention, rows(is_last ? 2 : 8),
                                                    kPrepareThreads, 0, stream);
  }
  if (error == cudaSuccess && is_last)
    error = launch_backward_wgmma<Element>(attention, BackwardPart::kDkdv, stream);
  return error;
}

template <typename Element, int kDim>
cudaError_t launch_long_backward_of(const AttentionBackwardParams& params, cudaStream_t stream) {
  return params.long_in_order
             ? launch_long_backward<LongBackwardConfig<Element, kDim, true>>(params, stream)
             : launch_long_backward<LongBackwardConfig<Element, kDim, false>>(params, stream);
}

template <typename Element>
cudaError_t launch_backward_long(const AttentionBackwardParams& params, cudaStream_t stream) {
  return dim_bucket(params) == 64 ? launch_long_backward_of<Element, 64>(params, stream)
                                  : launch_long_backward_of<Element, 128>(params, stream);
}

}  // namespace jagged_cuda::attention
