// The contract of an operator: its line of contract/operators.h, parsed once and checked by every
// call of its kernels. jagged_cuda/ops/_contract.py does the same, in the same order and with the
// same sentences, for fake kernels and triton_ref (tests/test_contract.py compares them).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>

namespace jagged_cuda {

using torch::stable::Tensor;

// The sizes of a call, by their names in the line; 0 if the line has no such size.
struct Sizes {
  int64_t B, T, Tq, Tk, Tx, Ty, M, N, D, Dv, H, G, R;
  int64_t Hb, Ht, Hp;  // heads of biases
  int64_t Rt, Rp;      // buckets of biases
  int64_t elems;       // sum Lx*Ly
  int64_t rest;        // the product of the dimensions of `...`
};

// One argument of a call. Anything but tensors and integers is not checked.
struct Argument {
  Argument(const Tensor& given) : tensor(&given) {}
  Argument(const std::optional<Tensor>& given) : tensor(given ? &*given : nullptr) {}
  Argument(int64_t given) : value(given) {}
  Argument(std::optional<int64_t> given) : value(given) {}
  Argument(bool) {}
  Argument(double) {}

  const Tensor* tensor = nullptr;
  std::optional<int64_t> value;
};

class Contract {
 public:
  explicit Contract(const char* op);  // the name of an operator of operators.h

  // The sizes of a call with all arguments of the schema, in its order. What does not fit raises
  // "op: argument must be <expected>, got <actual>".
  Sizes check(std::initializer_list<Argument> arguments) const;

  struct Line;

 private:
  std::shared_ptr<const Line> line_;
};

}  // namespace jagged_cuda
