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
// Three warpgroups compute. Each takes 64 keys of an item, so an item of one to three blocks of 64
// keys goes to a team of as many warpgroups; teams work side by side. They work on S^T and dP^T, so
// that P^T and dS^T are operands in registers:
//
//     for each 32 queries:
//       S^T = K Q^T, P^T = exp2(...)
//       dP^T = V dO^T, start dV += P^T dO
//       the team exchanges the sums of P * dP over its keys: delta
//       dS^T = P^T * (dP^T - delta), start dK += dS^T Q
//       the team exchanges dS; one warpgroup: dQ^T = K^T dS^T over all keys, written at once
//     write dK, dV
//
// P is rounded to the element type before it is multiplied by dP - delta, which saves registers.
//
// Shared memory: the ring, 198 KiB: an item takes 256 bytes for each key and query (rounded up to
// 16 and 32 rows), and 8 for lse and dlse of a query. dS of 192 keys and 32 queries: 12 KiB; dQ of 32
// queries of each warpgroup: 12; sums and delta: 3.
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
// No launch takes this kernel yet; it has not run on a GPU.
#pragma once

#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/route.cuh"

namespace jagged_cuda::attention {

constexpr int kShortRows = 192;

template <typename Element_>
struct ShortBackwardConfig {
  static constexpr PathName kName = PathName("cuda.attention.backward.short.d64");
  using Element = Element_;
  static constexpr int kDim = 64;  // columns in shared memory; more than D or Dv become zeros
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kWarpgroups = 3;
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kBlockKeys = 64;
  static constexpr int kBlocks = 1;
  static_assert(kWarpgroups * kBlocks * kBlockKeys == kShortRows);
  static constexpr int kStep = 32;  // queries of an iteration: 64 would need 64 more registers
  static constexpr int kBoxRows = 16;
  // With 384 threads a kernel starts with 168 registers a thread.
  static constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
  static constexpr int kSlots = 8;  // items in the ring at once
  static constexpr int kRingBytes = 198 * 1024;
};

struct ShortBackwardParams {
  CUtensorMap q;  // boxes of kBoxRows rows of one head
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap grad_out;
  AttentionBackwardParams attention;
};

__host__ __device__ constexpr int round_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// Where the parts of an item lie in the ring.
struct ShortLayout {
  int k, v, q, grad_out, lse, grad_lse, bytes;

  template <typename Config>
  __device__ __forceinline__ static ShortLayout of(int num_queries, int num_keys) {
    int k, v, q, grad_out, lse, grad_lse;
    const int key_rows = round_up(num_keys, Config::kBoxRows),
              query_rows = round_up(num_queries, Config::kStep);
    k = 0;
    v = k + key_rows * Config::kRowBytes;
    q = v + key_rows * Config::kRowBytes;
    grad_out = q + query_rows * Config::kRowBytes;
    lse = grad_out + query_rows * Config::kRowBytes;
    grad_lse = lse + query_rows * 4;
    return {k, v, q, grad_out, lse, grad_lse, round_up(grad_lse + query_rows * 4, 1024)};
  }
};

// One head of one sequence.
struct ShortItem {
  int query_begin;  // in q
  int key_begin;    // in k and v
  int num_queries;
  int num_keys;
  int head;             // -1: there are no more items
  int offset_bytes;     // in the ring
  int first_warpgroup;  // of its team
  int warpgroups;
  ShortLayout layout;
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
  int turn = 0;   // the warpgroup after the last item's

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
    item.layout = ShortLayout::of<Config>(item.num_queries, item.num_keys);
    const ShortLayout& layout = item.layout;
    item.offset_bytes = allocate(layout.bytes);
    item.warpgroups = round_up(item.num_keys, Config::kBlockKeys) / Config::kBlockKeys;
    item.first_warpgroup = turn + item.warpgroups <= Config::kWarpgroups ? turn : 0;
    turn = (item.first_warpgroup + item.warpgroups) % Config::kWarpgroups;
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
          visit({static_cast<int>(query_begin),
                 static_cast<int>(key_begin),
                 static_cast<int>(queries),
                 static_cast<int>(keys),
                 head,
                 0,
                 0,
                 0,
                 {}});
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
template <typename Config>
struct ShortConsumer {
  using Element = typename Config::Element;
  static constexpr int kStep = Config::kStep, kScoreBlocks = kStep / 8, kOutBlocks = 8;
  using RowsByRows = ptx::Wgmma<Element, false>;
  using RowsByColumns = ptx::Wgmma<Element, true>;
  using ColumnsByRows = ptx::Wgmma<Element, false, true>;

  const AttentionBackwardParams& params;
  ShortBackwardStorage<Config>& shared;
  const ShortItem& item;            // read again at each use, which saves registers
  const int warpgroup, warp, lane;  // warp of the warpgroup

