// Biases for kernels on wgmma whose rows are queries: what is added to scores, divided by their scale,
// is what the product Q K^T starts from, so that nothing is left to do behind it.
//
// A warp of producers writes what a step of keys brings to shared memory: kv_bias by key,
// position_bias by diagonal, of which those that the step before has, too, are there already.
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
  __device__ __forceinline__ float factor() const { return factor_; }
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
// before V of the one before it: kKeys, kv_bias; kPositions, position_bias. Code for both in one kernel
// does not stay in the instruction cache.
template <int kTileM, int kTileN, int kSlots, bool kKeys, bool kPositions>
struct StartingBias {
  static constexpr int kWarps = 1, kFillers = 1;  // of producers
  static constexpr bool kAhead = false;
  // Steps whose biases are kept: when a slot is free for K, that of the third step before was, too.
  static constexpr int kSteps = 3;
  static_assert(kSlots == 4);
  // Diagonals of a step, which are column - row + kTileM - 1. If the keys of the next step come next, it
  // has all of them but the first kTileN: it begins so much further on, in a ring, and brings the last
  // kTileN. Any other step begins kParts times as far on, behind all that may still be read.
  static constexpr int kDiagonals = kTileM + kTileN, kParts = (kDiagonals + kTileN - 1) / kTileN;
  static constexpr int kRing = kSteps * kParts * kTileN;
  // The first kTileM come once more behind the last, so that no step wraps; the second copy begins in other
  // banks.
  static constexpr int kCopy = kRing + kTileM + 16;

  struct Shared {
    alignas(16) float keys[kSteps][kKeys ? kTileN : 4];
    // Twice, the second time one further on, so that of every row the diagonals of columns 2 c and
    // 2 c + 1 lie in one aligned pair.
    alignas(16) float positions[kPositions ? 2 * kCopy : 4];
    int begins[kSteps];  // where the diagonals of a step do
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
        if constexpr (kKeys) use_keys(s, step, lane, add);
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
      const auto* pairs = reinterpret_cast<const float2*>(
          &positions[begins[step] + copy * kCopy + diagonal + copy]);
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

  // Writes what the steps of items bring. What counts is how few instructions a step takes: of one warp
  // beside twelve that compute, each takes ten cycles or more.
  class Writer {
   public:
    __device__ __forceinline__ explicit Writer(const AttentionParams& params)
        : params_(params), over_scale_(params) {}

    __device__ __forceinline__ void begin(const QueryTile& tile, int head) {
      const ScoreBias& bias = params_.bias;
      if constexpr (kKeys) {
        num_keys_ = tile.num_keys;
        keys_ = static_cast<const float*>(bias.kv_bias) + tile.key_begin * bias.kv_heads +
                static_cast<unsigned>(head) * bias.kv_heads / params_.heads;
      }
      if constexpr (kPositions) {
        last_bucket_ = bias.position_buckets - 1;
        const unsigned group = static_cast<unsigned>(params_.heads) / bias.position_heads;
        positions_ = static_cast<const float*>(bias.position_table) +
                     static_cast<unsigned>(head) / group * bias.position_buckets;
        // Of a step's first diagonal, but for its first key.
        distance_ =
            int64_t{tile.row} + kTileM - 1 + tile.num_keys - tile.num_queries - bias.position_first;
        next_key_ = -1;
      }
      largest_ = 0.0f;
    }

