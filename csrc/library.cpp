// Registers every operator of contract/operators.h, and gives its table to Python.

#include "contract/operators.h"

#include <torch/csrc/stable/library.h>

#include <string>

STABLE_TORCH_LIBRARY(jagged_cuda, m) {
  for (const auto& op : jagged_cuda::kOperators) m.def(op.schema);
}

// Each operator's schema and line, a line of text each. Read through ctypes by
// jagged_cuda/ops/_contract.py.
extern "C" __attribute__((visibility("default"))) const char* jagged_cuda_operators() {
  static const std::string text = [] {
    std::string all;
    for (const auto& op : jagged_cuda::kOperators)
      all += std::string(op.schema) + "\n" + op.line + "\n";
    return all;
  }();
  return text.c_str();
}
