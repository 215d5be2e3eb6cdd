// jagged_softmax's gradients by a ring (softmax/sequence_ring.cuh), to the bit: sums are made here in the
// order in which threads make them.
#include "cuda/kernels/softmax/sequence_ring.cuh"

#include "driver.h"

using namespace jagged_cuda;
using namespace jagged_cuda::sequence_softmax;
using lanes::Draw;

namespace {

constexpr double kScale = -0.7;
// Rows beside edges of what a warp has, and of stages, where four vectors lie beside each other.
constexpr int kEdges[] = {0,   0,   1,   2,   31,  32,  33,  34,  100, 127, 128, 129, 160,
                          255, 256, 257, 383, 384, 385, 511, 512, 513, 640, 641, 897};

// The sum over rows of dp p in one column, as the threads that share the sequence make it.
template <typename Element>
float sum_of_column(const Element* grad, const Element* p, int64_t len, int64_t grad_stride,
                    int64_t p_stride, int lanes_log2) {
  const bool in_cta = len > (32 * kItems) >> lanes_log2;
  const int rows = 32 >> lanes_log2, warps = in_cta ? kWarps : 1, step = rows * warps;
  float result = 0;
  for (int warp = 0; warp < warps; ++warp) {
    std::vector<float> sums(size_t(rows), 0.0f);
    for (int first = 0; first < rows; ++first) {
      for (int64_t row = warp * rows + first; row < len; row += step) {
        sums[size_t(first)] = __builtin_fmaf(float(grad[row * grad_stride]),
                                             float(p[row * p_stride]), sums[size_t(first)]);
      }
    }
    for (int distance = rows / 2; distance > 0; distance /= 2) {
      for (int i = 0; i < distance; ++i) sums[size_t(i)] += sums[size_t(i + distance)];
    }
    result = warp == 0 ? sums[0] : result + sums[0];
  }
  return result;
}

template <typename Element, int kVector>
std::string run(Draw& draw) {
  const int columns = kVector * (1 + draw.below(6)), lanes_log2 = std::min(draw.below(4), 2);
  const int count = 1 + draw.below(7);
  std::vector<int64_t> offsets{draw.one_in(3) ? draw.below(5) : 0};
  for (int seq = 0; seq < count; ++seq) {
    const int len = draw.one_in(3) ? draw.below(700) : draw.of(kEdges);
    offsets.push_back(offsets.back() + (len << 2 >> lanes_log2));
  }
  const int64_t total = std::max<int64_t>(1, offsets.back() + (draw.one_in(3) ? draw.below(9) : 0));
  const bool is_spoilt = draw.one_in(5);

  JaggedSoftmaxBackwardParams params{};
  params.grad_out_stride = columns + kVector * draw.below(3);
  params.out_stride = columns + kVector * draw.below(3);
  const auto elems = [&](int64_t stride) { return (total - 1) * stride + columns; };
  const auto* grad = draw.normals<Element>(elems(params.grad_out_stride), "grad");
  const auto* p = draw.normals<Element>(elems(params.out_stride), "p", 0.1f);
  auto* grad_x = lanes::unwritten<Element>(total * columns, "grad_x");
  std::vector<double> expected(size_t(total * columns), 0.0);
  for (int seq = 0; seq < count; ++seq) {
    const int64_t begin = offsets[size_t(seq)], len = offsets[size_t(seq) + 1] - begin;
    for (int column = 0; column < columns; ++column) {
      const auto* own_grad = grad + begin * params.grad_out_stride + column;
      const auto* own_p = p + begin * params.out_stride + column;
      const float sum = sum_of_column(own_grad, own_p, len, params.grad_out_stride,
                                      params.out_stride, lanes_log2);
      for (int64_t row = 0; row < len; ++row) {
        const float own = float(kScale) * float(own_p[row * params.out_stride]) *
                          (float(own_grad[row * params.grad_out_stride]) - sum);
        expected[size_t((begin + row) * columns + column)] = float(Element(own));
      }
    }
  }
  if (is_spoilt) lanes::spoil(draw, offsets, total);
  lanes::judge_bounds_alone(is_spoilt);

  params.grad_out = grad;
  params.out = p;
  params.grad_x = grad_x;
  params.offsets = {lanes::offsets(offsets, "offsets"), count, total, true};
  params.columns = columns;
  params.scale = kScale;
  constexpr int kEach[] = {1, 2, kWarps};
  const int seqs_each = draw.of(kEach);
  const int64_t groups = ((columns / kVector - 1) >> lanes_log2) + 1;
  const int64_t ctas = 1 + draw.below((count + seqs_each - 1) / seqs_each);
  using Launch = SoftmaxLaunch<JaggedSoftmaxBackwardParams>;
  if (launch<softmax_backward_ring_kernel<Element, kVector>>(
          Launch{params, lanes_log2, seqs_each}, {groups, ctas}, kThreads,
          sizeof(RingStorage<kVector * sizeof(Element)>), nullptr, nullptr) != cudaSuccess) {
    lanes::fail("no launch");
  }
  if (!is_spoilt) lanes::compare("grad_x", grad_x, expected, 0, 0);
  return std::to_string(count) + " sequences, " + std::to_string(total) + " rows of " +
         std::to_string(columns) + (is_spoilt ? ", spoilt" : "");
}

}  // namespace

int main(int argc, char** argv) {
  return lanes::main_of(argc, argv, [](Draw& draw) {
    switch (draw.below(5)) {
      case 0:
        return run<__nv_bfloat16, 8>(draw);
      case 1:
        return run<__nv_bfloat16, 4>(draw);
      case 2:
        return run<__half, 8>(draw);
      case 3:
        return run<__half, 4>(draw);
      default:
        return run<float, 4>(draw);
    }
  });
}
