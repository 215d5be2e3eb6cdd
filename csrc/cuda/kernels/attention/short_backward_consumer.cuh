// A computing warpgroup of the backward kernel for short sequences (short_backward.cuh). For its
// queries, up to two pages of them, and each page of keys:
//     start S^T = K Q^T, dP^T = V dO^T
//     P^T = exp2(...)
//     start dV += P^T dO
//     dS^T = P^T * (dP^T - delta), to shared memory
//     start dK += dS^T Q, dQ += dS K
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/short_backward_pages.cuh"

namespace jagged_cuda::attention {

// A pair of elements times two numbers, rounded to Element. bf16 rounds those first, for a third of
// the instructions; f16 has not their range.
template <typename Element>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, const float (&factors)[2]) {
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

template <typename Config>
struct ShortBackwardConsumer {
  using Element = typename Config::Element;
  using Storage = ShortBackwardStorage<Config>;
  using Rows = typename Storage::Rows;
  using Page = typename Storage::Page;
  static constexpr int kOwn = 1;
  static constexpr int kEarly = 4;  // pairs of lse, or delta, that are asked for before a wait

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

  // --- pages

  __device__ __forceinline__ void wait_ready(const ShortPlace& place) const {
    ptx::mbarrier_wait(shared.ready[place.slot], place.parity);
  }
  // This lane has read all that it will of a page, for which it has waited.
  __device__ __forceinline__ void release(const ShortPlace& place) const {
    ptx::mbarrier_arrive(shared.empty[place.slot]);
  }

  // --- a warp's 16 rows on their way through shared memory

  // This warp's rows of its place for the next dS, which no product reads any more: all warps
  // waited for the last but one before they met for the last.
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
    __syncwarp();  // before dS is written there
  }

  // --- a step: 64 keys, of which this lane's first is `own_key`, and kBlocks * 8 queries

  // Of lse or delta, `values` from this lane's first column on, those of the first blocks.
  __device__ __forceinline__ static void load_early(float2 (&early)[kEarly], const float* values) {
#pragma unroll
    for (int block = 0; block < kEarly; ++block)
      early[block] = *reinterpret_cast<const float2*>(values + block * 8);
  }
  // Those of any block.
  __device__ __forceinline__ static float2 pair_of(const float2 (&early)[kEarly],
                                                   const float* values, int block) {
    return block < kEarly ? early[block] : *reinterpret_cast<const float2*>(values + block * 8);
  }
  // S^T = K Q^T, dP^T = V dO^T
  template <int kBlocks>
  __device__ __forceinline__ void start_scores(Accumulator<1, kBlocks>& s,
                                               Accumulator<1, kBlocks>& dp, const Page& keys,
                                               const Rows& tile_q, const Rows& tile_grad_out) {
    ptx::wgmma_fence();
    start_scores_and_grad_probs(s, keys.rows[0], tile_q, dp, keys.rows[1], tile_grad_out);
  }
  // Scores of queries from `query` on that do not see their key become such that P is 0.
  template <int kBlocks>
  __device__ __forceinline__ void hide(Accumulator<1, kBlocks>& s, const WindowOf<int>& seen,
                                       int own_key, int query) const {
    constexpr int kQueries = kBlocks * 8;
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
  // P^T = exp2(...)
  template <int kBlocks>
  __device__ __forceinline__ void finish_scores(Accumulator<1, kBlocks>& s,
                                                const float2 (&early)[kEarly],
                                                const float* lse) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 own = pair_of(early, lse, block);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[0][block][i];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, i % 2 == 0 ? -own.x : -own.y));
      }
    }
  }
  // dV += P^T dO
  template <int kBlocks>
  __device__ __forceinline__ void start_grad_v(const PackedRows<Element, kBlocks>& p,
                                               const Rows& tile_grad_out) {
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dv, p, tile_grad_out);
    ptx::wgmma_commit_group();
  }
  // dS^T = P^T * (dP^T - delta), with P as rounded, which saves registers.
  template <int kBlocks>
  __device__ __forceinline__ void finish_grad_probs(PackedRows<Element, kBlocks>& ds,
                                                    Accumulator<1, kBlocks>& dp,
                                                    const PackedRows<Element, kBlocks>& p,
                                                    const float2 (&early)[kEarly],
                                                    const float* delta) const {
    ptx::fence_operands(dp[0]);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 own = pair_of(early, delta, block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t probs = p.fragments[block / 2][block % 2 * 2 + half];
        const float pair[2] = {dp[0][block][2 * half] - own.x, dp[0][block][2 * half + 1] - own.y};
        ds.fragments[block / 2][block % 2 * 2 + half] = multiply_pair<Element>(probs, pair);
      }
    }
  }
  // dS of keys past the end becomes 0, for dQ alone: what they give to dK and dV is not stored.
  template <int kBlocks>
  __device__ __forceinline__ static void zero_keys(PackedRows<Element, kBlocks>& ds, int own_key,
                                                   int num_keys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (own_key + half * 8 >= num_keys) ds.fragments[block / 2][block % 2 * 2 + half] = 0;
      }
    }
  }
  // dK += dS^T Q
  template <int kBlocks>
  __device__ __forceinline__ void start_grad_k(const PackedRows<Element, kBlocks>& ds,
                                               const Rows& tile_q) {
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, tile_q);
    ptx::wgmma_commit_group();
  }
  // dQ += dS K. Rows of dQ whose queries are not of this step add up what is not used.
  __device__ __forceinline__ void start_grad_q(Accumulator<1, 8>& grad_q, const Rows& scores,
                                               const Page& keys) {
    const ptx::MatrixDescriptor a = scores.descriptor(), b = keys.rows[0].descriptor();
    ptx::fence_operands(grad_q[0]);
    ptx::wgmma_fence();
    wgmma_columns_by_columns<Rows, Rows, /*kAdds=*/true>(grad_q, a, b);
    ptx::wgmma_commit_group();
  }

  // The keys from `key` on, in `keys`, and kBlocks * 8 queries from `query` on, which are in a
  // page's rows from `offset` on; adds to the dQ of that page.
  template <int kBlocks>
  __device__ __forceinline__ void step(Accumulator<1, 8>& grad_q, const WindowOf<int>& seen,
                                       Page& keys, int key, int num_keys, int slot, int query,
                                       int offset) {
    const auto rows_from = [&](Rows& rows) -> Rows& {
      return *reinterpret_cast<Rows*>(reinterpret_cast<char*>(rows.data) +
                                      offset * Storage::kRowBytes);
    };
    Rows& tile_q = rows_from(shared.pages[slot].rows[0]);
    Rows& tile_grad_out = rows_from(shared.pages[slot].rows[1]);
    Accumulator<1, kBlocks> s, dp;
    start_scores(s, dp, keys, tile_q, tile_grad_out);
    const float* lse = shared.lse[slot] + offset + lane % 4 * 2;
    const float* delta = shared.delta[slot] + offset + lane % 4 * 2;
    float2 early[kEarly];
    load_early(early, lse);
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    // Masked before the exponentials, so that nothing comes between these and what follows.
    const int own_key = key + warp * 16 + lane / 4;
    if (seen.cuts_tile(key, 64, query, kBlocks * 8, query + kBlocks * 8))
      hide(s, seen, own_key, query);
    finish_scores(s, early, lse);
    const PackedRows<Element, kBlocks> p(s);
    start_grad_v(p, tile_grad_out);
    load_early(early, delta);
    ptx::wgmma_wait_group<1>();
    PackedRows<Element, kBlocks> ds;
    finish_grad_probs(ds, dp, p, early, delta);
    if (key + 64 > num_keys) zero_keys(ds, own_key, num_keys);
    write_rows(ds, offset / 8);
    const Rows& scores = shared.grad_scores[warpgroup][next_scores];
    next_scores ^= 1;
    start_grad_k(ds, tile_q);
    ptx::fence_proxy_async();
    ptx::bar_sync(kOwn + warpgroup, 128);
    start_grad_q(grad_q, scores, keys);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    ptx::fence_operands(grad_q[0]);
  }

  // --- an item

  // One thread's part of a sum that passes to the other warpgroup, in the places of `from`'s dS.
  __device__ __forceinline__ float4* sum_of(int from) const {
    static_assert(sizeof(shared.grad_scores[0]) == 128 * 32 * sizeof(float));
    return reinterpret_cast<float4*>(shared.grad_scores[from]) + warp * 32 + lane;
  }
  __device__ __forceinline__ void give(const Accumulator<1, 8>& sum) const {
    float4* to = sum_of(warpgroup);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[i * 128] = make_float4(sum[0][i][0], sum[0][i][1], sum[0][i][2], sum[0][i][3]);
  }
  __device__ __forceinline__ void add(Accumulator<1, 8>& sum) const {
    const float4* from = sum_of(warpgroup ^ 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 other = from[i * 128];
      sum[0][i][0] += other.x;
      sum[0][i][1] += other.y;
      sum[0][i][2] += other.z;
      sum[0][i][3] += other.w;
    }
  }
  // Both warpgroups, twice for each exchange: `phase` is 0, then 1.
  __device__ __forceinline__ void meet(int phase) const {
    ptx::mbarrier_arrive(shared.sums);
    ptx::mbarrier_wait(shared.sums, phase);
  }
  // Of an item that both take, the first warpgroup gets all of dK, the second all of dV.
  __device__ __forceinline__ void exchange_sums() {
    ptx::bar_sync(kOwn + warpgroup, 128);
    if (warpgroup == 0) {
      give(dv);
    } else {
      give(dk);
    }
    meet(0);
    if (warpgroup == 0) {
      add(dk);
    } else {
      add(dv);
    }
    meet(1);  // before these places are written again
  }

  __device__ __forceinline__ void compute(const ShortBackwardItem& item) {
    const bool alone = item.owner != ShortBackwardItem::kBoth;
    const int num_queries = item.queries.len, num_keys = item.keys.len,
              key_pages = item.key_pages();
    // Its queries: of two pages from the first on the rows [first, last). Where both take the item
    // each has half: of three pages they share the one between.
    const bool shares_page = !alone && item.query_pages() == 3;
    const bool is_second = !alone && warpgroup == 1;
    const int first_page = is_second ? (shares_page ? 1 : 2) : 0;
    int first[2] = {shares_page && is_second ? 32 : 0, 0}, last[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) last[i] = min(num_queries - (first_page + i) * 64, 64);
    if (shares_page && !is_second) last[1] = 32;
    const auto page_of = [&](int i) { return ShortPlace(item, key_pages + first_page + i); };
    const auto release_queries = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (last[i] > 0) release(page_of(i));
      }
    };
    const WindowOf<int> seen = sequence_window(params, num_keys - num_queries).transposed();
    const float scale = static_cast<float>(params.scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (last[i] > 0) wait_ready(page_of(i));
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
        const ShortPlace own = page_of(i);
        Page& keys = shared.pages[place.slot];
        if (end - query > 32) {
          step<8>(dq[i], seen, keys, key, num_keys, own.slot, query, 0);
        } else {
          step<4>(dq[i], seen, keys, key, num_keys, own.slot, query, first[i]);
        }
      }
      release(place);
      if (page + 1 == key_pages) release_queries();
      if (!alone) exchange_sums();
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

}  // namespace jagged_cuda::attention
