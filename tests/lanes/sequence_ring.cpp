// jagged_softmax by a ring (softmax/sequence_ring.cuh), to the bit: forward beside softmax_short and
// softmax_long, which read the same sequences from memory; backward beside sums that are made here in the
// order in which threads make them.
#include "cuda/kernels/softmax/sequence_ring.cuh"

#include "driver.h"

#include <tuple>
#include <utility>

using namespace jagged_cuda;
using namespace jagged_cuda::sequence_softmax;
using lanes::Draw;

namespace {

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

struct Batch {
  int columns, lanes_log2, count;
  std::vector<int64_t> offsets;
  int64_t total;
  double scale;
  bool is_spoilt;

  Batch(Draw& draw, int vector)
      : columns(vector * (1 + draw.below(6))),
        lanes_log2(std::min(draw.below(4), 2)),
        count(1 + draw.below(7)),
        offsets{draw.one_in(3) ? draw.below(5) : 0} {
    for (int seq = 0; seq < count; ++seq) {
      const int len = draw.one_in(3) ? draw.below(700) : draw.of(kEdges);
      offsets.push_back(offsets.back() + (len << 2 >> lanes_log2));
    }
    total = std::max<int64_t>(1, offsets.back() + (draw.one_in(3) ? draw.below(9) : 0));
    constexpr int kTenths[] = {7, -7, 60, -13, 0};
    scale = draw.of(kTenths) / 10.0;
    is_spoilt = draw.one_in(5);
  }

  // After the reference has been made.
  template <typename Params>
  void set(Draw& draw, Params& params) {
    if (is_spoilt) lanes::spoil(draw, offsets, total);
    lanes::judge_bounds_alone(is_spoilt);
    params.offsets = {lanes::offsets(offsets, "offsets"), count, total, true};
    params.columns = columns;
    params.scale = scale;
  }

  template <typename Element, int kVector, typename Params>
  void launch_ring(Draw& draw, const Params& params) const {
    constexpr int kEach[] = {1, 2, kWarps};
    const int seqs_each = draw.of(kEach);
    const int64_t ctas = 1 + draw.below((count + seqs_each - 1) / seqs_each);
    using Launch = SoftmaxLaunch<Params>;
    if (launch<softmax_ring_kernel<Params, Element, kVector>>(
            Launch{params, lanes_log2, seqs_each}, {groups(kVector), ctas}, kThreads,
            sizeof(RingStorage<Params, kVector * sizeof(Element)>), nullptr,
            nullptr) != cudaSuccess) {
      lanes::fail("no launch");
    }
  }

  int64_t groups(int vector) const { return ((columns / vector - 1) >> lanes_log2) + 1; }

