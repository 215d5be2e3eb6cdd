// What a line cannot say of a probability.
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

inline void check_probability(const char* op, const char* argument, double p) {
  if (!(p >= 0 && p <= 1)) fail_argument(op, argument, "from 0 to 1", std::to_string(p));
}

}  // namespace jagged_cuda
