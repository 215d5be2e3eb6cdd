// Backward of jagged_flash_attention for short sequences (short_items.cuh says which a CTA takes): head
// dims up to 64, 16-bit elements, as many kv heads as heads, copies by TMA, products by wgmma (compute
// capability 9.0).
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// An item is one head of a sequence. Two warpgroups compute. Of up to 128 queries one takes an item
// alone, so that one's exponentials run beside the other's products; of more each takes half of the
// queries. It computes S^T and dP^T, so that P^T and dS^T are operands in registers:
//     for each 64 keys:
//       for each 64 of its queries (or the 32 that are left):
//         S^T = K Q^T, dP^T = V dO^T
//         P^T = exp2(...), dS^T = P^T * (dP^T - delta)
//         dV += P^T dO, dK += dS^T Q, dQ += dS K, for which dS^T passes through shared memory
//       if both take the item, the first adds the other's dK to its own, the second dV
//       store dK, dV
//     store dQ, which stayed in registers
// No atomics: the same bits at every run, whichever warpgroup takes an item.
//
// Shared memory: a ring of pages of 16 KiB: 64 rows of K and V, or of Q and dO. Pages of keys are given
// back as soon as they have been used, so that parts of the next item come in. A copy reaches into
// the next sequence: rows past the end are overwritten with zeros, since 0 times NaN is NaN: of
// queries up to a multiple of 32, which the last step may be. And 32 KiB for dS^T, twice for each
// warpgroup, so that one product may read it while the next is written; sums of dK or dV, and the
// gradients on their way out, pass through the same place.
//
// Barriers (every lane arrives for what it wrote or read):
//                          arrives                                   waits
//   issued, of an item     copying warp: it is described             all others
//   full, of a page        copying warp, with the bytes of the page  the helping warp that has it
//   ready, of a page       helping warp: zeros, lse and delta are    computing warps
//                          written
//   empty, of a page       computing warps that have read it, the    copying warp, for the next page
//                          copying warp for those that will not
//   kOwn + w               warpgroup w: dS is written, or has been read
//   kSums                  both: sums for the other are written
//   kRead + w              the other warpgroup has read those of w   warpgroup w
//
// Without a deadlock: pages are filled in the order of items, an item has no more than there are, and
// a warpgroup takes items in their order. kDescribed: an item described has a page or waits for one;
// of the items before it the ring holds kPages at most, and a warpgroup that walks to its next passes
// over no more than those that the other got in a row, at most five (ShortBackwardTurns).
#pragma once

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
  static constexpr int kPages = 11, kPageRows = 64;
  static constexpr int kAloneQueries = 128;  // up to which one warpgroup takes an item
  static constexpr PathName kName = PathName("cuda.attention.backward.short.d64");
};

// One head of one sequence.
struct alignas(16) ShortBackwardItem {
  enum Owner { kNone = -1, kFirst = 0, kSecond = 1, kBoth = 2 };  // kNone: there are no more items
  TinyRows queries;
  TinyRows keys;
  unsigned head;
  int owner;
  int first_copy;     // how many pages the CTA copied before
  unsigned slots;     // its pages' places in the ring, first of keys, then of queries: 4 bits each
  unsigned parities;  // how often, modulo 2, those were used before: a bit each

  __device__ __forceinline__ int key_pages() const { return (keys.len + 63) / 64; }
  __device__ __forceinline__ int query_pages() const { return (queries.len + 63) / 64; }
  // The page that is copied as number `copy`: the first of keys and all of queries, then the others,
  // each of which is wanted when the one before has been used.
  __device__ __forceinline__ int page_of(int copy) const {
    const int num_keys = key_pages(), num_queries = query_pages();
    if (num_keys == 0 || copy == 0) return copy;
    return copy <= num_queries ? num_keys + copy - 1 : copy - num_queries;
  }
};

// A page's place in the ring.
struct ShortPlace {
  int slot;
  int parity;

  __device__ __forceinline__ ShortPlace(const ShortBackwardItem& item, int page)
      : slot(item.slots >> (4 * page) & 15), parity(item.parities >> page & 1) {}
};

// Places of the ring in the order in which they become free: an item's pages of keys, then those of
// queries.
struct ShortPlaces {
  uint64_t next;      // 4 bits each, the first lowest
  unsigned uses = 0;  // of each place, modulo 2

