// Forward of jagged_target_attention with many queries, on wgmma and TMA (compute capability 9.0),
// 16-bit elements, head dims up to 128. The mathematics, the chunks of keys and their parts are those
// of target_forward.cuh; only the tiles are larger.
//
// Grid: one CTA per SM, which takes one item after another (target_items.cuh): a chunk of
// 2^kTargetWgmmaChunkLog2 keys (find_chunk), a key/value head, and a tile of kTileM of its rows. Two
// warpgroups compute 64 rows each; one warp of a third finds the items and copies:
//
//     producer (one warp)                 each computing warpgroup
//     for each item:                      for each item:
//       find it, publish it                 its rows of Q, by its own copies
//       K_0                                 S = Q K_0^T
//       for each key tile j:                for each key tile j:
//         K_{j+1}, V_j                        P_j = softmax step of S, to registers
//                                             start S = Q K_{j+1}^T, start O += P_j V_j
//                                             wait for S (its softmax step overlaps with P_j V_j)
//                                           write O, or the part of the chunk
//
// Shared memory: Q of each warpgroup, and kSlots tiles of kTileN rows, through which K and V pass in
// the order above; rows of 2 kDim bytes: 144, 224 KiB for kDim 64, 128.
//
// Barriers:         arrives                                   waits
//     items.full    producer                                  computing warps
//     items.empty   computing warps, when they have read it   producer
//     ring.full     producer, with the bytes of a tile        computing warps
//     ring.empty    computing warps, after their product      producer
//     1 + w         warpgroup w, before and after its copies  the same
//                   of Q, and after it has written zeros
//
// A copy may reach into the next sequence: scores of its keys are masked, its rows of V overwritten
// with zeros, since 0 times NaN is NaN. A warpgroup without rows only releases what the other reads.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/target_forward.cuh"
#include "cuda/kernels/attention/target_items.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

// Keys of a chunk: with so many rows parts are large, and an item's beginning and end cost much.
constexpr int kTargetWgmmaChunkLog2 = 10;

template <typename Element_, int kDim_>
struct TargetForwardWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileM = kWarpgroups * 64;
  static constexpr int kTileN = 128;
  static constexpr int kSlots = kDim == 128 ? 6 : 8;
  static constexpr int kItems = 2;  // published ahead
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr PathName kName = PathName("cuda.target.forward.wgmma.d") + kDim;
  static_assert(kDim == 64 || kDim == 128);
};

struct TargetForwardWgmmaParams {
  CUtensorMap k;  // boxes of kTileN rows of one head
  CUtensorMap v;
  TargetAttentionParams target;
  int64_t items;
  int row_tiles;  // of a key/value head
};

struct TargetItem {
  TargetChunk chunk;  // does not exist: there are no more
  int kv_head;
  int first_row;
};

template <typename Config>
struct TargetForwardWgmmaStorage {
  using Element = typename Config::Element;
  using QueryRows = WarpgroupTile<Element, 64, Config::kDim>;
  using KeyRows = WarpgroupTile<Element, Config::kTileN, Config::kDim>;
  QueryRows sQ[Config::kWarpgroups];
  KeyRows slots[Config::kSlots];
  Ring<Config::kSlots> ring;  // of slots
  Ring<Config::kItems> items;
  TargetItem item[Config::kItems];
};

// All lanes of a warp find the items, the first one publishes them and copies their keys and values.
template <typename Config>
__device__ __forceinline__ void produce_target(const TargetForwardWgmmaParams& params,
                                               TargetForwardWgmmaStorage<Config>& shared) {
  const int lane = threadIdx.x % 32, tiles = params.row_tiles * params.target.kv_heads;
  const uint64_t policy = ptx::l2_policy(/*is_read_once=*/params.row_tiles == 1);
  RingPosition<Config::kSlots> slot;
  RingPosition<Config::kItems> place;
  const auto publish = [&](const TargetItem& item) {  // one lane
    shared.items.acquire(place);
    shared.item[place.stage] = item;
    shared.items.publish(place.stage);
    place.advance();
  };
  for (TargetItems items(params.target.next_item); items.index < params.items; items.advance()) {
    const int64_t index = items.index;
    const int tile = static_cast<int>(index % tiles);
    const TargetItem item = {find_chunk(params.target, index / tiles), tile / params.row_tiles,
                             tile % params.row_tiles * Config::kTileM};
    if (item.chunk.seq < 0 || !item.chunk.exists) continue;
    if (lane == 0) {
      publish(item);
      const auto copy = [&](const CUtensorMap& map, int key) {
        shared.ring.acquire(slot);
        copy_tile(shared.slots[slot.stage], map, item.chunk.first_key + key, item.kv_head,
                  shared.ring.full[slot.stage], policy);
        slot.advance();
      };
      if (item.chunk.keys > 0) copy(params.k, 0);
      for (int key = 0; key < item.chunk.keys; key += Config::kTileN) {
        if (key + Config::kTileN < item.chunk.keys) copy(params.k, key + Config::kTileN);
        copy(params.v, key);
      }
    }
    __syncwarp();
  }
  if (lane == 0) publish(TargetItem{});
}

