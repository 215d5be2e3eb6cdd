// Forward of jagged_flash_attention for short sequences (short_items.cuh): head dims up to 64, 16-bit
// elements, copies by TMA, products by mma.sync (compute capability 9.0).
//
// An item is one head of a sequence, a unit 16 of its queries, which one warp takes against all
// keys:
//     for each 32 keys: S = Q K^T, P = exp(...), O += P V
//
// Sixteen warps compute; of the other four each of three copies one of Q, K and V, the last overwrites
// rows of V past the end with zeros (a copy may reach into the next sequence, and 0 times NaN is
// NaN). Scores of keys past the end are masked. Without queries there is no item; without keys a unit
// writes out 0 and lse -inf.
//
// Shared memory: the ring: 384 bytes for each row of an item, about five items of 100 rows. O leaves
// through the unit's own rows of Q.
#pragma once

#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/short_items.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_>
struct ShortForwardConfig {
  using Element = Element_;
  static constexpr int kConsumers = 512;
  // With 640 threads a kernel starts with 96 registers a thread.
  static constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kUnitRows = 16;
  static constexpr int kMaxUnits = kShortRows / kUnitRows;
  static constexpr int kRingBytes = 212 * 1024;
  static constexpr PathName kName = PathName("cuda.attention.forward.short.d64");
  using Storage = ShortStorage<kRingBytes>;
  using Tile = SharedTile<Element, 32, ShortLayout::kColumns>;
  static_assert(sizeof(Storage) <= 227 * 1024);
};

struct ShortForwardParams {
  ShortMaps q;
  ShortMaps k;
  ShortMaps v;
  AttentionParams attention;

  template <typename Element>
  cudaError_t encode() {
    const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
    const cudaError_t errors[] = {
        q.encode<Element>(attention, attention.q, queries, attention.heads, attention.dim_qk),
        k.encode<Element>(attention, attention.k, keys, attention.kv_heads, attention.dim_qk),
        v.encode<Element>(attention, attention.v, keys, attention.kv_heads, attention.dim_v)};
    for (cudaError_t error : errors) {
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
};

struct ShortForwardItems {
  __device__ __forceinline__ static bool is_first(const ShortSequence& /*sequence*/) {
    return true;
  }
  __device__ __forceinline__ static int cost(const ShortSequence& sequence) {
    const int queries = sequence.queries.len, keys = sequence.keys.len;
    // About rows moved.
    return queries + keys == 0 ? 0 : 32 + queries + keys + queries * keys / 64;
  }
};

template <typename Config>
__device__ __forceinline__ void produce_short_forward(const ShortForwardParams& params,
                                                      typename Config::Storage& shared,
                                                      bool listed, int warp, int lane) {
  using Storage = typename Config::Storage;
  const AttentionParams& attention = params.attention;
  const unsigned group = attention.heads / attention.kv_heads;
  if (warp == 0) {
    ShortProducer<Storage> producer{attention, shared, Config::kMaxUnits, lane};
    producer.template run<ShortForwardItems>(
        listed, [&](const ShortSequence& sequence, unsigned head) {
          ShortItem item{};
          item.queries = sequence.queries;
          item.keys = sequence.keys;
          item.head = head;
          item.units = (item.queries.len + Config::kUnitRows - 1) / Config::kUnitRows;
          if (item.units == 0) return;
          producer.begin_item();
          item.k = producer.allocate_rows(item.keys.len);
          item.q = producer.allocate_rows(item.queries.len);
          item.v = producer.allocate_rows(item.keys.len);
          const int rows = round_up(item.queries.len, Storage::kBoxRows) +
                           2 * round_up(item.keys.len, Storage::kBoxRows);
          uint64_t& full = producer.push(item, rows * Storage::kRowBytes);
          copy_short_rows(shared, params.k, item.k, item.keys, head / group, full, lane);
        });
  } else {
    for (int position = 0;; ++position) {
      const int slot = position % Storage::kDescribed, parity = position / Storage::kDescribed % 2;
      ptx::mbarrier_wait(shared.issued[slot], parity);
      const ShortItem& item = shared.items[slot];
      const bool more = item.units >= 0;
      uint64_t& full = shared.full[slot];
      if (more && warp == 1) {
        copy_short_rows(shared, params.q, item.q, item.queries, item.head, full, lane);
      } else if (more && warp == 2) {
        copy_short_rows(shared, params.v, item.v, item.keys, item.head / group, full, lane);
      } else if (warp == 3) {
        if (more) {
          ptx::mbarrier_wait(full, parity);
          zero_short_rows(shared, item.v, item.keys.len, lane);
          ptx::fence_proxy_async();
        }
        ptx::mbarrier_arrive(shared.ready[slot]);  // every lane, for its zeros
      }
      if (!more) return;
    }
  }
}

// 16 queries from `query` on, against all keys. Calls release() when all was read from the ring.
template <typename Config, typename Release>
__device__ __forceinline__ void attend_short(const AttentionParams& params, char* ring,
                                             const ShortItem& item, int query, int lane,
                                             Release release) {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Address = LaneAddress<Tile>;
  Tile& tile_q = *reinterpret_cast<Tile*>(ring + item.q);
  const auto k_rows = Address::by_columns(*reinterpret_cast<Tile*>(ring + item.k), 0, lane),
             v_rows = Address::by_rows(*reinterpret_cast<Tile*>(ring + item.v), 0, lane);
  const int num_queries = item.queries.len, num_keys = item.keys.len;
  // At least a tiny positive number: with scale 0 all scores are equal, but a masked one, -inf, must
  // stay so.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const int first = window.first_column(query) / 32 * 32,
            last = window.last_column(query, 16, num_keys);
  const RowOperand<true, 1, Tile> q(tile_q, query, lane);
  LazySoftmax softmax;
  Accumulator<1, 8> o = {};
  int key = first;
  // The next kBlocks * 8 keys.
  const auto step = [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    Accumulator<1, kBlocks> s = {};
    mma_rows_by_rows(s, q, k_rows.rows_on(key));
    if (scale < 0.0f) {  // the maximum of scale * S lies where -S is largest
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) s[0][i / 4][i % 4] = -s[0][i / 4][i % 4];
    }
    if (window.cuts_tile(query, 16, key, kBlocks * 8, num_keys))
      replace_unseen(s, -INFINITY, window, query + lane / 4, key, num_keys, lane);
    PackedRows<Element, kBlocks> p;
    float rescale[1][2];
    const bool moved = softmax.update(s, p, rescale, scale_log2, [] {});
    if (moved && key > first) rescale_rows(o, rescale);
    const auto values = v_rows.rows_on(key);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
#pragma unroll
      for (int out = 0; out < 8; out += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, values.block(block * 8, out * 8));
        ptx::mma_m16n8k16<Element>(o[0][out], p.fragments[block / 2], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(o[0][out + 1], p.fragments[block / 2], b[2], b[3]);
      }
    }
  };
#pragma unroll 1
  for (; key + 16 < last; key += 32) step(Constant<4>{});
  if (key < last) step(Constant<2>{});