  template <int kPages>
  __device__ __forceinline__ static ShortPlaces all() {
    uint64_t next = 0;
#pragma unroll
    for (int slot = 0; slot < kPages; ++slot) next |= static_cast<uint64_t>(slot) << (4 * slot);
    return {next};
  }
  template <int kPages>
  __device__ __forceinline__ void assign(ShortBackwardItem& item, int pages) {
    item.slots = item.parities = 0;
    for (int copy = 0; copy < pages; ++copy) {
      const int page = item.page_of(copy), slot = static_cast<int>(next & 15);
      next >>= 4;
      item.slots |= static_cast<unsigned>(slot) << (4 * page);
      item.parities |= (uses >> slot & 1) << page;
      uses ^= 1u << slot;
    }
    next |= static_cast<uint64_t>(item.slots) << (4 * (kPages - pages));
  }
};

template <typename Config>
struct ShortBackwardStorage : ShortLayout {
  using Rows = WarpgroupTile<typename Config::Element, Config::kPageRows, ShortLayout::kColumns>;
  static constexpr int kPages = Config::kPages;
  // Rows of K or Q, then of V or dO.
  struct Page {
    Rows rows[2];
  };
  Page pages[kPages];
  Rows grad_scores[Config::kWarpgroups][2];  // [keys, queries]
  float lse[kPages][Config::kPageRows], delta[kPages][Config::kPageRows];
  ShortBackwardItem items[kDescribed];
  uint64_t issued[kDescribed], full[kPages], ready[kPages], empty[kPages];
  ShortList listed;

  // One thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kDescribed; ++i) ptx::mbarrier_init(issued[i], 1);
    for (int i = 0; i < kPages; ++i) {
      ptx::mbarrier_init(full[i], 1);
      ptx::mbarrier_init(ready[i], 32);
      ptx::mbarrier_init(empty[i], Config::kWarpgroups * 128);
    }
    listed.init();
    ptx::fence_mbarrier_init();
  }
};

struct ShortBackwardParams {
  CUtensorMap keys[2];     // K, V
  CUtensorMap queries[2];  // Q, dO
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

// A pair of elements times two numbers, rounded to Element. bf16 rounds those first, for a third of the
// instructions; f16 has not their range.
template <typename Element>
__device__ __forceinline__ uint32_t times(uint32_t pair, const float (&factors)[2]) {
  if constexpr (std::is_same_v<Element, __half>) {
    const float2 elements = unpack<Element>(pair);
    return pack<Element>(elements.x * factors[0], elements.y * factors[1]);
  } else {
    const uint32_t rounded = pack<Element>(factors[0], factors[1]);
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                           *reinterpret_cast<const __nv_bfloat162*>(&rounded));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
}

// Rows [first, last) of both halves of a page become zeros; one warp.
template <typename Page>
__device__ __forceinline__ void zero_page_rows(Page& page, int first, int last, int lane) {
  constexpr int kChunks = ShortLayout::kRowBytes / 16;
#pragma unroll 1
  for (int chunk = first * kChunks + lane; chunk < last * kChunks; chunk += 32) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<uint4*>(page.rows[i].data)[chunk] = make_uint4(0, 0, 0, 0);
  }
}

