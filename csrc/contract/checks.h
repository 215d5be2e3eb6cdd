// Whether offsets are checked, and the sentence that says what is wrong with them.
#pragma once

#include "contract/contract.h"
#include "contract/offsets_rule.h"

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

namespace jagged_cuda {

// JAGGED_CUDA_CHECK is read at each call, so that jagged_cuda.set_checks() can change it by setting
// the variable of this process. Order and bounds are checked on the CPU in every mode.
enum class CheckMode {
  kOff,
  kWait,   // on CUDA too, waiting for the GPU; capacities and max_len too
  kAsync,  // on CUDA by a kernel that leaves what it finds for the next call; on the CPU as kWait
};

inline CheckMode check_mode() {
  const char* value = std::getenv("JAGGED_CUDA_CHECK");
  if (value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0) return CheckMode::kOff;
  return std::strcmp(value, "async") == 0 ? CheckMode::kAsync : CheckMode::kWait;
}

// `argument` is the name of the offsets, or of what gives the capacity of matrices.
std::string finding_text(const char* op, const char* argument, const Finding& finding);

// Applies a rule to indices 0 to num_seqs, on the host; throws the first finding.
template <typename Rule>
void enforce(const char* op, const char* argument, const Rule& rule) {
  for (int64_t index = 0; index <= rule.num_seqs; ++index) {
    const Finding finding = rule.at(index);
    if (finding.fault != Fault::kNone) fail(finding_text(op, argument, finding));
  }
}

}  // namespace jagged_cuda
