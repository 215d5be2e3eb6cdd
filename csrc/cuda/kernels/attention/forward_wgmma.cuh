// Forward of jagged_flash_attention on wgmma and TMA (compute capability 9.0), 16-bit elements. The
// mathematics is that of forward_mma_sync.cuh.
//
// Grid: x = query tiles of kTileM rows, mostly one for each CTA (else TilesOfCta, MiddleTilesOfCta), y =
// groups of heads. A CTA takes the heads of its group one after another, so that the tile is searched for
// once, and the copies for one head run while the one before is computed. One warpgroup computes (four
// warps, 16 whole rows each), or two where rows are narrow and sequences long, since 64 rows of 32 columns
// ask more of L2 than of the tensor cores; one warp more, the producer, finds the tile and keeps the copies
// ahead. Each warpgroup walks over the keys that its own 64 rows see, so that a row's bits are the same in
// a tile of 64 and of 128 rows, and only releases the other slots.
//
//     producer                          warpgroup, each
//     for each head:                    for each head:
//       Q, K_0                            S = Q K_0^T
//       for each key tile j:              for each key tile j:
//         K_{j+1}, V_j                      P_j = softmax step of S, to registers
//                                           start S = Q K_{j+1}^T, start O += P_j V_j
//                                           wait for S (its softmax step overlaps with P_j V_j)
//                                         write O
//
// Shared memory: Q, and kSlots slots through which K and V pass in the order above; 64 rows of 2
// kDim bytes each, of Q kTileM: 20 (two warpgroups: 24), 40, 80 KiB for kDim 32, 64, 128.
//
// Barriers:         arrives                              waits
//     q_full        producer, with the bytes of Q        warpgroups, before they read the tile and Q
//     q_empty       their threads, after the head's      producer, before it copies the next Q or
//                   last S, or of a tile without keys    writes the next tile
//     full[slot]    producer, with the bytes of a tile   warpgroups, before they read the slot
//     empty[slot]   their warps, after their product     producer, before it copies into the slot
// One __syncthreads once the barriers are initialised.
//
// A copy may reach into the next sequence. Of K that gives scores that are masked; rows of V past
// the end are overwritten with zeros, since 0 times NaN is NaN; rows of Q give rows that are not
// stored. A sequence of length 0 has no rows and its virtual tile exits; without keys nothing is
// copied: out 0, lse -inf.
#pragma once

#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, int kWarpgroups_ = 1>
struct ForwardWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;                // columns of products: D and Dv, rounded up
  static constexpr int kWarpgroups = kWarpgroups_;  // that compute
  static constexpr int kTileColumns = kDim == 96 ? 128 : kDim;  // of Q, K, V in shared memory
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kTileM = kWarpgroups * 64;
  // Chosen by time on an H100 (docs/performance_log.md). Nothing depends on the batch, so that a
  // row's bits depend on its own sequence alone: the forward pass is batch-invariant.
  static constexpr int kTileN = 64;
  static constexpr int kSlots = 4;
  // As many as registers allow: one more would leave too few for S, P and O.
  static constexpr int kMinCtas = (kDim == 32 ? 4 : kDim == 64 ? 3 : 2) / kWarpgroups;
  static constexpr PathName kName =
      PathName("cuda.attention.forward.wgmma.d") + kDim + (kWarpgroups == 2 ? ".rows128" : "");
  static_assert(kDim == 32 || kDim == 64 || kDim == 96 || kDim == 128);
};

struct ForwardWgmmaParams {
  CUtensorMap q;  // boxes of kTileM rows of one head
  CUtensorMap k;  // boxes of 64 rows
  CUtensorMap v;
  AttentionParams attention;
  int heads_per_cta;  // divides H
};

