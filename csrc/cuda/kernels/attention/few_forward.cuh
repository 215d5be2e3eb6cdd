// Forward of jagged_flash_attention where there are few tiles: then a launch costs more than what it
// does, so one kernel has the CTAs of two, that on wgmma (forward_wgmma.cuh) and that for tiny
// sequences (tiny_forward.cuh, tiny_wide_forward.cuh). For head dims of 33 to 64 the former computes
// what the kernel for short sequences does (short_forward.cuh), without its ring: a CTA has a tile of
// 64 queries, which wait for nothing but the tile's own copies.
//
// Grid: y = heads; x = first the tiles of the former, then CTAs of the latter, numbered over x and y,
// whose warps take 16 queries of one head of a sequence each, and all of which write to the rows
// outside all sequences. forward_few is compiled for one CTA per SM, so that these have the registers
// that they want.
//
// forward_few: shared memory, barriers and edges are those of forward_wgmma.cuh; tiny sequences need
// none.
//
// forward_few_short, a tile of a short sequence, one warpgroup:
//     warps 0, 1, 2: copy K, Q, V of the tile;  all wait;  warp 3: zeros in V past the end
//     __syncthreads;  the 64 queries against all keys (attend_short)
// Shared memory: all keys and values of a sequence, kShortRows rows each, and the tile's queries, in
// rows of 128 bytes: 72 KiB. O leaves through the warp's own rows of Q.
// Barriers: `full`: warps 0 to 2, each with the bytes of its copies; all threads wait, once per CTA.
// One __syncthreads once it is initialised, one behind the zeros, one behind the products.
// A CTA whose tile has no rows, or is of a sequence that is tiny or not short, ends at once.
#pragma once

#include "cuda/kernels/attention/few_forward.h"
#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/short_forward.cuh"
#include "cuda/kernels/attention/tiny_wide_forward.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

template <typename Element, int kDim, bool kSlabs_>
struct FewForwardConfig {
  static constexpr bool kSlabs = kSlabs_;  // whether tiles are looked for in slabs
  using Tiles = ForwardWgmmaConfig<Element, kDim>;
  using Tiny = std::conditional_t<kDim <= 64, TinyForwardConfig<Element, kDim>,
                                  TinyWideForwardConfig<Element, kDim>>;
  static constexpr int kThreads = Tiles::kThreads, kTinyWarps = kThreads / 32;
  static constexpr int kBlocks = (kDim <= 64 ? kTinyRows : kTinyWideRows) / 16;  // of a sequence
};

struct FewForwardParams : ForwardWgmmaParams {
  unsigned tile_ctas;  // of the grid's x
};

// The CTAs for tiny sequences, behind the others of the grid's x.
template <typename Config>
__device__ __forceinline__ void run_tiny(const AttentionParams& attention, unsigned first_cta) {
  using Tiny = typename Config::Tiny;
  const unsigned heads = attention.heads, ctas = (gridDim.x - first_cta) * gridDim.y,
                 cta = (blockIdx.x - first_cta) * gridDim.y + blockIdx.y,
                 items =
                     static_cast<unsigned>(attention.q_offsets.num_seqs) * Config::kBlocks * heads;
  fill_outside(attention.q_offsets, attention.out.data, heads * attention.dim_v / 2, 0.0f, cta,
               ctas);
  fill_outside(attention.q_offsets, attention.lse, heads, -INFINITY, cta, ctas);
  const unsigned item = cta * Config::kTinyWarps + threadIdx.x / 32;
  if (item >= items) return;
  const unsigned block = item / heads, seq = block / Config::kBlocks, head = item % heads;
  const int begin = static_cast<int>(block % Config::kBlocks) * 16, lane = threadIdx.x % 32;
  if constexpr (Tiny::kDim <= 64) {
    attend_tiny<Tiny>(attention, seq, head, begin, 1, lane);
  } else {
    attend_tiny_wide<Tiny>(attention, seq, head, begin, 1, lane);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void forward_few(const __grid_constant__ FewForwardParams params) {
  using Tiles = typename Config::Tiles;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  const AttentionParams& attention = params.attention;
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x < params.tile_ctas) {
    run_forward_wgmma<Tiles, false, Config::kSlabs>(
        params, *reinterpret_cast<ForwardWgmmaStorage<Tiles>*>(wgmma_shared_bytes));
    if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_behind
    return;
  }
  run_tiny<Config>(attention, params.tile_ctas);
}

template <typename Element_, bool kSlabs_>
struct FewShortConfig {
  using Element = Element_;
  static constexpr bool kSlabs = kSlabs_;
  using Short = ShortForwardConfig<Element>;
  using Tiny = TinyForwardConfig<Element, 64>;
  static constexpr int kTinyWarps = 4, kThreads = kTinyWarps * 32, kMinCtas = 3;
  static constexpr int kBlocks = kTinyRows / 16;  // of a tiny sequence
  static constexpr int kTileM = kTinyWarps * Short::kUnitRows;
};

struct FewShortParams : ShortForwardParams {
  unsigned tile_ctas;  // of the grid's x
};

struct FewShortStorage : ShortLayout {
  // Bytes of all keys, all values and a tile of queries.
  static constexpr int kKeys = 0, kValues = kShortRows * kRowBytes, kQueries = 2 * kValues;
  alignas(1024) char ring[kQueries + 64 * kRowBytes];
  uint64_t full;
};

// A tile of a short sequence; nothing if the CTA's is of another.
template <typename Config>
__device__ __forceinline__ void run_short_tile(const FewShortParams& params,
                                               FewShortStorage& shared) {
  constexpr int kTileM = Config::kTileM;
  const AttentionParams& attention = params.attention;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.full, 3);
    ptx::fence_mbarrier_init();
  }
  const JaggedTile found = find_tile_of_grid<kTileM, Config::kSlabs>(attention);
  const int num_rows = static_cast<int>(min(found.rows.len, int64_t{kShortRows + 1}));
  __syncthreads();
  if (found.seq < 0 || found.row >= num_rows || num_rows > kShortRows ||
      is_tiny(attention, num_rows, num_rows)) {
    return;
  }
  const int row = static_cast<int>(found.row);
  const unsigned begin = static_cast<unsigned>(found.rows.begin);
  const WindowOf<int> window{0, window_rows32(attention.window_left),
                             window_rows32(attention.window_right)};
  ShortItem item{};
  item.queries = item.keys = {begin, num_rows};
  item.head = blockIdx.y;
  item.k = FewShortStorage::kKeys;
  item.v = FewShortStorage::kValues;
  item.q = FewShortStorage::kQueries - row * FewShortStorage::kRowBytes;  // of the first query
  const unsigned kv_head = item.head / static_cast<unsigned>(attention.heads / attention.kv_heads);
  const auto copy = [&](const ShortMaps& maps, int to, TinyRows rows, unsigned head) {
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(
          shared.full, round_up(rows.len, FewShortStorage::kBoxRows) * FewShortStorage::kRowBytes);
    }
    copy_short_rows(shared, maps, to, rows, head, shared.full, lane);
  };
  const TinyRows keys = {begin, window.last_column(row, kTileM, num_rows)};
  if (warp == 0) copy(params.k, item.k, keys, kv_head);
  if (warp == 1)
    copy(params.q, FewShortStorage::kQueries, {begin + row, min(kTileM, num_rows - row)},
         item.head);
  if (warp == 2) copy(params.v, item.v, keys, kv_head);
  ptx::mbarrier_wait(shared.full, 0);
  if (warp == 3) {
    zero_short_rows(shared, item.v, min(num_rows, round_up(keys.len, FewShortStorage::kBoxRows)),
                    round_up(keys.len, Config::Short::kKeyRows), lane);
    ptx::fence_proxy_async();
  }
  __syncthreads();
  attend_short<typename Config::Short>(
      attention, shared.ring, item, row, warp, lane, [] { __syncthreads(); }, [] {});
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_few_short(
    const __grid_constant__ FewShortParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x < params.tile_ctas) {
    run_short_tile<Config>(params, *reinterpret_cast<FewShortStorage*>(wgmma_shared_bytes));
    if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_behind
    return;
  }
  run_tiny<Config>(params.attention, params.tile_ctas);
}

