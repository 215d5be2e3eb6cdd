// Biases for kernels on wgmma whose rows are queries: what is added to scores, divided by their scale,
// is what the product Q K^T starts from, so that nothing is left to do behind it.
//
// A warp of producers writes what a step of keys brings to shared memory, in the order in which a lane
// of an accumulator takes it: four values at once, of two neighbouring keys and two rows, of which the
// second is the eighth behind the first.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/tiles.cuh"

#include <cmath>

namespace jagged_cuda::attention {

// A bias over the scale, which is not 0. What is finite stays so.
class BiasOverScale {
 public:
  __device__ __forceinline__ explicit BiasOverScale(const AttentionParams& params)
      : factor_(1.0f / static_cast<float>(params.scale)) {}
  __device__ __forceinline__ float operator()(float bias) const {
    constexpr float kMost = 1e37f;
    const float quotient = bias * factor_;
    return isinf(quotient) && !isinf(bias) ? copysignf(kMost, quotient) : quotient;
  }

 private:
  const float factor_;
};

// Of tiles of kTileM rows and steps of kTileN keys, which are copied to a ring of kSlots, K of a step
// before V of the one before it.
template <int kTileM, int kTileN, int kSlots>
struct StartingBias {
  static constexpr int kWarps = 1;
  // Steps whose biases are kept: when a slot is free for K, that of the third step before was, too.
  static constexpr int kSteps = 3;
  static_assert(kSlots == 4);

  struct Shared {
    // kv_bias of keys 2 i and 2 i + 1, twice.
    float4 keys[kSteps][kTileN / 2];
    // position_bias of the diagonals i and i + 1, and of those 8 before: diagonal 0 is that of the
    // first key and the last row but 8.
    float4 positions[kSteps][kTileM + kTileN];

    // What the scores of this lane start from, of which `row` in the tile is its first row.
    template <int kBlocks>
    __device__ __forceinline__ void load(Accumulator<1, kBlocks>& s, const AttentionParams& params,
                                         int step, int row, int lane) const {
      static_assert(kBlocks * 8 == kTileN);
      const bool has_keys = params.bias.kv_bias != nullptr;
      const float4* pairs = &keys[step][lane % 4];
      if (params.bias.position_table == nullptr) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) set(s[0][block], pairs[block * 4]);
        return;
      }
      const float4* diagonals = &positions[step][2 * (lane % 4) + kTileM - 9 - row];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) set(s[0][block], diagonals[block * 8]);
      if (!has_keys) return;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float4 pair = pairs[block * 4];
        s[0][block][0] += pair.x;
        s[0][block][1] += pair.y;
        s[0][block][2] += pair.z;
        s[0][block][3] += pair.w;
      }
    }

   private:
    __device__ __forceinline__ static void set(float (&scores)[4], const float4& values) {
      scores[0] = values.x;
      scores[1] = values.y;
      scores[2] = values.z;
      scores[3] = values.w;
    }
  };

  // Of one item: writes what the steps bring.
  class Writer {
   public:
    __device__ __forceinline__ Writer(const AttentionParams& params, const QueryTile& tile, int head)
        : params_(params), tile_(tile), over_scale_(params) {
      const ScoreBias& bias = params.bias;
      if (bias.kv_bias != nullptr)
        keys_ = static_cast<const float*>(bias.kv_bias) + tile.key_begin * bias.kv_heads +
                head / (params.heads / bias.kv_heads);
      if (bias.position_table != nullptr)
        positions_ = static_cast<const float*>(bias.position_table) +
                     head / (params.heads / bias.position_heads) * bias.position_buckets;
    }

    // Asks for what comes from far: kv_bias of the step from `key` on.
    __device__ __forceinline__ void load(int key) {
      if (params_.bias.kv_bias == nullptr) return;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const int own = key + i / 2 * 64 + 2 * lane() + i % 2;
        loaded_[i] =
            own < tile_.num_keys ? __ldg(keys_ + int64_t{own} * params_.bias.kv_heads) : 0.0f;
      }
    }
    // Writes that, and all else of that step.
    __device__ __forceinline__ void store(Shared& shared, int step, int key) const {
      if (params_.bias.kv_bias != nullptr) {
#pragma unroll
        for (int i = 0; i < kLaneKeys; i += 2) {
          const float one = over_scale_(loaded_[i]), other = over_scale_(loaded_[i + 1]);
          shared.keys[step][i / 2 * 32 + lane()] = make_float4(one, other, one, other);
        }
      }
      if (params_.bias.position_table != nullptr) store_positions(shared.positions[step], key);
    }

   private:
    static constexpr int kLaneKeys = kTileN / 32;
    static_assert(kTileN % 64 == 0 && kTileM % 32 == 0);

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

    __device__ __forceinline__ void store_positions(float4 (&quads)[kTileM + kTileN],
                                                    int key) const {
      // The bucket of the first key and the last row, before it is clamped; it falls by one from
      // diagonal to diagonal.
      constexpr int64_t kFar = 1 << 24;
      const int64_t distance = int64_t{tile_.row} + kTileM - 1 + tile_.num_keys -
                               tile_.num_queries - key - params_.bias.position_first;
      const int first = static_cast<int>(max(min(distance, kFar), -kFar)),
                last = params_.bias.position_buckets - 1;
      constexpr int kAtOnce = 2;  // since registers are few
      static_assert((kTileM + kTileN) % (32 * kAtOnce) == 0);
#pragma unroll
      for (int begin = 0; begin < kTileM + kTileN; begin += 32 * kAtOnce) {
        float values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          values[i] = __ldg(positions_ + min(max(first - begin - i * 32 - lane(), 0), last));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float value = over_scale_(values[i]);
          const int place = begin + i * 32 + lane();
          quads[place].z = value;
          if (place >= 1) quads[place - 1].w = value;
          if (place >= 8) quads[place - 8].x = value;
          if (place >= 9) quads[place - 9].y = value;
        }
      }
    }

    const AttentionParams& params_;
    const QueryTile& tile_;
    const BiasOverScale over_scale_;
    const float* keys_;
    const float* positions_;
    float loaded_[kLaneKeys];  // of the next step, on their way
  };

  // Follows the copies of copy_operands; one warp.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void copy(const AttentionParams& params, Storage& shared) {
    const int lane = threadIdx.x % 32;
    RingPosition<Storage::kItems> place;
    RingPosition<kSlots> slot;
    RingPosition<kSteps> step;
    const auto arrive = [&] {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared.ring.full[slot.stage]);
      slot.advance();
    };
    for (;;) {
      shared.items.wait(place);
      const WorkItem& item = shared.item[place.stage];
      const typename Config::Mask mask(params, item.tile, shared.keys[place.stage]);
      // What is read of the item lies in shared memory, so that it is released behind the last copy.
      const int stage = place.advance();
      const bool is_end = item.is_end;
      if (!is_end && mask.first() < mask.last()) {
        Writer writer(params, item.tile, item.head);
        const auto store = [&](int key) {
          shared.ring.acquire(slot);
          writer.store(shared.bias, step.advance(), key);
          arrive();
        };
        writer.load(mask.first());
        store(mask.first());
        int next = mask.next(mask.first());
        writer.load(next);
        for (int key = mask.first(); key < mask.last(); key = next) {
          next = mask.next(key);
          if (next < mask.last()) {
            store(next);
            writer.load(mask.next(next));
          }
          shared.ring.acquire(slot);  // of V
          arrive();
        }
      }
      __syncwarp();
      if (lane == 0) shared.items.release(stage);
      if (is_end) return;
    }
  }
};

}  // namespace jagged_cuda::attention