template <typename Config>
struct ForwardWgmmaStorage {
  using QueryRows = WarpgroupTile<typename Config::Element, Config::kTileM, Config::kTileColumns>;
  using KeyRows = WarpgroupTile<typename Config::Element, Config::kTileN, Config::kTileColumns>;
  QueryRows sQ;
  KeyRows slots[Config::kSlots];
  uint64_t q_full, q_empty, full[Config::kSlots], empty[Config::kSlots];
  QueryTile tile;
};

// A tile as the consumers take it, without rows if they leave it to another kernel.
template <int kTileM>
__device__ __forceinline__ QueryTile query_tile_of(const AttentionParams& params,
                                                   const JaggedTile& found) {
  RowRange kv = found.seq < 0 ? RowRange{0, 0} : found.rows;
  if (found.seq >= 0 && params.kv_offsets.data != params.q_offsets.data)
    kv = sequence_rows(params.kv_offsets, found.seq);
  QueryTile tile;
  tile.global_row = found.rows.begin + found.row;
  tile.key_begin = kv.begin;
  tile.row = static_cast<int>(min(found.row, found.rows.len));
  tile.num_queries = static_cast<int>(found.rows.len);
  tile.rows = min(kTileM, tile.num_queries - tile.row);
  tile.num_keys = static_cast<int>(kv.len);
  if (found.seq < 0 ? params.split_by_length
                    : left_to_tiny(params, found.rows.len, kv.len) ||
                          left_to_short(params, found.rows.len, kv.len) ||
                          left_to_long(params, found.rows.len, kv.len)) {
    tile.rows = 0;
  }
  return tile;
}

// Whether most rows are likely those of long sequences, which have a kernel of their own: then those of
// this one, which are neither tiny nor long, are looked for by sequence. (Of long_rows() each none is, and a
// CTA could have the last tile of each of its sequences, which a causal mask leaves most to do.)
inline bool looks_by_sequence(const AttentionParams& params) {
  return params.long_plan != nullptr && params.split_by_length && !params.longer_in_slabs &&
         params.q_offsets.num_seqs > 0 && params.q_offsets.data == params.kv_offsets.data &&
         params.q_offsets.total / (long_rows(params) + 1) >= params.q_offsets.num_seqs;
}

// Rows of the longest sequence in self-attention that is not long, and tiles of kTile rows that it has.
inline __host__ __device__ int most_middle_rows(const AttentionParams& params) {
  const PlannedLengths& planned = params.planned;
  return planned.above < kShortRows && planned.spared < kShortRows ? planned.above : kShortRows;
}
template <int kTile>
__host__ __device__ int64_t middle_tiles(const AttentionParams& params) {
  return (most_middle_rows(params) + kTile - 1) / kTile;
}

// The tiles of sequences that are neither tiny nor long among those of this CTA in a grid of
// B * middle_tiles() or fewer CTAs, where looks_by_sequence(). All lanes of a warp.
template <int kTile>
class MiddleTilesOfCta {
 public:
  __device__ __forceinline__ explicit MiddleTilesOfCta(const AttentionParams& params)
      : params_(params), tiles_(params.q_offsets) {}

  // False if there are no more.
  __device__ __forceinline__ bool next(JaggedTile& tile) {
    return tiles_.next(tile, middle_tiles<kTile>(params_), [&](int64_t len) {
      return len > tiny_limit(params_) && !left_to_long(params_, len, len);
    });
  }

 private:
  const AttentionParams& params_;
  TilesBySequence<kTile> tiles_;
};

// Whether any sequence is neither tiny nor long, where looks_by_sequence(). All kThreads of a CTA.
template <int kThreads>
__device__ __forceinline__ bool any_middle(const AttentionParams& params) {
  return any_sequence<kThreads>(params, [&](int seq) {
    const int64_t len = sequence_rows(params.q_offsets, seq).len;
    return len > tiny_limit(params) && !left_to_long(params, len, len);
  });
}

