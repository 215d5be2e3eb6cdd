// Backward of jagged_flash_attention for short sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements, D and Dv up to 64, up to kShortRows queries and keys, as many kv heads as heads.
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(P * dP) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// delta is summed from what is computed anyway, so that O is not read. Five products; no atomics,
// the same bits at every run.
//
// Grid: one persistent CTA per SM. It owns the items (sequence, head) that start in its part of all
// rows, in order: CTAs own equally many rows. Four warps, the producers, find the items (each for
// itself) and copy into a ring, as far ahead as there is room; each copies one of K, Q, dO and V.
// Two warpgroups compute. One owns up to 128 keys, in two blocks of 64: an item of up to 128 keys
// goes to one of them (they take turns), a longer one to both, the item's team. They work on S^T and
// dP^T, so that P^T and dS^T are operands in registers:
//
//     for each 32 queries:
//       S^T = K Q^T, dP^T = V dO^T
//       P^T = exp2(...), start dV += P^T dO
//       the team exchanges the sums of P * dP over its keys: delta
//       dS^T = P^T * (dP^T - delta), start dK += dS^T Q
//       the team exchanges dS; one warpgroup: dQ^T = K^T dS^T over all keys, written at once
//     write dK, dV
//
// P is rounded to the element type before it is multiplied by dP - delta, which saves registers.
//
// Shared memory: the ring, 200 KiB: an item takes 256 bytes for each key and query (rounded up to
// 16 and 32 rows), and 8 for lse and dlse of a query. dS of 256 keys and 32 queries: 16 KiB; dQ of 32
// queries of each warpgroup: 8; sums and delta: 2.
//
// Barriers:         arrives                                   waits
//     full[slot]    4 producers, with the bytes of an item    all warpgroups
//     empty[slot]   all computing warps, when they have       producers, when they need the room
//                   read the item or passed it over
// and two named barriers of the team per 32 queries: the sums are written; dS is written, and the
// sums are read. A third after the last queries: dS is read.
//
// Copies are of 16 rows and may reach into the next sequence. Rows past the end of Q, dO and K are
// overwritten with zeros, since 0 times NaN is NaN; rows past the end of V reach only rows of dP^T
// that are replaced by zeros. Sequences without queries or keys are no items: their gradients are
// zeros, which the producer writes. Tiny sequences and the rows outside all sequences belong to
// tiny_backward.cuh, longer sequences to backward_wgmma.cuh (route.cuh).
//
// No launch takes this kernel yet (docs/performance_log.md).
#pragma once

#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/route.cuh"

namespace jagged_cuda::attention {

constexpr int kShortRows = 256;

template <typename Element_>
struct ShortBackwardConfig {
  static constexpr PathName kName = PathName("cuda.attention.backward.short.d64");
  using Element = Element_;
  static constexpr int kDim = 64;  // columns in shared memory; more than D or Dv become zeros
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kWarpgroups = 2;
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kBlockKeys = 64;
  static constexpr int kBlocks =
      2;  // of 64 keys, that a warpgroup owns: dK and dV take 128 registers
  static_assert(kWarpgroups * kBlocks * kBlockKeys == kShortRows);
  static constexpr int kStep = 32;  // queries of an iteration: 64 would need 64 more registers
  static constexpr int kBoxRows = 16;
  // With 384 threads a kernel starts with 168 registers a thread.
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr int kSlots = 8;  // items in the ring at once
  static constexpr int kRingBytes = 200 * 1024;
};

struct ShortBackwardParams {
  CUtensorMap q;  // boxes of kBoxRows rows of one head
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap grad_out;
  AttentionBackwardParams attention;
};

// One head of one sequence.
struct ShortItem {
  int query_begin;  // in q
  int key_begin;    // in k and v
  int num_queries;
  int num_keys;
  int head;          // -1: there are no more items
  int owner;         // the warpgroup that takes it, or kBoth
  int offset_bytes;  // in the ring

  static constexpr int kBoth = -1;
};

__host__ __device__ constexpr int round_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// Where the parts of an item lie in the ring.
template <typename Config>
struct ShortLayout {
  int k, v, q, grad_out, lse, grad_lse, bytes;

