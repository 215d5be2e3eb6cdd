// Backward of jagged_flash_attention for short sequences (short_items.cuh): head dims up to 64,
// 16-bit elements, as many kv heads as heads, copies by TMA, products by mma.sync (compute
// capability 9.0).
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// An item is one head of a sequence, a unit 16 of its keys or of its queries, which one warp takes
// against all queries or keys. So S and dP are computed twice, and nothing is summed over warps: no
// atomics, the same bits at every run.
//
// Twelve warps compute; of the other four one copies Q, K, V and dO, three sum delta from O (which
// they read themselves) and dO, and overwrite rows past the end with zeros (a copy may reach into
// the next sequence, and 0 times NaN is NaN).
//
// Shared memory: the ring: 520 bytes for each row of an item, two of 208 rows. Gradients leave
// through 8 rows of each warp's own.
#pragma once

#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/short_items.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_>
struct ShortBackwardConfig {
  using Element = Element_;
  static constexpr int kConsumers = 384;
  static constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
  static constexpr int kHelpers = 3;  // warps
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kUnitRows = 16;
  static constexpr int kMaxUnits = 2 * kShortRows / kUnitRows;
  static constexpr int kRingBytes = 204 * 1024;
  static constexpr PathName kName = PathName("cuda.attention.backward.short.d64");
  struct Storage : ShortStorage<kRingBytes> {
    alignas(1024) char stages[kConsumers / 32][8 * ShortLayout::kRowBytes];
  };
  using Tile = SharedTile<Element, 32, ShortLayout::kColumns>;
  static_assert(sizeof(Storage) <= 227 * 1024);
};

struct ShortBackwardParams {
  ShortMaps q;
  ShortMaps k;
  ShortMaps v;
  ShortMaps grad_out;
  AttentionBackwardParams attention;
};

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// Statistics and zeros of one item; one warp of kHelpers.
template <typename Config>
__device__ __forceinline__ void prepare_short(const AttentionBackwardParams& params,
                                              typename Config::Storage& shared,
                                              const ShortItem& item, uint64_t& full, int parity,
                                              int helper, int lane) {
  using Element = typename Config::Element;
  constexpr int kHelpers = Config::kHelpers, kRowBytes = ShortLayout::kRowBytes,
                kBoxRows = ShortLayout::kBoxRows, kAtOnce = 4;
  const int num_queries = item.queries.len, query_rows = round_up(num_queries, kBoxRows);
  const int own_row = lane / 8, chunk = lane % 8;
  float* lse = reinterpret_cast<float*>(shared.ring + item.lse);
  float* delta = reinterpret_cast<float*>(shared.ring + item.delta);
  const uint64_t first = static_cast<uint64_t>(item.queries.begin) * params.heads + item.head;
  bool waited = false;
  // 4 rows at a time.
#pragma unroll 1
  for (int row = helper * 4; row < query_rows; row += kAtOnce * kHelpers * 4) {
    uint4 out[kAtOnce];
    const LaneRows g(params.out, item.queries.begin + row + own_row, item.head, chunk * 8);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = i * kHelpers * 4;
      out[i] = ptx::ld_global_nc_16(g.row(step),
                                    row + own_row + step < num_queries && chunk * 8 < params.dim_v);
    }
    if (!waited) {
      // Numbers of the item's queries, a query past the end, or one that sees nothing, has P = 0.
      for (int query = helper * 32 + lane; query < query_rows; query += kHelpers * 32) {
        const float value =
            query < num_queries
                ? static_cast<const float*>(
                      params.lse)[first + static_cast<uint64_t>(query) * params.heads]
                : -INFINITY;
        lse[query] = value == -INFINITY ? INFINITY : value * kLog2E;
      }
      ptx::mbarrier_wait(full, parity);
      waited = true;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int query = row + own_row + i * kHelpers * 4;
      if (query >= query_rows) break;  // the same in all lanes
      const uint4 grad = *reinterpret_cast<const uint4*>(
          shared.ring + item.grad_out + query * kRowBytes + ((chunk ^ (query & 7)) * 16));
      const uint32_t a[4] = {out[i].x, out[i].y, out[i].z, out[i].w},
                     b[4] = {grad.x, grad.y, grad.z, grad.w};
      float sum = 0.0f;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 x = unpack<Element>(a[pair]), y = unpack<Element>(b[pair]);
        sum += x.x * y.x;
        sum += x.y * y.y;
      }
#pragma unroll
      for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      if (chunk == 0) {
        if (query < num_queries && params.grad_lse != nullptr)
          sum -= static_cast<const float*>(
              params.grad_lse)[first + static_cast<uint64_t>(query) * params.heads];
        delta[query] = query < num_queries ? sum : 0.0f;
      }
    }
  }
  if (!waited) ptx::mbarrier_wait(full, parity);
  zero_short_rows(shared, item.q, num_queries, helper, kHelpers, lane);
  zero_short_rows(shared, item.grad_out, num_queries, helper, kHelpers, lane);
  zero_short_rows(shared, item.k, item.keys.len, helper, kHelpers, lane);
  zero_short_rows(shared, item.v, item.keys.len, helper, kHelpers, lane);
  ptx::fence_proxy_async();
}

