// Backward of jagged_flash_attention for short sequences (short_items.cuh): head dims up to 64,
// 16-bit elements, as many kv heads as heads, copies by TMA, products by wgmma (compute capability
// 9.0).
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// An item is one head of a sequence. K, V, Q and dO are copied once; delta is summed from O, which
// three helping warps ask for ahead. Two warpgroups compute, 64 keys each of a tile of 128, on S^T and dP^T, so
// that P^T and dS^T are operands in registers:
//     for each tile of keys:
//       for each 128 queries:
//         for each 64 of them: S^T = K Q^T, dP^T = V dO^T
//                              P^T = exp2(...), dS^T = P^T * (dP^T - delta)
//                              dS^T to shared memory, dV += P^T dO, dK += dS^T Q
//         meet; dQ += dS K, each warpgroup for 64 of the queries, which stays in registers
//       store dK, dV
//     store dQ
// No atomics: the same bits at every run.
//
// A copy may reach into the next sequence: rows past the end are overwritten with zeros, since 0 times
// NaN is NaN: of queries up to a multiple of 32, which the last step may be, of keys of 64.
//
// Shared memory: the ring: up to 590 bytes for each row of an item; dS of a tile of keys and 128
// queries, 32 KiB.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/short_items.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_>
struct ShortBackwardConfig {
  using Element = Element_;
  static constexpr int kWarpgroups = 2;
  // With 384 threads a kernel starts with 168 registers a thread.
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr int kHelpers = 3;  // warps
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kMaxUnits = kWarpgroups * 4;  // each computing warp takes part in each item
  static constexpr int kRingBytes = 184 * 1024;
  static constexpr int kQueryRows = 32, kKeyRows = 64;  // of which rows in the ring are a multiple
  static constexpr PathName kName = PathName("cuda.attention.backward.short.d64");
  using Rows = WarpgroupTile<Element, 64, ShortLayout::kColumns>;
  struct Storage : ShortStorage<kRingBytes> {
    WarpgroupTile<Element, 128, 128> grad_scores;  // [keys, queries]
  };
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
  constexpr int kHelpers = Config::kHelpers;
  const int num_queries = item.queries.len, query_rows = round_up(num_queries, Config::kQueryRows),
            key_rows = round_up(item.keys.len, Config::kKeyRows);
  float* lse = reinterpret_cast<float*>(shared.ring + item.lse);
  float* delta = reinterpret_cast<float*>(shared.ring + item.delta);
  const uint64_t first = static_cast<uint64_t>(item.queries.begin) * params.heads + item.head;
  const LaneRows out(params.out, item.queries.begin, item.head, 0);
#pragma unroll 1
  for (int query = helper * 32 + lane; query < query_rows; query += kHelpers * 32) {
    const uint64_t place = first + static_cast<uint64_t>(query) * params.heads;
    const bool exists = query < num_queries;
    if (exists) ptx::prefetch_l2(out.row(query));  // for add_delta
    // A query past the end, or one that sees nothing, has P = 0.
    const float value = exists ? __ldg(static_cast<const float*>(params.lse) + place) : -INFINITY;
    const float grad = exists && params.grad_lse != nullptr
                           ? __ldg(static_cast<const float*>(params.grad_lse) + place)
                           : 0.0f;
    lse[query] = value == -INFINITY ? INFINITY : value * kLog2E;
    delta[query] = -grad;
  }
  ptx::mbarrier_wait(full, parity);
  zero_short_rows(shared, item.q, num_queries, query_rows, helper, kHelpers, lane);
  zero_short_rows(shared, item.grad_out, num_queries, query_rows, helper, kHelpers, lane);
  zero_short_rows(shared, item.k, item.keys.len, key_rows, helper, kHelpers, lane);
  zero_short_rows(shared, item.v, item.keys.len, key_rows, helper, kHelpers, lane);
  ptx::fence_proxy_async();
}

template <typename Config>
__device__ __forceinline__ void produce_short_backward(const ShortBackwardParams& params,
                                                       typename Config::Storage& shared, int warp,
                                                       int lane) {
  using Storage = typename Config::Storage;
  const AttentionBackwardParams& attention = params.attention;
  const bool listed = lists_all(attention);
  if (listed) list_short(attention, shared, warp * 32 + lane);
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
    item.units = Config::kMaxUnits;
    const int query_rows = round_up(item.queries.len, Config::kQueryRows),
              key_rows = round_up(item.keys.len, Config::kKeyRows);
    producer.begin_item();
    item.k = producer.allocate_rows(key_rows);
    item.q = producer.allocate_rows(query_rows);
    item.v = producer.allocate_rows(key_rows);
    item.grad_out = producer.allocate_rows(query_rows);
    item.lse = producer.allocate(round_up(query_rows * 8, 1024));
    item.delta = item.lse + query_rows * 4;
    const int rows =
        round_up(item.queries.len, Storage::kBoxRows) + round_up(item.keys.len, Storage::kBoxRows);
    uint64_t& full = producer.push(item, 2 * rows * Storage::kRowBytes);
    copy_short_rows(shared, params.grad_out, item.grad_out, item.queries, head, full, lane);
    copy_short_rows(shared, params.q, item.q, item.queries, head, full, lane);
    copy_short_rows(shared, params.k, item.k, item.keys, head, full, lane);
    copy_short_rows(shared, params.v, item.v, item.keys, head, full, lane);
  });
}

