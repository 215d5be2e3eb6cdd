// Forward of jagged_flash_attention for long sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements (of f32: tf32_long_forward.cuh). For a tile of queries of one sequence and head, over
// tiles j of its keys, with c = |scale| log2(e) and a reference m per row:
//     S_j = Q K_j^T,  P_j = exp2(c (S_j - m)),  l = l r + rowsum P_j,  O = O r + P_j V_j
// where r = exp2(c (m before - m)), and at the end out = O / l, lse = |scale| m + ln l. For a negative
// scale S is negated. m follows the row's maximum, but seldom moves (LazySoftmax). Up to 128 dims a step
// computes no maximum (kKeepsReference): where the sums show that m has fallen behind, S is computed once
// more from K_j, which stays in its slot until then, and m moves. At 96 and 128 dims that holds for the
// first step, too, whose m is the maximum over some keys (kGuesses).
//
// Grid: one CTA per SM, which takes items (tile of kTileM queries, head) from a plan that lists long
// sequences first, until there are no more (long_items.cuh). A CTA has a warpgroup of producers and
// kWarpgroups that compute 64 rows each:
//
//     scheduler (one warp)     copier (one thread)          each computing warpgroup
//     for each item:           for each item:               for each item:
//       take it, publish it      Q, K_0                       for each key tile j:
//                                for each key tile j:           take the turn
//                                  K_{j+1}, V_j                 start S = Q K_j^T
//                                                               start O += P_{j-1} V_{j-1}
//                                                               pass the turn
//                                                               P_j = softmax step of S
//
// Turns: a warp that starts a product waits until those before it are done. So only one warpgroup at a
// time hands products to the tensor cores, while the others are at their exponentials. All warpgroups
// take equally many turns, those without rows in a tile, too: one per key tile, one per item without
// keys and one at the end.
//
// From item to item: the product with the last P of an item is started together with the first S of the
// next item, behind which the output of the item is stored. So the tensor cores do not wait between items.
// The output leaves through the item's tile of Q, as bulk copies that run beside the next item; rows of a
// warp that has fewer than 16 are copied by its lanes.
//
// Above 128 dims there is no room for a second Q (kOwnQueries): each warpgroup has a tile of Q for itself,
// which is filled anew as soon as it has computed its last S of an item. The last product and the output
// of an item come before the next Q. A warpgroup also passes over the key tiles at the end of an item
// that its rows do not see.
//
// Registers: setmaxnreg moves them from the producers to the others. A product that accumulates reads and
// writes its accumulators in the register file, which slows all other instructions of the SM down by
// about 1.6: so what counts is how few there are between two turns.
//
// Packed heads: where kv heads serve several heads, a tile holds 2^packed_shift of these of each query
// (kPacked), query by query: a row of the tile is a head of a query, and boxes of Q and of the output
// hold as many heads.
//
// Components of a Config, and what takes their place with ranges of keys, biases, silu (ranged_forward.cuh)
// and f32 (tf32_long_forward.cuh):
//     Mask     which keys a row sees          WindowMask      RangesMask, found by a third warp of producers
//     Score    what becomes of a score        SoftmaxScore    SiluScore
//     Bias     what is added to a score       NoBias          StartingBias, by a fourth warp of producers;
//                                                             StartingTimes, by warpgroups behind all others
//     Values   how V reaches a product        PlainValues     TransposedValues, by two warps of producers
//     Consumer a computing warpgroup          LongForward-    RangedForwardConsumer, whose items end before
//                                             Consumer        the next begins
// With RangesMask steps that no row sees are passed over, and items are published further ahead than there
// are tiles of Q (kQueryRing).
//
// Shared memory, in rows of 2 kTileColumns bytes: Q kTileM rows, twice (above 128 dims once); kSlots
// tiles of kTileN rows, through which K and V pass in the order above. 112, 192, 192, 216, 224 KiB for
// kDim 64, 96, 128, 192, 256: products of 96 columns leave out a quarter of tiles of 128.
//
// Barriers, beside those of long_items.cuh:
//                     arrives                              waits
//     items.empty     copier, computing warps              scheduler; then sQ is free as well
//     q_full          copier, with the bytes of Q          computing warps
//     q_empty[w]      warpgroup w, after its last S        copier (kOwnQueries)
//     q_empty[stage]  computing warps, after their last S  copier (kQueryRing)
//     ring.full       copier, with the bytes of a tile     computing warps
//                     and lanes of what brings biases
//     ring.empty      computing warps, after its product   copier
//     turn[w]         warpgroup w - 1, modulo their number warpgroup w, before it starts products
//     zeroed[w]       warpgroup w                          the same, after it has written zeros
//     vote[w]         warpgroup w                          the same: whether some m has fallen behind
//
// A copy may reach into the next sequence. Of K that gives scores that are masked; rows of V past
// the end are overwritten with zeros, since 0 times NaN is NaN; rows of Q give rows that are not
// stored. A sequence of length 0 is not planned; one without keys gives out 0, lse -inf, and so do
// rows outside all sequences, where the plan has them.
#pragma once