  Accumulator<1, kOutBlocks> dk, dv;
  Accumulator<1, kScoreBlocks> s;
  uint32_t p[kScoreBlocks / 2][4];

  __device__ __forceinline__ WindowOf<int> window() const {  // rows are keys
    return WindowOf<int>{item.num_keys - item.num_queries, window_rows32(params.window_left),
                         window_rows32(params.window_right)}
        .transposed();
  }
  __device__ __forceinline__ int place() const { return warpgroup - item.first_warpgroup; }
  __device__ __forceinline__ void team_sync() const {
    const int barrier = item.warpgroups == 1   ? 1 + warpgroup
                        : item.warpgroups == 2 ? 5 + item.first_warpgroup
                                               : 7;
    ptx::bar_sync(barrier, item.warpgroups * 128);
  }
  __device__ __forceinline__ ptx::MatrixDescriptor rows(int part, int row) const {
    return {ptx::shared_address(shared.ring) + item.offset_bytes + part + row * Config::kRowBytes,
            0, 8 * Config::kRowBytes, ptx::Swizzle::k128Bytes};
  }
  __device__ __forceinline__ int first_key() const { return place() * 64; }

  // Rows [begin, end) of a part become zeros.
  __device__ __forceinline__ void zero_part(int part, int begin, int end) const {
    char* first = shared.ring + item.offset_bytes + part;
    for (int index = warp * 32 + lane; index < (end - begin) * 8; index += 128)
      *reinterpret_cast<uint4*>(first + begin * Config::kRowBytes + index * 16) =
          make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void zero_rows_past_end() const {
    const int query_rows = round_up(item.num_queries, kStep);
    zero_part(item.layout.q, item.num_queries, query_rows);
    zero_part(item.layout.grad_out, item.num_queries, query_rows);
    zero_part(item.layout.k, item.num_keys, round_up(item.num_keys, Config::kBoxRows));
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + warpgroup, 128);
  }

  // S^T of this warpgroup's keys.
  __device__ __forceinline__ void start_scores(int query) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      RowsByRows::run(s[0], rows(item.layout.k, first_key()) + k * 32,
                      rows(item.layout.q, query) + k * 32, k > 0);
    ptx::wgmma_commit_group();
  }
  // dP^T, and dV += P^T dO behind it.
  __device__ __forceinline__ void start_grad_probs(int query) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      RowsByRows::run(s[0], rows(item.layout.v, first_key()) + k * 32,
                      rows(item.layout.grad_out, query) + k * 32, k > 0);
    ptx::wgmma_commit_group();
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      RowsByColumns::run(dv[0], p[k], rows(item.layout.grad_out, query + k * 16), true);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ bool has_unseen(int query) const {
    return first_key() + 64 > item.num_keys ||
           window().cuts_tile(first_key(), 64, query, kStep, query + kStep);
  }
  // Zeros where a query does not see a key.
  __device__ __forceinline__ void zero_unseen(Accumulator<1, kScoreBlocks>& values,
                                              int query) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key() + warp * 16 + half * 8 + lane / 4;
      const VisibleColumns visible(window(), key, query, kStep, query + kStep);
      const bool exists = key < item.num_keys;
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 2; ++i) {
        if (!exists || !visible.contains(i / 2 * 8 + 2 * (lane % 4) + i % 2))
          values[0][i / 2][2 * half + i % 2] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void finish_probs(int query, float scale_log2) {
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(s[0]);
    const float* lse =
        reinterpret_cast<const float*>(shared.ring + item.offset_bytes + item.layout.lse);
#pragma unroll
    for (int column = 0; column < kScoreBlocks; ++column) {
      const float2 own =
          *reinterpret_cast<const float2*>(lse + query + column * 8 + 2 * (lane % 4));
      // A query that sees nothing has lse -inf and P = 0.
      const float lse_log2[2] = {own.x == -INFINITY ? INFINITY : own.x * kLog2E,
                                 own.y == -INFINITY ? INFINITY : own.y * kLog2E};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = s[0][column][i];
        value = ptx::ex2_approx(value * scale_log2 - lse_log2[i % 2]);
      }
    }
    if (has_unseen(query)) zero_unseen(s, query);
    const PackedRows<Element, kScoreBlocks> packed(s);
#pragma unroll
    for (int i = 0; i < kScoreBlocks * 2; ++i) p[i / 4][i % 4] = packed.fragments[i / 4][i % 4];
  }

  // P at rows 8 half + lane / 4 and two columns of a block.
  __device__ __forceinline__ float2 probs(int column, int half) const {
    return unpack<Element>(p[column / 2][column % 2 * 2 + half]);
  }

