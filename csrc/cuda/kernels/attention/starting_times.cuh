// time_bias alone for the forward kernels on wgmma (long_forward.cuh): what is added to the scores of a
// computing warp's 16 rows, values[bucket of (q_time[row] - kv_time[key])], is written to shared memory
// by a warp of its own, over the scale, in the order of the accumulators. The product starts from it:
// a computing warp has a load of 16 bytes for four scores.
//
//     bringer (one warp)             writer w                     computing warp w
//     for each item:                 for each item:               for each step of keys:
//       for each kWindow keys:         spans, values of the head    for each unit of kUnit keys:
//         times, spans of 16 keys      for each window:               load, release the unit
//                                        groups of 16 keys
//                                        for each unit: write it
//
// Times are looked at for 16 rows and 16 keys at once (Group): one value, one comparison with a boundary
// for each score, or a look at a cell of distances (TimeCells). Where none of these serves, such as
// for unsorted times further apart than 2^31, a search for each score. Any times are right.
//
// What a writer does is short of latency, not of slots: loads stand in rows, before all stores.
//
// Barriers:              arrives                    waits
//     warps[w].ring.full   writer w                 computing warp w
//     warps[w].ring.empty  computing warp w         writer w
//     window_ring.full     bringer                  writers
//     window_ring.empty    writers                  bringer
// Every lane arrives for what it has written or read, as racecheck follows it. Items as in long_forward.cuh,
// where bringer and writers wait for items.full and arrive at items.empty.
//
// Shared memory: for each writer kSteps units of 4 KiB, the values of an item's head and what is known of
// 32 groups; two windows of times; 256 cells. For kTileM 128, kTileN 128: 117 KiB.
#pragma once

#include "cuda/kernels/attention/row_ranges.cuh"
#include "cuda/kernels/attention/starting_bias.cuh"
#include "cuda/kernels/attention/starting_times.h"
#include "cuda/kernels/attention/time_buckets.cuh"

namespace jagged_cuda::attention {

// Of tiles of kTileM rows and steps of kTileN keys; up to kMostBuckets buckets.
template <int kTileM, int kTileN>
struct StartingTimes {
  static constexpr int kMostBuckets = kMostForwardTimeBuckets;
  static constexpr int kWriters = kTileM / 16, kWarps = kWriters + 1;  // and one that brings times
  static constexpr int kFillers = 0;                                   // of the ring of K and V
  static constexpr bool kAhead = true;
  // Keys that are handed over at once; how many of these are kept.
  static constexpr int kUnit = 64, kSteps = kTileN > kUnit ? 3 : 2;
  static constexpr int kBlocks = kUnit / 8;
  static constexpr int kGroup = 16, kWindow = 32 * kGroup;  // keys whose groups are found at once
  static constexpr int kBarrier = 15;                       // of all writing warps
  static constexpr uint32_t kNarrow = 1u << 31;
  static_assert(kTileN % kUnit == 0 && kWindow % kTileN == 0);

  // The times between 16 rows and 16 keys: the value of the nearest, that of the bucket behind it, the
  // soonest of the keys, and that more than the boundary between the buckets.
  struct alignas(16) Group {
    float value;
    float behind;
    uint32_t soonest;
    uint32_t boundary;
  };
  // Of kWindow keys, the last one repeated behind the sequence.
  struct Window {
    alignas(16) uint32_t times[kWindow];  // less the soonest of their 16
    TimeSpan spans[kWindow / kGroup];
  };
  // Of distances: the place of the value of those before `boundary`, behind which is that of others.
  struct alignas(8) Cell {
    uint32_t boundary;
    uint32_t offset;
    __device__ __forceinline__ uint32_t offset_of(uint32_t away) const {
      return offset + (away >= boundary ? 4 : 0);
    }
  };
  // What is seldom looked at of the item whose 16 rows a warp writes.
  struct Item {
    TimeSpan span;
    KeyHull seen;
    const int64_t* q_time;   // of the tile
    const int64_t* kv_time;  // of the sequence
    int last_row;
    int last_key;
  };
  struct alignas(16) Warp {
    Item item;
    float4 scores[kSteps][kBlocks][32];
    float values[kMostBuckets];  // of the item's head, over the scale
    Group groups[kWindow / kGroup];
    Ring<kSteps> ring;
  };

  struct Shared {
    Warp warps[kWriters];
    Window windows[2];
    Ring<2> window_ring;
    Cell cells[TimeCells::kCells];
    uint32_t boundaries[kMostBuckets];  // the lower half
    int crowded;                        // whether a cell has more than one boundary

