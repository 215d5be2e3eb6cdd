// What host code knows of attention/starting_times.cuh.
#pragma once

namespace jagged_cuda::attention {

// The forward kernel for time_bias alone takes tables of at most so many buckets.
constexpr int kMostForwardTimeBuckets = 256;

}  // namespace jagged_cuda::attention
