// Work on short sequences, of up to kShortRows queries and keys, that are not tiny. One persistent CTA
// per SM takes items (sequence, head): warps copy their operands into a ring in shared memory, as far
// ahead as there is room; other warps take units of items (some of their queries), and wait for nothing
// but an item's copies.
//
// Barriers, for each item:     arrives                              waits
//     issued    copying warp, when the item is described            helping warps
//     full      copying warp, with the bytes of the item            helping warps
//     ready     last helping warp, when rows past the end are zeros computing warps
//     empty     a computing warp for each unit, each lane when it   copying warp, when it needs the
//               has read its operands                               room
//
// Units go to warps in turn. Those of a warp are as many apart as there are warps that compute, which is
// what four items have at most; no more than kAhead items are in flight. So a warp walks over few of
// the descriptions, of which there are kDescribed.
//
// Which items a CTA takes: where there are few sequences (lists_all) all threads of each CTA read all
// their lengths, and it takes an equal part of the work; else sequences go round, 8 at a time.
#pragma once

#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/tiny_tile.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma.cuh"

namespace jagged_cuda::attention {

__host__ __device__ constexpr int round_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// One head of one sequence, in the ring.
struct ShortItem {
  TinyRows queries;
  TinyRows keys;
  unsigned head;
  int first_unit;  // of all units of the CTA
  int units;       // -1: there are no more items
  int q, k, v;     // bytes from the start of the ring
};

// A sequence and those of its heads that a CTA takes.
struct ShortSequence {
  TinyRows queries;
  TinyRows keys;
  int first_head;
  int last_head;
};

struct ShortLayout {
  static constexpr int kColumns = 64;  // more than D or Dv become zeros
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kBoxRows = 16, kWideBoxRows = 64;  // of copies
  static constexpr int kAhead = 8;
  static constexpr int kDescribed = 32;
  static constexpr int kList = 256;
  // Up to kList / kCostRatio sequences per CTA are listed at once: in an equal part of the work none
  // costs less than this part of the average.
  static constexpr int kCostRatio = 16;
};

// The sequences that a CTA takes, or some of them: those that come first from the front on, the others
// from the back.
struct ShortList {
  ShortSequence sequences[ShortLayout::kList];
  int num_first, num_last;
  int warp_costs[32];

  __device__ __forceinline__ void init() { num_first = num_last = 0; }
};

template <int kRingBytes_>
struct ShortStorage : ShortLayout {
  static constexpr int kRingBytes = kRingBytes_;
  alignas(1024) char ring[kRingBytes];
  ShortItem items[kDescribed];
  uint64_t issued[kDescribed], full[kDescribed], ready[kDescribed], empty[kDescribed];
  ShortList listed;

