// The items of the backward kernel for short sequences (short_backward.cuh), the ring of pages
// through which their operands pass, and which of the two warpgroups takes an item.
//
// Without a deadlock: pages are filled in the order of items, an item has no more than there are,
// and a warpgroup takes items in their order. kDescribed: an item described has a page or waits for
// one; of the items before it the ring holds kPages at most, and a warpgroup that walks to its next
// passes over no more than those that the other got in a row, at most five (ShortBackwardTurns).
#pragma once

#include "cuda/kernels/attention/short_items.cuh"

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

// The two elements of a word.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// --- items

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
  // The page that is copied as number `copy`: the first of keys and all of queries, then the
  // others, each of which is wanted when the one before has been used.
  __device__ __forceinline__ int page_of(int copy) const {
    const int num_keys = key_pages(), num_queries = query_pages();
    if (num_keys == 0 || copy == 0) return copy;
    return copy <= num_queries ? num_keys + copy - 1 : copy - num_queries;
  }
};

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

// --- the ring of pages

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
  uint64_t issued[kDescribed], full[kPages], ready[kPages], empty[kPages], sums;
  ShortList listed;

  // One thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kDescribed; ++i) ptx::mbarrier_init(issued[i], 1);
    for (int i = 0; i < kPages; ++i) {
      ptx::mbarrier_init(full[i], 1);
      ptx::mbarrier_init(ready[i], 32);
      ptx::mbarrier_init(empty[i], Config::kWarpgroups * 128);
    }
    ptx::mbarrier_init(sums, Config::kWarpgroups * 128);
    listed.init();
    ptx::fence_mbarrier_init();
  }
};

}  // namespace jagged_cuda::attention
