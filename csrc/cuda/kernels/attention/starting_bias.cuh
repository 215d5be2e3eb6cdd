// Biases for kernels on wgmma whose rows are queries: what is added to scores, divided by their scale,
// is what the product Q K^T starts from, so that nothing is left to do behind it.
//
// A warp of producers writes what a step of keys brings to shared memory: kv_bias by key,
// position_bias by diagonal.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/tiles.cuh"

#include <cmath>

namespace jagged_cuda::attention {

// A bias over the scale, which is not 0. What is too large to be multiplied by scale and log2(e) again
// hides its key if it is negative, such as the least float; of silu it is 0 as it is.
class BiasOverScale {
 public:
  __device__ __forceinline__ explicit BiasOverScale(const AttentionParams& params)
      : factor_(1.0f / static_cast<float>(params.scale)), silu_(params.silu) {}
  __device__ __forceinline__ float operator()(float bias) const {
    const float quotient = bias * factor_, most = -kLeastMaximum * fminf(fabsf(factor_), 1.0f);
    if (!(fabsf(quotient) > most)) return quotient;
    return copysignf(isinf(bias) || (bias < 0.0f && !silu_) ? INFINITY : most, quotient);
  }

 private:
  const float factor_;
  const bool silu_;
};

// Biases of a size below this, with scores of as much, stay below kMostShift in units of log2.
constexpr float kMostBias = 16384.0f;

// Of tiles of kTileM rows and steps of kTileN keys, which are copied to a ring of kSlots, K of a step
// before V of the one before it: kv_bias alone, or kPositions, position_bias and perhaps kv_bias. Code
// for both in one kernel does not stay in the instruction cache.
template <int kTileM, int kTileN, int kSlots, bool kPositions>
struct StartingBias {
  static constexpr int kWarps = 1, kFillers = 1;  // of producers
  static constexpr bool kAhead = false;
  // Steps whose biases are kept: when a slot is free for K, that of the third step before was, too.
  static constexpr int kSteps = 3;
  static_assert(kSlots == 4);
  // Diagonals of a step, which are column - row + kTileM - 1; the second copy begins in other banks.
  static constexpr int kDiagonals = kTileM + kTileN, kCopy = kDiagonals + 16;

  struct Shared {
    alignas(16) float keys[kSteps][kTileN];
    // Twice, the second time one further on, so that of every row the diagonals of columns 2 c and
    // 2 c + 1 lie in one aligned pair.
    alignas(16) float positions[kSteps][kPositions ? 2 * kCopy : 4];
    // Whether a bias of this step, or of an earlier one of the item, is kMostBias or more in size.
    bool is_large[kSteps];

    // What the scores of this lane start from, of which `row` in the tile is its first row.
    template <int kBlocks>
    __device__ __forceinline__ void load(Accumulator<1, kBlocks>& s, const AttentionParams& params,
                                         RingPosition<kSteps> place, int row, int lane) const {
      const int step = place.stage;
      static_assert(kBlocks * 8 == kTileN);
      const auto set = [](float& score, float value) { score = value; };
      const auto add = [](float& score, float value) { score += value; };
      if constexpr (kPositions) {
        use_positions(s, step, row, lane, set);
        if (has_keys(params)) use_keys(s, step, lane, add);
      } else {
        use_keys(s, step, lane, set);
      }
    }
    // Before and behind that, or the second alone for a step that its warpgroup does not see.
    __device__ __forceinline__ static void wait(RingPosition<kSteps>, int) {}
    __device__ __forceinline__ static void pass(RingPosition<kSteps>& place, int, int) {
      place.advance();
    }
    __device__ __forceinline__ static void skip(RingPosition<kSteps>& place) { place.advance(); }
    __device__ __forceinline__ static void init() {}

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

  __device__ __forceinline__ static bool has_keys(const AttentionParams& params) {
    return !kPositions || params.bias.kv_bias != nullptr;
  }

  // Of one item: writes what its steps bring.
  class Writer {
   public:
    __device__ __forceinline__ Writer(const AttentionParams& params, const QueryTile& tile,
                                      int head)
        : params_(params), tile_(tile), over_scale_(params) {
      const ScoreBias& bias = params.bias;
      if (has_keys(params))
        keys_ = static_cast<const float*>(bias.kv_bias) + tile.key_begin * bias.kv_heads +
                static_cast<unsigned>(head) * bias.kv_heads / params.heads;
      if constexpr (kPositions)
        positions_ = static_cast<const float*>(bias.position_table) +
                     head / (params.heads / bias.position_heads) * bias.position_buckets;
    }

