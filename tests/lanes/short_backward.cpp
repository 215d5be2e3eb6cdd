// Backward of attention for short sequences of head dims up to 64, bf16 (attention/short_backward.cuh): few
// CTAs, so that places in the ring of pages are used many times.
#include "cuda/kernels/attention/short_backward.cuh"

#include "attention.h"

using namespace jagged_cuda;
using namespace jagged_cuda::attention;
using lanes::Draw;

namespace {

using Element = __nv_bfloat16;
constexpr int kEdges[] = {0, 1, 32, 33, 64, 65, 96, 127, 128, 129, 192, 193, 255, 256};

lanes::AttentionShape draw_shape(Draw& draw) {
  lanes::AttentionShape s;
  s.heads = s.kv_heads = 1 + draw.below(5);
  s.dim_qk = 8 * (1 + draw.below(8));
  s.dim_v = draw.one_in(2) ? s.dim_qk : 8 * (1 + draw.below(8));
  const bool is_cross = draw.one_in(3);
  s.q_offsets[0] = draw.one_in(3) ? draw.below(70) : 0;
  s.kv_offsets[0] = is_cross ? draw.below(20) : s.q_offsets[0];
  const auto length = [&] { return draw.one_in(2) ? draw.of(kEdges) : draw.below(257); };
  for (int left = 1 + draw.below(5); left > 0;) {
    const int rows = length(), keys = is_cross ? length() : rows;
    if (std::max(rows, keys) <= kTinyRows) continue;  // which it leaves to others
    s.q_offsets.push_back(s.q_offsets.back() + rows);
    s.kv_offsets.push_back(s.kv_offsets.back() + keys);
    --left;
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

std::string run(Draw& draw) {
  AttentionBackwardParams params{};
  const lanes::BackwardBatch<Element> batch(draw, draw_shape(draw), params);
  lanes::products_may_read_unwritten(true);  // dS of the other half of 64 queries
  if (launch_backward_short<Element>(params, nullptr) != cudaSuccess) lanes::fail("no launch");
  batch.judge(/*outside=*/false);  // the kernel for tiny sequences has those rows
  return batch.describe();
}

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