// A page of queries: their statistics, and zeros behind them; one warp. A lane sums one chunk of 8
// columns of every fourth row.
template <typename Config>
__device__ __forceinline__ void prepare_queries(const AttentionBackwardParams& params,
                                                ShortBackwardStorage<Config>& shared,
                                                const ShortBackwardItem& item, int page,
                                                const ShortPlace& place, int lane) {
  using Element = typename Config::Element;
  constexpr int kAtOnce = 8;
  const int first = page * Config::kPageRows, rows = min(item.queries.len - first, 64),
            chunk = lane % 8;
  const unsigned begin = item.queries.begin + first;
  const LaneRows out(params.out, begin + lane / 8, item.head, chunk * 8);
  const bool column = chunk * 8 < params.dim_v;
  uint4 a[kAtOnce];
  const char* next = out.data;
  const auto load = [&](int half) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      a[i] = ptx::ld_global_nc_16(next, half * 32 + i * 4 + lane / 8 < rows && column);
      next += out.row_bytes * uint64_t{4};
    }
  };
  load(0);
  if (lane + 32 < rows)
    ptx::prefetch_l2(LaneRows(params.out, begin + lane + 32, item.head, 0).data);
  float lse[2], grad[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane;
    const uint64_t statistic =
        static_cast<uint64_t>(begin + row) * static_cast<unsigned>(params.heads) + item.head;
    // A query past the end, or one that sees nothing, has P = 0.
    const float value =
        row < rows ? __ldg(static_cast<const float*>(params.lse) + statistic) : -INFINITY;
    lse[half] = value == -INFINITY ? INFINITY : value * kLog2E;
    grad[half] = row < rows && params.grad_lse != nullptr
                     ? __ldg(static_cast<const float*>(params.grad_lse) + statistic)
                     : 0.0f;
  }
  ptx::mbarrier_wait(shared.full[place.slot], place.parity);
  float* delta = shared.delta[place.slot];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shared.lse[place.slot][half * 32 + lane] = lse[half];
    delta[half * 32 + lane] = -grad[half];
  }
  __syncwarp();
  const char* grad_out = reinterpret_cast<const char*>(shared.pages[place.slot].rows[1].data);
#pragma unroll 1
  for (int half = 0; half < 2 && half * 32 < rows; ++half) {
    float sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = half * 32 + i * 4 + lane / 8;
      const uint4 b = *reinterpret_cast<const uint4*>(grad_out + row * ShortLayout::kRowBytes +
                                                      (chunk ^ (row & 7)) * 16);
      const uint32_t x[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, y[4] = {b.x, b.y, b.z, b.w};
      sum[i] = 0.0f;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 u = unpack<Element>(x[pair]), v = unpack<Element>(y[pair]);
        sum[i] = __fmaf_rn(u.y, v.y, __fmaf_rn(u.x, v.x, sum[i]));
      }
    }
    if (half == 0) load(1);
#pragma unroll
    for (int other = 1; other < 8; other *= 2) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], other);
    }
    if (chunk == 0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = half * 32 + i * 4 + lane / 8;
        if (row < rows) delta[row] += sum[i];
      }
    }
  }
  zero_page_rows(shared.pages[place.slot], rows, round_up(rows, 32), lane);
}

// A helping warp takes every kHelpers-th page, in the order of copies.
template <typename Config>
__device__ __forceinline__ void help_short_backward(const AttentionBackwardParams& params,
                                                    ShortBackwardStorage<Config>& shared,
                                                    int helper, int lane) {
  using Storage = ShortBackwardStorage<Config>;
  for (int position = 0;; ++position) {
    const int described = position % Storage::kDescribed;
    ptx::mbarrier_wait(shared.issued[described], position / Storage::kDescribed % 2);
    const ShortBackwardItem& item = shared.items[described];
    if (item.owner == ShortBackwardItem::kNone) return;
    const int key_pages = item.key_pages(), pages = key_pages + item.query_pages(),
              passed = item.first_copy % Config::kHelpers;
#pragma unroll 1
    for (int copy = (helper + Config::kHelpers - passed) % Config::kHelpers; copy < pages;
         copy += Config::kHelpers) {
      const int page = item.page_of(copy);
      const ShortPlace place(item, page);
      if (page < key_pages) {
        ptx::mbarrier_wait(shared.full[place.slot], place.parity);
        zero_page_rows(shared.pages[place.slot], item.keys.len - page * Config::kPageRows, 64,
                       lane);
      } else {
        prepare_queries<Config>(params, shared, item, page - key_pages, place, lane);
      }
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(shared.ready[place.slot]);
    }
  }
}

// Those that both warpgroups take come first, so that they seldom wait for each other, and the last
// items are small.
template <typename Config>
struct ShortBackwardItems {
  __device__ __forceinline__ static bool is_first(const ShortSequence& sequence) {
    return sequence.queries.len > Config::kAloneQueries;
  }
  // In 50 cycles of the CTA, by clock() at each part of an item (docs/performance_log.md).
  __device__ __forceinline__ static int cost(const ShortSequence& sequence) {
    const int queries = sequence.queries.len, key_pages = (sequence.keys.len + 63) / 64,
              query_pages = (queries + 63) / 64, steps = (queries + 31) / 32;  // of 32 queries
    if (queries + key_pages == 0) return 0;
    if (is_first(sequence)) return 44 + key_pages * (query_pages == 3 ? 120 : 144);
    return 45 + 7 * query_pages + key_pages * (11 + steps / 2 * 29 + steps % 2 * 17);
  }
};