  // One thread.
  __device__ __forceinline__ void init(int max_units) {
    for (int i = 0; i < kDescribed; ++i) {
      ptx::mbarrier_init(issued[i], 1);
      ptx::mbarrier_init(full[i], 1);
      ptx::mbarrier_init(ready[i], 32);
      ptx::mbarrier_init(empty[i], 32 * max_units);
    }
    listed.init();
    ptx::fence_mbarrier_init();
  }
};

__device__ __forceinline__ ShortSequence short_sequence(const AttentionParams& params,
                                                        int64_t seq) {
  if (seq >= params.q_offsets.num_seqs) return {};
  const TinyRows queries = tiny_rows(params.q_offsets, static_cast<unsigned>(seq));
  const TinyRows keys = params.kv_offsets.data == params.q_offsets.data
                            ? queries
                            : tiny_rows(params.kv_offsets, static_cast<unsigned>(seq));
  if (max(queries.len, keys.len) > kShortRows || is_tiny(params, queries.len, keys.len)) return {};
  return {queries, keys, 0, params.heads};
}

__device__ __forceinline__ bool lists_all(const AttentionParams& params) {
  return params.q_offsets.num_seqs * ShortLayout::kCostRatio <= ShortLayout::kList * gridDim.x;
}

// Whether likely none is short, and whether one is; the latter by all kThreads of a CTA.
__device__ __forceinline__ bool are_mostly_tiny(const AttentionParams& params) {
  return params.q_offsets.total < params.q_offsets.num_seqs * (kTinyRows / 2);
}
template <int kThreads>
__device__ __forceinline__ bool any_short(const AttentionParams& params) {
  return any_sequence<kThreads>(params, [&](int seq) {
    const ShortSequence sequence = short_sequence(params, seq);
    return sequence.queries.len + sequence.keys.len > 0;
  });
}

// Lists the sequences of this CTA, those first for which Items::is_first() holds; all kThreads of it.
// Items::cost() says what one head of a sequence takes, 0 where there is no
// item: as steps of the kernel are, not smoothly, or some CTAs get a fifth more than others.
template <typename Items, int kThreads>
__device__ __forceinline__ void list_short(const AttentionParams& params, ShortList& list) {
  const int num_seqs = static_cast<int>(params.q_offsets.num_seqs),
            thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int per_thread = (num_seqs + kThreads - 1) / kThreads, first = thread * per_thread,
            last = min(first + per_thread, num_seqs);
  int cost = 0;
#pragma unroll 4
  for (int seq = first; seq < last; ++seq) cost += Items::cost(short_sequence(params, seq));
  int sum = cost;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) list.warp_costs[thread / 32] = sum;
  __syncthreads();
  int total = 0, before = sum - cost;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) before += list.warp_costs[warp];
    total += list.warp_costs[warp];
  }
  const int64_t heads = params.heads, all = total * heads, low = all * blockIdx.x / gridDim.x,
                high = all * (blockIdx.x + 1) / gridDim.x;
  if ((before + cost) * heads > low && before * heads < high) {
    int64_t start = before * heads;
#pragma unroll 1
    for (int seq = first; seq < last; ++seq) {
      ShortSequence sequence = short_sequence(params, seq);
      const int own = Items::cost(sequence);
      if (own == 0) continue;
      // Heads whose items start in [low, high). Costs of one sequence fit 32 bits.
      const auto head_at = [&](int64_t place) {
        const int64_t passed = place - start;
        if (passed <= 0) return 0;
        if (passed >= own * heads) return static_cast<int>(heads);
        return static_cast<int>((static_cast<unsigned>(passed) + own - 1) / own);
      };
      sequence.first_head = head_at(low);
      sequence.last_head = head_at(high);
      start += own * heads;
      if (sequence.first_head < sequence.last_head) {
        const int place = Items::is_first(sequence)
                              ? atomicAdd(&list.num_first, 1)
                              : ShortLayout::kList - 1 - atomicAdd(&list.num_last, 1);
        list.sequences[place] = sequence;
      }
    }
  }
  __syncthreads();
}

// Lists the sequences of round `round`, where they go round; false if there are no more. One warp.
template <typename Items>
__device__ __forceinline__ bool list_round(const AttentionParams& params, ShortList& list,
                                           int round, int lane) {
  constexpr int kRun = 8, kRunsAtOnce = 32 / kRun, kLoads = 4;
  const auto run_of = [&](int run) {
    return (static_cast<int64_t>(round) * kLoads * kRunsAtOnce + run) * gridDim.x + blockIdx.x;
  };
  if (run_of(0) * kRun >= params.q_offsets.num_seqs) return false;
  ShortSequence sequences[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    sequences[i] =
        short_sequence(params, run_of(i * kRunsAtOnce + lane / kRun) * kRun + lane % kRun);
  int num_first = 0, num_last = 0;
  const unsigned lanes_before = (1u << lane) - 1;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const bool any = sequences[i].queries.len + sequences[i].keys.len > 0,
               first = any && Items::is_first(sequences[i]);
    const unsigned all_first = __ballot_sync(0xffffffffu, first),
                   all_last = __ballot_sync(0xffffffffu, any && !first);
    if (first) {
      list.sequences[num_first + __popc(all_first & lanes_before)] = sequences[i];
    } else if (any) {
      list.sequences[ShortLayout::kList - 1 - num_last - __popc(all_last & lanes_before)] =
          sequences[i];
    }
    num_first += __popc(all_first);
    num_last += __popc(all_last);
  }
  if (lane == 0) {
    list.num_first = num_first;
    list.num_last = num_last;
  }
  __syncwarp();
  return true;
}

