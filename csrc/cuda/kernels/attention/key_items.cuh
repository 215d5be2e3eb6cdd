// Tiles of keys as items of a persistent backward kernel: the order in which they are taken, the
// queries that see one, and how a scheduler hands it to the other warps of its CTA. `Item` has the
// lengths of its sequence.
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"
#include "cuda/kernels/attention/long_plan.cuh"

namespace jagged_cuda::attention {

// Whether a sequence's tiles of keys are taken from the last to the first: where late keys are seen
// by more queries, they come first.
__device__ __forceinline__ bool keys_fall(const AttentionParams& params) {
  return params.window_left < AttentionParams::kUnbounded &&
         params.window_right >= AttentionParams::kUnbounded;
}

// The window of an item's sequence: rows are keys, columns are queries.
template <typename Item>
__device__ __forceinline__ WindowOf<int> queries_window(const AttentionParams& params,
                                                        const Item& item) {
  return sequence_window(params, item.num_keys - item.num_queries).transposed();
}

// Writes an item to its stage of `items`, once that is free; one warp.
template <typename Item, int kItems>
__device__ __forceinline__ void publish_item(Ring<kItems>& ring, RingPosition<kItems>& place,
                                             Item (&items)[kItems], const Item& item) {
  ring.acquire(place);
  if (threadIdx.x % 32 == 0) {
    items[place.stage] = item;
    ptx::mbarrier_arrive(ring.full[place.stage]);
  }
  __syncwarp();
  place.advance();
}

}  // namespace jagged_cuda::attention
