#include "cuda/checks.h"

#include "contract/checks.h"

#include "cuda/glue.h"
#include "cuda/kernels/check_offsets.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace jagged_cuda {
namespace {

std::atomic<ErrorWord*> error_word{nullptr};

// Pinned memory that every GPU can write; null where it cannot be had. Must not be called while a
// stream is being captured.
ErrorWord* allocate_error_word() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (error_word.load() == nullptr) {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(ErrorWord), cudaHostAllocPortable | cudaHostAllocMapped) !=
        cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    error_word.store(new (memory) ErrorWord{});
  }
  return error_word.load();
}

// What a kernel has found since the last time; "" if nothing.
std::string take_error() {
  ErrorWord* word = error_word.load();
  if (word == nullptr || __atomic_load_n(&word->state, __ATOMIC_ACQUIRE) != ErrorWord::kWritten) {
    return "";
  }
  const std::string text = finding_text(word->op, word->argument, word->finding);
  __atomic_store_n(&word->state, ErrorWord::kEmpty, __ATOMIC_RELEASE);
  return text;
}

void throw_pending_error() {
  const std::string text = take_error();
  if (!text.empty()) fail(text + " (found on the GPU by an earlier call)");
}

bool is_capturing(const char* op, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(op, cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Where a kernel writes what it finds; null where there is no place and none can be made.
ErrorWord* find_error_word(const char* op, cudaStream_t stream) {
  ErrorWord* word = error_word.load();
  return word != nullptr || is_capturing(op, stream) ? word : allocate_error_word();
}

bool is_wide(const Tensor& offsets) { return offsets.scalar_type() == ScalarType::Long; }

template <typename Element>
std::vector<Element> copy_to_host(const char* op, const Tensor& tensor, cudaStream_t stream) {
  std::vector<Element> host(static_cast<size_t>(tensor.size(0)));
  check_cuda(op, cudaMemcpyAsync(host.data(), tensor.const_data_ptr(),
                                 host.size() * sizeof(Element), cudaMemcpyDeviceToHost, stream));
  check_cuda(op, cudaStreamSynchronize(stream));
  return host;
}

// Calls check(int64_t{}) or check(int32_t{}) for the dtype of `offsets`.
template <typename Check>
void for_dtype(const Tensor& offsets, Check check) {
  if (is_wide(offsets)) {
    check(int64_t{0});
  } else {
    check(int32_t{0});
  }
}

}  // namespace

void maybe_validate_offsets(const char* op, const char* argument, const Tensor& offsets,
                            int64_t total, std::optional<int64_t> max_len, bool is_first) {
  const CheckMode mode = check_mode();
  if (mode == CheckMode::kOff) return;
  if (mode == CheckMode::kAsync && is_first) throw_pending_error();
  const cudaStream_t stream = current_stream(offsets);
  const int64_t num_seqs = offsets.size(0) - 1, most_rows = max_len.value_or(kUnlimited);
  if (mode == CheckMode::kAsync) {
    if (ErrorWord* error = find_error_word(op, stream)) {
      check_cuda(op, launch_check_offsets({offsets.const_data_ptr(), is_wide(offsets), num_seqs,
                                           total, most_rows, op, argument, error},
                                          stream));
    }
  } else if (!is_capturing(op, stream)) {
    for_dtype(offsets, [&](auto zero) {
      const auto host = copy_to_host<decltype(zero)>(op, offsets, stream);
      enforce(op, argument, OffsetsRule<decltype(zero)>{host.data(), num_seqs, total, most_rows});
    });
  }
}

void maybe_validate_counts(const char* op, const char* argument, const Tensor& counts) {
  const CheckMode mode = check_mode();
  if (mode == CheckMode::kOff) return;
  const cudaStream_t stream = current_stream(counts);
  const int64_t last = counts.size(0) - 1;
  if (mode == CheckMode::kAsync) {
    if (ErrorWord* error = find_error_word(op, stream)) {
      check_cuda(
          op, launch_check_counts(
                  {counts.const_data_ptr(), is_wide(counts), last, op, argument, error}, stream));
    }
  } else if (!is_capturing(op, stream)) {
    for_dtype(counts, [&](auto zero) {
      const auto host = copy_to_host<decltype(zero)>(op, counts, stream);
      enforce(op, argument, CountsRule<decltype(zero)>{host.data(), last});
    });
  }
}

void maybe_validate_capacity(const char* op, const char* argument, const Tensor& needed,
                             int64_t capacity) {
  const CheckMode mode = check_mode();
  if (mode == CheckMode::kOff) return;
  const cudaStream_t stream = current_stream(needed);
  if (mode == CheckMode::kAsync) {
    if (ErrorWord* error = find_error_word(op, stream)) {
      check_cuda(op, launch_check_capacity({static_cast<const int64_t*>(needed.const_data_ptr()),
                                            capacity, op, argument, error},
                                           stream));
    }
  } else if (!is_capturing(op, stream)) {
    const auto host = copy_to_host<int64_t>(op, needed, stream);
    enforce(op, argument, CapacityRule{host.data(), 0, capacity});
  }
}

void maybe_validate_index(const char* op, const char* argument, const Tensor& index,
                          int64_t num_seqs) {
  const CheckMode mode = check_mode();
  if (mode == CheckMode::kOff) return;
  const cudaStream_t stream = current_stream(index);
  if (mode == CheckMode::kAsync) {
    if (ErrorWord* error = find_error_word(op, stream)) {
      check_cuda(op, launch_check_index({index.const_data_ptr<int64_t>(), index.size(0), num_seqs,
                                         op, argument, error},
                                        stream));
    }
  } else if (!is_capturing(op, stream)) {
    const auto host = copy_to_host<int64_t>(op, index, stream);
    enforce(op, argument, IndexRule{host.data(), index.size(0), num_seqs});
  }
}

void maybe_validate_matrices(const char* op, const char* argument, const Tensor& rows,
                             const Tensor& columns, bool has_y_offsets,
                             const Tensor& matrix_offsets, int64_t total_rows,
                             int64_t total_columns, int64_t capacity) {
  const CheckMode mode = check_mode();
  if (mode == CheckMode::kOff) return;
  maybe_validate_offsets(op, "offsets", rows, total_rows);
  maybe_validate_offsets(op, has_y_offsets ? "y_offsets" : "offsets", columns, total_columns,
                         std::nullopt, /*is_first=*/false);
  const cudaStream_t stream = current_stream(rows);
  const int64_t num_seqs = rows.size(0) - 1;
  if (mode == CheckMode::kAsync) {
    if (ErrorWord* error = find_error_word(op, stream)) {
      check_cuda(op, launch_check_matrix_offsets(
                         {rows.const_data_ptr(), columns.const_data_ptr(),
                          static_cast<const int64_t*>(matrix_offsets.const_data_ptr()),
                          is_wide(rows), num_seqs, capacity, op, argument, error},
                         stream));
    }
  } else if (!is_capturing(op, stream)) {
    const auto begins = copy_to_host<int64_t>(op, matrix_offsets, stream);
    for_dtype(rows, [&](auto zero) {
      using Offset = decltype(zero);
      const auto host_rows = copy_to_host<Offset>(op, rows, stream);
      const auto host_columns = copy_to_host<Offset>(op, columns, stream);
      enforce(op, argument,
              MatrixOffsetsRule<Offset>{host_rows.data(), host_columns.data(), begins.data(),
                                        num_seqs, capacity});
    });
  }
}

}  // namespace jagged_cuda

// Called through ctypes by jagged_cuda/_checks.py. The first returns whether there is room for
// errors; the second what was found since the last time, "" if nothing, until it is called again by
// the same thread.
extern "C" __attribute__((visibility("default"))) bool jagged_cuda_allocate_error_word() {
  return jagged_cuda::allocate_error_word() != nullptr;
}

extern "C" __attribute__((visibility("default"))) const char* jagged_cuda_take_error() {
  static thread_local std::string text;
  text = jagged_cuda::take_error();
  return text.c_str();
}