// The CTAs for tiles and behind them those for tiny sequences, a warp for each item: of y * kTinyWarps,
// where y is the number of heads. At least one, since they write the rows outside all sequences, which
// may be all there are.
template <typename Config>
Grid few_grid(const AttentionParams& attention, int64_t tile_ctas) {
  const int64_t items = attention.q_offsets.num_seqs * Config::kBlocks;
  return {tile_ctas + (items > 0 ? (items + Config::kTinyWarps - 1) / Config::kTinyWarps : 1),
          attention.heads};
}

template <typename Config, typename Element = typename Config::Element>
cudaError_t launch_few_short(const AttentionParams& attention, cudaStream_t stream) {
  FewShortParams params;
  params.attention = attention;
  params.attention.longer_in_slabs = Config::kSlabs;
  const cudaError_t error = params.encode<Element>();
  if (error != cudaSuccess) return error;
  const int64_t tiles =
      tile_grid(params.attention, attention.q_offsets, Config::kTileM, attention.heads).x;
  params.tile_ctas = static_cast<unsigned>(tiles);
  return launch_behind<forward_few_short<Config>>(
      is_behind_long(attention), params, few_grid<Config>(attention, tiles), Config::kThreads,
      sizeof(FewShortStorage), stream, path_behind_long(attention, Config::Short::kName));
}

template <typename Config>
cudaError_t launch_few_tiles(const AttentionParams& attention, cudaStream_t stream) {
  using Tiles = typename Config::Tiles;
  FewForwardParams params;
  params.attention = attention;
  params.attention.longer_in_slabs = Config::kSlabs;
  params.heads_per_cta = 1;
  const cudaError_t error = encode_forward_maps<Tiles>(params, attention);
  if (error != cudaSuccess) return error;
  const Grid tiles =
      tile_grid(params.attention, attention.q_offsets, Tiles::kTileM, attention.heads);
  params.tile_ctas = static_cast<unsigned>(tiles.x);
  return launch_behind<forward_few<Config>>(
      is_behind_long(attention), params, few_grid<Config>(attention, tiles.x), Config::kThreads,
      sizeof(ForwardWgmmaStorage<Tiles>), stream, path_behind_long(attention, Tiles::kName));
}

template <typename Element>
cudaError_t launch_forward_few(const AttentionParams& attention, cudaStream_t stream) {
  const auto launch = [&](auto slabs) {
    constexpr bool kSlabs = slabs.value != 0;
    const int bucket = dim_bucket(attention);
    if (bucket == 64) return launch_few_short<FewShortConfig<Element, kSlabs>>(attention, stream);
    if (bucket == 32)
      return launch_few_tiles<FewForwardConfig<Element, 32, kSlabs>>(attention, stream);
    if (fits_96(attention))
      return launch_few_tiles<FewForwardConfig<Element, 96, kSlabs>>(attention, stream);
    return launch_few_tiles<FewForwardConfig<Element, 128, kSlabs>>(attention, stream);
  };
  return looks_in_slabs(attention) ? launch(Constant<1>{}) : launch(Constant<0>{});
}

}  // namespace jagged_cuda::attention
