// Biases for kernels on wgmma whose rows are queries: what is added to scores, divided by their scale,
// is what the product Q K^T starts from, so that nothing is left to do behind it.
//
// A warp of producers writes what a step of keys brings to a ring in shared memory, some steps ahead:
// kv_bias by key, position_bias by diagonal, time_bias as starting_times.cuh has it.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/starting_times.cuh"
#include "cuda/kernels/attention/tiles.cuh"

namespace jagged_cuda::attention {

// Of tiles of kTileM rows, kItems of them on their way, and steps of kTileN keys.
template <int kTileM, int kTileN, int kItems>
struct StartingBias {
  static constexpr int kWarps = 1;  // of producers
  static constexpr int kSteps = 3;  // that are kept
  // Diagonals of a step, which are column - row + kTileM - 1; the second copy begins in other banks.
  static constexpr int kDiagonals = kTileM + kTileN, kCopy = kDiagonals + 16;
  static_assert(kTileN == 128 && kTileM % 32 == 0);

  struct Shared {
    Ring<kSteps> ring;
    alignas(16) float keys[kSteps][kTileN];
    // Twice, the second time one further on, so that of every row the diagonals of columns 2 c and
    // 2 c + 1 lie in one aligned pair.
    alignas(16) float positions[kSteps][2 * kCopy];
    StartingTimes<kTileM, kTileN, kItems, kSteps> times;

    // By all threads, before others.
    template <int kThreads>
    __device__ __forceinline__ void init(const AttentionParams& params, int consumer_warps) {
      if (threadIdx.x == 0) ring.init(consumer_warps);
      if (params.bias.time_table != nullptr) times.template init<kThreads>(params);
    }

    // What the scores of this lane start from, of which `row` in the tile is its first row, in the
    // step of keys from `key` on. All lanes of a warp.
    template <int kBlocks>
    __device__ __forceinline__ void load(Accumulator<1, kBlocks>& s, const AttentionParams& params,
                                         const QueryTile& tile, int stage, int step, int row,
                                         int key, int lane) const {
      static_assert(kBlocks * 8 == kTileN);
      const ScoreBias& bias = params.bias;
      const auto set = [](float& score, float value) { score = value; };
      const auto add = [](float& score, float value) { score += value; };
      if (bias.time_table != nullptr) {
        times.load(s, params, tile, stage, step, row, key, lane);
        __syncwarp();
        if (bias.position_table != nullptr) use_positions(s, step, row, lane, add);
        if (bias.kv_bias != nullptr) use_keys(s, step, lane, add);
      } else if (bias.position_table != nullptr) {
        use_positions(s, step, row, lane, set);
        if (bias.kv_bias != nullptr) use_keys(s, step, lane, add);
      } else {
        use_keys(s, step, lane, set);
      }
    }

   private:
    template <int kBlocks, typename Use>
    __device__ __forceinline__ void use_keys(Accumulator<1, kBlocks>& s, int step, int lane,
                                             Use use) const {
      const auto* pairs = reinterpret_cast<const float2*>(keys[step]) + lane % 4;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 pair = pairs[block * 4];
        use(s[0][block][0], pair.x);
        use(s[0][block][1], pair.y);
        use(s[0][block][2], pair.x);
        use(s[0][block][3], pair.y);
      }
    }
    // Rows and columns 8 further on have the same diagonals.
    template <int kBlocks, typename Use>
    __device__ __forceinline__ void use_positions(Accumulator<1, kBlocks>& s, int step, int row,
                                                  int lane, Use use) const {
      const int diagonal = 2 * (lane % 4) - row + kTileM - 1, copy = diagonal % 2;
      const auto* pairs =
          reinterpret_cast<const float2*>(&positions[step][copy * kCopy + diagonal + copy]);
      float2 before = pairs[-4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 pair = pairs[block * 4];
        use(s[0][block][0], pair.x);
        use(s[0][block][1], pair.y);
        use(s[0][block][2], before.x);
        use(s[0][block][3], before.y);
        before = pair;
      }
    }
  };

