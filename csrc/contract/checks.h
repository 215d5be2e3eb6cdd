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
inline std::string finding_text(const char* op, const char* argument, const Finding& finding) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  const bool of_matrices =
      finding.fault == Fault::kMatrixBegin || finding.fault == Fault::kMatrixSum;
  const auto name = [&](int64_t index) {
    return (of_matrices ? "matrix_offsets" : std::string(argument)) + "[" + number(index) + "]";
  };
  const std::string got = ", got " + number(finding.value);
  const std::string must_be = std::string(op) + ": " + name(finding.index) + " must be ";
  switch (finding.fault) {
    case Fault::kNegative:
    case Fault::kMatrixBegin:
      return must_be + ">= 0" + got;
    case Fault::kDecreasing:
      return must_be + ">= " + name(finding.index - 1) + " = " + number(finding.reference) + got;
    case Fault::kPastTheEnd:
      return must_be + "<= the number of rows " + number(finding.reference) + got;
    case Fault::kTooLong:
      return std::string(op) + ": sequence " + number(finding.index) + " of " + argument +
             " must have at most max_len = " + number(finding.reference) + " rows" + got;
    case Fault::kCapacity:
      return std::string(op) + ": " + argument + " must be at least " + number(finding.reference) +
             got;
    case Fault::kOutOfRange:
      return must_be + "the number of one of " + number(finding.reference) + " sequences" + got;
    case Fault::kMatrixSum:
      return must_be + name(finding.index - 1) + " + " + number(finding.rows) + " * " +
             number(finding.columns) + " = " + number(finding.reference) + got;
    case Fault::kMatrixCapacity:
      return std::string(op) + ": " + argument + " must be at least " + number(finding.reference) +
             " elements (the matrix of sequence " + number(finding.index) + " ends there)" + got;
    case Fault::kNone:
      break;
  }
  return "";
}

// Applies a rule to indices 0 to num_seqs, on the host; throws the first finding.
template <typename Rule>
void enforce(const char* op, const char* argument, const Rule& rule) {
  for (int64_t index = 0; index <= rule.num_seqs; ++index) {
    const Finding finding = rule.at(index);
    if (finding.fault != Fault::kNone) fail(finding_text(op, argument, finding));
  }
}

}  // namespace jagged_cuda