    // Asks for what comes from far of the step from `key` on: of kv_bias a lane has four in turn, of
    // diagonals every 32nd of the last kTileN.
    __device__ __forceinline__ void load(int key) {
      if constexpr (kKeys) {
        const int first = key + lane() * kLaneValues, stride = params_.bias.kv_heads;
        const float* g = keys_ + int64_t{first} * stride;
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i, g += stride)
          loaded_keys_[i] = first + i < num_keys_ ? __ldg(g) : 0.0f;
      }
      if constexpr (kPositions) {
        // The bucket of the first diagonal, before it is clamped; it falls by one from each to the next.
        constexpr int64_t kFar = 1 << 24;
        bucket_ = static_cast<int>(max(min(distance_ - key, kFar), -kFar)) - lane();
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) loaded_positions_[i] = position(kTileM + i * 32);
      }
    }
    // Writes that, and all else of that step.
    __device__ __forceinline__ void store(Shared& shared, int step, int key) {
      if constexpr (kKeys) {
        scale(loaded_keys_);
        reinterpret_cast<float4*>(shared.keys[step])[lane()] =
            make_float4(loaded_keys_[0], loaded_keys_[1], loaded_keys_[2], loaded_keys_[3]);
      }
      if constexpr (kPositions) store_positions(shared, step, key);
      if (__any_sync(0xffffffffu, !(largest_ < kMostBias))) largest_ = INFINITY;
      if (lane() == 0) shared.is_large[step] = largest_ == INFINITY;
    }

   private:
    static constexpr int kLaneValues = 4;
    static_assert(kTileN == 32 * kLaneValues && kTileM % 64 == 0);

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

    // Values that were read are divided by the scale; most are too small for what BiasOverScale looks at.
    template <int kValues>
    __device__ __forceinline__ void scale(float (&values)[kValues]) {
      float largest = fabsf(values[0]);
#pragma unroll
      for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, fabsf(values[i]));
      largest_ = fmaxf(largest_, largest);
      if (largest < kMostBias) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] *= over_scale_.factor();
      } else {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] = over_scale_(values[i]);
      }
    }

    __device__ __forceinline__ float position(int diagonal) const {
      return __ldg(positions_ +
                   static_cast<unsigned>(min(max(bucket_ - diagonal, 0), last_bucket_)));
    }
    __device__ __forceinline__ void store_positions(Shared& shared, int step, int key) {
      const bool is_next = key == next_key_;
      next_key_ = key + kTileN;
      begin_ = wrapped(begin_ + (is_next ? 1 : kParts) * kTileN);
      if (lane() == 0) shared.begins[step] = begin_;
      if (!is_next) {
        float values[kTileM / 32];
#pragma unroll
        for (int i = 0; i < kTileM / 32; ++i) values[i] = position(i * 32);
        scale(values);
#pragma unroll
        for (int i = 0; i < kTileM / 32; i += 2) write(shared, i * 32, values[i], values[i + 1]);
      }
      scale(loaded_positions_);
#pragma unroll
      for (int i = 0; i < kLaneValues; i += 2)
        write(shared, kTileM + i * 32, loaded_positions_[i], loaded_positions_[i + 1]);
    }
    // Diagonals of the step, in 64 that do not wrap.
    __device__ __forceinline__ void write(Shared& shared, int diagonal, float one,
                                          float other) const {
      const int place = wrapped(begin_ + diagonal);
      float* out = shared.positions + place + lane();
      write_twice(out, one, other);
      if (place < kTileM) write_twice(out + kRing, one, other);
    }
    __device__ __forceinline__ static void write_twice(float* out, float one, float other) {
      out[0] = one;
      out[32] = other;
      out[kCopy + 1] = one;
      out[kCopy + 33] = other;
    }
    __device__ __forceinline__ static int wrapped(int place) {
      return place >= kRing ? place - kRing : place;
    }

    const AttentionParams& params_;
    const BiasOverScale over_scale_;
    int num_keys_;
    const float* keys_;
    const float* positions_;
    int64_t distance_;
    int last_bucket_;
    int next_key_;   // behind the last step
    int begin_ = 0;  // of its diagonals
    int bucket_;
    // Of the next step, on their way.
    float loaded_keys_[kLaneValues], loaded_positions_[kLaneValues];
    float largest_;  // of the item's steps so far
  };

  // Follows the copies of copy_operands; one warp.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void copy(const AttentionParams& params, Storage& shared) {
    RingPosition<Storage::kItems> place;
    RingPosition<kSlots> slot;
    RingPosition<kSteps> step;
    Writer writer(params);
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
        writer.begin(item.tile, item.head);
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