    // One thread.
    __device__ __forceinline__ void init() {
      for (Warp& warp : warps) warp.ring.init(32, 32);
      window_ring.init(kWriters * 32, 32);
    }
    // The units of a step, of which a computing warp has the rows from `row` in the tile on.
    __device__ __forceinline__ void wait(RingPosition<kSteps> unit, int row) {
#pragma unroll
      for (int i = 0; i < kTileN / kUnit; ++i) {
        warps[row / 16].ring.wait(unit);
        unit.advance();
      }
    }
    // What the scores of this lane start from.
    template <int kScoreBlocks>
    __device__ __forceinline__ void load(Accumulator<1, kScoreBlocks>& s, const AttentionParams&,
                                         RingPosition<kSteps> unit, int row, int lane) const {
#pragma unroll
      for (int first = 0; first < kScoreBlocks; first += kBlocks) {
        const float4(&scores)[kBlocks][32] = warps[row / 16].scores[unit.stage];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float4 values = scores[block][lane];
          s[0][first + block][0] = values.x;
          s[0][first + block][1] = values.y;
          s[0][first + block][2] = values.z;
          s[0][first + block][3] = values.w;
        }
        unit.advance();
      }
    }
    __device__ __forceinline__ void pass(RingPosition<kSteps>& unit, int row, int) {
#pragma unroll
      for (int i = 0; i < kTileN / kUnit; ++i) {
        warps[row / 16].ring.release(unit.stage);
        unit.advance();
      }
    }
    // Instead of that for a step that its warpgroup does not see.
    __device__ __forceinline__ static void skip(RingPosition<kSteps>&) {}
  };

  // Of one item, for the 16 rows of a warp.
  class Writer {
   public:
    __device__ __forceinline__ Writer(const AttentionParams& params, Shared& shared, int warp)
        : params_(params), shared_(shared), own_(shared.warps[warp]), first_row_(warp * 16) {}

    template <typename Keys>
    __device__ __forceinline__ void begin(const QueryTile& tile, const Keys& keys, int head) {
      const int64_t* q_time = bias().q_time + tile.global_row;
      const int last_row = tile.rows - 1;
      const int64_t time = __ldg(q_time + min(first_row_ + lane() % 16, last_row));
      const float* table = static_cast<const float*>(bias().time_table) +
                           head / (params_.heads / bias().time_heads) * bias().time_buckets;
      const BiasOverScale over_scale(params_);
      constexpr int kAtOnce = 4;  // loads on their way
      float loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        loaded[i] = __ldg(table + min(lane() + i * 32, bias().time_buckets - 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_[half] =
            static_cast<uint32_t>(__shfl_sync(kAll, static_cast<int>(time), lane() / 4 + half * 8));
      }
      TimeSpan span = {time, time};
      span.combine();
      KeyHull hull;
      if (lane() < 16 && first_row_ + lane() <= last_row) {
        hull.widen(keys.rows[first_row_ + lane()].first);
        hull.widen(keys.rows[first_row_ + lane()].second);
      }
      hull = hull.of_warp();
      if (lane() == 0) {
        own_.item = {
            span, hull, q_time, bias().kv_time + tile.key_begin, last_row, tile.num_keys - 1};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) own_.values[lane() + i * 32] = over_scale(loaded[i]);
#pragma unroll 1
      for (int i = lane() + kAtOnce * 32; i < bias().time_buckets; i += 32)
        own_.values[i] = over_scale(__ldg(table + i));
      __syncwarp();
    }

    // Finds the groups of a window whose first key is `first_key`, one in each lane.
    __device__ __forceinline__ void find(const Window& window, int first_key) {
      window_ = &window;
      const TimeSpan keys = window.spans[lane()];
      const TimeDistances away(bias().symmetric, own_.item.span, keys);
      int first, last;
      if (away.farthest < kNarrow && shared_.crowded == 0) {
        first = cell_bucket(away.nearest);
        last = cell_bucket(away.farthest);
      } else {
        first = bucket_of(bias(), away.nearest, 0, bias().time_buckets - 1);
        last = bucket_of(bias(), away.farthest, first, bias().time_buckets - 1);
      }
      const auto soonest = static_cast<uint32_t>(keys.soonest);
      Group group = {own_.values[first], own_.values[min(first + 1, last)], soonest, soonest};
      if (first < last) group.boundary += shared_.boundaries[first];
      const int key = first_key + lane() * kGroup;
      const bool is_seen = key < own_.item.seen.end && key + kGroup > own_.item.seen.begin,
                 has_two =
                     first + 1 == last && away.is_ordered && away.farthest - away.nearest < kNarrow;
      __syncwarp();
      own_.groups[lane()] = group;
      one_ = __ballot_sync(kAll, !is_seen || first == last);
      rich_ = __ballot_sync(kAll, is_seen && first < last && !has_two);
      narrow_ = __ballot_sync(kAll, away.widest < kNarrow && shared_.crowded == 0);
      __syncwarp();
    }

    // Writes what is added to the scores of the window's kUnit keys from `key` on, which are these of
    // the sequence from `first` on.
    __device__ __forceinline__ void write(int key, int first, int stage) const {
      constexpr unsigned kGroups = kUnit / kGroup, kAllGroups = (1u << kGroups) - 1;
      const int place = key / kGroup;
      const Group* groups = &own_.groups[place];
      float4* out = &own_.scores[stage][0][lane()];
      if ((one_ >> place & kAllGroups) == kAllGroups) {
        float values[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) values[group] = groups[group].value;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float value = values[group];
          out[2 * group * 32] = out[(2 * group + 1) * 32] = make_float4(value, value, value, value);
        }
        return;
      }
      // As if all had one or two. Loads come first, since stores might overwrite what they load.
      const auto* times = reinterpret_cast<const uint2*>(&window_->times[key]) + lane() % 4;
      Group found[kGroups];
      uint2 pairs[2 * kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        found[group] = groups[group];
        pairs[2 * group] = times[group * (kGroup / 2)];
        pairs[2 * group + 1] = times[group * (kGroup / 2) + 4];
      }
#pragma unroll
      for (int block = 0; block < 2 * kGroups; ++block) {
        const Group& own = found[block / 2];
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto time = static_cast<int>(i % 2 == 0 ? pairs[block].x : pairs[block].y);
          values[i] =
              time <= static_cast<int>(rows_[i / 2] - own.boundary) ? own.behind : own.value;
        }
        out[block * 32] = make_float4(values[0], values[1], values[2], values[3]);
      }
#pragma unroll 1
      for (unsigned left = rich_ >> place & kAllGroups; left != 0; left &= left - 1) {
        const int group = __ffs(static_cast<int>(left)) - 1;
        float4* own = out + 2 * group * 32;
        if (narrow_ >> (place + group) & 1) {
          look_up(own, times + group * (kGroup / 2), groups[group].soonest);
        } else {
          search(reinterpret_cast<float*>(own), first + group * kGroup);
        }
      }
    }