// This CTA's tile in a grid of tile_grid(), where it is known whether its tiles lie in slabs.
template <int kTile, bool kSlabs>
__device__ __forceinline__ JaggedTile find_tile_of_grid(const AttentionParams& params) {
  if constexpr (kSlabs)
    return find_longer_tile<kTile>(params.q_offsets, tiny_limit(params), blockIdx.x);
  return find_any_tile<kTile>(params.q_offsets, blockIdx.x);
}

// Finds the tiles and copies everything that the warpgroup reads, in the order of its use; one warp,
// whose first lane copies. Behind more than one tile comes one without rows.
template <typename Config, bool kLooped, bool kSlabs>
__device__ __forceinline__ void produce_forward(const ForwardWgmmaParams& params,
                                                ForwardWgmmaStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads,
            first_head = blockIdx.y * params.heads_per_cta;
  RingPosition<Config::kSlots> ring;
  int phase = 0;  // of sQ and the tile
  // One lane.
  const auto publish = [&](const QueryTile& tile) {
    ptx::mbarrier_wait(shared.q_empty, phase % 2 ^ 1);
    shared.tile = tile;
    const KeyRange keys(tile, window_of(attention, tile), Config::kTileN);
    if (tile.rows == 0 || keys.first >= keys.last) {
      ptx::mbarrier_arrive(shared.q_full);
      ++phase;
      return;
    }
    for (int i = 0; i < params.heads_per_cta; ++i) {
      const int head = first_head + i;
      const auto copy = [&](const CUtensorMap& map, int key) {
        ptx::mbarrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
        copy_tile(shared.slots[ring.stage], map, tile.key_begin + key, head / group,
                  shared.full[ring.stage]);
        ring.advance();
      };
      ptx::mbarrier_wait(shared.q_empty, phase % 2 ^ 1);
      copy_tile(shared.sQ, params.q, tile.global_row, head, shared.q_full);
      ++phase;
      copy(params.k, keys.first);
      for (int key = keys.first; key < keys.last; key += Config::kTileN) {
        if (key + Config::kTileN < keys.last) copy(params.k, key + Config::kTileN);
        copy(params.v, key);
      }
    }
  };
  if constexpr (kLooped) {
    TilesOfCta<Config::kTileM> tiles(attention, attention.q_offsets);
    MiddleTilesOfCta<Config::kTileM> middle_tiles(attention);
    JaggedTile found;
    while (attention.longer_in_slabs ? tiles.next(found) : middle_tiles.next(found)) {
      const QueryTile tile = query_tile_of<Config::kTileM>(attention, found);
      if (tile.rows == 0) continue;
      if (threadIdx.x % 32 == 0) publish(tile);
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) publish(QueryTile{});
  } else {
    const QueryTile tile = query_tile_of<Config::kTileM>(
        attention, find_tile_of_grid<Config::kTileM, kSlabs>(attention));
    if (threadIdx.x % 32 == 0) publish(tile);
  }
}

// Rows of a tile from `first` on become zeros for the tensor cores; all threads of a warpgroup. Each
// warpgroup writes the same.
template <typename Tile>
__device__ __forceinline__ void zero_rows(Tile& tile, int first, int warpgroup) {
  zero_tile_rows<128>(tile, first, Tile::kRows, threadIdx.x % 128);
  ptx::fence_proxy_async();
  ptx::bar_sync(1 + warpgroup, 128);
}

// The keys of a tile that a warpgroup's own 64 rows see.
template <typename Config>
__device__ __forceinline__ KeyRange own_keys(const QueryTile& tile, const WindowOf<int>& window,
                                             int warpgroup) {
  QueryTile own = tile;
  own.row += warpgroup * 64;
  own.rows = min(64, tile.rows - warpgroup * 64);
  KeyRange keys(own, window, Config::kTileN);
  if (own.rows <= 0) keys.last = keys.first;
  return keys;
}