#include "cuda/kernels/attention/long_forward_config.cuh"
#include "cuda/kernels/attention/long_forward_consumer.cuh"

#include <algorithm>

namespace jagged_cuda::attention {

// Copies Q for each warpgroup that has rows of an item, where each has a tile of its own. Returns the parities
// of their next phases.
template <typename Config>
__device__ __forceinline__ unsigned copy_own_queries(const CUtensorMap& q,
                                                     LongForwardStorage<Config>& shared,
                                                     int64_t global_row, int rows, int head,
                                                     unsigned parities) {
  for (int w = 0; w < Config::kWarpgroups && w * 64 < rows; ++w) {
    ptx::mbarrier_wait(shared.q_empty[w], parities >> w & 1);
    parities ^= 1u << w;
    copy_tile(shared.sQ[w], q, global_row + w * 64, head, shared.q_full[w]);
  }
  return parities;
}

// Copies Q, K and V of the items, in the order of their use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_operands(const LongForwardParams& params,
                                              LongForwardStorage<Config>& shared) {
  using Storage = LongForwardStorage<Config>;
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kSlots> slot;
  unsigned q_parities = ~0u;                   // of kOwnQueries, one bit per warpgroup
  RingPosition<Storage::kQueryTiles> queries;  // of kQueryRing
  for (;;) {
    shared.items.wait(place);
    const WorkItem item = shared.item[place.stage];
    const typename Config::Mask mask(attention, item.tile, shared.keys[place.stage]);
    const int stage = place.advance();
    // What is prepared of a mask is looked at until the last copy.
    const bool has_keys = mask.first() < mask.last();
    if (!Config::Mask::kPrepared || !has_keys) shared.items.release(stage);
    if (item.is_end) return;
    if (!has_keys) continue;
    const auto copy = [&](const CUtensorMap& map, int key) {
      shared.ring.acquire(slot);
      copy_tile(shared.slots[slot.stage], map, item.tile.key_begin + key, item.head / group,
                shared.ring.full[slot.stage]);
      slot.advance();
    };
    if constexpr (Storage::kQueryRing)
      ptx::mbarrier_wait(shared.q_empty[queries.stage], queries.parity ^ 1);
    if constexpr (!Config::kOwnQueries) {
      const int tile = Storage::kQueryRing ? queries.advance() : stage;
      copy_tile(shared.sQ[tile], params.q, item.tile.global_row, item.head, shared.q_full[tile]);
    }
    copy(params.k, mask.first());
    if constexpr (Config::kOwnQueries)
      q_parities = copy_own_queries<Config>(params.q, shared, item.tile.global_row, item.tile.rows,
                                            item.head, q_parities);
    for (int key = mask.first(), next; key < mask.last(); key = next) {
      next = mask.next(key);
      if (next < mask.last()) copy(params.k, next);
      if constexpr (Config::Values::kWarps > 0) {
        shared.values.copy(params.v, item.tile.key_begin + key, item.head / group);
        slot.advance();
      } else {
        copy(params.v, key);
      }
    }
    if (Config::Mask::kPrepared) shared.items.release(stage);
  }
}

