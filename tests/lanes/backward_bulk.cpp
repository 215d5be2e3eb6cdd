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
  s.draw_rows(draw, 3, [&] { return draw.one_in(2) ? draw.of(kEdges) : draw.below(200); });
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