    // Asks for what comes from far: kv_bias of the step from `key` on, of which a lane has four in turn.
    __device__ __forceinline__ void load(int key) {
      if (!has_keys(params_)) return;
      const int first = key + lane() * kLaneKeys, stride = params_.bias.kv_heads;
      const float* g = keys_ + int64_t{first} * stride;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i, g += stride)
        loaded_[i] = first + i < tile_.num_keys ? __ldg(g) : 0.0f;
    }
    // Writes that, and all else of that step.
    __device__ __forceinline__ void store(Shared& shared, int step, int key) {
      if (has_keys(params_)) {
        reinterpret_cast<float4*>(shared.keys[step])[lane()] =
            make_float4(over_scale_(loaded_[0]), over_scale_(loaded_[1]), over_scale_(loaded_[2]),
                        over_scale_(loaded_[3]));
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) largest_ = fmaxf(largest_, fabsf(loaded_[i]));
      }
      if constexpr (kPositions) store_positions(shared.positions[step], key);
      if (__any_sync(0xffffffffu, !(largest_ < kMostBias))) largest_ = INFINITY;
      if (lane() == 0) shared.is_large[step] = largest_ == INFINITY;
    }

   private:
    static constexpr int kLaneKeys = 4;
    static_assert(kTileN == 32 * kLaneKeys && kTileM % 32 == 0);

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

    __device__ __forceinline__ void store_positions(float (&out)[2 * kCopy], int key) {
      // The bucket of the first diagonal, before it is clamped; it falls by one from each to the
      // next.
      constexpr int64_t kFar = 1 << 24;
      const int64_t distance = int64_t{tile_.row} + kTileM - 1 + tile_.num_keys -
                               tile_.num_queries - key - params_.bias.position_first;
      const int first = static_cast<int>(max(min(distance, kFar), -kFar)) - lane(),
                last = params_.bias.position_buckets - 1;
      constexpr int kAtOnce = 2;  // since registers are few
      static_assert(kDiagonals % (32 * kAtOnce) == 0);
#pragma unroll
      for (int begin = 0; begin < kDiagonals; begin += 32 * kAtOnce) {
        float values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          values[i] = __ldg(positions_ + min(max(first - begin - i * 32, 0), last));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float value = over_scale_(values[i]);
          largest_ = fmaxf(largest_, fabsf(values[i]));
          float* place = out + begin + i * 32 + lane();
          place[0] = value;
          place[kCopy + 1] = value;
        }
      }
    }

    const AttentionParams& params_;
    const QueryTile& tile_;
    const BiasOverScale over_scale_;
    const float* keys_;
    const float* positions_;
    float loaded_[kLaneKeys];  // of the next step, on their way
    float largest_ = 0.0f;     // of the item's steps so far
  };

  // Follows the copies of copy_operands; one warp.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void copy(const AttentionParams& params, Storage& shared) {
    RingPosition<Storage::kItems> place;
    RingPosition<kSlots> slot;
    RingPosition<kSteps> step;
    const auto arrive = [&] {
      shared.ring.publish(slot.stage);  // every lane, for what it has written
      slot.advance();
    };
    for (;;) {
      shared.items.wait(place);
      // What is read of the item lies in shared memory, so that it is released behind the last copy.
      const WorkItem& item = shared.item[place.stage];
      const typename Config::Mask mask(params, item.tile, shared.keys[place.stage]);
      const int stage = place.advance();
      const bool is_end = item.is_end;
      if (!is_end && mask.first() < mask.last()) {
        Writer writer(params, item.tile, item.head);
        const auto store = [&](int key) {
          shared.ring.acquire(slot);
          writer.store(shared.bias, step.advance(), key);
          arrive();
        };
        int key = mask.first();
        writer.load(key);
        // Once more than there are steps, for the last V.
        for (bool is_first = true, is_step = true; is_step; is_first = false) {
          is_step = key < mask.last();
          if (is_step) {
            store(key);
            key = mask.next(key);
            writer.load(key);
          }
          if (!is_first) {
            shared.ring.acquire(slot);  // of V of the step before
            arrive();
          }
        }
      }
      shared.items.release(stage);
      if (is_end) return;
    }
  }
};

}  // namespace jagged_cuda::attention