// What each warp of producers does.
template <typename Config>
__device__ __forceinline__ void produce_long_forward(const LongForwardParams& params,
                                                     LongForwardStorage<Config>& shared) {
  if constexpr (Config::Mask::kPrepared) {
    if (threadIdx.x < 32) schedule_planned<Config>(params.attention, shared);
    if (threadIdx.x / 32 == 2) prepare_masks<Config>(params.attention, shared);
  } else {
    if (threadIdx.x < 32) {
      schedule<Config>(params.attention, shared, [&](int stage, const WorkItem& item) {
        shared.keys[stage] = Config::Mask::find(params.attention, item.tile);
      });
    }
  }
  if (threadIdx.x == 32) copy_operands<Config>(params, shared);
  if constexpr (Config::Values::kWarps > 0) {
    static_assert(Config::Values::kWarps == 2 && Config::Bias::kWarps == 0);
    if (threadIdx.x >= 64) Config::Values::template prepare<Config>(params.attention, shared);
  }
  if constexpr (Config::Bias::kWarps > 0) {
    if (threadIdx.x / 32 == 3) Config::Bias::template copy<Config>(params.attention, shared);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void long_forward(
    const __grid_constant__ LongForwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  // Above 128 dims it takes sequences of almost any length, and never looks.
  if (Config::kDim <= 128 && params.attention.looks_for_long &&
      !any_planned<Config::kThreads>(params.attention)) {
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_dependent
    return;
  }
  auto& shared = *reinterpret_cast<LongForwardStorage<Config>*>(wgmma_shared_bytes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    shared.init();
  }
  __syncthreads();  // the barriers are initialised
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  // Of the kernels for shorter sequences, which fill SMs that have no items, or no more.
  ptx::griddepcontrol_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_long_forward(params, shared);
  } else if (Config::kWriters > 0 && warpgroup > Config::kWarpgroups) {
    if constexpr (Config::kWriters > 0) {
      ptx::setmaxnreg_dec<Config::kWriterRegisters>();
      const int first = (Config::kWarpgroups + 1) * 4;
      Config::Bias::template write<Config>(
          params.attention, shared,
          __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - first, 0));
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    typename Config::template Consumer<Config>(params, shared, warpgroup - 1).run();
  }
}

template <typename Config>
cudaError_t launch_long_forward(const AttentionParams& attention, cudaStream_t stream) {
  using Storage = LongForwardStorage<Config>;
  LongForwardParams params;
  params.attention = attention;
  const int shift = attention.packed_shift;
  const cudaError_t errors[] = {encode_heads<typename Storage::QueryRows>(
                                    params.q, attention, attention.q, attention.q_offsets.total,
                                    attention.heads, attention.dim_qk, shift),
                                encode_heads<typename Storage::KeyRows>(
                                    params.k, attention, attention.k, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_qk),
                                encode_heads<typename Storage::ValueRows>(
                                    params.v, attention, attention.v, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  if constexpr (Storage::kStoresThroughQueries) {
    const cudaError_t error =
        encode_heads<WarpgroupTile<typename Config::Element, kStoredRows, Config::kTileColumns>>(
            params.out, attention, attention.out, attention.q_offsets.total, attention.heads,
            attention.dim_v, shift);
    if (error != cudaSuccess) return error;
  }
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // So many rows hold only so many sequences of more than planned.above.
  const int64_t rows = attention.q_offsets.total, most = rows / (attention.planned.above + 1),
                num_seqs = std::min(attention.q_offsets.num_seqs, most),
                items =
                    num_tiles(rows << shift, num_seqs, Config::kTileM) * (attention.heads >> shift);
  const Grid grid{items < num_sms ? items : num_sms};
  if (attention.long_first && attention.plans_itself) {
    return launch<long_forward<Config>>(params, grid, Config::kThreads, sizeof(Storage), stream,
                                        Config::kName);
  }
  if (attention.plans_itself) {
    return launch_planning<long_forward<Config>>(attention, params, grid, Config::kThreads,
                                                 sizeof(Storage), stream, Config::kName);
  }
  return launch_dependent<long_forward<Config>>(params, grid, Config::kThreads, sizeof(Storage),
                                                stream, Config::kName);
}

// Calls launch(LongForwardConfig) for the smallest head dim that holds D and Dv.
template <typename Element, typename Launch>
cudaError_t for_long_forward(const AttentionParams& params, Launch launch) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  if constexpr (sizeof(Element) == 4) {  // tf32_long_forward.cuh
    return dim <= 64 ? launch(LongForwardConfig<Element, 64>())
                     : launch(LongForwardConfig<Element, 128>());
  } else {
    if (params.packed_shift > 0) {
      return dim <= 64 ? launch(LongForwardConfig<Element, 64, true>())
                       : launch(LongForwardConfig<Element, 128, true>());
    }
    if (dim <= 64) return launch(LongForwardConfig<Element, 64>());
    if (dim <= 96) return launch(LongForwardConfig<Element, 96>());
    if (dim <= 128) return launch(LongForwardConfig<Element, 128>());
    if (dim <= 192) return launch(LongForwardConfig<Element, 192>());
    return launch(LongForwardConfig<Element, 256>());
  }
}

template <typename Element>
cudaError_t launch_forward_plan(AttentionParams& params, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  params.planned = planned_lengths(params);
  const int64_t rows = params.q_offsets.total, num_seqs = params.q_offsets.num_seqs,
                shorter = long_rows(params) > 0 ? long_rows(params) : 2 * tiny_limit(params);
  // It has the rows outside as well where it takes sequences of any length.
  params.looks_for_long = long_rows(params) > 0 && rows * 2 < num_seqs * shorter;
  return for_long_forward<Element>(params, [&](auto config) {
    constexpr int kTileM = decltype(config)::kTileM;
    params.plans_itself = takes_own_plan(params, params.q_offsets, kTileM >> params.packed_shift,
                                         params.heads >> params.packed_shift, num_sms);
    if (!params.plans_itself) {
      // Those for shorter sequences, which are few then, fill its last round. Where it comes last it fills
      // theirs; but that for short ones leaves no SM before its end.
      params.long_first = dim_bucket(params) == 64 && rows >= num_seqs * kShortRows;
      return launch_plan<kTileM, AttentionParams>(false, params, stream);
    }
    params.long_first = rows >= num_seqs * shorter;
    return cudaSuccess;
  });
}

template <typename Element>
cudaError_t launch_forward_long(const AttentionParams& params, cudaStream_t stream) {
  return for_long_forward<Element>(
      params, [&](auto config) { return launch_long_forward<decltype(config)>(params, stream); });
}

}  // namespace jagged_cuda::attention
