#include "cpu/work_list.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

namespace jagged_cuda::cpu {

void run_tasks(size_t num_tasks, size_t scratch_bytes,
               void (*run)(const void* context, size_t task, void* scratch), const void* context) {
  if (num_tasks == 0) return;
  const int64_t num_workers =
      std::min<int64_t>(static_cast<int64_t>(num_tasks), torch::stable::get_num_threads());
  const size_t stride = (scratch_bytes + 4095) / 4096 * 4096;
  const AlignedBuffer scratch(stride * static_cast<size_t>(num_workers));
  std::atomic<size_t> next_task{0};
  const auto work = [&](int64_t worker_begin, int64_t worker_end) {
    for (int64_t worker = worker_begin; worker < worker_end; ++worker) {
      void* memory = static_cast<char*>(scratch.data()) + stride * static_cast<size_t>(worker);
      for (size_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        run(context, task, memory);
      }
    }
  };
  if (num_workers <= 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, num_workers, 1, work);
  }
}

}  // namespace jagged_cuda::cpu
