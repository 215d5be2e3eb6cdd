// Forward of jagged_flash_attention for short sequences (short_items.cuh): head dims up to 64, 16-bit
// elements, copies by TMA, products by mma.sync (compute capability 9.0).
//
// An item is one head of a sequence, a unit 32 of its queries, which one warp takes against all
// keys:
//     for each 32 keys: S = Q K^T, P = exp(...), O += P V
//
// Twelve warps compute; of the other four one copies Q, K and V, one overwrites rows of V past the
// end with zeros (a copy may reach into the next sequence, and 0 times NaN is NaN). Scores of keys
// past the end are masked.
//
// Shared memory: the ring: 384 bytes for each row of an item, about five items of 100 rows. O leaves
// through the unit's own rows of Q.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/short_items.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_>
struct ShortForwardConfig {
  using Element = Element_;
  static constexpr int kConsumers = 384;
  static constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kUnitRows = 16;  // of one warp
  static constexpr int kKeyRows = 32;   // of which the keys in the ring are a multiple
  static constexpr int kMaxUnits = kShortRows / kUnitRows;
  static constexpr int kRingBytes = 212 * 1024;
  static constexpr PathName kName = PathName("cuda.attention.forward.short.d64");
  using Storage = ShortStorage<kRingBytes>;
  using Rows = WarpgroupTile<Element, 64, ShortLayout::kColumns>;
  static_assert(sizeof(Storage) <= 227 * 1024);
};

struct ShortForwardParams {
  ShortMaps q;
  ShortMaps k;
  ShortMaps v;
  AttentionParams attention;
};

template <typename Config>
__device__ __forceinline__ void produce_short_forward(const ShortForwardParams& params,
                                                      typename Config::Storage& shared, int warp,
                                                      int lane) {
  using Storage = typename Config::Storage;
  const AttentionParams& attention = params.attention;
  const bool listed = lists_all(attention);
  if (listed) list_short<64>(attention, shared, warp * 32 + lane);
  const unsigned group = attention.heads / attention.kv_heads;
  if (warp == 0) {
    ShortProducer<Storage> producer{attention, shared, Config::kMaxUnits, lane};
    producer.run(listed, [&](const ShortSequence& sequence, unsigned head) {
      ShortItem item{};
      item.queries = sequence.queries;
      item.keys = sequence.keys;
      item.head = head;
      item.units = round_up(item.queries.len, 64) / Config::kUnitRows;
      if (item.units == 0) return;
      producer.begin_item();
      item.k = producer.allocate_rows(round_up(item.keys.len, Config::kKeyRows));
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
          zero_short_rows(shared, item.v, item.keys.len,
                          round_up(item.keys.len, Config::kKeyRows), 0, 1, lane);
          ptx::fence_proxy_async();
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.ready[slot]);
      }
      if (!more) return;
    }
  }
}

// S = Q K^T of 64 queries and kBlocks * 8 keys.
template <typename Element, int kBlocks>
__device__ __forceinline__ void start_scores(float (&s)[kBlocks][4], ptx::MatrixDescriptor q,
                                             ptx::MatrixDescriptor keys) {
  constexpr int kFirst = kBlocks == 12 ? 8 : kBlocks;
#pragma unroll
  for (int k = 0; k < ShortLayout::kRowBytes; k += 32) {
    ptx::Wgmma<Element, false>::run(reinterpret_cast<float(&)[kFirst][4]>(s[0]), q + k, keys + k,
                                    k > 0);
  }
  if constexpr (kFirst < kBlocks) {
#pragma unroll
    for (int k = 0; k < ShortLayout::kRowBytes; k += 32) {
      ptx::Wgmma<Element, false>::run(
          reinterpret_cast<float(&)[kBlocks - kFirst][4]>(s[kFirst]), q + k,
          keys + kFirst * 8 * ShortLayout::kRowBytes + k, k > 0);
    }
  }
}

