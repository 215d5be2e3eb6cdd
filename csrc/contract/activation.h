// What may follow a product: free of torch and CUDA headers, so that contract and kernels share it.
#pragma once

namespace jagged_cuda {

// In the order of jagged_cuda/ops/jagged_dense_bmm.py.
enum class Activation : int { kNone, kRelu, kGelu, kSilu, kSigmoid, kTanh };
constexpr int kActivations = 6;

}  // namespace jagged_cuda