  // Writes what the steps of the items bring; one warp.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void write(const AttentionParams& params, Storage& shared) {
    const int lane = threadIdx.x % 32;
    const ScoreBias& bias = params.bias;
    RingPosition<Storage::kItems> place;
    RingPosition<kSteps> step;
    for (;;) {
      shared.items.wait(place);
      const WorkItem& item = shared.item[place.stage];
      const QueryTile& tile = item.tile;
      const bool is_end = item.is_end;
      const typename Config::Mask mask(params, tile, shared.keys[place.stage]);
      const int stage = place.advance();
      if (!is_end && mask.first() < mask.last()) {
        const float *keys = nullptr, *positions = nullptr;
        if (bias.kv_bias != nullptr)
          keys = static_cast<const float*>(bias.kv_bias) + tile.key_begin * bias.kv_heads +
                 item.head / (params.heads / bias.kv_heads);
        if (bias.position_table != nullptr)
          positions = static_cast<const float*>(bias.position_table) +
                      item.head / (params.heads / bias.position_heads) * bias.position_buckets;
        if (bias.time_table != nullptr)
          shared.bias.times.begin_item(params, tile, item.head, shared.keys[stage].rows, stage);
        for (int key = mask.first(); key < mask.last(); key = mask.next(key)) {
          shared.bias.ring.acquire(step);
          if (keys != nullptr)
            write_keys(shared.bias.keys[step.stage], params, keys, tile.num_keys, key);
          if (positions != nullptr)
            write_positions(shared.bias.positions[step.stage], params, positions, tile, key);
          if (bias.time_table != nullptr)
            shared.bias.times.write(params, tile, stage, step.stage, key);
          __syncwarp();
          if (lane == 0) shared.bias.ring.publish(step.stage);
          step.advance();
        }
      }
      __syncwarp();
      if (lane == 0) shared.items.release(stage);
      if (is_end) return;
    }
  }

 private:
  __device__ __forceinline__ static void write_keys(float (&out)[kTileN],
                                                    const AttentionParams& params, const float* g,
                                                    int num_keys, int key) {
    constexpr int kEach = kTileN / 32;
    const BiasOverScale over_scale(params);
    const int lane = threadIdx.x % 32;
    float values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int own = key + i * 32 + lane;
      values[i] = own < num_keys ? __ldg(g + int64_t{own} * params.bias.kv_heads) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) out[i * 32 + lane] = over_scale(values[i]);
  }

  __device__ __forceinline__ static void write_positions(float (&out)[2 * kCopy],
                                                         const AttentionParams& params,
                                                         const float* g, const QueryTile& tile,
                                                         int key) {
    const BiasOverScale over_scale(params);
    const int lane = threadIdx.x % 32, last = params.bias.position_buckets - 1;
    // The bucket of the first diagonal, before it is clamped; it falls by one from each to the next.
    constexpr int64_t kFar = 1 << 24;
    const int64_t distance = int64_t{tile.row} + kTileM - 1 + tile.num_keys - tile.num_queries -
                             key - params.bias.position_first;
    const int first = static_cast<int>(max(min(distance, kFar), -kFar)) - lane;
    constexpr int kAtOnce = kDiagonals / 32 / 2;  // since registers are few
    static_assert(kDiagonals % (32 * kAtOnce) == 0);
#pragma unroll
    for (int begin = 0; begin < kDiagonals; begin += 32 * kAtOnce) {
      float values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        values[i] = __ldg(g + min(max(first - begin - i * 32, 0), last));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float value = over_scale(values[i]);
        float* place = out + begin + i * 32 + lane;
        place[0] = value;
        place[kCopy + 1] = value;
      }
    }
  }
};

}  // namespace jagged_cuda::attention