template <typename Config, bool kLooped>
__device__ __forceinline__ void consume_forward(const ForwardWgmmaParams& params,
                                                ForwardWgmmaStorage<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kTileN = Config::kTileN, kSlots = Config::kSlots;
  constexpr int kScoreBlocks = kTileN / 8, kOutBlocks = Config::kDim / 8;
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16 + lane / 4;
  const int warpgroup = Config::kWarpgroups == 1 ? 0 : threadIdx.x / 128;
  // At least a tiny positive number: with scale 0 all scores are equal, but a
  // masked one, -inf, must stay so.
  const float scale = static_cast<float>(attention.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);

  RingPosition<kSlots> ring;
  int phase = 0;
  do {
    ptx::mbarrier_wait(shared.q_full, phase % 2);
    const QueryTile tile = shared.tile;
    if (tile.rows == 0) return;
    const WindowOf<int> window = window_of(attention, tile);
    const KeyRange all_keys(tile, window, kTileN);
    const KeyRange keys =
        Config::kWarpgroups == 1 ? all_keys : own_keys<Config>(tile, window, warpgroup);
    if (kLooped && all_keys.first >= all_keys.last) {
      ptx::mbarrier_arrive(shared.q_empty);
      ++phase;
    }
    for (int i = 0; i < params.heads_per_cta; ++i) {
      const int head = blockIdx.y * params.heads_per_cta + i;
      OnlineSoftmax<1> softmax;
      Accumulator<1, kOutBlocks> o = {};
      Accumulator<1, kScoreBlocks> s;
      float rescale[1][2];
      const auto start_scores = [&] {
        ptx::mbarrier_wait(shared.full[ring.stage], ring.parity);
        ptx::wgmma_fence();
        wgmma_rows_by_rows<Config::kDim, true>(s, shared.sQ, warpgroup * 64,
                                               shared.slots[ring.stage]);
        ptx::wgmma_commit_group();
        return ring.advance();
      };
      // What becomes of the scores of the keys from `key` on, when their product is done.
      const auto finish_scores = [&](int key, int slot) {
        ptx::fence_operands(s[0]);
        const bool last = key + kTileN >= keys.last;
        if (lane == 0) ptx::mbarrier_arrive(shared.empty[slot]);
        if (last) ptx::mbarrier_arrive(shared.q_empty);
        if (scale < 0.0f) {
          // The maximum of scale * S lies where -S is largest.
#pragma unroll
          for (int e = 0; e < kScoreBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
        }
        if (window.cuts_tile(tile.row + warpgroup * 64, 64, key, kTileN, tile.num_keys)) {
          replace_unseen(s, -INFINITY, window, tile.row + own_row, key, tile.num_keys, lane);
        }
        softmax.update(s, rescale, scale_log2);
      };
      // O += P V for a tile with `rows` rows.
      const auto start_output = [&](const PackedRows<Element, kScoreBlocks>& p, int rows) {
        auto& sV = shared.slots[ring.stage];
        ptx::mbarrier_wait(shared.full[ring.stage], ring.parity);
        if (rows < kTileN) zero_rows(sV, rows, warpgroup);
        ptx::fence_operands(o[0]);
        ptx::wgmma_fence();
        wgmma_packed_by_columns<true>(o, p, sV);
        ptx::wgmma_commit_group();
        return ring.advance();
      };
      const auto finish_output = [&](int slot) {
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(o[0]);
        if (lane == 0) ptx::mbarrier_arrive(shared.empty[slot]);
      };

      // K or V of a step that only the other warpgroup computes.
      const auto skip_slot = [&] {
        ptx::mbarrier_wait(shared.full[ring.stage], ring.parity);
        if (lane == 0) ptx::mbarrier_arrive(shared.empty[ring.stage]);
        ring.advance();
      };
      const bool has_keys = keys.first < keys.last;
      if (has_keys || all_keys.first < all_keys.last) {
        ptx::mbarrier_wait(shared.q_full, phase % 2);
        ++phase;
      }
      if constexpr (Config::kWarpgroups > 1) {
        const int end = has_keys ? keys.first : all_keys.last;
        for (int key = all_keys.first; key < end; key += kTileN) {
          skip_slot();
          if (key > all_keys.first) skip_slot();
        }
        if (!has_keys && all_keys.first < all_keys.last) {
          skip_slot();
          ptx::mbarrier_arrive(shared.q_empty);
        }
      }
      if (has_keys) {
        const int first_slot = start_scores();
        if (Config::kWarpgroups > 1 && keys.first > all_keys.first) skip_slot();
        ptx::wgmma_wait_group<0>();
        finish_scores(keys.first, first_slot);
        int key = keys.first;
        for (; key + kTileN < keys.last; key += kTileN) {
          const PackedRows<Element, kScoreBlocks> p(s);
          const int score_slot = start_scores(), value_slot = start_output(p, kTileN);
          ptx::wgmma_wait_group<1>();
          finish_scores(key + kTileN, score_slot);
          finish_output(value_slot);
          rescale_rows(o, rescale);
        }
        const bool is_last = Config::kWarpgroups == 1 || key + kTileN >= all_keys.last;
        if (!is_last) skip_slot();
        finish_output(start_output(PackedRows<Element, kScoreBlocks>(s), tile.num_keys - key));
        if constexpr (Config::kWarpgroups > 1) {
          for (key += kTileN; key < all_keys.last; key += kTileN) {
            if (key + kTileN < all_keys.last) skip_slot();
            skip_slot();
          }
        }
      }

      softmax.finish();
      const int64_t global_row = tile.global_row + own_row;
      const int rows = tile.rows - own_row;  // from this lane's first on
      float inverse_sum[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = softmax.row_sum[0][half];
        inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
        if (lane % 4 == 0 && half * 8 < rows) {
          static_cast<float*>(attention.lse)[(global_row + half * 8) * attention.heads + head] =
              sum == 0.0f
                  ? -INFINITY
                  : __fmaf_rn(softmax.row_max[0][half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
        }
      }
      store_quads(o, inverse_sum, row_of<Element>(attention.out, global_row, head),
                  attention.out.row_stride, rows, attention.dim_v, lane);
    }
  } while (kLooped);
}

// A CTA and its tiles.
template <typename Config, bool kLooped, bool kSlabs = false>
__device__ __forceinline__ void run_forward_wgmma(const ForwardWgmmaParams& params,
                                                  ForwardWgmmaStorage<Config>& shared) {
  constexpr int kConsumerWarps = Config::kConsumers / 32;
  if (threadIdx.x == Config::kConsumers) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    ptx::mbarrier_init(shared.q_full, 1);
    ptx::mbarrier_init(shared.q_empty, Config::kConsumers);
    for (int slot = 0; slot < Config::kSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], 1);
      ptx::mbarrier_init(shared.empty[slot], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= Config::kConsumers) {
    produce_forward<Config, kLooped, kSlabs>(params, shared);
  } else {
    consume_forward<Config, kLooped>(params, shared);
  }
}

template <typename Config, bool kLooped>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_wgmma(
    const __grid_constant__ ForwardWgmmaParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  // launch_longer; and the next one, which may be that for long sequences, finds its plan complete.
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (kLooped && nothing_is_left(params.attention)) return;
  // Behind the kernel for long sequences there are likely none of others.
  if (kLooped && params.attention.long_first && !params.attention.longer_in_slabs &&
      params.attention.q_offsets.num_seqs <= 4 * Config::kThreads &&
      !any_middle<Config::kThreads>(params.attention))
    return;
  run_forward_wgmma<Config, kLooped>(
      params, *reinterpret_cast<ForwardWgmmaStorage<Config>*>(wgmma_shared_bytes));
}

template <typename Config>
cudaError_t encode_forward_maps(ForwardWgmmaParams& params, const AttentionParams& attention) {
  using QueryRows = typename ForwardWgmmaStorage<Config>::QueryRows;
  using KeyRows = typename ForwardWgmmaStorage<Config>::KeyRows;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  const cudaError_t errors[] = {encode_heads<QueryRows>(params.q, attention, attention.q, queries,
                                                        attention.heads, attention.dim_qk),
                                encode_heads<KeyRows>(params.k, attention, attention.k, keys,
                                                      attention.kv_heads, attention.dim_qk),
                                encode_heads<KeyRows>(params.v, attention, attention.v, keys,
                                                      attention.kv_heads, attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Whether most rows of narrow heads are likely those of sequences so long that K and V are copied often, and
// tiles of 128 rows are enough for the GPU.
inline bool takes_two_warpgroups(const AttentionParams& params) {
  constexpr int64_t kMeanRows = 512, kEnoughTiles = 528;
  const OffsetsView &queries = params.q_offsets, &keys = params.kv_offsets;
  return params.dim_qk <= 32 && params.dim_v <= 32 && !params.longer_in_slabs &&
         keys.num_seqs > 0 && keys.total / kMeanRows >= keys.num_seqs &&
         queries.total / kMeanRows >= queries.num_seqs &&
         queries.total / 128 * params.heads >= kEnoughTiles;
}

template <typename Element, int kDim, int kWarpgroups>
cudaError_t launch_forward_wgmma_tiles(const AttentionParams& attention, cudaStream_t stream) {
  using Config = ForwardWgmmaConfig<Element, kDim, kWarpgroups>;
  ForwardWgmmaParams params;
  params.attention = attention;
  const cudaError_t error = encode_forward_maps<Config>(params, attention);
  if (error != cudaSuccess) return error;
  Grid grid = tile_grid(attention, attention.q_offsets, Config::kTileM, attention.heads);
  const bool is_behind = attention.split_by_length || is_behind_long(attention);
  const auto launch_kernel = [&](auto looped) {
    return launch_behind<forward_wgmma<Config, looped.value != 0>>(
        is_behind, params, grid, Config::kThreads, sizeof(ForwardWgmmaStorage<Config>), stream,
        path_behind_long(attention, Config::kName));
  };
  if constexpr (kWarpgroups > 1) {
    params.heads_per_cta = 1;
    return launch_kernel(Constant<0>{});
  } else {
    const bool by_sequence = looks_by_sequence(attention);
    params.heads_per_cta = by_sequence ? 1 : heads_per_cta(attention, grid.x);
    grid = looped_grid(attention, attention.q_offsets, Config::kTileM,
                       attention.heads / params.heads_per_cta);
    if (by_sequence) {
      // One on each SM of an H100 finds a few thousand tiles while that for long sequences waits for SMs;
      // of more it would not hide what its products wait for.
      constexpr int64_t kFewTiles = 4096, kFewCtas = 132, kManyCtas = 528;
      const int64_t tiles = attention.q_offsets.num_seqs * middle_tiles<Config::kTileM>(attention),
                    ctas = tiles * attention.heads <= kFewTiles ? kFewCtas : kManyCtas,
                    enough = (ctas + attention.heads - 1) / attention.heads;
      grid.x = tiles < enough ? tiles : enough;
    }
    return attention.longer_in_slabs || by_sequence ? launch_kernel(Constant<1>{})
                                                    : launch_kernel(Constant<0>{});
  }
}

template <typename Element>
cudaError_t launch_forward_wgmma(const AttentionParams& attention, cudaStream_t stream) {
  if (takes_two_warpgroups(attention))
    return launch_forward_wgmma_tiles<Element, 32, 2>(attention, stream);
  const auto launch_dim = [&](auto dim) {
    return launch_forward_wgmma_tiles<Element, dim.value, 1>(attention, stream);
  };
  return fits_96(attention) ? launch_dim(Constant<96>{}) : for_dim<128>(attention, launch_dim);
}

}  // namespace jagged_cuda::attention
