// The producers of the backward kernel for short sequences (short_backward.cuh): one warp copies
// pages of operands, kHelpers warps make them ready for the products.
//
//     copying warp                               each helping warp
//     for each item:                             for each item:
//       choose who takes it, describe it           for each kHelpers-th page:
//       for each page:                               of keys: zeros behind them
//         wait until its place is free               of queries: lse and delta, zeros behind them
//         copy K and V, or Q and dO                  tell the computing warps
#pragma once

#include "cuda/kernels/attention/short_backward_pages.cuh"

namespace jagged_cuda::attention {

struct ShortBackwardParams {
  CUtensorMap keys[2];     // K, V
  CUtensorMap queries[2];  // Q, dO
  AttentionBackwardParams attention;
};

// --- the helping warps

// a b summed over 8 elements of each.
template <typename Element>
__device__ __forceinline__ float dot_chunks(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float2 u = unpack<Element>(x[pair]), v = unpack<Element>(y[pair]);
    sum = __fmaf_rn(u.y, v.y, __fmaf_rn(u.x, v.x, sum));
  }
  return sum;
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

// A page of queries: lse and delta = rowsum(dO * O) - dlse, and zeros behind them; one warp. A lane
// multiplies one chunk of 8 columns of every fourth row, half a page at a time. What comes from
// global memory is asked for before the wait for the page, which has dO.
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
  const LaneRows gOut(params.out, begin + lane / 8, item.head, chunk * 8);
  const bool has_column = chunk * 8 < params.dim_v;
  uint4 out[kAtOnce];
  const char* next = gOut.data;
  const auto load_out = [&](int half) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      out[i] = ptx::ld_global_nc_16(next, half * 32 + i * 4 + lane / 8 < rows && has_column);
      next += gOut.row_bytes * uint64_t{4};
    }
  };
  load_out(0);
  if (lane + 32 < rows)
    ptx::prefetch_l2(LaneRows(params.out, begin + lane + 32, item.head, 0).data);
  float lse_log2[2], grad_lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane;
    const uint64_t statistic =
        static_cast<uint64_t>(begin + row) * static_cast<unsigned>(params.heads) + item.head;
    // A query past the end, or one that sees nothing, has P = 0.
    const float value =
        row < rows ? __ldg(static_cast<const float*>(params.lse) + statistic) : -INFINITY;
    lse_log2[half] = value == -INFINITY ? INFINITY : value * kLog2E;
    grad_lse[half] = row < rows && params.grad_lse != nullptr
                         ? __ldg(static_cast<const float*>(params.grad_lse) + statistic)
                         : 0.0f;
  }
  ptx::mbarrier_wait(shared.full[place.slot], place.parity);
  float* delta = shared.delta[place.slot];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shared.lse[place.slot][half * 32 + lane] = lse_log2[half];
    delta[half * 32 + lane] = -grad_lse[half];
  }
  __syncwarp();
  const char* grad_out = reinterpret_cast<const char*>(shared.pages[place.slot].rows[1].data);
#pragma unroll 1
  for (int half = 0; half < 2 && half * 32 < rows; ++half) {
    float sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = half * 32 + i * 4 + lane / 8;
      const uint4 own = *reinterpret_cast<const uint4*>(grad_out + row * ShortLayout::kRowBytes +
                                                        (chunk ^ (row & 7)) * 16);
      sum[i] = dot_chunks<Element>(out[i], own);
    }
    if (half == 0) load_out(1);
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
  __syncwarp();  // other lanes have read rows behind the end, too, with half a page
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

// --- the copying warp

// Takes items, and copies their pages in the order in which they are wanted; one warp.
template <typename Config>
struct ShortBackwardCopier {
  using Storage = ShortBackwardStorage<Config>;
  using Items = ShortBackwardItems<Config>;

  const ShortBackwardParams& params;
  Storage& shared;
  const int lane;
  int described = 0;  // the next item's place among those that are
  int copied = 0;     // pages
  ShortPlaces places = ShortPlaces::all<Storage::kPages>();
  ShortBackwardTurns turns;

  __device__ __forceinline__ void describe(const ShortBackwardItem& item) {
    if (lane == 0) {
      shared.items[described] = item;
      ptx::mbarrier_arrive(shared.issued[described]);
    }
    described = (described + 1) % Storage::kDescribed;
  }
  // Copies a page into its place, which is free; one thread. `alone`: one warpgroup takes the item.
  __device__ __forceinline__ void copy(const ShortBackwardItem& item, int page, int slot,
                                       bool alone) {
    const int key_pages = item.key_pages(), query_pages = item.query_pages();
    const bool is_keys = page < key_pages;
    const TinyRows range = is_keys ? item.keys : item.queries;
    const int row = (is_keys ? page : page - key_pages) * Config::kPageRows;
    // Both warpgroups read all keys, and of three pages of queries the one between.
    if (alone || (!is_keys && !(query_pages == 3 && page - key_pages == 1)))
      ptx::mbarrier_arrive_count(shared.empty[slot], 128);
    uint64_t& full = shared.full[slot];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(typename Storage::Page));
    const CUtensorMap* maps = is_keys ? params.keys : params.queries;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ptx::cp_async_bulk_tensor_3d(shared.pages[slot].rows[i].data, maps[i], 0,
                                   static_cast<int>(item.head), static_cast<int>(range.begin) + row,
                                   full);
  }
  __device__ __forceinline__ void visit(const ShortSequence& sequence, unsigned head) {
    ShortBackwardItem item{sequence.queries, sequence.keys, head, ShortBackwardItem::kBoth, copied};
    const bool alone = !Items::is_first(sequence);
    if (alone) item.owner = turns.next(item);
    const int pages = item.key_pages() + item.query_pages();
    places.template assign<Storage::kPages>(item, pages);
    describe(item);
    copied += pages;
#pragma unroll 1
    for (int number = 0; number < pages; ++number) {
      const int page = item.page_of(number);
      const ShortPlace place(item, page);
      ptx::mbarrier_wait(shared.empty[place.slot], place.parity ^ 1);
      if (lane == 0) copy(item, page, place.slot, alone);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void run(bool listed) {
    visit_short<Items>(
        params.attention, shared.listed, listed, lane,
        [&](const ShortSequence& sequence, unsigned head) { visit(sequence, head); });
    ShortBackwardItem end{};
    end.owner = ShortBackwardItem::kNone;
    describe(end);
  }
};

}  // namespace jagged_cuda::attention