// Which warpgroup takes an item alone: the one that has got less.
struct ShortBackwardTurns {
  int ahead = 0;  // of what the first got, less what the second got

  // In units of 64 keys by 32 queries: from 4 to 19.
  __device__ __forceinline__ int next(const ShortBackwardItem& item) {
    const int cost = 3 + max(1, item.key_pages() * ((item.queries.len + 31) / 32));
    const bool second = ahead > 0;
    ahead += second ? -cost : cost;
    return second ? ShortBackwardItem::kSecond : ShortBackwardItem::kFirst;
  }
};

template <typename Config>
__device__ __forceinline__ void produce_short_backward(const ShortBackwardParams& params,
                                                       ShortBackwardStorage<Config>& shared,
                                                       bool listed, int warp, int lane) {
  using Storage = ShortBackwardStorage<Config>;
  const AttentionBackwardParams& attention = params.attention;
  using Items = ShortBackwardItems<Config>;
  if (warp > 0) {
    help_short_backward<Config>(attention, shared, warp - 1, lane);
    return;
  }
  int described = 0, copied = 0;
  auto places = ShortPlaces::all<Storage::kPages>();
  ShortBackwardTurns turns;
  const auto describe = [&](const ShortBackwardItem& item) {
    if (lane == 0) {
      shared.items[described] = item;
      ptx::mbarrier_arrive(shared.issued[described]);
    }
    described = (described + 1) % Storage::kDescribed;
  };
  const auto visit = [&](const ShortSequence& sequence, unsigned head) {
    ShortBackwardItem item{sequence.queries, sequence.keys, head, ShortBackwardItem::kBoth, copied};
    const bool alone = !Items::is_first(sequence);
    if (alone) item.owner = turns.next(item);
    const int key_pages = item.key_pages(), pages = key_pages + item.query_pages();
    places.template assign<Storage::kPages>(item, pages);
    describe(item);
    copied += pages;
#pragma unroll 1
    for (int copy = 0; copy < pages; ++copy) {
      const int page = item.page_of(copy);
      const ShortPlace place(item, page);
      const int slot = place.slot;
      ptx::mbarrier_wait(shared.empty[slot], place.parity ^ 1);
      if (lane == 0) {
        const bool is_keys = page < key_pages;
        const TinyRows range = is_keys ? item.keys : item.queries;
        const int row = (is_keys ? page : page - key_pages) * Config::kPageRows;
        // Both warpgroups read all keys, and of three pages of queries the one between.
        if (alone || (!is_keys && !(pages - key_pages == 3 && page - key_pages == 1)))
          ptx::mbarrier_arrive_count(shared.empty[slot], 128);
        uint64_t& full = shared.full[slot];
        ptx::mbarrier_arrive_expect_tx(full, sizeof(typename Storage::Page));
        const CUtensorMap* maps = is_keys ? params.keys : params.queries;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          ptx::cp_async_bulk_tensor_3d(shared.pages[slot].rows[i].data, maps[i], 0,
                                       static_cast<int>(head), static_cast<int>(range.begin) + row,
                                       full);
      }
      __syncwarp();
    }
  };
  visit_short<Items>(attention, shared.listed, listed, lane, visit);
  ShortBackwardItem end{};
  end.owner = ShortBackwardItem::kNone;
  describe(end);
}

// A warpgroup that computes.
template <typename Config>
struct ShortBackwardConsumer {
  using Element = typename Config::Element;
  using Storage = ShortBackwardStorage<Config>;
  using Rows = typename Storage::Rows;
  static constexpr int kOwn = 1, kSums = kOwn + 2, kRead = kSums + 1;

  const AttentionBackwardParams& params;
  Storage& shared;
  const int warpgroup, lane, warp;
  const float scale_log2;
  int next_scores = 0;  // of its two places for dS
  Accumulator<1, 8> dk, dv, dq[2];