// Visits each item; all sequences of the CTA are listed already, or go round. One warp.
template <typename Items, typename Visit>
__device__ __forceinline__ void visit_short(const AttentionParams& params, ShortList& list,
                                            bool listed, int lane, Visit visit) {
  for (int round = 0; listed ? round == 0 : list_round<Items>(params, list, round, lane); ++round) {
    const int num_first = list.num_first, num_all = num_first + list.num_last;
    for (int i = 0; i < num_all; ++i) {
      const ShortSequence sequence =
          list.sequences[i < num_first ? i : ShortLayout::kList - 1 - (i - num_first)];
      for (int head = sequence.first_head; head < sequence.last_head; ++head)
        visit(sequence, static_cast<unsigned>(head));
    }
  }
}

// The copying warp.
template <typename Storage>
struct ShortProducer {
  const AttentionParams& params;
  Storage& shared;
  int max_units;
  int lane;
  int pushed = 0, released = 0;  // items
  int units = 0;
  // Bytes of the ring that were ever given out, counting those skipped at its end: now, at the start
  // of the item with lane % kAhead, and of the oldest item not released. They may wrap.
  unsigned tail = 0, start = 0, oldest = 0;
  int place = 0;  // tail within the ring

  static constexpr int kAhead = Storage::kAhead, kDescribed = Storage::kDescribed;

  // Waits until the oldest item has been read.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_wait(shared.empty[released % kDescribed], released / kDescribed % 2);
    ++released;
    oldest = __shfl_sync(0xffffffffu, start, released % kAhead);
  }
  // Room in one piece: its offset in the ring.
  __device__ __forceinline__ int allocate(int bytes) {
    constexpr int kRing = Storage::kRingBytes;
    if (place + bytes > kRing) {
      tail += kRing - place;
      place = 0;
    }
    while (tail + bytes - oldest > kRing) release();
    tail += bytes;
    place += bytes;
    return place - bytes;
  }
  __device__ __forceinline__ int allocate_rows(int rows) {
    return allocate(round_up(round_up(rows, Storage::kBoxRows) * Storage::kRowBytes, 1024));
  }
  // Before an item's parts are allocated.
  __device__ __forceinline__ void begin_item() {
    while (pushed - released == kAhead) release();
    if (lane == pushed % kAhead) start = tail;
    if (released == pushed) oldest = tail;
  }

  // Describes an item whose parts are allocated, of so many bytes; returns its full barrier.
  __device__ __forceinline__ uint64_t& push(ShortItem& item, int bytes) {
    const int slot = pushed++ % kDescribed;
    item.first_unit = units;
    units += item.units;
    if (lane == 0) {
      shared.items[slot] = item;
      if (item.units < max_units)
        ptx::mbarrier_arrive_count(shared.empty[slot], 32 * (max_units - item.units));
      ptx::mbarrier_arrive_expect_tx(shared.full[slot], bytes);
      ptx::mbarrier_arrive(shared.issued[slot]);
    }
    __syncwarp();
    return shared.full[slot];
  }
  __device__ __forceinline__ void finish() {
    begin_item();
    const int slot = pushed % kDescribed;
    if (lane == 0) {
      shared.items[slot].units = -1;
      ptx::mbarrier_arrive(shared.issued[slot]);
      ptx::mbarrier_arrive(shared.full[slot]);
    }
  }

  // Visits each item; all sequences of the CTA are listed already, or go round.
  template <typename Items, typename Visit>
  __device__ __forceinline__ void run(bool listed, Visit visit) {
    visit_short<Items>(params, shared.listed, listed, lane, visit);
    finish();
  }
};

// A tensor in boxes of kBoxRows and of kWideBoxRows rows of one head: few copies, since each takes
// its thread some time, and no more than a box of rows past the end.
struct ShortMaps {
  CUtensorMap narrow;
  CUtensorMap wide;

  template <typename Element>
  cudaError_t encode(const AttentionParams& params, const HeadsView& view, int64_t rows,
                     int64_t heads, int64_t dim) {
    using Narrow = WarpgroupTile<Element, ShortLayout::kBoxRows, ShortLayout::kColumns>;
    using Wide = WarpgroupTile<Element, ShortLayout::kWideBoxRows, ShortLayout::kColumns>;
    const cudaError_t error = encode_heads<Narrow>(narrow, params, view, rows, heads, dim);
    return error == cudaSuccess ? encode_heads<Wide>(wide, params, view, rows, heads, dim) : error;
  }
};

