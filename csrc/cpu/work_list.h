// Runs the items of an operator over torch's threads. Consecutive items form tasks of about equal
// cost, which threads take as they become free; items write disjoint parts of the result and do not
// depend on the number of threads, so neither does the result.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

namespace jagged_cuda::cpu {

// Memory aligned to cache lines.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t bytes) : data_(::operator new(bytes, kAlignment)) {}
  ~AlignedBuffer() { ::operator delete(data_, kAlignment); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  void* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  void* data_;
};

template <class Item>
class WorkList {
 public:
  // `cost` in multiply-adds, or as much time.
  void add(const Item& item, int64_t cost) {
    if (task_begins_.empty() || task_cost_ + cost > kTaskCost) {
      task_begins_.push_back(items_.size());
      task_cost_ = 0;
    }
    task_cost_ += cost;
    items_.push_back(item);
  }

  // compute(item, scratch) for every item, with `scratch_bytes` of memory for each thread.
  template <class Compute>
  void run(size_t scratch_bytes, const Compute& compute) const {
    if (items_.empty()) return;
    const int64_t num_tasks = static_cast<int64_t>(task_begins_.size());
    const int64_t num_workers = std::min<int64_t>(num_tasks, torch::stable::get_num_threads());
    const size_t stride = (scratch_bytes + 4095) / 4096 * 4096;
    const AlignedBuffer scratch(stride * static_cast<size_t>(num_workers));
    std::atomic<int64_t> next_task{0};
    const auto work = [&](int64_t worker_begin, int64_t worker_end) {
      for (int64_t worker = worker_begin; worker < worker_end; ++worker) {
        void* memory = static_cast<char*>(scratch.data()) + stride * static_cast<size_t>(worker);
        for (int64_t task;
             (task = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
          const size_t index = static_cast<size_t>(task);
          const size_t end = task + 1 < num_tasks ? task_begins_[index + 1] : items_.size();
          for (size_t item = task_begins_[index]; item < end; ++item) compute(items_[item], memory);
        }
      }
    };
    if (num_workers <= 1) {
      work(0, 1);
    } else {
      torch::stable::parallel_for(0, num_workers, 1, work);
    }
  }

 private:
  static constexpr int64_t kTaskCost =
      1 << 19;  // 20 to 50 us: well above what starting a thread costs

  std::vector<Item> items_;
  std::vector<size_t> task_begins_;
  int64_t task_cost_ = 0;
};

}  // namespace jagged_cuda::cpu
