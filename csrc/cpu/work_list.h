// Runs the items of an operator over torch's threads. Consecutive items form tasks of about equal
// cost, which threads take as they become free; items write disjoint parts of the result and do not
// depend on the number of threads, so neither does the result.
#pragma once

#include <cstddef>
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

// run(context, task, scratch) for tasks 0 to num_tasks - 1, on torch's threads, each of which has
// `scratch_bytes` of memory.
void run_tasks(size_t num_tasks, size_t scratch_bytes,
               void (*run)(const void* context, size_t task, void* scratch), const void* context);

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
    const auto work = [&](size_t task, void* scratch) {
      const size_t end = task + 1 < task_begins_.size() ? task_begins_[task + 1] : items_.size();
      for (size_t item = task_begins_[task]; item < end; ++item) compute(items_[item], scratch);
    };
    run_tasks(
        task_begins_.size(), scratch_bytes,
        [](const void* context, size_t task, void* scratch) {
          (*static_cast<const decltype(work)*>(context))(task, scratch);
        },
        &work);
  }

 private:
  static constexpr int64_t kTaskCost =
      1 << 19;  // 20 to 50 us: well above what starting a thread costs

  std::vector<Item> items_;
  std::vector<size_t> task_begins_;
  int64_t task_cost_ = 0;
};

}  // namespace jagged_cuda::cpu