  __device__ __forceinline__ ShortLayout(int num_queries, int num_keys) {
    const int key_rows = round_up(num_keys, Config::kBoxRows),
              query_rows = round_up(num_queries, Config::kStep);
    k = 0;
    v = k + key_rows * Config::kRowBytes;
    q = v + key_rows * Config::kRowBytes;
    grad_out = q + query_rows * Config::kRowBytes;
    lse = grad_out + query_rows * Config::kRowBytes;
    grad_lse = lse + query_rows * 4;
    bytes = round_up(grad_lse + query_rows * 4, 1024);
  }
};

template <typename Config>
struct ShortBackwardStorage {
  using Element = typename Config::Element;
  using StepTile = WarpgroupTile<Element, Config::kStep, 64>;
  alignas(1024) char ring[Config::kRingBytes];
  StepTile sGradScores[Config::kWarpgroups * Config::kBlocks];  // dS: [queries, keys of a block]
  StepTile sGradQ[Config::kWarpgroups];
  float sSums[Config::kConsumers / 32][Config::kStep];   // of P * dP over a warp's keys
  float sDelta[Config::kConsumers / 32][Config::kStep];  // a copy for each warp
  ShortItem items[Config::kSlots];
  uint64_t full[Config::kSlots], empty[Config::kSlots];
};
static_assert(sizeof(ShortBackwardStorage<ShortBackwardConfig<__half>>) <= 227 * 1024);

// --- producer

// Where sequence `seq` begins, counted in rows of q and of k.
__device__ __forceinline__ int64_t row_position(const AttentionParams& params, int64_t seq) {
  return clamped_offset(params.q_offsets, seq) + clamped_offset(params.kv_offsets, seq);
}

// The first sequence that ends after `position`; all lanes of a warp.
__device__ __forceinline__ int64_t find_sequence(const AttentionParams& params, int64_t position,
                                                 int lane) {
  int64_t low = 0, high = params.q_offsets.num_seqs;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, probe = low + step * (lane + 1) - 1;
    const bool before = probe < high && row_position(params, probe + 1) <= position;
    const unsigned stopped = ~__ballot_sync(0xffffffffu, before);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    const int64_t next = low + step * passed;
    if (passed < 32) high = min(high, next + step - 1);
    low = min(next, high);
  }
  return low;
}

// Zeros for `rows` rows of one head; all lanes of a warp.
template <typename Element>
__device__ __forceinline__ void zero_head(const HeadsView& view, int64_t begin, int rows, int head,
                                          int columns, int lane) {
  const int chunks = columns / 8;
  for (int index = lane; index < rows * chunks; index += 32) {
    *reinterpret_cast<uint4*>(row_of<Element>(view, begin + index / chunks, head) +
                              index % chunks * 8) = make_uint4(0, 0, 0, 0);
  }
}

template <typename Config>
struct ShortProducer {
  const ShortBackwardParams& params;
  ShortBackwardStorage<Config>& shared;
  int warp, lane;
  int pushed = 0, released = 0;  // items
  // Bytes of the ring that were ever given out, counting those skipped at its end; the same at the
  // start of the item in slot `lane`, and of the oldest item not released.
  int64_t tail = 0, start = 0, oldest = 0;
  int place = 0;  // tail within the ring
  int next_owner = 0;

