// The last arguments of the attention operators, in the order of their schemas: the used part of each
// key sequence, and what is added to scores.
#pragma once

#include "contract/contract.h"
#include "contract/score_bias.h"

#include <algorithm>
#include <optional>

namespace jagged_cuda {

struct Biases {
  // Beyond any distance in rows, from which it can be subtracted.
  static constexpr int64_t kFarPosition = int64_t{1} << 62;

  std::optional<Tensor> kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries;
  bool symmetric;
  std::optional<Tensor> position_table;
  int64_t position_first;

  // Contiguous; what the contract does not check raises.
  Biases(const char* op, const std::optional<Tensor>& kv_lengths_any,
         const std::optional<Tensor>& kv_bias_any, const std::optional<Tensor>& time_table_any,
         const std::optional<Tensor>& q_time_any, const std::optional<Tensor>& kv_time_any,
         const std::optional<Tensor>& boundaries_any, bool is_symmetric,
         const std::optional<Tensor>& position_table_any, int64_t first_position)
      : symmetric(is_symmetric),
        position_first(std::clamp(first_position, -kFarPosition, kFarPosition)) {
    const auto dense = [&](const std::optional<Tensor>& given) {
      return given ? std::optional<Tensor>(as_contiguous(op, *given)) : std::nullopt;
    };
    kv_lengths = dense(kv_lengths_any);
    kv_bias = dense(kv_bias_any);
    time_table = dense(time_table_any);
    q_time = dense(q_time_any);
    kv_time = dense(kv_time_any);
    boundaries = dense(boundaries_any);
    position_table = dense(position_table_any);
    const auto require = [&](const char* argument, const std::optional<Tensor>& given) {
      if (time_table && !given) fail_argument(op, argument, "a tensor with time_table", "None");
    };
    require("q_time", q_time);
    require("kv_time", kv_time);
    require("boundaries", boundaries);
  }

  ScoreBias view() const {
    ScoreBias bias{};
    if (kv_bias) {
      bias.kv_bias = kv_bias->const_data_ptr();
      bias.kv_heads = static_cast<int>(kv_bias->size(1));
    }
    if (time_table) {
      bias.time_table = time_table->const_data_ptr();
      bias.time_heads = static_cast<int>(time_table->size(0));
      bias.time_buckets = static_cast<int>(time_table->size(1));
      bias.q_time = q_time->const_data_ptr<int64_t>();
      bias.kv_time = kv_time->const_data_ptr<int64_t>();
      bias.boundaries = boundaries->const_data_ptr<int64_t>();
      bias.symmetric = symmetric;
    }
    if (position_table) {
      bias.position_table = position_table->const_data_ptr();
      bias.position_heads = static_cast<int>(position_table->size(0));
      bias.position_buckets = static_cast<int>(position_table->size(1));
      bias.position_first = position_first;
    }
    return bias;
  }

  bool any() const { return kv_lengths || kv_bias || time_table || position_table; }
};

// The gradients of kv_bias, time_table and position_table, full of zeros; empty where there is none.
struct BiasGradients {
  Tensor kv_bias, time_table, position_table;

  BiasGradients(const char* op, const Tensor& like, const Sizes& sizes, const Biases& biases)
      : kv_bias(zeros(op, like, {sizes.Tk, sizes.Hb})),
        time_table(zeros(op, like, {sizes.Ht, biases.time_table ? sizes.Rt + 1 : 0})),
        position_table(zeros(op, like, {sizes.Hp, sizes.Rp})) {}

 private:
  static Tensor zeros(const char* op, const Tensor& like, Shape shape) {
    Tensor made = allocate(op, like, shape, sum_dtype(like.scalar_type()));
    if (made.numel() > 0) torch::stable::zero_(made);
    return made;
  }
};

}  // namespace jagged_cuda