  __device__ __forceinline__ ShortBackwardConsumer(const AttentionBackwardParams& attention,
                                                   Storage& storage, int own_warpgroup,
                                                   int own_warp, int own_lane)
      : params(attention),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(own_lane),
        warp(own_warp),
        scale_log2(scale_of(attention)) {}

  // At least a tiny number: with scale 0 all scores are equal, but masked ones, infinite, stay so.
  __device__ __forceinline__ static float scale_of(const AttentionParams& attention) {
    const float scale = static_cast<float>(attention.scale) * kLog2E;
    return copysignf(fmaxf(fabsf(scale), 1e-30f), scale);
  }

  __device__ __forceinline__ static void reset(Accumulator<1, 8>& sum) {
#pragma unroll
    for (int e = 0; e < 32; ++e) sum[0][e / 4][e % 4] = 0.0f;
  }

  // This warp's 16 rows of its place for the next dS, which no product reads any more: all warps waited
  // for the last but one before they met for the last.
  __device__ __forceinline__ uint32_t own_rows() const {
    return ptx::shared_address(shared.grad_scores[warpgroup][next_scores].data) +
           warp * 16 * Storage::kRowBytes;
  }
  // Packed rows to there, from chunk `first` on.
  template <int kBlocks>
  __device__ __forceinline__ void write_rows(const PackedRows<Element, kBlocks>& packed,
                                             int first) const {
    const uint32_t row = own_rows() + lane % 16 * Storage::kRowBytes;
#pragma unroll
    for (int k = 0; k < kBlocks / 2; ++k)
      ptx::stmatrix_x4(row + (((first + 2 * k + lane / 16) ^ (lane & 7)) * 16),
                       packed.fragments[k]);
  }

  // Writes 64 rows from `row` on, times `scale`: each warp its own, through own_rows().
  __device__ __forceinline__ void store(const Accumulator<1, 8>& sum, float scale,
                                        const HeadsView& view, const TinyRows& range, unsigned head,
                                        int row, int columns) const {
    PackedRows<Element, 8> packed;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float pair[2] = {sum[0][i / 2][i % 2 * 2] * scale,
                             sum[0][i / 2][i % 2 * 2 + 1] * scale};
      packed.set(i / 2, i % 2, pair);
    }
    __syncwarp();
    write_rows(packed, 0);
    __syncwarp();
    const int own_row = row + warp * 16 + lane / 8, chunk = lane % 8,
              rows = chunk * 8 < columns ? range.len - own_row : 0;
    const LaneRows g(view, range.begin + own_row, head, chunk * 8);
    const uint32_t own = own_rows() + lane / 8 * Storage::kRowBytes;
    char* target = g.data;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 value = ptx::ld_shared_16(own + i * 4 * Storage::kRowBytes +
                                            ((chunk ^ (i % 2 * 4 + lane / 8)) * 16));
      if (i * 4 < rows) ptx::st_global_16(target, value);
      target += uint64_t{4} * g.row_bytes;
    }
  }

  __device__ __forceinline__ void wait_ready(const ShortPlace& place) const {
    ptx::mbarrier_wait(shared.ready[place.slot], place.parity);
  }
  // This lane has read all that it will of a page, for which it has waited.
  __device__ __forceinline__ void release(const ShortPlace& place) const {
    ptx::mbarrier_arrive(shared.empty[place.slot]);
  }

  // The keys from `key` on, in `keys`, and kBlocks * 8 queries from `query` on, which are in a page's
  // rows from `offset` on; adds to the dQ of that page.
  template <int kBlocks>
  __device__ __forceinline__ void step(Accumulator<1, 8>& grad_q, const WindowOf<int>& seen,
                                       typename Storage::Page& keys, int key, int num_keys,
                                       int slot, int query, int offset) {
    constexpr int kQueries = kBlocks * 8, kEarly = 4;
    const auto rows_from = [&](Rows& rows) -> Rows& {
      return *reinterpret_cast<Rows*>(reinterpret_cast<char*>(rows.data) +
                                      offset * Storage::kRowBytes);
    };
    Rows& tile_q = rows_from(shared.pages[slot].rows[0]);
    Rows& tile_grad_out = rows_from(shared.pages[slot].rows[1]);
    Accumulator<1, kBlocks> s, dp;
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, keys.rows[0], 0, tile_q);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, keys.rows[1], 0, tile_grad_out);
    ptx::wgmma_commit_group();
    const float* lse = shared.lse[slot] + offset + lane % 4 * 2;
    const float* delta = shared.delta[slot] + offset + lane % 4 * 2;
    float2 early[kEarly];  // asked for before the wait
