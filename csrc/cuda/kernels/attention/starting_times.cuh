// time_bias alone for kernels on wgmma whose rows are queries (starting_bias.cuh): what scores start
// from is written by warps of their own, one for each computing warp of 16 rows, in the order of its
// accumulators, so that it has nothing to do but to load.
//
// Times are looked at for 16 rows and 16 keys at once: one value, one comparison with a boundary, or a
// look at a cell of distances for each score (TimeCells). Where none of these serves, such as for
// unsorted times further apart than 2^31, a search for each score. Any times are right.
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
  static constexpr int kWarps = kTileM / 16;
  static constexpr int kFillers = 0;           // of the ring of K and V
  // Keys that are handed over at once; how many of these are kept.
  static constexpr int kUnit = 64, kSteps = kTileN > kUnit ? 3 : 2;
  static constexpr int kBlocks = kUnit / 8;
  static constexpr int kGroup = 16, kWindow = 32 * kGroup;  // keys whose groups are found at once
  static constexpr int kBarrier = 15;                       // of all writing warps
  static constexpr uint32_t kNarrow = 1u << 31;
  static_assert(kTileN % kUnit == 0 && kWindow % kTileN == 0);

  // The times between 16 rows and 16 keys: the value of the nearest, that of the bucket behind it, and
  // the boundary between them, counted from the nearest distance on, modulo 2^32.
  struct alignas(16) Group {
    float value;
    float behind;
    uint32_t boundary;
    uint32_t nearest;
  };
  // Of distances: the place of the value of those before `boundary`, behind which is that of others.
  struct alignas(8) Cell {
    uint32_t boundary;
    uint32_t offset;
    __device__ __forceinline__ uint32_t offset_of(uint32_t away) const {
      return offset + (away >= boundary ? 4 : 0);
    }
  };
  struct alignas(16) Warp {
    float4 scores[kSteps][kBlocks][32];
    float values[kMostBuckets];  // of the item's head, over the scale
    Group groups[kWindow / kGroup];
    Ring<kSteps> ring;
  };

  struct Shared {
    Warp warps[kWarps];
    Cell cells[TimeCells::kCells];
    int crowded;  // whether a cell has more than one boundary

    // One thread.
    __device__ __forceinline__ void init() {
      for (Warp& warp : warps) warp.ring.init(1);
    }
    // What the scores of this lane start from, of which `row` in the tile is its first row.
    template <int kScoreBlocks>
    __device__ __forceinline__ void load(Accumulator<1, kScoreBlocks>& s, const AttentionParams&,
                                         RingPosition<kSteps>& unit, int row, int lane) {
      Warp& own = warps[row / 16];
#pragma unroll
      for (int first = 0; first < kScoreBlocks; first += kBlocks) {
        own.ring.wait(unit);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float4 values = own.scores[unit.stage][block][lane];
          s[0][first + block][0] = values.x;
          s[0][first + block][1] = values.y;
          s[0][first + block][2] = values.z;
          s[0][first + block][3] = values.w;
        }
        __syncwarp();
        if (lane == 0) own.ring.release(unit.stage);
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
      q_time_ = bias().q_time + tile.global_row;
      kv_time_ = bias().kv_time + tile.key_begin;
      last_row_ = tile.rows - 1;
      last_key_ = tile.num_keys - 1;
      window_ = -1;
      asm volatile("" : "+l"(kv_time_));  // kept, since it is used often
      const int64_t time = __ldg(q_time_ + min(first_row_ + lane() % 16, last_row_));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_[half] =
            static_cast<uint32_t>(__shfl_sync(kAll, static_cast<int>(time), lane() / 4 + half * 8));
      }
      span_ = {time, time};
      span_.combine();
      KeyHull hull;
      if (lane() < 16 && first_row_ + lane() <= last_row_) {
        hull.widen(keys.rows[first_row_ + lane()].first);
        hull.widen(keys.rows[first_row_ + lane()].second);
      }
      seen_ = hull.of_warp();
      const BiasOverScale over_scale(params_);
      const float* table = static_cast<const float*>(bias().time_table) +
                           head / (params_.heads / bias().time_heads) * bias().time_buckets;
#pragma unroll 4
      for (int i = lane(); i < bias().time_buckets; i += 32)
        own_.values[i] = over_scale(__ldg(table + i));
      __syncwarp();
    }

    // What scores of keys from `key` on, a multiple of kUnit, start from.
    __device__ __forceinline__ void write(int key, int stage) {
      if (key / kWindow != window_) find(key / kWindow);
      const int place = key % kWindow / kGroup;
      constexpr unsigned kAllGroups = (1u << kUnit / kGroup) - 1;
      if ((one_ >> place & kAllGroups) == kAllGroups) {
#pragma unroll
        for (int group = 0; group < kUnit / kGroup; ++group)
          fill(&own_.scores[stage][2 * group][lane()], own_.groups[place + group].value);
        return;
      }
#pragma unroll 1
      for (int group = 0; group < kUnit / kGroup; ++group) {
        const int first = key + group * kGroup;
        if (first >= seen_.end || first + kGroup <= seen_.begin) continue;
        float4* out = &own_.scores[stage][2 * group][lane()];
        const Group found = own_.groups[place + group];
        const unsigned bit = 1u << (place + group);
        if (one_ & bit) {
          fill(out, found.value);
        } else if (two_ & bit) {
          const uint32_t shifted[2] = {rows_[0] - found.nearest, rows_[1] - found.nearest};
          for_each_pair(out, first, [&](int half, uint32_t time) {
            return shifted[half] - time >= found.boundary ? found.behind : found.value;
          });
        } else if (narrow_ & bit) {
          const int mirrored = bias().symmetric ? -1 : 0;
          for_each_pair(out, first, [&](int half, uint32_t time) {
            const int difference = static_cast<int>(rows_[half] - time);
            const auto away = static_cast<uint32_t>(max(difference, difference * mirrored));
            return value_at(shared_.cells[TimeCells::index_of(away)].offset_of(away));
          });
        } else {
          search(reinterpret_cast<float*>(out), first);
        }
      }
    }

   private:
    static constexpr unsigned kAll = 0xffffffffu;

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ const ScoreBias& bias() const { return params_.bias; }

    __device__ __forceinline__ static void fill(float4* out, float value) {
      out[0] = out[32] = make_float4(value, value, value, value);
    }
    __device__ __forceinline__ float value_at(uint32_t offset) const {
      return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(own_.values) + offset);
    }

    template <typename Value>
    __device__ __forceinline__ void for_each_pair(float4* out, int first, Value value) const {
      uint32_t times[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = min(first + i / 2 * 8 + 2 * (lane() % 4) + i % 2, last_key_);
        times[i] = __ldg(reinterpret_cast<const uint32_t*>(kv_time_ + key));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(times[i]));  // loads first
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        out[block * 32] = make_float4(value(0, times[2 * block]), value(0, times[2 * block + 1]),
                                      value(1, times[2 * block]), value(1, times[2 * block + 1]));
      }
    }

    // The groups of a window, one in each lane.
    __device__ __forceinline__ void find(int window) {
      window_ = window;
      const int first_key = window * kWindow + lane() * kGroup;
      const auto time_at = [&](int i) { return __ldg(kv_time_ + min(first_key + i, last_key_)); };
      TimeSpan keys = {time_at(0), time_at(0)};
      bool is_sorted = true;
#pragma unroll
      for (int i = 1; i < kGroup; ++i) {
        const int64_t time = time_at(i);
        is_sorted &= keys.latest <= time;
        keys.latest = time;
      }
      if (!is_sorted) {
#pragma unroll 1
        for (int i = 0; i < kGroup; ++i) keys.include(time_at(i));
      }
      const TimeDistances away(bias().symmetric, span_, keys);
      const int first = bucket(away.nearest), last = bucket(away.farthest);
      Group group = {own_.values[first], 0.0f, ~0u, static_cast<uint32_t>(away.nearest)};
      if (first < last) {
        group.boundary = static_cast<uint32_t>(__ldg(bias().boundaries + first)) - group.nearest;
        group.behind = own_.values[first + 1];
      }
      __syncwarp();
      own_.groups[lane()] = group;
      one_ = __ballot_sync(kAll, first == last);
      two_ = __ballot_sync(kAll, first + 1 == last && away.is_ordered &&
                                     away.farthest - away.nearest < kNarrow);
      narrow_ = __ballot_sync(kAll, away.widest < kNarrow && shared_.crowded == 0);
      __syncwarp();
    }
    __device__ __forceinline__ int bucket(uint64_t away) const {
      if (away >= kNarrow || shared_.crowded != 0)
        return bucket_of(bias(), away, 0, bias().time_buckets - 1);
      const auto own = static_cast<uint32_t>(away);
      return static_cast<int>(shared_.cells[TimeCells::index_of(own)].offset_of(own) / 4);
    }

    // The lane's 8 scores of a group, one after another.
    __device__ __forceinline__ void search(float* out, int first) const {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int key = first + i / 4 * 8 + 2 * (lane() % 4) + i % 2,
                  row = first_row_ + i % 4 / 2 * 8 + lane() / 4;
        const int64_t query = __ldg(q_time_ + min(row, last_row_)),
                      time = __ldg(kv_time_ + min(key, last_key_));
        const uint64_t away =
            !bias().symmetric && query < time ? 0 : time_between(query, time);
        out[i / 4 * 128 + i % 4] = own_.values[bucket(away)];
      }
    }

    const AttentionParams& params_;
    Shared& shared_;
    Warp& own_;
    const int first_row_;
    const int64_t* q_time_;   // of the tile
    const int64_t* kv_time_;  // of the sequence
    int last_row_;
    int last_key_;
    int window_;
    uint32_t rows_[2];  // times of the lane's rows, the lower half
    TimeSpan span_;     // of the 16 rows
    KeyHull seen_;      // by them
    // Groups with one bucket; those with two whose queries are all later than their keys, where
    // distances from the nearest on are exact in 32 bits; and those for which cells serve.
    unsigned one_;
    unsigned two_;
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
    for (;;) {
      storage.items.wait(place);
      const WorkItem& item = storage.item[place.stage];
      const auto& keys = storage.keys[place.stage];
      const typename Config::Mask mask(params, item.tile, keys);
      const int stage = place.advance();
      if (item.is_end) return;
      if (mask.first() < mask.last() && warp / 4 * 64 < item.tile.rows) {
        writer.begin(item.tile, keys, item.head);
        const int last = mask.own_last(warp / 4);
        for (int key = mask.first(); key < last; key = mask.next(key)) {
#pragma unroll 1
          for (int first = key; first < key + kTileN; first += kUnit) {
            shared.warps[warp].ring.acquire(unit);
            writer.write(first, unit.stage);
            __syncwarp();
            if (lane == 0) shared.warps[warp].ring.publish(unit.stage);
            unit.advance();
          }
        }
      }
      __syncwarp();
      if (lane == 0) storage.items.release(stage);
    }
  }

 private:
  __device__ __forceinline__ static void fill(const ScoreBias& bias, Shared& shared, int thread) {
    constexpr int kThreads = kWarps * 32;
    if (thread == 0) shared.crowded = 0;
    ptx::bar_sync(kBarrier, kThreads);
    const int last = bias.time_buckets - 1;
    const auto boundary = [&](int i) { return i < last ? __ldg(bias.boundaries + i) : LLONG_MAX; };
    for (int index = thread; index < TimeCells::kCells; index += kThreads) {
      const int64_t begin = TimeCells::begin_of(index),
                    end = index + 1 < TimeCells::kCells ? TimeCells::begin_of(index + 1)
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
