#include "cuda/kernels/attention/long_plan.cuh"

namespace jagged_cuda::attention {

template <int kTile, typename Params>
cudaError_t launch_plan(bool is_behind, Params params, cudaStream_t stream) {
  params.planned = planned_lengths(params);
  return launch_behind<plan_long<kTile, Params>>(is_behind, params, Grid{1}, kPlanThreads, 0,
                                                 stream, nullptr);
}

template cudaError_t launch_plan<128>(bool, AttentionParams, cudaStream_t);
template cudaError_t launch_plan<192>(bool, AttentionParams, cudaStream_t);
template cudaError_t launch_plan<64>(bool, AttentionBackwardParams, cudaStream_t);
template cudaError_t launch_plan<128>(bool, AttentionBackwardParams, cudaStream_t);

}  // namespace jagged_cuda::attention
