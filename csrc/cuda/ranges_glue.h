// What the glue of jagged_slice and jagged_index_select shares.
#pragma once

#include "cuda/plan.h"
#include "cuda/kernels/rows/ranges.h"

namespace jagged_cuda {

// The plan of `num_ranges` ranges of the sequences of contiguous offsets [B + 1] in `rows` rows:
// choose(params) says which, `launch` enqueues the kernels.
template <typename Choose, typename Launch>
Plan plan_ranges(const char* op, const char* asked, const Tensor& bounds, int64_t rows,
                 int64_t num_ranges, int64_t total, Choose choose, Launch launch) {
  const PlanTensors plan(op, bounds, total, num_ranges);
  std::optional<Tensor> tile_sums;
  if (const int64_t tiles = range_tiles(num_ranges); tiles > 1) {
    tile_sums = allocate(op, bounds, {tiles}, ScalarType::Long);
  }

  RangesParams params{};
  params.offsets = view_offsets(bounds, rows);
  params.num_ranges = num_ranges;
  params.most = rows;
  params.tile_sums = tile_sums ? tile_sums->mutable_data_ptr<int64_t>() : nullptr;
  params.planned = plan.offsets.mutable_data_ptr();
  params.uncut = plan.uncut_data();
  params.index = plan.index.mutable_data_ptr<int64_t>();
  params.total = total;
  params.capacity = plan.capacity;
  choose(params);
  check_cuda(op, launch(params, current_stream(bounds)));
  plan.maybe_validate(asked);
  return {plan.index, plan.offsets};
}

}  // namespace jagged_cuda