  // Waits until the oldest item has been read.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_wait(shared.empty[released % Config::kSlots], released / Config::kSlots % 2);
    ++released;
    oldest = released < pushed ? __shfl_sync(0xffffffffu, start, released % Config::kSlots) : tail;
  }

  // Room for `bytes` in one piece: its offset in the ring.
  __device__ __forceinline__ int allocate(int bytes) {
    constexpr int kRing = Config::kRingBytes;
    if (released == pushed) oldest = tail;
    if (place + bytes > kRing) {
      tail += kRing - place;
      place = 0;
    }
    while (pushed - released == Config::kSlots ||
           (released < pushed && tail + bytes - oldest > kRing))
      release();
    if (lane == pushed % Config::kSlots) start = tail;
    tail += bytes;
    place += bytes;
    return place - bytes;
  }

  // Boxes of `rows` rows of this warp's tensor.
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, char* to, int row, int rows,
                                            int head, uint64_t& full) {
    constexpr int kBoxBytes = Config::kBoxRows * Config::kRowBytes;
    if (lane != 0) return;
    const int boxes = round_up(rows, Config::kBoxRows) / Config::kBoxRows;
    ptx::mbarrier_arrive_expect_tx(full, boxes * kBoxBytes);
    for (int box = 0; box < boxes; ++box) {
      ptx::cp_async_bulk_tensor_3d(to + box * kBoxBytes, map, 0, head, row + box * Config::kBoxRows,
                                   full);
    }
  }
  __device__ __forceinline__ void copy_statistics(char* to, const void* source,
                                                  const ShortItem& item) {
    const int heads = params.attention.heads;
    const float* first = static_cast<const float*>(source) +
                         static_cast<int64_t>(item.query_begin) * heads + item.head;
    for (int row = lane; row < round_up(item.num_queries, Config::kStep); row += 32) {
      const bool valid = row < item.num_queries;
      ptx::cp_async_4(to + row * 4, first + static_cast<int64_t>(valid ? row : 0) * heads,
                      valid ? 4 : 0);
    }
  }

  __device__ __forceinline__ void push(ShortItem item) {
    const AttentionBackwardParams& attention = params.attention;
    const ShortLayout<Config> layout(item.num_queries, item.num_keys);
    item.offset_bytes = allocate(layout.bytes);
    item.owner = ShortItem::kBoth;
    if (item.num_keys <= Config::kBlocks * Config::kBlockKeys) {
      item.owner = next_owner;
      next_owner ^= 1;
    }
    const int slot = pushed++ % Config::kSlots;
    uint64_t& full = shared.full[slot];
    char* base = shared.ring + item.offset_bytes;
    switch (warp) {
      case 0:
        if (lane == 0) shared.items[slot] = item;
        copy_rows(params.k, base + layout.k, item.key_begin, item.num_keys, item.head, full);
        break;
      case 1:
        copy_rows(params.q, base + layout.q, item.query_begin, item.num_queries, item.head, full);
        break;
      case 2:
        copy_rows(params.grad_out, base + layout.grad_out, item.query_begin, item.num_queries,
                  item.head, full);
        copy_statistics(base + layout.lse, attention.lse, item);
        break;
      default:
        copy_rows(params.v, base + layout.v, item.key_begin, item.num_keys, item.head, full);
        if (attention.grad_lse != nullptr)
          copy_statistics(base + layout.grad_lse, attention.grad_lse, item);
    }
    ptx::cp_async_mbarrier_arrive_noinc(full);
  }

  __device__ __forceinline__ void finish() {
    if (pushed - released == Config::kSlots) release();
    const int slot = pushed % Config::kSlots;
    if (warp == 0 && lane == 0) shared.items[slot].head = -1;
    ptx::mbarrier_arrive(shared.full[slot]);
    if (lane == 0) ptx::mbarrier_arrive(shared.full[slot]);
  }

  __device__ __forceinline__ void visit(const ShortItem& item) {
    const AttentionBackwardParams& attention = params.attention;
    if (item.num_queries > 0 && item.num_keys > 0) {
      push(item);
      return;
    }
    using Element = typename Config::Element;
    if (warp != 0) return;
    zero_head<Element>(attention.grad_q, item.query_begin, item.num_queries, item.head,
                       attention.dim_qk, lane);
    zero_head<Element>(attention.grad_k, item.key_begin, item.num_keys, item.head, attention.dim_qk,
                       lane);
    zero_head<Element>(attention.grad_v, item.key_begin, item.num_keys, item.head, attention.dim_v,
                       lane);
  }

  // Visits the items that start in this CTA's part.
  __device__ __forceinline__ void run() {
    const AttentionBackwardParams& attention = params.attention;
    const int heads = attention.heads;
    const int64_t num_seqs = attention.q_offsets.num_seqs;
    const int64_t all = heads * (attention.q_offsets.total + attention.kv_offsets.total);
    const int64_t first = all * blockIdx.x / gridDim.x, last = all * (blockIdx.x + 1) / gridDim.x;
    bool more = true;
    for (int64_t seq = find_sequence(attention, first / heads, lane); more && seq < num_seqs;
         seq += 31) {
      const int64_t own = min(seq + lane, num_seqs);
      const int64_t query = clamped_offset(attention.q_offsets, own),
                    key = clamped_offset(attention.kv_offsets, own);
      for (int i = 0; i < 31 && seq + i < num_seqs; ++i) {
        const int64_t query_begin = __shfl_sync(0xffffffffu, query, i),
                      key_begin = __shfl_sync(0xffffffffu, key, i);
        const int64_t queries =
            max(__shfl_sync(0xffffffffu, query, i + 1) - query_begin, int64_t{0});
        const int64_t keys = max(__shfl_sync(0xffffffffu, key, i + 1) - key_begin, int64_t{0});
        const int64_t position = heads * (query_begin + key_begin);
        if (position >= last) {
          more = false;
          break;
        }
        if (max(queries, keys) > kShortRows ||
            (attention.split_by_length && is_tiny(queries, keys)))
          continue;
        for (int head = 0; head < heads; ++head) {
          const int64_t item = position + head * (queries + keys);
          if (item < first) continue;
          if (item >= last) break;
          visit({static_cast<int>(query_begin), static_cast<int>(key_begin),
                 static_cast<int>(queries), static_cast<int>(keys), head, 0, 0});
        }
      }
    }
    finish();
  }
};

