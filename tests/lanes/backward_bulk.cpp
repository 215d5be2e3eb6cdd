// Backward of attention for head dims of 65 to 128, bf16: a CTA for each tile (attention/backward_bulk.cuh),
// and warpgroups that take tiles one after another (attention/backward_items.cuh).
#include "cuda/kernels/attention/backward_items.cuh"

#include "attention.h"

using namespace jagged_cuda;
using namespace jagged_cuda::attention;
using lanes::Draw;

namespace {

using Element = __nv_bfloat16;
constexpr int kEdges[] = {0, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 192, 200};

lanes::AttentionShape draw_shape(Draw& draw) {
  lanes::AttentionShape s;
  s.kv_heads = 1 + draw.below(2);
  s.heads = s.kv_heads * (1 + (draw.one_in(3) ? 1 : 0));
  s.dim_qk = 8 * (9 + draw.below(8));
  s.dim_v = draw.one_in(2) ? s.dim_qk : 8 * (1 + draw.below(16));
  const bool is_cross = draw.one_in(3);
  s.q_offsets[0] = draw.one_in(3) ? draw.below(70) : 0;
  s.kv_offsets[0] = is_cross ? draw.below(20) : s.q_offsets[0];
  const auto length = [&] { return draw.one_in(2) ? draw.of(kEdges) : draw.below(200); };
  for (int left = 1 + draw.below(3); left > 0; --left) {
    const int rows = length();
    s.q_offsets.push_back(s.q_offsets.back() + rows);
    s.kv_offsets.push_back(s.kv_offsets.back() + (is_cross ? length() : rows));
  }
  const int64_t behind = draw.one_in(3) ? draw.below(100) : 0;
  s.queries = std::max<int64_t>(s.q_offsets.back() + behind, 1);
  s.keys = is_cross ? std::max<int64_t>(s.kv_offsets.back() + draw.below(30), 1) : s.queries;
  s.left = s.right = AttentionParams::kUnbounded;
  if (draw.one_in(3)) s.right = 0;
  if (draw.one_in(4)) {
    s.left = draw.below(90);
    s.right = draw.below(9);
  }
  s.scale = draw.one_in(6) ? -0.2 : 1 / std::sqrt(double(s.dim_qk));
  return s;
}

cudaError_t launch(const BulkBackwardParams& params, bool many_queries, bool many_keys) {
  using Config = ItemsBackwardConfig<Element>;
  cudaError_t error = launch<clear_item_counts<void>>(
      ClearItemCountsParams{params.attention.next_item}, Grid{1}, 1, 0, nullptr, nullptr);
  if (error != cudaSuccess) return error;
  error = many_queries ? launch_dependent<backward_dq_items<Config>>(
                             params, Grid{lanes::num_sms}, Config::kThreads,
                             int(sizeof(DqItemsStorage<Element>)), nullptr)
                       : launch_dq_bulk<Element>(params, true, nullptr);
  if (error != cudaSuccess) return error;
  return many_keys ? launch_dependent<backward_dkdv_items<Config>>(
                         params, Grid{lanes::num_sms}, Config::kThreads,
                         int(sizeof(DkdvItemsStorage<Element>)), nullptr)
                   : launch_dkdv_bulk<Element>(params, nullptr);
}

std::string run(Draw& draw) {
  BulkBackwardParams bulk{};
  const lanes::BackwardBatch<Element> batch(draw, draw_shape(draw), bulk.attention);
  const bool many_queries = draw.below(2), many_keys = draw.below(2);
  cudaError_t launched = encode_bulk_maps<Element>(bulk);
  if (launched == cudaSuccess) launched = launch(bulk, many_queries, many_keys);
  if (launched != cudaSuccess) lanes::fail("no launch");
  batch.judge();
  return batch.describe() + (many_queries ? ", dq by items" : "") +
         (many_keys ? ", dk and dv by items" : "");
}

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