  const uint32_t stage = ptx::shared_address(ring) + item.q + query * Tile::kRowBytes;
  const unsigned row = item.queries.begin + query;
  const int rows = num_queries - query;
  const LaneRows out(params.out, row + lane / 8, item.head, lane % 8 * 8);
  char* lse =
      static_cast<char*>(params.lse) +
      (static_cast<uint64_t>(row + lane / 4) * static_cast<unsigned>(params.heads) + item.head) * 4;
  softmax.finish();
  float inverse_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.row_sum[half];
    inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
    if (lane % 4 == 0 && half * 8 + lane / 4 < rows) {
      *reinterpret_cast<float*>(lse + half * 8 * static_cast<unsigned>(params.heads) * 4) =
          sum == 0.0f
              ? -INFINITY
              : __fmaf_rn(softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
    }
  }
  const auto output = ShortOutput::of<Element>(o[0], inverse_sum, stage, lane);
  release();
  output.store(out, lane % 8 * 8 < params.dim_v ? rows - lane / 8 : 0);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void forward_short(
    const __grid_constant__ ShortForwardParams params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) shared.init(Config::kMaxUnits, Config::kConsumers / 32);
  __syncthreads();
  const bool listed = lists_all(params.attention);
  if (listed) list_short<ShortForwardItems, Config::kThreads>(params.attention, shared.listed);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_short_forward<Config>(params, shared, listed, warp, lane);
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ShortUnits<Storage> units{shared, lane, warp - 4};
    int unit;
    while (units.find(unit)) {
      attend_short<Config>(params.attention, shared.ring, units.item(), unit * Config::kUnitRows,
                           lane, [&] {
                             ptx::fence_proxy_async();  // before the next copy to the rows of Q
                             units.take_next();
                           });
    }
  }
}

template <typename Element>
cudaError_t launch_forward_short(const AttentionParams& attention, cudaStream_t stream) {
  using Config = ShortForwardConfig<Element>;
  ShortForwardParams params;
  params.attention = attention;
  int device = 0, num_sms = 0;
  const cudaError_t errors[] = {
      params.encode<Element>(), cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<forward_short<Config>>(attention, params, Grid{num_sms}, Config::kThreads,
                                              sizeof(typename Config::Storage), stream,
                                              path_behind_long(attention, Config::kName));
}

}  // namespace jagged_cuda::attention