// --- consumers

// Writes a warp's 16 rows of an accumulator as 16 columns of a tile.
template <typename Element, int kBlocks, typename Tile>
__device__ __forceinline__ void store_transposed(const PackedRows<Element, kBlocks>& packed,
                                                 Tile& tile, int warp, int lane) {
  const int matrix = lane / 8;
#pragma unroll
  for (int k = 0; k < kBlocks / 2; ++k) {
    ptx::stmatrix_x4_trans(packed.fragments[k],
                           tile.chunk(k * 16 + matrix / 2 * 8 + lane % 8, warp * 2 + matrix % 2));
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// What one warpgroup does for an item, of which it owns kBlocks blocks of 64 keys from first_block
// on.
template <typename Config, int kBlocks>
struct ShortConsumer {
  using Element = typename Config::Element;
  static constexpr int kStep = Config::kStep, kScoreBlocks = kStep / 8, kOutBlocks = 8;
  using RowsByRows = ptx::Wgmma<Element, false>;
  using RowsByColumns = ptx::Wgmma<Element, true>;
  using ColumnsByRows = ptx::Wgmma<Element, false, true>;

  const AttentionBackwardParams& params;
  ShortBackwardStorage<Config>& shared;
  const ShortItem item;
  const ShortLayout<Config> layout;
  const WindowOf<int> window;                    // rows are keys
  const uint32_t base;                           // of the item in shared memory
  const int first_block, warpgroup, warp, lane;  // warp of the warpgroup

  Accumulator<1, kOutBlocks> dk[kBlocks], dv[kBlocks];
  Accumulator<1, kScoreBlocks> s[kBlocks], dp[kBlocks];
  uint32_t p[kBlocks][kScoreBlocks / 2][4];

  __device__ __forceinline__ bool both() const { return item.owner == ShortItem::kBoth; }
  __device__ __forceinline__ void team_sync() const {
    if (both()) {
      ptx::bar_sync(3, Config::kConsumers);
    } else {
      ptx::bar_sync(1 + warpgroup, 128);
    }
  }
  __device__ __forceinline__ ptx::MatrixDescriptor rows(int part, int row) const {
    return {base + part + row * Config::kRowBytes, 0, 8 * Config::kRowBytes,
            ptx::Swizzle::k128Bytes};
  }
  __device__ __forceinline__ int key_of(int block) const { return (first_block + block) * 64; }

  // Rows [begin, end) of a part become zeros.
  __device__ __forceinline__ void zero_part(int part, int begin, int end) const {
    char* first = shared.ring + item.offset_bytes + part;
    for (int index = warp * 32 + lane; index < (end - begin) * 8; index += 128)
      *reinterpret_cast<uint4*>(first + begin * Config::kRowBytes + index * 16) =
          make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void zero_rows_past_end() const {
    const int query_rows = round_up(item.num_queries, kStep);
    zero_part(layout.q, item.num_queries, query_rows);
    zero_part(layout.grad_out, item.num_queries, query_rows);
    zero_part(layout.k, item.num_keys, round_up(item.num_keys, Config::kBoxRows));
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + warpgroup, 128);
  }

  __device__ __forceinline__ void start_scores(int query) {
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        RowsByRows::run(s[block][0], rows(layout.k, key_of(block)) + k * 32,
                        rows(layout.q, query) + k * 32, k > 0);
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        RowsByRows::run(dp[block][0], rows(layout.v, key_of(block)) + k * 32,
                        rows(layout.grad_out, query) + k * 32, k > 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ bool has_unseen(int block, int query) const {
    return key_of(block) + 64 > item.num_keys ||
           window.cuts_tile(key_of(block), 64, query, kStep, query + kStep);
  }
  // Zeros where a query does not see a key.
  __device__ __forceinline__ void zero_unseen(Accumulator<1, kScoreBlocks>& values, int block,
                                              int query) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key_of(block) + warp * 16 + half * 8 + lane / 4;
      const VisibleColumns visible(window, key, query, kStep, query + kStep);
      const bool exists = key < item.num_keys;
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 2; ++i) {
        if (!exists || !visible.contains(i / 2 * 8 + 2 * (lane % 4) + i % 2))
          values[0][i / 2][2 * half + i % 2] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void finish_probs(int query, float scale_log2) {
    ptx::wgmma_wait_group<1>();
    const float* lse = reinterpret_cast<const float*>(shared.ring + item.offset_bytes + layout.lse);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::fence_operands(s[block][0]);
#pragma unroll
    for (int column = 0; column < kScoreBlocks; ++column) {
      const float2 own =
          *reinterpret_cast<const float2*>(lse + query + column * 8 + 2 * (lane % 4));
      // A query that sees nothing has lse -inf and P = 0.
      const float lse_log2[2] = {own.x == -INFINITY ? INFINITY : own.x * kLog2E,
                                 own.y == -INFINITY ? INFINITY : own.y * kLog2E};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = s[block][0][column][i];
          value = ptx::ex2_approx(value * scale_log2 - lse_log2[i % 2]);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (has_unseen(block, query)) zero_unseen(s[block], block, query);
      const PackedRows<Element, kScoreBlocks> packed(s[block]);
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 2; ++i)
        p[block][i / 4][i % 4] = packed.fragments[i / 4][i % 4];
    }
  }

  // Writes the sums of P * dP over the warp's keys: lane l has that of query l.
  __device__ __forceinline__ void sum_keys(int query) {
    ptx::wgmma_wait_group<0>();
    float sums[kScoreBlocks * 2];
#pragma unroll
    for (int i = 0; i < kScoreBlocks * 2; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::fence_operands(dp[block][0]);
      if (has_unseen(block, query)) zero_unseen(dp[block], block, query);
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 2; ++i) {
        sums[i] += s[block][0][i / 2][i % 2] * dp[block][0][i / 2][i % 2];
        sums[i] += s[block][0][i / 2][2 + i % 2] * dp[block][0][i / 2][2 + i % 2];
      }
    }
    // The eight lanes that share columns halve what they hold at each exchange.
#pragma unroll
    for (int half = kScoreBlocks; half > 0; half /= 2) {
      const int distance = half * 4;  // lanes: 16, 8, 4
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float other =
            __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + half], distance);
        sums[i] = (upper ? sums[i + half] : sums[i]) + other;
      }
    }
    // Left: index lane / 4 of the columns, counted as i.
    const int index = lane / 4;
    shared.sSums[warpgroup * 4 + warp][index / 2 * 8 + 2 * (lane % 4) + index % 2] = sums[0];
  }

  __device__ __forceinline__ void start_grad_values(int query) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::fence_operands(dv[block][0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k)
        RowsByColumns::run(dv[block][0], p[block][k], rows(layout.grad_out, query + k * 16), true);
    }
    ptx::wgmma_commit_group();
  }

  // delta of 32 queries, out of the team's sums, to this warp's copy.
  __device__ __forceinline__ void gather_delta(int query) {
    const int first = both() ? 0 : warpgroup * 4;
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) delta += shared.sSums[first + i][lane];
    if (both()) {
#pragma unroll
      for (int i = 4; i < 8; ++i) delta += shared.sSums[i][lane];
    }
    if (params.grad_lse != nullptr) {
      delta -= reinterpret_cast<const float*>(shared.ring + item.offset_bytes +
                                              layout.grad_lse)[query + lane];
    }
    shared.sDelta[warpgroup * 4 + warp][lane] = delta;
    __syncwarp();
  }

  // dS, to dp.
  __device__ __forceinline__ void score_gradients() {
    const float* delta = shared.sDelta[warpgroup * 4 + warp];
#pragma unroll
    for (int column = 0; column < kScoreBlocks; ++column) {
      const float2 own = *reinterpret_cast<const float2*>(delta + column * 8 + 2 * (lane % 4));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 probs = unpack<Element>(p[block][column / 2][column % 2 * 2 + half]);
          float (&pair)[4] = dp[block][0][column];
          pair[2 * half] = probs.x * (pair[2 * half] - own.x);
          pair[2 * half + 1] = probs.y * (pair[2 * half + 1] - own.y);
        }
      }
    }
  }

  // dS to shared memory, for dQ, and dK += dS^T Q.
  __device__ __forceinline__ void start_grad_keys(int query) {
    using Packed = PackedRows<Element, kScoreBlocks>;
    const int first_tile = (both() ? 0 : warpgroup * Config::kBlocks) + first_block;
    uint32_t ds[kBlocks][kScoreBlocks / 2][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Packed packed(dp[block]);
      store_transposed(packed, shared.sGradScores[first_tile + block], warp, lane);
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 2; ++i)
        ds[block][i / 4][i % 4] = packed.fragments[i / 4][i % 4];
    }
    ptx::fence_proxy_async();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::fence_operands(dk[block][0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k)
        RowsByColumns::run(dk[block][0], ds[block][k], rows(layout.q, query + k * 16), true);
    }
    ptx::wgmma_commit_group();
  }

  // dQ of 32 queries, over all keys of the item.
  __device__ __forceinline__ void grad_queries(int query, float scale) {
    Accumulator<1, kScoreBlocks> dq = {};
    const int first = both() ? 0 : warpgroup * Config::kBlocks;
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    for (int key = 0; key < item.num_keys; key += 16) {
      auto& tile = shared.sGradScores[first + key / 64];
      ColumnsByRows::run(dq[0], rows(layout.k, key), tile.descriptor() + key % 64 * 2, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq[0]);
#pragma unroll
    for (int i = 0; i < kScoreBlocks * 4; ++i) dq[0][i / 4][i % 4] *= scale;
    auto& tile = shared.sGradQ[warpgroup];
    __syncwarp();  // the warp has read what it wrote here before
    store_transposed(PackedRows<Element, kScoreBlocks>(dq), tile, warp, lane);
    __syncwarp();
    const int column = warp * 16 + lane % 2 * 8;
#pragma unroll
    for (int row = lane / 2; row < kStep; row += 16) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile.chunk(row, column / 8));
      if (query + row < item.num_queries && column < params.dim_qk) {
        *reinterpret_cast<uint4*>(
            row_of<Element>(params.grad_q, static_cast<int64_t>(item.query_begin) + query + row,
                            item.head) +
            column) = chunk;
      }
    }
  }

  __device__ __forceinline__ void run(uint64_t& empty) {
    const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
    zero_rows_past_end();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kOutBlocks * 4; ++i)
        dk[block][0][i / 4][i % 4] = dv[block][0][i / 4][i % 4] = 0.0f;
    }
    for (int query = 0, step = 0; query < item.num_queries; query += kStep, ++step) {
      start_scores(query);
      finish_probs(query, scale_log2);
      sum_keys(query);
      start_grad_values(query);
      team_sync();  // the sums are written
      gather_delta(query);
      score_gradients();
      start_grad_keys(query);
      team_sync();  // dS is written, the sums are read
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        ptx::fence_operands(dk[block][0]);
        ptx::fence_operands(dv[block][0]);
      }
      if (!both() || step % 2 == warpgroup) grad_queries(query, scale);
    }
    if (both()) team_sync();  // dS is read
    if (lane == 0) ptx::mbarrier_arrive(empty);
    const float scales[2] = {scale, scale}, ones[2] = {1.0f, 1.0f};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int key = key_of(block) + warp * 16 + lane / 4, keys = item.num_keys - key;
      const int64_t global_row = static_cast<int64_t>(item.key_begin) + key;
      store_quads(dk[block], scales, row_of<Element>(params.grad_k, global_row, item.head),
                  params.grad_k.row_stride, keys, params.dim_qk, lane);
      store_quads(dv[block], ones, row_of<Element>(params.grad_v, global_row, item.head),
                  params.grad_v.row_stride, keys, params.dim_v, lane);
    }
  }
};