// A warpgroup that computes 64 keys of each tile and 64 of each 128 queries.
template <typename Config>
struct ShortBackwardConsumer {
  using Element = typename Config::Element;
  using Storage = typename Config::Storage;
  using Rows = typename Config::Rows;
  using Scores = WarpgroupTile<Element, 128, 128>;
  static constexpr int kScoresBarrier = 1 + 1;  // list_short has the first

  const AttentionBackwardParams& params;
  Storage& shared;
  const int warpgroup, lane, warp;
  const float scale_log2;
  Accumulator<1, 8> dk, dv, dq[2];

  __device__ __forceinline__ ShortBackwardConsumer(const AttentionBackwardParams& attention,
                                                   Storage& storage, int own_warpgroup,
                                                   int own_warp, int own_lane)
      : params(attention),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(own_lane),
        warp(own_warp),
        scale_log2(static_cast<float>(attention.scale) * kLog2E) {}

  __device__ __forceinline__ Rows& rows_of(int part, int row) const {
    return *reinterpret_cast<Rows*>(shared.ring + part + row * Storage::kRowBytes);
  }

  __device__ __forceinline__ static void reset(Accumulator<1, 8>& sum) {
#pragma unroll
    for (int e = 0; e < 32; ++e) sum[0][e / 4][e % 4] = 0.0f;
  }

  __device__ __forceinline__ void store(const Accumulator<1, 8>& sum, float scale,
                                        const HeadsView& view, const TinyRows& range, unsigned head,
                                        int row, int columns) const {
    const float scales[2] = {scale, scale};
    const int own_row = row + warp * 16 + lane / 4;
    store_quads(
        sum, scales,
        row_of<Element>(view, static_cast<int64_t>(range.begin) + own_row, static_cast<int>(head)),
        view.row_stride, range.len - own_row, columns, lane);
  }

  // dS^T of half a step's queries to shared memory.
  template <int kBlocks>
  __device__ __forceinline__ void write_grad_scores(const PackedRows<Element, kBlocks>& ds,
                                                    int half) {
    const int row = warpgroup * 64 + warp * 16 + lane % 16;
    const uint32_t base = ptx::shared_address(shared.grad_scores.data) +
                          half * Scores::kGroupBytes + row * Scores::kRowBytes;
#pragma unroll
    for (int k = 0; k < kBlocks / 2; ++k)
      ptx::stmatrix_x4(base + (((2 * k + lane / 16) ^ (row & 7)) * 16), ds.fragments[k]);
  }