template <typename Config>
__device__ __forceinline__ void consume_target(const TargetForwardWgmmaParams& params,
                                               TargetForwardWgmmaStorage<Config>& shared) {
  using Element = typename Config::Element;
  using WideTile = typename TargetForwardWgmmaStorage<Config>::KeyRows;
  constexpr int kTileN = Config::kTileN, kScoreBlocks = kTileN / 8, kOutBlocks = Config::kDim / 8;
  const TargetAttentionParams& attention = params.target;
  const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128, barrier = 1 + warpgroup;
  const int own_row = threadIdx.x / 32 * 16 + lane / 4;  // of the tile, and the eighth behind it
  // At least a tiny positive number: with scale 0 all scores are equal, but a
  // masked one, -inf, must stay so.
  const float scale_log2 = fmaxf(fabsf(attention.scale) * kLog2E, 1e-30f);
  auto& sQ = shared.sQ[warpgroup];

  RingPosition<Config::kSlots> ring;
  RingPosition<Config::kItems> place;
  while (true) {
    shared.items.wait(place);
    const TargetItem item = shared.item[place.stage];
    __syncwarp();  // all lanes have read it
    if (lane == 0) shared.items.release(place.stage);
    place.advance();
    const TargetChunk& chunk = item.chunk;
    if (!chunk.exists) return;
    const TargetRows target(attention, chunk.seq, item.kv_head);
    const int rows = target.count() - item.first_row;  // from the tile's first on
    if (rows <= warpgroup * 64) {
      const int tiles = 2 * ((chunk.keys + kTileN - 1) / kTileN);
      for (int tile = 0; tile < tiles; ++tile) {
        shared.ring.wait(ring);
        __syncwarp();
        if (lane == 0) shared.ring.release(ring.stage);
        ring.advance();
      }
      continue;
    }

    // Until each warp has computed its last S of the item before, Q is read.
    ptx::bar_sync(barrier, 128);
    load_query_rows<128>(sQ, attention.q, target, item.first_row + warpgroup * 64,
                         rows - warpgroup * 64, attention.dim_qk, attention.aligned);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::bar_sync(barrier, 128);

    OnlineSoftmax<1> softmax;
    Accumulator<1, kOutBlocks> o = {};
    Accumulator<1, kScoreBlocks> s;
    float rescale[1][2];
    const auto start_scores = [&] {
      shared.ring.wait(ring);
      ptx::wgmma_fence();
      wgmma_rows_by_rows<0, true>(s, sQ, 0, shared.slots[ring.stage]);
      ptx::wgmma_commit_group();
      return ring.advance();
    };
    // What becomes of the scores of the keys from `key` on, when their product is done.
    const auto finish_scores = [&](int key, int slot) {
      ptx::fence_operands(s[0]);
      if (lane == 0) shared.ring.release(slot);
      if (attention.scale < 0.0f) {
        // The maximum of scale * S lies where -S is largest.
#pragma unroll
        for (int e = 0; e < kScoreBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
      }
      if (key + kTileN > chunk.keys) {
#pragma unroll
        for (int e = 0; e < kScoreBlocks * 4; ++e) {
          if (key + e / 4 * 8 + lane % 4 * 2 + e % 2 >= chunk.keys) s[0][e / 4][e % 4] = -INFINITY;
        }
      }
      softmax.update(s, rescale, scale_log2);
    };
    // O += P V for the tile of the keys from `key` on.
    const auto start_output = [&](const PackedRows<Element, kScoreBlocks>& p, int key) {
      auto& sV = shared.slots[ring.stage];
      shared.ring.wait(ring);
      if (key + kTileN > chunk.keys) {
        zero_tile_rows<128>(sV, chunk.keys - key, kTileN, threadIdx.x % 128);
        ptx::fence_proxy_async();
        ptx::bar_sync(barrier, 128);
      }
      ptx::fence_operands(o[0]);
      ptx::wgmma_fence();
      wgmma_packed_by_columns<true>(o, p, sV);
      ptx::wgmma_commit_group();
      return ring.advance();
    };
    const auto finish_output = [&](int slot) {
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(o[0]);
      if (lane == 0) shared.ring.release(slot);
    };

    if (chunk.keys > 0) {
      const int first_slot = start_scores();
      ptx::wgmma_wait_group<0>();
      finish_scores(0, first_slot);
      int key = 0;
      for (; key + kTileN < chunk.keys; key += kTileN) {
        const PackedRows<Element, kScoreBlocks> p(s);
        const int score_slot = start_scores(), value_slot = start_output(p, key);
        ptx::wgmma_wait_group<1>();
        finish_scores(key + kTileN, score_slot);
        finish_output(value_slot);
        rescale_rows(o, rescale);
      }
      finish_output(start_output(PackedRows<Element, kScoreBlocks>(s), key));
    }

    softmax.finish();
    const bool whole = chunk.whole || attention.parts == nullptr;
    float inverse_sum[2];
    int64_t out_rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row + half * 8;
      const float sum = softmax.row_sum[0][half], maximum = softmax.row_max[0][half];
      const int64_t index = target.index(item.first_row + row);
      inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      out_rows[half] = index;
      if (row >= rows) continue;
      if (whole) {
        if (lane % 4 == 0) {
          attention.lse[index] =
              sum == 0.0f ? -INFINITY : maximum * fabsf(attention.scale) + logf(sum);
        }
        continue;
      }
      const int columns = round_up_to_8(attention.dim_v);
      const int64_t part = part_row(attention, chunk.slot, item.kv_head, item.first_row + row);
      if (lane % 4 == 0)
        reinterpret_cast<float2*>(attention.part_stats)[part] = make_float2(maximum, sum);
      float* gPart = attention.parts + part * columns + lane % 4 * 2;
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        if (block * 8 < columns) {
          *reinterpret_cast<float2*>(gPart + block * 8) =
              make_float2(o[0][block][2 * half], o[0][block][2 * half + 1]);
        }
      }
    }
    if (whole) {
      // Of the rows of a lane the second is the eighth behind the first, at whatever distance.
      store_quads(o, inverse_sum,
                  static_cast<Element*>(attention.out) + out_rows[0] * attention.dim_v,
                  (out_rows[1] - out_rows[0]) * (attention.dim_v / 8), rows - own_row,
                  attention.dim_v, lane);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void target_forward_wgmma(
    const __grid_constant__ TargetForwardWgmmaParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<TargetForwardWgmmaStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumers = Config::kWarpgroups * 128;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    shared.ring.init(kConsumers / 32);
    shared.items.init(kConsumers / 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < kConsumers + 32) produce_target(params, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume_target(params, shared);
  }
}

// Rows of a key/value head from which on it serves, head dims above 32: fewer fit a tile of mma.sync.
constexpr int64_t kTargetWgmmaRows = 33;

inline bool takes_target_wgmma(const TargetAttentionParams& params,
                               int64_t least_rows = kTargetWgmmaRows) {
  const int dim = dim_bucket(params);
  return target_rows(params) >= least_rows && (dim == 64 || dim == 128) && params.aligned &&
         !params.mma_sync_only && params.offsets.total > 0 && params.offsets.total < kMaxRows32 &&
         params.next_item != nullptr && has_wgmma();
}

// cudaErrorNotSupported where k or v has no tensor map.
template <typename Element>
cudaError_t launch_target_forward_wgmma(const TargetAttentionParams& target, cudaStream_t stream) {
  return for_dim<128>(target, [&](auto dim) {
    if constexpr (dim.value < 64) {
      return cudaErrorNotSupported;
    } else {
      using Config = TargetForwardWgmmaConfig<Element, dim.value>;
      TargetForwardWgmmaParams params;
      params.target = target;
      params.target.chunk_log2 = kTargetWgmmaChunkLog2;
      params.row_tiles =
          static_cast<int>((target_rows(target) + Config::kTileM - 1) / Config::kTileM);
      const auto encode = [&](CUtensorMap& map, const HeadsView& view, int dims) {
        return encode_tensor_map(map,
                                 {view.data, target.type, target.offsets.total, target.kv_heads,
                                  dims, view.row_stride, view.head_stride},
                                 Config::kTileN,
                                 WarpgroupTile<Element, 64, dim.value>::kBlockColumns);
      };
      for (cudaError_t found :
           {encode(params.k, target.k, target.dim_qk), encode(params.v, target.v, target.dim_v)}) {
        if (found != cudaSuccess) return found;
      }
      params.items = target_grid(params.target, params.row_tiles).x;
      const cudaError_t launched = launch_target_items<target_forward_wgmma<Config>>(
          params, Config::kThreads, sizeof(TargetForwardWgmmaStorage<Config>), stream,
          Config::kName);
      if (launched != cudaSuccess) return launched;
      return launch_merge<merge_forward<Element>>(params.target, stream);
    }
  });
}

template <typename Element>
cudaError_t launch_target_forward(const TargetAttentionParams& params, cudaStream_t stream) {
  if (takes_target_wgmma(params)) {
    const cudaError_t error = launch_target_forward_wgmma<Element>(params, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return launch_target_forward_mma_sync<Element>(params, stream);
}

}  // namespace jagged_cuda::attention