  // Writes the sums of P * dP over the warp's keys.
  __device__ __forceinline__ void sum_keys(int query) {
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    if (has_unseen(query)) zero_unseen(s, query);
    float sums[kScoreBlocks * 2];
#pragma unroll
    for (int column = 0; column < kScoreBlocks; ++column) {
      const float2 low = probs(column, 0), high = probs(column, 1);
      sums[2 * column] = low.x * s[0][column][0] + high.x * s[0][column][2];
      sums[2 * column + 1] = low.y * s[0][column][1] + high.y * s[0][column][3];
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

  // delta of 32 queries, out of the team's sums, to this warp's copy.
  __device__ __forceinline__ void gather_delta(int query) {
    float delta = 0.0f;
#pragma unroll 1
    for (int member = 0; member < item.warpgroups; ++member) {
      const auto* sums = shared.sSums + (item.first_warpgroup + member) * 4;
      delta += (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
    }
    if (params.grad_lse != nullptr) {
      delta -= reinterpret_cast<const float*>(shared.ring + item.offset_bytes +
                                              item.layout.grad_lse)[query + lane];
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
      for (int half = 0; half < 2; ++half) {
        const float2 factor = probs(column, half);
        s[0][column][2 * half] = factor.x * (s[0][column][2 * half] - own.x);
        s[0][column][2 * half + 1] = factor.y * (s[0][column][2 * half + 1] - own.y);
      }
    }
  }

  // dS to shared memory, for dQ, and dK += dS^T Q.
  __device__ __forceinline__ void start_grad_keys(int query) {
    const PackedRows<Element, kScoreBlocks> ds(s);
    store_transposed(ds, shared.sGradScores[warpgroup], warp, lane);
    ptx::fence_proxy_async();
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      RowsByColumns::run(dk[0], ds.fragments[k], rows(item.layout.q, query + k * 16), true);
    ptx::wgmma_commit_group();
  }

  // dQ of 32 queries, over all keys of the item.
  __device__ __forceinline__ void grad_queries(int query, float scale) {
    Accumulator<1, kScoreBlocks> dq = {};
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    for (int key = 0; key < item.num_keys; key += 16) {
      auto& tile = shared.sGradScores[item.first_warpgroup + key / 64];
      ColumnsByRows::run(dq[0], rows(item.layout.k, key), tile.descriptor() + key % 64 * 2, true);
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
    for (int i = 0; i < kOutBlocks * 4; ++i) dk[0][i / 4][i % 4] = dv[0][i / 4][i % 4] = 0.0f;
    int turn = 0;
    for (int query = 0; query < item.num_queries; query += kStep) {
      start_scores(query);
      finish_probs(query, scale_log2);
      start_grad_probs(query);
      sum_keys(query);
      team_sync();  // the sums are written
      gather_delta(query);
      score_gradients();
      start_grad_keys(query);
      team_sync();  // dS is written, the sums are read
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dk[0]);
      ptx::fence_operands(dv[0]);
      if (turn == place()) grad_queries(query, scale);
      if (++turn == item.warpgroups) turn = 0;
    }
    if (item.warpgroups > 1) team_sync();  // dS is read
    const int key = first_key() + warp * 16 + lane / 4, keys = item.num_keys - key,
              head = item.head;
    const int64_t global_row = static_cast<int64_t>(item.key_begin) + key;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty);
    const float scales[2] = {scale, scale}, ones[2] = {1.0f, 1.0f};
    store_quads(dk, scales, row_of<Element>(params.grad_k, global_row, head),
                params.grad_k.row_stride, keys, params.dim_qk, lane);
    store_quads(dv, ones, row_of<Element>(params.grad_v, global_row, head),
                params.grad_v.row_stride, keys, params.dim_v, lane);
  }
};

template <typename Config>
__device__ __forceinline__ void consume_item(const ShortBackwardParams& params,
                                             ShortBackwardStorage<Config>& shared,
                                             const ShortItem& item, int warpgroup,
                                             uint64_t& empty) {
  ShortConsumer<Config>{params.attention,
                        shared,
                        item,
                        warpgroup,
                        static_cast<int>(threadIdx.x) / 32 % 4,
                        static_cast<int>(threadIdx.x) % 32}
      .run(empty);
}

template <typename Config>
__device__ __forceinline__ void consume_items(const ShortBackwardParams& params,
                                              ShortBackwardStorage<Config>& shared) {
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  for (int count = 0;; ++count) {
    const int slot = count % Config::kSlots;
    ptx::mbarrier_wait(shared.full[slot], count / Config::kSlots % 2);
    const ShortItem& item = shared.items[slot];
    if (item.head < 0) return;
    const int place = warpgroup - item.first_warpgroup;
    if (place < 0 || place >= item.warpgroups) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.empty[slot]);
      continue;
    }
    consume_item<Config>(params, shared, item, warpgroup, shared.empty[slot]);
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
