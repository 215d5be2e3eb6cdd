// Forward of jagged_flash_attention in TF32 for long sequences, on wgmma and TMA (compute capability
// 9.0): long_forward.cuh with operands of f32.
//
// Q, K and V are rounded to TF32 by their copies, P in registers. A product in TF32 sums over what is
// contiguous in shared memory, so O += P V wants V^T. Two more warps of producers transpose V on its way:
//
//     copier (one thread)         two warps                                each computing warpgroup
//     for each key tile j:        for each half of V_j:                    as in long_forward.cuh
//       K_{j+1} to its slot         4 keys x 4 columns of a lane at a time
//       V_j, half by half           to registers, from there to V_j^T's slot
//
// A lane's probabilities lie where an operand in registers has every other key of eight first, then those
// between. So a row of V^T has its keys in that order, and no P moves between lanes. Keys behind the last
// become zeros there.
//
// Shared memory: Q 64 rows for each of two warpgroups, kSlots tiles of kTileN keys, and a tile of V as it
// comes: 192 and 224 KiB for kDim 64, 128 with 128 and 64 keys.
//
// Barriers beside those of long_forward.cuh: values.ring, full by the copies of half a tile, empty by both
// warps; ring.full of V's slots by the second of the two, when both have met and made V^T visible to
// the tensor cores.
#pragma once

#include "cuda/kernels/attention/long_forward.cuh"

namespace jagged_cuda::attention {

template <int kDim, int kTileN>
struct TransposedValues {
  static constexpr int kWarps = 2, kMetBarrier = 15;
  static constexpr int kHalf = kTileN / 2;
  template <typename KeyRows>
  using Rows = WarpgroupTile<float, kHalf, kDim>;
  using Half = WarpgroupTile<float, kHalf, kDim>;
  using Tile = WarpgroupTile<float, kDim, kTileN>;  // V^T

  struct Shared {
    Half halves[2];
    Ring<2> ring;           // of halves
    RingPosition<2> place;  // the copier's

    __device__ __forceinline__ void init() {
      ring.init(kWarps);
      place = {};
    }
    // Both halves of the tile from row `key` of v on; the copier.
    __device__ __forceinline__ void copy(const CUtensorMap& map, int64_t key, int head) {
      RingPosition<2> to = place;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ring.acquire(to);
        copy_tile(halves[to.stage], map, key + half * kHalf, head, ring.full[to.stage]);
        to.advance();
      }
      place = to;
    }
  };

  // A slot that holds V^T.
  template <typename Slot>
  __device__ __forceinline__ static Tile& prepared(Slot& slot) {
    static_assert(sizeof(Slot) == sizeof(Tile));
    return reinterpret_cast<Tile&>(slot);
  }

  // Half a tile of V, of which `keys` exist, to columns of V^T from `column` on. Eight lanes read eight
  // chunks of one key and write to eight chunks of other banks.
  __device__ __forceinline__ static void transpose(Tile& to, Half& from, int column, int keys) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 2;
    constexpr int kDimBlocks = kDim / 32, kKeyBlocks = kHalf / 16;
#pragma unroll 1
    for (int unit = warp; unit < kDimBlocks * kKeyBlocks; unit += kWarps) {
      const int dim_chunk = unit % kDimBlocks * 8 + lane % 8,
                key_chunk = unit / kDimBlocks * 4 + (lane % 8 / 2 ^ lane / 8);
      const int first_key = key_chunk / 2 * 8 + key_chunk % 2;
      float4 of_key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 2 * i;
        of_key[i] = key < keys ? *reinterpret_cast<const float4*>(from.chunk(key, dim_chunk))
                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      const int to_chunk = column / 4 + key_chunk;
      const auto write = [&](int i, float a, float b, float c, float d) {
        *reinterpret_cast<float4*>(to.chunk(dim_chunk * 4 + i, to_chunk)) = make_float4(a, b, c, d);
      };
      write(0, of_key[0].x, of_key[1].x, of_key[2].x, of_key[3].x);
      write(1, of_key[0].y, of_key[1].y, of_key[2].y, of_key[3].y);
      write(2, of_key[0].z, of_key[1].z, of_key[2].z, of_key[3].z);
      write(3, of_key[0].w, of_key[1].w, of_key[2].w, of_key[3].w);
    }
  }

  // Transposes V of the items, in the order of its use; two warps.
  template <typename Config, typename Storage>
  __device__ __forceinline__ static void prepare(const AttentionParams& attention,
                                                 Storage& shared) {
    const bool is_first = threadIdx.x % 32 == 0;
    RingPosition<Storage::kItems> place;
    RingPosition<Config::kSlots> slot;
    RingPosition<2> from;
    for (;;) {
      shared.items.wait(place);
      const WorkItem item = shared.item[place.stage];
      const typename Config::Mask mask(attention, item.tile, shared.keys[place.stage]);
      shared.items.release(place.advance());
      if (item.is_end) return;
      if (mask.first() >= mask.last()) continue;
      slot.advance();  // the first K
      for (int key = mask.first(), next; key < mask.last(); key = next) {
        next = mask.next(key);
        if (next < mask.last()) slot.advance();
        shared.ring.acquire(slot);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          shared.values.ring.wait(from);
          const int first = half * kHalf;
          transpose(prepared(shared.slots[slot.stage]), shared.values.halves[from.stage], first,
                    item.tile.num_keys - key - first);
          __syncwarp();
          if (is_first) shared.values.ring.release(from.stage);
          from.advance();
        }
        ptx::fence_proxy_async();
        ptx::bar_sync(kMetBarrier, kWarps * 32);
        if (threadIdx.x % 64 == 0) shared.ring.publish(slot.stage);
        slot.advance();
      }
    }
  }
};

template <int kDim_>
struct LongForwardConfig<float, kDim_, false> {
  template <typename Config>
  using Consumer = LongForwardConsumer<Config>;
  using Element = float;
  static constexpr int kDim = kDim_, kTileColumns = kDim;
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileM = kWarpgroups * 64;
  static constexpr int kTileN = kDim == 128 ? 64 : 128;
  static constexpr int kSlots = 4;
  static constexpr bool kKeepsReference = true;
  static constexpr bool kOwnQueries = true;
  static constexpr int kItems = 2;
  static constexpr int kWriters = 0;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr bool kPacked = false;
  using Mask = WindowMask<kTileN, kPacked>;
  using Score = SoftmaxScore;
  using Bias = NoBias;
  using Values = TransposedValues<kDim, kTileN>;
  static constexpr PathName kName = PathName("cuda.attention.forward.long.d") + kDim + ".tf32";
  static_assert(kDim == 64 || kDim == 128);
};

}  // namespace jagged_cuda::attention