  // kBlocks * 8 queries from `query` on and the keys from `key` on.
  template <int kBlocks>
  __device__ __forceinline__ void step(const ShortItem& item, const WindowOf<int>& seen, int key,
                                       int query) {
    constexpr int kQueries = kBlocks * 8;
    Rows& tile_q = rows_of(item.q, query);
    Rows& tile_grad_out = rows_of(item.grad_out, query);
    Accumulator<1, kBlocks> s, dp;
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, rows_of(item.k, key), 0, tile_q);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, rows_of(item.v, key), 0, tile_grad_out);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    const auto* lse = reinterpret_cast<const float*>(shared.ring + item.lse) + query + lane % 4 * 2;
    const auto* delta =
        reinterpret_cast<const float*>(shared.ring + item.delta) + query + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 own = *reinterpret_cast<const float2*>(lse + block * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[0][block][i];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, i % 2 == 0 ? -own.x : -own.y));
      }
    }
    const int own_key = key + warp * 16 + lane / 4;
    if (seen.cuts_tile(key, 64, query, kQueries, query + kQueries)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const VisibleColumns visible(seen, own_key + half * 8, query, kQueries, query + kQueries);
        const int first = visible.first - lane % 4 * 2, last = visible.last - lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (block * 8 + i < first || block * 8 + i >= last) s[0][block][2 * half + i] = 0.0f;
          }
        }
      }
    }
    if (key + 64 > item.keys.len) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) {
          if (own_key + half * 8 >= item.keys.len) s[0][i / 2][2 * half + i % 2] = 0.0f;
        }
      }
    }
    const PackedRows<Element, kBlocks> p(s);
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dv, p, tile_grad_out);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dp[0]);
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
    write_grad_scores(ds, query / 64 % 2);
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, tile_q);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
  }

  // Adds to dQ of this warpgroup's half of a step what kKeys keys from `key` on give.
  template <int kKeys>
  __device__ __forceinline__ void add_grad_q(Accumulator<1, 8>& sum, const ShortItem& item,
                                             int key) {
    using Product = ptx::Wgmma<Element, true, true>;
    const ptx::MatrixDescriptor scores = shared.grad_scores.descriptor() +
                                         warpgroup * Scores::kGroupBytes,
                                keys = rows_of(item.k, key).descriptor();
    ptx::fence_operands(sum[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys; k += 16)
      Product::run(sum[0], scores + Scores::row_step_bytes(k), keys + Rows::row_step_bytes(k),
                   true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum[0]);
  }

  __device__ __forceinline__ void meet() {
    ptx::bar_sync(kScoresBarrier, Config::kWarpgroups * 128);
  }

  // delta += rowsum(dO * O); both warpgroups.
  __device__ __forceinline__ void add_delta(const ShortItem& item) {
    constexpr int kAtOnce = 4, kStep = Config::kWarpgroups * 16;  // rows
    const int num_queries = item.queries.len, chunk = lane % 8, first = (warpgroup * 4 + warp) * 4;
    float* delta = reinterpret_cast<float*>(shared.ring + item.delta);
    const LaneRows out(params.out, item.queries.begin, item.head, chunk * 8);
#pragma unroll 1
    for (int row = first; row < num_queries; row += kAtOnce * kStep) {
      const int own_row = row + lane / 8;
      uint4 a[kAtOnce];
      float sum[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        a[i] = ptx::ld_global_nc_16(out.row(own_row + i * kStep),
                                    own_row + i * kStep < num_queries && chunk * 8 < params.dim_v);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int query = min(own_row + i * kStep, num_queries - 1);
        const uint4 b = *reinterpret_cast<const uint4*>(
            shared.ring + item.grad_out + query * Storage::kRowBytes + (chunk ^ (query & 7)) * 16);
        const uint32_t x[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float2 u = unpack<Element>(x[pair]), v = unpack<Element>(y[pair]);
          sum[i] = __fmaf_rn(u.y, v.y, __fmaf_rn(u.x, v.x, sum[i]));
        }
      }
#pragma unroll
      for (int other = 1; other < 8; other *= 2) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], other);
      }
      if (chunk == 0) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (own_row + i * kStep < num_queries) delta[own_row + i * kStep] += sum[i];
        }
      }
    }
    meet();
  }

  // A tile of keys, of which this warpgroup computes those from `key` + 64 w on.
  __device__ __forceinline__ void tile(const ShortItem& item, int key) {
    const WindowOf<int> seen =
        WindowOf<int>{item.keys.len - item.queries.len, window_rows32(params.window_left),
                      window_rows32(params.window_right)}
            .transposed();  // rows are keys
    const int own_key = key + warpgroup * 64, num_queries = item.queries.len;
    const bool active = own_key < item.keys.len, both = key + 64 < item.keys.len;
    const int first = seen.first_column(key),
              last = seen.last_column(key, min(128, item.keys.len - key), num_queries);
    reset(dk);
    reset(dv);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i * 128 >= last || i * 128 + 128 <= first) continue;  // the same in both warpgroups
#pragma unroll 1
      for (int query = i * 128; query < min(num_queries, i * 128 + 128); query += 64) {
        if (!active) break;
        if (query >= last || query + 64 <= first) {
          write_grad_scores(PackedRows<Element, 8>(Accumulator<1, 8>{}), query / 64 % 2);
        } else if (query + 32 < num_queries) {
          step<8>(item, seen, own_key, query);
        } else {
          step<4>(item, seen, own_key, query);
        }
      }
      ptx::fence_proxy_async();
      meet();
      if (both) {
        add_grad_q<128>(dq[i], item, key);
      } else {
        add_grad_q<64>(dq[i], item, key);
      }
      meet();  // before dS is written again
    }
    if (active) {
      store(dk, static_cast<float>(params.scale), params.grad_k, item.keys, item.head, own_key,
            params.dim_qk);
      store(dv, 1.0f, params.grad_v, item.keys, item.head, own_key, params.dim_v);
    }
  }

  __device__ __forceinline__ void run() {
    for (int position = 0;; ++position) {
      const int slot = position % Storage::kDescribed;
      ptx::mbarrier_wait(shared.ready[slot], position / Storage::kDescribed % 2);
      const ShortItem item = shared.items[slot];
      if (item.units < 0) return;
      add_delta(item);
      reset(dq[0]);
      reset(dq[1]);
#pragma unroll 1
      for (int key = 0; key < item.keys.len; key += 128) tile(item, key);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared.empty[slot]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = i * 128 + warpgroup * 64;
        if (query < item.queries.len)
          store(dq[i], static_cast<float>(params.scale), params.grad_q, item.queries, item.head,
                query, params.dim_qk);
      }
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
  if (threadIdx.x == 0) shared.init(Config::kHelpers, Config::kMaxUnits, 0);
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_short_backward<Config>(params, shared, warp, lane);
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