template <typename Config, int kBlocks>
__device__ __forceinline__ void consume_item(const ShortBackwardParams& params,
                                             ShortBackwardStorage<Config>& shared,
                                             const ShortItem& item, int first_block, int warpgroup,
                                             uint64_t& empty) {
  const AttentionBackwardParams& attention = params.attention;
  const WindowOf<int> window =
      WindowOf<int>{item.num_keys - item.num_queries, window_rows32(attention.window_left),
                    window_rows32(attention.window_right)}
          .transposed();
  ShortConsumer<Config, kBlocks> consumer{attention,
                                          shared,
                                          item,
                                          ShortLayout<Config>(item.num_queries, item.num_keys),
                                          window,
                                          ptx::shared_address(shared.ring) + item.offset_bytes,
                                          first_block,
                                          warpgroup,
                                          static_cast<int>(threadIdx.x) / 32 % 4,
                                          static_cast<int>(threadIdx.x) % 32};
  consumer.run(empty);
}

template <typename Config>
__device__ __forceinline__ void consume_items(const ShortBackwardParams& params,
                                              ShortBackwardStorage<Config>& shared) {
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  for (int count = 0;; ++count) {
    const int slot = count % Config::kSlots;
    ptx::mbarrier_wait(shared.full[slot], count / Config::kSlots % 2);
    const ShortItem item = shared.items[slot];
    if (item.head < 0) return;
    const bool both = item.owner == ShortItem::kBoth;
    if (!both && item.owner != warpgroup) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.empty[slot]);
      continue;
    }
    const int first_block = both ? warpgroup * Config::kBlocks : 0;
    if (item.num_keys > (first_block + 1) * Config::kBlockKeys) {
      consume_item<Config, 2>(params, shared, item, first_block, warpgroup, shared.empty[slot]);
    } else {
      consume_item<Config, 1>(params, shared, item, first_block, warpgroup, shared.empty[slot]);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_short(
    const __grid_constant__ ShortBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<ShortBackwardStorage<Config>*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == Config::kConsumers) {
    for (int slot = 0; slot < Config::kSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], 4 * (1 + 32));
      ptx::mbarrier_init(shared.empty[slot], Config::kConsumers / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= Config::kConsumers) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    ShortProducer<Config>{params, shared, static_cast<int>(threadIdx.x) / 32 % 4,
                          static_cast<int>(threadIdx.x) % 32}
        .run();
    return;
  }
  ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
  consume_items<Config>(params, shared);
  if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // launch_longer
}

template <typename Element>
cudaError_t launch_backward_short(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Config = ShortBackwardConfig<Element>;
  using Box = WarpgroupTile<Element, Config::kBoxRows, Config::kDim>;
  ShortBackwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int device = 0, ctas = 0;
  const cudaError_t errors[] = {
      encode_heads<Box>(params.q, attention, attention.q, queries, attention.heads,
                        attention.dim_qk),
      encode_heads<Box>(params.k, attention, attention.k, keys, attention.heads, attention.dim_qk),
      encode_heads<Box>(params.v, attention, attention.v, keys, attention.heads, attention.dim_v),
      encode_heads<Box>(params.grad_out, attention, attention.grad_out, queries, attention.heads,
                        attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&ctas, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<backward_short<Config>>(attention, params, Grid{ctas}, Config::kThreads,
                                               sizeof(ShortBackwardStorage<Config>), stream,
                                               Config::kName);
}

}  // namespace jagged_cuda::attention