  std::string text(const char* pass) const {
    return std::string(pass) + std::to_string(count) + " sequences, " + std::to_string(total) +
           " rows of " + std::to_string(columns) + (is_spoilt ? ", spoilt" : "");
  }
};

// Each sequence as jagged_softmax_kernel computes it.
template <typename Element, int kVector>
void softmax_without_ring(const SoftmaxLaunch<JaggedSoftmaxParams> launch) {
  auto& shared = *reinterpret_cast<SharedStorage*>(lanes::dynamic_shared());
  const JaggedSoftmaxParams& params = launch.params;
  const RowRange range = sequence_rows(params.offsets, blockIdx.y);
  const bool in_cta = range.len > (32 * kItems) >> launch.lanes_log2;
  if (range.len == 0 || (!in_cta && threadIdx.x >= 32)) return;
  const Place place(in_cta, launch.lanes_log2, int64_t{blockIdx.x} << launch.lanes_log2, kVector,
                    params.columns);
  if (range.len <= place.row_step * kItems) {
    softmax_short<Element, kVector>(params, range, place, shared);
  } else {
    softmax_long<Element, kVector>(params, range, place, shared);
  }
}

// Infinities and NaN in some columns of a sequence.
template <typename Element>
void make_infinite(Draw& draw, Element* x, int64_t len, int64_t stride, int columns) {
  const float inf = INFINITY, kinds[] = {-inf, -inf, inf, NAN};
  for (int i = draw.below(4); i > 0 && len > 0; --i) {
    const float value = kinds[draw.below(4)];
    int64_t first = draw.below(int(len)), last = draw.one_in(2) ? len : first + 1;
    if (draw.one_in(3)) std::tie(first, last) = std::pair(int64_t{0}, draw.one_in(2) ? len : last);
    Element* column = x + draw.below(columns);
    for (int64_t row = first; row < last; ++row) column[row * stride] = Element(value);
  }
}

// One column, whose largest logit decides whether it is NaN, as in torch.
template <typename Element>
void softmax_of_column(const Element* x, double* p, int64_t len, int64_t x_stride, int columns,
                       double scale) {
  double largest = -INFINITY, sum = 0;
  for (int64_t row = 0; row < len; ++row) {
    const double logit = scale * double(float(x[row * x_stride]));
    if (!(logit <= largest)) largest = std::isnan(largest) ? largest : logit;
  }
  for (int64_t row = 0; row < len; ++row) {
    p[row * columns] = std::exp(scale * double(float(x[row * x_stride])) - largest);
    sum += p[row * columns];
  }
  for (int64_t row = 0; row < len; ++row) p[row * columns] /= sum;
}

template <typename Element>
void compare_softmax(const Element* got, const Element* without_ring,
                     const std::vector<double>& expected) {
  const double eps = sizeof(Element) == 4              ? 1e-5
                     : std::is_same_v<Element, __half> ? 0x1p-10
                                                       : 0x1p-7;
  for (size_t i = 0; i < expected.size(); ++i) {
    const float value = float(got[i]), other = float(without_ring[i]);
    const bool is_nan = std::isnan(value);
    const bool is_same = is_nan ? std::isnan(other) : value == other;
    const bool is_near =
        is_nan ? std::isnan(expected[i])
               : std::abs(value - expected[i]) <= eps * expected[i] + (eps < 1e-3 ? 1e-7 : 0x1p-30);
    if (is_same && is_near) continue;
    printf("WRONG out[%zu]: %g, without a ring %g, reference %g\n", i, value, other, expected[i]);
    ++lanes::wrong;
    return;
  }
}

template <typename Element, int kVector>
std::string run_forward(Draw& draw) {
  Batch batch(draw, kVector);
  const auto& [columns, lanes_log2, count, offsets, total, scale, is_spoilt] = batch;
  JaggedSoftmaxParams params{};
  params.x_stride = columns + kVector * draw.below(3);
  auto* x = draw.normals<Element>((total - 1) * params.x_stride + columns, "x");
  auto* out = lanes::unwritten<Element>(total * columns, "out");
  auto* without_ring = lanes::unwritten<Element>(total * columns, "without_ring");
  std::fill(without_ring, without_ring + total * columns, Element(0.0f));
  std::vector<double> expected(size_t(total * columns), 0.0);
  for (int seq = 0; seq < count; ++seq) {
    const int64_t begin = offsets[size_t(seq)], len = offsets[size_t(seq) + 1] - begin;
    Element* own = x + begin * params.x_stride;
    if (draw.one_in(2)) make_infinite(draw, own, len, params.x_stride, columns);
    for (int column = 0; column < columns; ++column) {
      softmax_of_column(own + column, expected.data() + begin * columns + column, len,
                        params.x_stride, columns, scale);
    }
  }
  params.x = x;
  params.out = out;
  batch.set(draw, params);
  if (!is_spoilt) {
    JaggedSoftmaxParams other = params;
    other.out = without_ring;
    if (launch<softmax_without_ring<Element, kVector>>(
            SoftmaxLaunch<JaggedSoftmaxParams>{other, lanes_log2, 1},
            {batch.groups(kVector), count}, kThreads, sizeof(SharedStorage), nullptr,
            nullptr) != cudaSuccess) {
      lanes::fail("no launch");
    }
  }
  batch.launch_ring<Element, kVector>(draw, params);
  if (!is_spoilt) compare_softmax(out, without_ring, expected);
  return batch.text("forward, ");
}

template <typename Element, int kVector>
std::string run_backward(Draw& draw) {
  Batch batch(draw, kVector);
  const auto& [columns, lanes_log2, count, offsets, total, scale, is_spoilt] = batch;
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
        const float own = float(scale) * float(own_p[row * params.out_stride]) *
                          (float(own_grad[row * params.grad_out_stride]) - sum);
        expected[size_t((begin + row) * columns + column)] = float(Element(own));
      }
    }
  }
  params.grad_out = grad;
  params.out = p;
  params.grad_x = grad_x;
  batch.set(draw, params);
  batch.launch_ring<Element, kVector>(draw, params);
  if (!is_spoilt) lanes::compare("grad_x", grad_x, expected, 0, 0);
  return batch.text("backward, ");
}

template <typename Element, int kVector>
std::string run(Draw& draw) {
  // Forward the host takes a ring with vectors of 16 bytes alone.
  if constexpr (kVector * sizeof(Element) == 16) {
    if (draw.one_in(2)) return run_forward<Element, kVector>(draw);
  }
  return run_backward<Element, kVector>(draw);
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