   private:
    static constexpr unsigned kAll = 0xffffffffu;

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ const ScoreBias& bias() const { return params_.bias; }
    __device__ __forceinline__ float value_at(uint32_t offset) const {
      return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(own_.values) + offset);
    }

    // The lane's 8 scores of a group by their cells, a block at once.
    __device__ __forceinline__ void look_up(float4* out, const uint2* times,
                                            uint32_t soonest) const {
      const int mirrored = bias().symmetric ? -1 : 0;
#pragma unroll 1
      for (int block = 0; block < 2; ++block) {
        const uint2 pair = times[4 * block];
        uint32_t away[4];
        Cell cells[4];
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto difference =
              static_cast<int>(rows_[i / 2] - soonest - (i % 2 == 0 ? pair.x : pair.y));
          away[i] = static_cast<uint32_t>(max(difference, difference * mirrored));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) cells[i] = shared_.cells[TimeCells::index_of(away[i])];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = value_at(cells[i].offset_of(away[i]));
        out[block * 32] = make_float4(values[0], values[1], values[2], values[3]);
      }
    }
    __device__ __forceinline__ int cell_bucket(uint64_t away) const {
      const auto own = static_cast<uint32_t>(away);
      return static_cast<int>(shared_.cells[TimeCells::index_of(own)].offset_of(own) / 4);
    }

    // The lane's 8 scores of a group, one after another.
    __device__ __forceinline__ void search(float* out, int first) const {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int key = first + i / 4 * 8 + 2 * (lane() % 4) + i % 2,
                  row = first_row_ + i % 4 / 2 * 8 + lane() / 4;
        const Item& item = own_.item;
        const int64_t query = __ldg(item.q_time + min(row, item.last_row)),
                      time = __ldg(item.kv_time + min(key, item.last_key));
        const uint64_t away = !bias().symmetric && query < time ? 0 : time_between(query, time);
        out[i / 4 * 128 + i % 4] = own_.values[bucket_of(bias(), away, 0, bias().time_buckets - 1)];
      }
    }

    const AttentionParams& params_;
    Shared& shared_;
    Warp& own_;
    const int first_row_;
    const Window* window_;
    uint32_t rows_[2];  // times of the lane's rows, the lower half
    // Groups with one bucket, or unseen; those that are seen and have neither one nor two whose queries
    // are all later than their keys; and those for which cells serve.
    unsigned one_;
    unsigned rich_;
    unsigned narrow_;
  };

  // All writing warps, of which this is `warp`.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void write(const AttentionParams& params, Storage& storage,
                                               int warp) {
    const int lane = threadIdx.x % 32;
    Shared& shared = storage.bias;
    fill(params.bias, shared, warp * 32 + lane);
    Writer writer(params, shared, warp);
    RingPosition<Storage::kItems> place;
    RingPosition<kSteps> unit;
    RingPosition<2> window;
    for (;;) {
      storage.items.wait(place);
      const WorkItem& item = storage.item[place.stage];
      const auto& keys = storage.keys[place.stage];
      const typename Config::Mask mask(params, item.tile, keys);
      const int stage = place.advance();
      if (item.is_end) return;
      const int last = warp / 4 * 64 < item.tile.rows ? mask.own_last(warp / 4) : 0;
      if (last > 0 && mask.first() < mask.last()) writer.begin(item.tile, keys, item.head);
      for_each_window(mask, [&](int first_key, auto for_each_step) {
        shared.window_ring.wait(window);
        const Window& own = shared.windows[window.stage];
        if (first_key < last) writer.find(own, first_key);
        for_each_step([&](int key) {
          if (key >= last) return;
#pragma unroll 1
          for (int first = key; first < key + kTileN; first += kUnit) {
            shared.warps[warp].ring.acquire(unit);
            writer.write(first - first_key, first, unit.stage);
            shared.warps[warp].ring.publish(unit.stage);
            __syncwarp();
            unit.advance();
          }
        });
        shared.window_ring.release(window.stage);
        window.advance();
      });
      storage.items.release(stage);
    }
  }

  // Brings the times of keys; one warp.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void copy(const AttentionParams& params, Storage& storage) {
    const int lane = threadIdx.x % 32;
    Shared& shared = storage.bias;
    RingPosition<Storage::kItems> place;
    RingPosition<2> position;
    for (;;) {
      storage.items.wait(place);
      const WorkItem& item = storage.item[place.stage];
      const typename Config::Mask mask(params, item.tile, storage.keys[place.stage]);
      const int stage = place.advance();
      if (item.is_end) return;
      const int64_t* times = params.bias.kv_time + item.tile.key_begin;
      const int last_key = item.tile.num_keys - 1;
      for_each_window(mask, [&](int first_key, auto) {
        shared.window_ring.acquire(position);
        Window& window = shared.windows[position.stage];
        const auto time = [&](int i) {
          return __ldg(times + min(first_key + lane * kGroup + i, last_key));
        };
        TimeSpan span;
#pragma unroll 4
        for (int i = 0; i < kGroup; ++i) span.include(time(i));
        window.spans[lane] = span;
        const auto soonest = static_cast<uint32_t>(span.soonest);
#pragma unroll 1
        for (int i = 0; i < kGroup; i += 4) {
          *reinterpret_cast<uint4*>(&window.times[lane * kGroup + i]) =
              make_uint4(static_cast<uint32_t>(time(i)) - soonest,
                         static_cast<uint32_t>(time(i + 1)) - soonest,
                         static_cast<uint32_t>(time(i + 2)) - soonest,
                         static_cast<uint32_t>(time(i + 3)) - soonest);
        }
        shared.window_ring.publish(position.stage);
        position.advance();
      });
      storage.items.release(stage);
    }
  }

 private:
  // Calls use(its first key, for_each_step) for each window that an item's steps touch.
  template <typename Mask, typename Use>
  __device__ __forceinline__ static void for_each_window(const Mask& mask, Use use) {
    for (int key = mask.first(); key < mask.last();) {
      const int first_key = key / kWindow * kWindow;
      int next = key;
      while (next < mask.last() && next < first_key + kWindow) next = mask.next(next);
      use(first_key, [&](auto use_step) {
        for (int step = key; step < next; step = mask.next(step)) use_step(step);
      });
      key = next;
    }
  }

  __device__ __forceinline__ static void fill(const ScoreBias& bias, Shared& shared, int thread) {
    constexpr int kThreads = kWriters * 32;
    if (thread == 0) shared.crowded = 0;
    ptx::bar_sync(kBarrier, kThreads);
    const int last = bias.time_buckets - 1;
    const auto boundary = [&](int i) { return i < last ? __ldg(bias.boundaries + i) : LLONG_MAX; };
    for (int i = thread; i < last; i += kThreads)
      shared.boundaries[i] = static_cast<uint32_t>(boundary(i));
    for (int index = thread; index < TimeCells::kCells; index += kThreads) {
      const int64_t begin = TimeCells::begin_of(index), end = index + 1 < TimeCells::kCells
                                                                  ? TimeCells::begin_of(index + 1)
                                                                  : int64_t{TimeCells::kLimit};
      const int bucket = bucket_of(bias, begin, 0, last);
      const int64_t next = boundary(bucket);
      shared.cells[index] = {next < end ? static_cast<uint32_t>(next) : TimeCells::kLimit,
                             static_cast<uint32_t>(bucket) * 4};
      if (boundary(bucket + 1) < end) shared.crowded = 1;
    }
    ptx::bar_sync(kBarrier, kThreads);
  }
};

}  // namespace jagged_cuda::attention