// Starts the copies of one tensor's rows; one warp.
template <typename Storage>
__device__ __forceinline__ void copy_short_rows(Storage& shared, const ShortMaps& maps, int to,
                                                const TinyRows& rows, unsigned head, uint64_t& full,
                                                int lane) {
  if (lane == 0) {
    const int last = round_up(rows.len, Storage::kBoxRows);
    const auto copy = [&](const CUtensorMap& map, int row) {
      ptx::cp_async_bulk_tensor_3d(shared.ring + to + row * Storage::kRowBytes, map, 0,
                                   static_cast<int>(head), static_cast<int>(rows.begin) + row,
                                   full);
    };
    int row = 0;
#pragma unroll 1
    for (; row + Storage::kWideBoxRows <= last; row += Storage::kWideBoxRows) copy(maps.wide, row);
#pragma unroll 1
    for (; row < last; row += Storage::kBoxRows) copy(maps.narrow, row);
  }
  __syncwarp();
}

// Hands a computing warp one unit after another.
template <typename Storage>
struct ShortUnits {
  Storage& shared;
  int lane;
  int taken;         // the warp's unit of all; at first its own number
  int position = 0;  // of the item

  __device__ __forceinline__ int slot() const { return position % Storage::kDescribed; }
  __device__ __forceinline__ const ShortItem& item() const { return shared.items[slot()]; }

  // Waits for the item of the unit taken; `unit` is the unit's number in it. False if there is none.
  __device__ __forceinline__ bool find(int& unit) {
    for (;; ++position) {
      ptx::mbarrier_wait(shared.ready[slot()], position / Storage::kDescribed % 2);
      if (item().units < 0) return false;
      unit = taken - item().first_unit;
      if (unit < item().units) return true;
    }
  }
  // This lane has read all that it will of the unit's item.
  __device__ __forceinline__ void take_next(int warps) {
    ptx::mbarrier_arrive(shared.empty[slot()]);
    taken += warps;
  }
};

// Rows [first, last) of a part become zeros; one warp.
template <typename Storage>
__device__ __forceinline__ void zero_short_rows(Storage& shared, int part, int first, int last,
                                                int lane) {
  constexpr int kChunks = Storage::kRowBytes / 16;
  for (int chunk = first * kChunks + lane; chunk < last * kChunks; chunk += 32)
    *reinterpret_cast<uint4*>(shared.ring + part + chunk * 16) = make_uint4(0, 0, 0, 0);
}

// A warp's 16 rows of 64 columns, each times its scale, as they leave: lane l holds chunk l % 8 of rows
// 4 i + l / 8. They pass through 16 rows of shared memory that only this warp uses.
struct ShortOutput {
  uint4 chunks[4];

  template <typename Element>
  __device__ __forceinline__ static ShortOutput of(const float (&o)[8][4], const float (&scale)[2],
                                                   uint32_t stage, int lane) {
    constexpr int kRowBytes = ShortLayout::kRowBytes;
    ShortOutput output;
    // The stage starts at a multiple of 1024 bytes.
    const uint32_t row = stage + lane % 16 * kRowBytes;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      uint32_t fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = o[k + i / 2];
        const int half = i % 2;
        fragment[i] = pack<Element>(pair[2 * half] * scale[half], pair[2 * half + 1] * scale[half]);
      }
      ptx::stmatrix_x4(row + (((k + lane / 16) ^ (lane & 7)) * 16), fragment);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      output.chunks[i] = ptx::ld_shared_16(stage + row * kRowBytes + ((lane % 8 ^ row % 8) * 16));
    }
    return output;
  }

  // `g` is this lane's chunk of row lane / 8, `rows` how many exist from there on; none in the columns
  // past the end.
  __device__ __forceinline__ void store(const LaneRows& g, int rows) const {
    char* target = g.data;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i * 4 < rows) ptx::st_global_16(target, chunks[i]);
      target += static_cast<uint64_t>(g.row_bytes) * 4;
    }
  }
};

}  // namespace jagged_cuda::attention