template <typename Config>
__device__ __forceinline__ void produce_short_backward(const ShortBackwardParams& params,
                                                       typename Config::Storage& shared, int warp,
                                                       int lane) {
  using Storage = typename Config::Storage;
  const AttentionBackwardParams& attention = params.attention;
  const bool listed = lists_all(attention);
  if (listed) list_short<24>(attention, shared, warp * 32 + lane);
  if (warp > 0) {
    for (int position = 0;; ++position) {
      const int slot = position % Storage::kDescribed, parity = position / Storage::kDescribed % 2;
      ptx::mbarrier_wait(shared.issued[slot], parity);
      const ShortItem& item = shared.items[slot];
      const bool more = item.units >= 0;
      if (more) {
        prepare_short<Config>(attention, shared, item, shared.full[slot], parity, warp - 1, lane);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared.ready[slot]);
      if (!more) return;
    }
  }
  ShortProducer<Storage> producer{attention, shared, Config::kMaxUnits, lane};
  producer.run(listed, [&](const ShortSequence& sequence, unsigned head) {
    ShortItem item{};
    item.queries = sequence.queries;
    item.keys = sequence.keys;
    item.head = head;
    const auto units = [](int rows) { return (rows + Config::kUnitRows - 1) / Config::kUnitRows; };
    item.units = units(item.queries.len) + units(item.keys.len);
    const int query_rows = round_up(item.queries.len, Storage::kBoxRows),
              key_rows = round_up(item.keys.len, Storage::kBoxRows);
    producer.begin_item();
    item.k = producer.allocate_rows(key_rows);
    item.q = producer.allocate_rows(query_rows);
    item.v = producer.allocate_rows(key_rows);
    item.grad_out = producer.allocate_rows(query_rows);
    item.lse = producer.allocate(round_up(query_rows * 8, 1024));
    item.delta = item.lse + query_rows * 4;
    uint64_t& full = producer.push(item, 2 * (query_rows + key_rows) * Storage::kRowBytes);
    copy_short_rows(shared, params.grad_out, item.grad_out, item.queries, head, full, lane);
    copy_short_rows(shared, params.q, item.q, item.queries, head, full, lane);
    copy_short_rows(shared, params.k, item.k, item.keys, head, full, lane);
    copy_short_rows(shared, params.v, item.v, item.keys, head, full, lane);
  });
}

// A computing warp's item.
template <typename Config>
struct ShortBackwardUnit {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Address = LaneAddress<Tile>;

  const AttentionBackwardParams& params;
  char* ring;
  uint32_t stage;
  const ShortItem& item;
  int lane;

  __device__ __forceinline__ Tile& tile(int part) const {
    return *reinterpret_cast<Tile*>(ring + part);
  }
  __device__ __forceinline__ WindowOf<int> window() const {
    return {item.keys.len - item.queries.len, window_rows32(params.window_left),
            window_rows32(params.window_right)};
  }

  __device__ __forceinline__ void store(const Accumulator<1, 8>& o, float scale,
                                        const HeadsView& view, const TinyRows& range, int row,
                                        int columns) const {
    const float scales[2] = {scale, scale};
    const LaneRows g(view, range.begin + row + lane / 8, item.head, lane % 8 * 8);
    ShortOutput::of<Element, 8>(o[0], scales, stage, lane)
        .store(g, lane % 8 * 8 < columns ? range.len - row - lane / 8 : 0);
  }

  // dK and dV of 16 keys.
  __device__ __forceinline__ void key_gradients(int key) const {
    const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
    const WindowOf<int> seen = window().transposed();  // rows are keys
    const int first = seen.first_column(key) / 32 * 32,
              last = seen.last_column(key, 16, item.queries.len);
    const RowOperand<true, 1, Tile> k(tile(item.k), key, lane), v(tile(item.v), key, lane);
    Accumulator<1, 8> dk = {}, dv = {};
    int query = first;
    // The next kBlocks * 8 queries.
    const auto step = [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      const auto* lse = reinterpret_cast<const float*>(ring + item.lse) + query + lane % 4 * 2;
      const auto* delta = reinterpret_cast<const float*>(ring + item.delta) + query + lane % 4 * 2;
      Accumulator<1, kBlocks> s = {}, dp = {};
      mma_rows_by_rows(s, k, Address::by_columns(tile(item.q), query, lane));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 own = *reinterpret_cast<const float2*>(lse + block * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = s[0][block][i];
          score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, i % 2 == 0 ? -own.x : -own.y));
        }
      }
      if (seen.cuts_tile(key, 16, query, kBlocks * 8, query + kBlocks * 8))
        replace_unseen(s, 0.0f, seen, key + lane / 4, query, query + kBlocks * 8, lane);
      const PackedRows<Element, kBlocks> p(s);
      mma_packed_by_columns(dv, p, Address::by_rows(tile(item.grad_out), query, lane));
      mma_rows_by_rows(dp, v, Address::by_columns(tile(item.grad_out), query, lane));
      PackedRows<Element, kBlocks> ds;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 own = *reinterpret_cast<const float2*>(delta + block * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // P as rounded, which saves registers.
          const float2 probs = unpack<Element>(p.fragments[block / 2][block % 2 * 2 + half]);
          const float pair[2] = {probs.x * (dp[0][block][2 * half] - own.x),
                                 probs.y * (dp[0][block][2 * half + 1] - own.y)};
          ds.set(block, half, pair);
        }
      }
      mma_packed_by_columns(dk, ds, Address::by_rows(tile(item.q), query, lane));
    };
