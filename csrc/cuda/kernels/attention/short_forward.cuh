// Forward of jagged_flash_attention for short sequences (short_items.cuh): head dims up to 64, 16-bit
// elements, copies by TMA, products by wgmma (compute capability 9.0).
//
// An item is one head of a sequence. A warpgroup takes 64 of its queries, four units of 16, against
// all keys:
//     for each 64 keys (or the 32 that are left): S = Q K^T, P = exp(...), O += P V
// while three others do the same, so that one's exponentials run beside the others' products. A warp
// of whose 16 queries there is none takes part in the products alone.
//
// Sixteen warps compute; of the other four each of three copies one of Q, K and V, the last overwrites
// rows of V past the end with zeros, up to a multiple of 32, which the last step may be (a copy may
// reach into the next sequence, and 0 times NaN is NaN). Scores of keys past the end are masked; what
// queries past the end give is not stored. Without queries there is no item; without keys a unit
// writes out 0 and lse -inf.
//
// Shared memory: the ring: 384 bytes for each row of an item, about five items of 100 rows. A product
// may read rows behind an item's last, and behind the ring's. O leaves through the unit's own rows of
// Q.
// Barriers beside those of short_items.cuh: 1 to 4, of each warpgroup: its products have read Q.
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
  static constexpr int kUnitRows = 16;  // of one warp
  static constexpr int kMaxUnits = kShortRows / kUnitRows;
  static constexpr int kKeyRows = 32;  // of which the values in the ring are a multiple
  static constexpr int kRingBytes = 212 * 1024;
  static constexpr PathName kName = PathName("cuda.attention.forward.short.d64");
  using Storage = ShortStorage<kRingBytes>;
  using Rows = WarpgroupTile<Element, 64, ShortLayout::kColumns>;
  // A part of the ring has 16 rows at least.
  static_assert(sizeof(Storage) <= 227 * 1024 &&
                sizeof(Storage) >= kRingBytes + 48 * ShortLayout::kRowBytes);
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
  // In about 170 cycles of a warpgroup, by clock() (docs/performance_log.md).
  __device__ __forceinline__ static int cost(const ShortSequence& sequence) {
    const int keys = sequence.keys.len, steps = (keys + 31) / 32;  // of 32 keys
    return (sequence.queries.len + 63) / 64 * (16 + steps / 2 * 10 + steps % 2 * 6);
  }
};

template <typename Config>
__device__ __forceinline__ void produce_short_forward(const ShortForwardParams& params,
                                                      typename Config::Storage& shared, bool listed,
                                                      int warp, int lane) {
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
          item.units = round_up(item.queries.len, 64) / Config::kUnitRows;
          if (item.units == 0) return;
          producer.begin_item();
          item.k = producer.allocate_rows(item.keys.len);
          item.q = producer.allocate_rows(item.queries.len);
          item.v = producer.allocate_rows(round_up(item.keys.len, Config::kKeyRows));
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
          zero_short_rows(shared, item.v, item.keys.len, round_up(item.keys.len, Config::kKeyRows),
                          lane);
          ptx::fence_proxy_async();
        }
        ptx::mbarrier_arrive(shared.ready[slot]);  // every lane, for its zeros
      }
      if (!more) return;
    }
  }
}

// 64 queries from `query` on, against all keys; a warpgroup, of which this is warp `warp`. It meets()
// before its output passes through the rows of Q, and calls release() when all was read from the ring.
template <typename Config, typename Meet, typename Release>
__device__ __forceinline__ void attend_short(const AttentionParams& params, char* ring,
                                             const ShortItem& item, int query, int warp, int lane,
                                             Meet meet, Release release) {
  using Element = typename Config::Element;
  using Rows = typename Config::Rows;
  const auto rows_of = [&](int part, int row) -> const Rows& {
    return *reinterpret_cast<const Rows*>(ring + part + row * Rows::kRowBytes);
  };
  const Rows& tile_q = rows_of(item.q, query);
  const int num_queries = item.queries.len, num_keys = item.keys.len, own = query + warp * 16;
  // At least a tiny positive number: with scale 0 all scores are equal, but a masked one, -inf, must
  // stay so.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const int first = window.first_column(query) / 32 * 32,
            last = window.last_column(query, 64, num_keys);
  LazySoftmax softmax;
  Accumulator<1, 8> o = {};
  int key = first;
  // The next kBlocks * 8 keys.
  const auto step = [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    Accumulator<1, kBlocks> s;
    ptx::wgmma_fence();
    wgmma_rows_by_rows<0, true>(s, tile_q, 0, rows_of(item.k, key));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();  // for the output of the last step, too
    ptx::fence_operands(s[0]);
    ptx::fence_operands(o[0]);
    PackedRows<Element, kBlocks> p;  // of queries past the end anything
    if (own < num_queries) {
      if (scale < 0.0f) {  // the maximum of scale * S lies where -S is largest
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) s[0][i / 4][i % 4] = -s[0][i / 4][i % 4];
      }
      if (window.cuts_tile(own, 16, key, kBlocks * 8, num_keys))
        replace_unseen(s, -INFINITY, window, own + lane / 4, key, num_keys, lane);
      float rescale[1][2];
      const bool moved = softmax.update(s, p, rescale, scale_log2, [] {});
      if (moved && key > first) rescale_rows(o, rescale);
    }
    ptx::fence_operands(o[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(o, p, rows_of(item.v, key));
    ptx::wgmma_commit_group();
    key += kBlocks * 8;
  };
#pragma unroll 1
  while (key + 32 < last) step(Constant<8>{});
  if (key < last) step(Constant<4>{});
  ptx::wgmma_wait_group<0>();
  ptx::fence_operands(o[0]);
  meet();
  if (own >= num_queries) return release();

  const uint32_t stage = ptx::shared_address(ring) + item.q + own * Rows::kRowBytes;
  const unsigned row = item.queries.begin + own;
  const int rows = num_queries - own;
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
  const bool listed = lists_all(params.attention);
  if (listed && are_mostly_tiny(params.attention) &&
      !any_short<Config::kThreads>(params.attention)) {
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
    return;
  }
  if (threadIdx.x == 0) shared.init(Config::kMaxUnits);
  __syncthreads();
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
      attend_short<Config>(
          params.attention, shared.ring, units.item(), unit / 4 * 64, warp % 4, lane,
          [&] { ptx::bar_sync(warp / 4, 128); },
          [&] {
            ptx::fence_proxy_async();  // before the next copy to the rows of Q
            units.take_next(Config::kConsumers / 32);
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
