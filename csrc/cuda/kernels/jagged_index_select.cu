// jagged_index_select: whole sequences by their numbers. Its plan alone is rows/ranges.cuh's.
//
//   z_k[i] = x_b[i] with b = chosen[k]
//
// and its gradient: dx_b[i] = sum over the copies k of sequence b, in the order of k, of dz_k[i].
//
// Both are two kernels, of which the second goes through the rows of x. It starts while the first one runs,
// and waits for it:
//              first                                         second
//   forward    copies/group.cuh: place and rows of copies    copies/write.cuh: rows of x to all their copies
//   backward   copies/find_tiles.cuh: tiles of the gradient  copies/sum.cuh: the rows of all copies, added
// With more than kMostCounted copies or sequences there is nothing to count: forward takes rows by their
// plan's index (jagged_take), and backward follows a sort (copies/group.cuh).
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/copies/find_tiles.cuh"
#include "cuda/kernels/copies/group.cuh"
#include "cuda/kernels/copies/sum.cuh"
#include "cuda/kernels/copies/write.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/rows/ranges.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {

using namespace copies;

cudaError_t launch_jagged_index_select_plan(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_index_select_plan");
}

cudaError_t launch_group_copies(const GroupCopiesParams& params, cudaStream_t stream) {
  if (params.num_copies > kMostCounted || params.num_seqs > kMostCounted) {
    return cudaErrorInvalidValue;
  }
  const Grid grid{(params.num_copies + params.num_seqs + 1 + 31) / 32};
  return launch<group_copies_kernel>(params, grid, kGroupWarps * 32, 0, stream, nullptr);
}

cudaError_t launch_follow_order(const FollowOrderParams& params, cudaStream_t stream) {
  if (params.num_copies == 0) return cudaSuccess;
  const Grid grid{(params.num_copies + kFollowThreads - 1) / kFollowThreads};
  return launch<follow_order_kernel>(params, grid, kFollowThreads, 0, stream, nullptr);
}

int found_tile_log2(int64_t row_bytes) {
  int log2 = 7;
  while (log2 > 2 && row_bytes << log2 > kTileBytes) --log2;
  return log2;
}

cudaError_t launch_find_tiles(const FindTilesParams& params, cudaStream_t stream) {
  if (params.num_copies > kMostCounted || params.num_seqs > kMostCounted) {
    return cudaErrorInvalidValue;
  }
  const int64_t ctas = (params.num_seqs + 2 + kFindWarps - 1) / kFindWarps;
  const Grid grid{ctas, (kFewestCtas + ctas - 1) / ctas};
  return launch<find_tiles_kernel>(params, grid, kFindThreads, 0, stream, nullptr);
}

cudaError_t launch_jagged_index_select(const WriteCopiesParams& params, cudaStream_t stream) {
  const auto launch_tiles = [&](auto unit, auto tile_rows) {
    constexpr int kTileRows = decltype(tile_rows)::value;
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileRows);
    // At least so many that zeros behind the last copy take few steps.
    const int64_t ctas = (std::max(tiles, params.taken.total / kRows) + kWarps - 1) / kWarps;
    const WriteCopiesLaunch arguments{params, rows::lanes_log2(params.row_units), tiles,
                                      ctas * kWarps};
    return launch_dependent<write_copies_kernel<decltype(unit), kTileRows>>(
        arguments, {ctas}, kThreads, 0, stream, "cuda.jagged_index_select.copies");
  };
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    return params.row_units * params.unit_bytes <= kNarrowBytes
               ? launch_tiles(unit, std::integral_constant<int, 2 * kCopyRows>{})
               : launch_tiles(unit, std::integral_constant<int, kCopyRows>{});
  });
}

cudaError_t launch_jagged_index_select_backward(const SumCopiesParams& params,
                                                cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return params.vectors ? launch_sum_copies<Element, 16 / sizeof(Element)>(params, stream)
                          : launch_sum_copies<Element, 1>(params, stream);
  });
}

}  // namespace jagged_cuda