// 64 queries from `query` on, against all keys; a warpgroup, of which this is warp `warp`.
template <typename Config>
__device__ __forceinline__ void attend_short(const AttentionParams& params,
                                             const typename Config::Storage& shared,
                                             const ShortItem& item, uint64_t& empty, int query,
                                             int warp, int lane) {
  using Element = typename Config::Element;
  using Rows = typename Config::Rows;
  const auto rows_of = [&](int part, int row) -> const Rows& {
    return *reinterpret_cast<const Rows*>(shared.ring + part + row * ShortLayout::kRowBytes);
  };
  const ptx::MatrixDescriptor q = rows_of(item.q, query).descriptor();
  const int num_queries = item.queries.len, num_keys = item.keys.len, own_query = query + warp * 16;
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
    const ptx::MatrixDescriptor keys = rows_of(item.k, key).descriptor();
    ptx::wgmma_fence();
    start_scores<Element>(s[0], q, keys);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(s[0]);
    if (scale < 0.0f) {  // the maximum of scale * S lies where -S is largest
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) s[0][i / 4][i % 4] = -s[0][i / 4][i % 4];
    }
    if (window.cuts_tile(own_query, 16, key, kBlocks * 8, num_keys))
      replace_unseen(s, -INFINITY, window, own_query + lane / 4, key, num_keys, lane);
    PackedRows<Element, kBlocks> p;
    float rescale[1][2];
    const bool moved = softmax.update(s, p, rescale, scale_log2, [] {});
    if (moved && key > first) rescale_rows(o, rescale);
    ptx::fence_operands(o[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(o, p, rows_of(item.v, key));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(o[0]);
    key += kBlocks * 8;
  };
#pragma unroll 1
  while (key < last) {
    const int left = last - key;
    if (left > 96) {
      step(Constant<16>{});
    } else if (left > 64) {
      step(Constant<12>{});
    } else if (left > 32) {
      step(Constant<8>{});
    } else {
      step(Constant<4>{});
    }
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(empty);

  const int rows = num_queries - own_query - lane / 4;
  const int64_t row = static_cast<int64_t>(item.queries.begin) + own_query + lane / 4;
  float* lse = static_cast<float*>(params.lse) + row * params.heads + item.head;
  softmax.finish();
  float inverse_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.row_sum[half];
    inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
    if (lane % 4 == 0 && half * 8 < rows) {
      lse[half * 8 * params.heads] =
          sum == 0.0f
              ? -INFINITY
              : __fmaf_rn(softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
    }
  }
  store_quads(o, inverse_sum, row_of<Element>(params.out, row, static_cast<int>(item.head)),
              params.out.row_stride, rows, params.dim_v, lane);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void forward_short(
    const __grid_constant__ ShortForwardParams params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) shared.init(1, Config::kMaxUnits, Config::kConsumers / 32);
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_short_forward<Config>(params, shared, warp, lane);
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    // Units of 16 queries, four at a time, in turn.
    ShortUnits<Storage> units{shared, lane, warp - 4};
    int unit;
    while (units.find(unit)) {
      attend_short<Config>(params.attention, shared, units.item(), shared.empty[units.slot()],
                           unit / 4 * 64, warp % 4, lane);
      units.taken += Config::kConsumers / 32;
    }
  }
}

template <typename Element>
cudaError_t launch_forward_short(const AttentionParams& attention, cudaStream_t stream) {
  using Config = ShortForwardConfig<Element>;
  ShortForwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int device = 0, num_sms = 0;
  const cudaError_t errors[] = {
      params.q.encode<Element>(attention, attention.q, queries, attention.heads, attention.dim_qk),
      params.k.encode<Element>(attention, attention.k, keys, attention.kv_heads, attention.dim_qk),
      params.v.encode<Element>(attention, attention.v, keys, attention.kv_heads, attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<forward_short<Config>>(attention, params, Grid{num_sms}, Config::kThreads,
                                              sizeof(typename Config::Storage), stream,
                                              Config::kName);
}

}  // namespace jagged_cuda::attention
