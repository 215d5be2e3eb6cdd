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
  const auto length = [&] { return draw.one_in(2) ? draw.of(kEdges) : draw.below(257); };
  s.draw_rows(draw, 5, length, kTinyRows + 1);  // it leaves others to those for tiny sequences
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