#pragma unroll
    for (int block = 0; block < kEarly; ++block)
      early[block] = *reinterpret_cast<const float2*>(lse + block * 8);
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    // Masked before the exponentials, so that nothing comes between these and what follows.
    const int own_key = key + warp * 16 + lane / 4;
    if (seen.cuts_tile(key, 64, query, kQueries, query + kQueries)) {
      const float unseen = scale_log2 < 0.0f ? INFINITY : -INFINITY;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const VisibleColumns visible(seen, own_key + half * 8, query, kQueries, query + kQueries);
        const int first = visible.first - lane % 4 * 2, last = visible.last - lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (block * 8 + i < first || block * 8 + i >= last) s[0][block][2 * half + i] = unseen;
          }
        }
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 own =
          block < kEarly ? early[block] : *reinterpret_cast<const float2*>(lse + block * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[0][block][i];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, i % 2 == 0 ? -own.x : -own.y));
      }
    }
    const PackedRows<Element, kBlocks> p(s);
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dv, p, tile_grad_out);
    ptx::wgmma_commit_group();
#pragma unroll
    for (int block = 0; block < kEarly; ++block)
      early[block] = *reinterpret_cast<const float2*>(delta + block * 8);
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dp[0]);
    PackedRows<Element, kBlocks> ds;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 own =
          block < kEarly ? early[block] : *reinterpret_cast<const float2*>(delta + block * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // P as rounded, which saves registers.
        const uint32_t probs = p.fragments[block / 2][block % 2 * 2 + half];
        const float pair[2] = {dp[0][block][2 * half] - own.x, dp[0][block][2 * half + 1] - own.y};
        ds.fragments[block / 2][block % 2 * 2 + half] = times<Element>(probs, pair);
      }
    }
    if (key + 64 > num_keys) {  // what keys past the end give to dK and dV is not stored
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          if (own_key + half * 8 >= num_keys) ds.fragments[block / 2][block % 2 * 2 + half] = 0;
        }
      }
    }
    write_rows(ds, offset / 8);
    Rows& scores = shared.grad_scores[warpgroup][next_scores];
    next_scores ^= 1;
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, tile_q);
    ptx::wgmma_commit_group();
    ptx::fence_proxy_async();
    ptx::bar_sync(kOwn + warpgroup, 128);
    // Rows of dQ whose queries are not of this step add up what is not used.
    using Product = ptx::Wgmma<Element, true, true>;
    const ptx::MatrixDescriptor a = scores.descriptor(), b = keys.rows[0].descriptor();
    ptx::fence_operands(grad_q[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 64; k += 16)
      Product::run(grad_q[0], a + Rows::row_step_bytes(k), b + Rows::row_step_bytes(k), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    ptx::fence_operands(grad_q[0]);
  }

  // Adds the other warpgroup's `kept` to this one's, and gives it `given`, which is of no use here any
  // more.
  __device__ __forceinline__ void exchange(Accumulator<1, 8>& kept,
                                           const Accumulator<1, 8>& given) {
    const int other = warpgroup ^ 1, thread = warp * 32 + lane;
    static_assert(sizeof(shared.grad_scores[0]) == 128 * 32 * sizeof(float));
    auto* to = reinterpret_cast<float4*>(shared.grad_scores[warpgroup]) + thread;
    const auto* from = reinterpret_cast<const float4*>(shared.grad_scores[other]) + thread;
    ptx::bar_sync(kOwn + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[i * 128] = make_float4(given[0][i][0], given[0][i][1], given[0][i][2], given[0][i][3]);
    ptx::bar_sync(kSums, 256);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 sum = from[i * 128];
      kept[0][i][0] += sum.x;
      kept[0][i][1] += sum.y;
      kept[0][i][2] += sum.z;
      kept[0][i][3] += sum.w;
    }
    ptx::bar_arrive(kRead + other, 256);
  }

  __device__ __forceinline__ void compute(const ShortBackwardItem& item) {
    const bool alone = item.owner != ShortBackwardItem::kBoth;
    const int num_queries = item.queries.len, num_keys = item.keys.len,
              key_pages = item.key_pages();
    const bool shares_page = !alone && item.query_pages() == 3;  // the one between
    const bool is_second = !alone && warpgroup == 1;
    // Its queries: of two pages from the first on the rows [first, last).
    const int first_page = is_second ? (shares_page ? 1 : 2) : 0;
    int first[2] = {shares_page && is_second ? 32 : 0, 0}, last[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) last[i] = min(num_queries - (first_page + i) * 64, 64);
    if (shares_page && !is_second) last[1] = 32;
    const WindowOf<int> seen =
        WindowOf<int>{num_keys - num_queries, window_rows32(params.window_left),
                      window_rows32(params.window_right)}
            .transposed();  // rows are keys
    const float scale = static_cast<float>(params.scale);
    const auto release_queries = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (last[i] > 0) release(ShortPlace(item, key_pages + first_page + i));
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (last[i] > 0) wait_ready(ShortPlace(item, key_pages + first_page + i));
    }
    reset(dq[0]);
    reset(dq[1]);
    if (key_pages == 0) release_queries();
#pragma unroll 1
    for (int page = 0; page < key_pages; ++page) {
      const ShortPlace place(item, page);
      wait_ready(place);
      const int key = page * 64;
      const int first_query = seen.first_column(key),
                last_query = seen.last_column(key, min(64, num_keys - key), num_queries);
      reset(dk);
      reset(dv);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int begin = (first_page + i) * 64, query = begin + first[i], end = begin + last[i];
        if (query >= end || query >= last_query || end <= first_query) continue;
        const ShortPlace own(item, key_pages + first_page + i);
        if (end - query > 32) {
          step<8>(dq[i], seen, shared.pages[place.slot], key, num_keys, own.slot, query, 0);
        } else {
          step<4>(dq[i], seen, shared.pages[place.slot], key, num_keys, own.slot, query, first[i]);
        }
      }
      release(place);
      if (page + 1 == key_pages) release_queries();
      if (!alone) {
        if (warpgroup == 0) {
          exchange(dk, dv);
        } else {
          exchange(dv, dk);
        }
        ptx::bar_sync(kRead + warpgroup, 256);  // before these places are written again
      }
      if (alone || warpgroup == 0)
        store(dk, scale, params.grad_k, item.keys, item.head, key, params.dim_qk);
      if (alone || warpgroup == 1)
        store(dv, 1.0f, params.grad_v, item.keys, item.head, key, params.dim_v);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (warp * 16 >= first[i] && warp * 16 < last[i])
        store(dq[i], scale, params.grad_q, item.queries, item.head, (first_page + i) * 64,
              params.dim_qk);
    }
  }

  __device__ __forceinline__ void run() {
    for (int position = 0;; ++position) {
      const int described = position % Storage::kDescribed;
      ptx::mbarrier_wait(shared.issued[described], position / Storage::kDescribed % 2);
      const ShortBackwardItem item = shared.items[described];
      if (item.owner == ShortBackwardItem::kNone) return;
      if (item.owner == ShortBackwardItem::kBoth || item.owner == warpgroup) compute(item);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_short(
    const __grid_constant__ ShortBackwardParams params) {
  using Storage = ShortBackwardStorage<Config>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const bool listed = lists_all(params.attention);
  if (listed)
    list_short<ShortBackwardItems<Config>, Config::kThreads>(params.attention, shared.listed);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce_short_backward<Config>(params, shared, listed, warp, lane);
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
  const auto encode = [&](CUtensorMap& map, const HeadsView& view, int64_t rows, int64_t dim) {
    return encode_heads<typename ShortBackwardStorage<Config>::Rows>(map, attention, view, rows,
                                                                     attention.heads, dim);
  };
  const cudaError_t errors[] = {
      encode(params.keys[0], attention.k, keys, attention.dim_qk),
      encode(params.keys[1], attention.v, keys, attention.dim_v),
      encode(params.queries[0], attention.q, queries, attention.dim_qk),
      encode(params.queries[1], attention.grad_out, queries, attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return launch_longer<backward_short<Config>>(attention, params, Grid{num_sms}, Config::kThreads,
                                               sizeof(ShortBackwardStorage<Config>), stream,
                                               Config::kName);
}

}  // namespace jagged_cuda::attention