#pragma unroll 1
    for (; query + 16 < last; query += 32) step(Constant<4>{});
    if (query < last) step(Constant<2>{});
    store(dk, scale, params.grad_k, item.keys, key, params.dim_qk);
    store(dv, 1.0f, params.grad_v, item.keys, key, params.dim_v);
  }

  // dQ of 16 queries.
  __device__ __forceinline__ void query_gradients(int query) const {
    const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
    const int num_keys = item.keys.len;
    const WindowOf<int> seen = window();
    const int last = seen.last_column(query, 16, num_keys);
    const RowOperand<true, 1, Tile> q(tile(item.q), query, lane),
        grad_out(tile(item.grad_out), query, lane);
    Accumulator<1, 8> dq = {};
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query + half * 8 + lane / 4;
      lse[half] = reinterpret_cast<const float*>(ring + item.lse)[row];
      delta[half] = reinterpret_cast<const float*>(ring + item.delta)[row];
    }
    int key = seen.first_column(query) / 32 * 32;
    // The next kBlocks * 8 keys.
    const auto step = [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      Accumulator<1, kBlocks> s = {}, dp = {};
      mma_rows_by_rows(s, q, Address::by_columns(tile(item.k), key, lane));
      mma_rows_by_rows(dp, grad_out, Address::by_columns(tile(item.v), key, lane));
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        float& score = s[0][i / 4][i % 4];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, -lse[i % 4 / 2]));
      }
      if (seen.cuts_tile(query, 16, key, kBlocks * 8, num_keys))
        replace_unseen(s, 0.0f, seen, query + lane / 4, key, num_keys, lane);
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i)
        s[0][i / 4][i % 4] *= dp[0][i / 4][i % 4] - delta[i % 4 / 2];
      mma_packed_by_columns(dq, PackedRows<Element, kBlocks>(s),
                            Address::by_rows(tile(item.k), key, lane));
    };
#pragma unroll 1
    for (; key + 16 < last; key += 32) step(Constant<4>{});
    if (key < last) step(Constant<2>{});
    store(dq, scale, params.grad_q, item.queries, query, params.dim_qk);
  }

  // Units are first those of keys.
  __device__ __forceinline__ void run(int unit) const {
    const int key = unit * Config::kUnitRows,
              key_units = (item.keys.len + Config::kUnitRows - 1) / Config::kUnitRows,
              query = (unit - key_units) * Config::kUnitRows;
    if (unit < key_units) {
      key_gradients(key);
    } else {
      query_gradients(query);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_short(
    const __grid_constant__ ShortBackwardParams params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) shared.init(Config::kHelpers, Config::kMaxUnits, Config::kConsumers / 32);
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_short_backward<Config>(params, shared, warp, lane);
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ShortUnits<Storage> units{shared, lane, warp - 4};
    const uint32_t stage = ptx::shared_address(shared.stages[warp - 4]);
    int unit;
    while (units.find(unit)) {
      ShortBackwardUnit<Config>{params.attention, shared.ring, stage, units.item(), lane}.run(unit);
      units.take_next();
    }
  }
}

template <typename Element>
cudaError_t launch_backward_short(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Config = ShortBackwardConfig<Element>;
  ShortBackwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int device = 0, num_sms = 0;
  const cudaError_t errors[] = {
      params.q.encode<Element>(attention, attention.q, queries, attention.heads, attention.dim_qk),
      params.k.encode<Element>(attention, attention.k, keys, attention.heads, attention.dim_qk),
      params.v.encode<Element>(attention, attention.v, keys, attention.heads, attention.dim_v),
      params.grad_out.encode<Element>(attention, attention.grad_out, queries, attention.heads,
                                      attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<backward_short<Config>>(attention, params, Grid{num_sms}, Config::kThreads,
                                               sizeof(typename Config::Storage), stream,
                                               Config::kName);
}

}  // namespace jagged_cuda::attention
