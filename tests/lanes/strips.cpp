// jagged2_softmax over the rows of each column, by strips (softmax/strips.cuh), both directions.
#include "cuda/kernels/softmax/strips.cuh"

#include "driver.h"

using namespace jagged_cuda;
using lanes::Draw;

namespace {

constexpr double kScale = 0.7;
constexpr int kMostElems = 60'000;  // of a matrix
constexpr int kEdges[] = {0,   1,   2,   3,   31,  32,  33,  59,  60,  61,   63,   64,  65,
                          127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025};

struct Matrices {
  std::vector<int64_t> rows{3}, columns{0}, begins{0};  // offsets
  int64_t capacity = 0;
};

Matrices draw_matrices(Draw& draw) {
  Matrices m;
  m.begins[0] = draw.one_in(3) ? draw.below(5) : 0;
  const int count = 1 + draw.below(4);
  const auto length = [&](int most) {
    return std::min(draw.one_in(3) ? draw.below(700) : draw.of(kEdges), most);
  };
  for (int seq = 0; seq < count; ++seq) {
    int rows = length(kMostElems);
    int columns = length(std::max(1, kMostElems / std::max(rows, 1)));
    if (seq == 0 && draw.one_in(3)) rows = 8177, columns = 1 + draw.below(3);  // from global memory
    m.rows.push_back(m.rows.back() + rows);
    m.columns.push_back(m.columns.back() + columns);
    m.begins.push_back(m.begins.back() + int64_t{rows} * columns);
  }
  m.capacity = std::max<int64_t>(1, m.begins.back() + (draw.one_in(3) ? draw.below(50) : 0));
  return m;
}

// y of each column of every matrix; zeros elsewhere. Backward of y = x and the gradient `grad`.
template <bool kBackward, typename Element>
std::vector<double> reference(const Matrices& m, const Element* x, const Element* grad) {
  std::vector<double> y(size_t(m.capacity), 0.0);
  for (size_t seq = 0; seq + 1 < m.begins.size(); ++seq) {
    const int64_t rows = m.rows[seq + 1] - m.rows[seq];
    const int64_t columns = m.columns[seq + 1] - m.columns[seq];
    for (int64_t column = 0; column < columns; ++column) {
      const auto place = [&](int64_t row) { return m.begins[seq] + row * columns + column; };
      const auto at = [&](const Element* v, int64_t row) { return double(float(v[place(row)])); };
      double largest = -INFINITY, sum = 0;
      for (int64_t row = 0; row < rows; ++row) largest = std::max(largest, kScale * at(x, row));
      for (int64_t row = 0; row < rows; ++row) {
        sum += kBackward ? at(x, row) * at(grad, row) : exp(kScale * at(x, row) - largest);
      }
      for (int64_t row = 0; row < rows; ++row) {
        y[size_t(place(row))] = kBackward ? kScale * at(x, row) * (at(grad, row) - sum)
                                          : exp(kScale * at(x, row) - largest) / sum;
      }
    }
  }
  return y;
}

template <typename Element, bool kBackward>
std::string run(Draw& draw) {
  Matrices m = draw_matrices(draw);
  const bool is_spoilt = draw.one_in(5);
  const int shift = sizeof(Element) == 2 ? draw.below(2) : 0;  // a view that begins in a high half
  const Element* x = draw.normals<Element>(m.capacity + shift, "x", kBackward ? 0.1f : 2) + shift;
  const Element* grad = draw.normals<Element>(m.capacity + shift, "grad") + shift;
  Element* out = lanes::unwritten<Element>(m.capacity + shift, "out") + shift;
  const std::vector<double> expected = reference<kBackward>(m, x, grad);
  if (is_spoilt) lanes::spoil(draw, draw.one_in(2) ? m.begins : m.rows, m.capacity);
  lanes::judge_bounds_alone(is_spoilt);

  const auto num_seqs = int64_t(m.rows.size()) - 1;
  const MatricesView view{{lanes::offsets(m.rows, "rows"), num_seqs, INT64_MAX, true},
                          {lanes::offsets(m.columns, "columns"), num_seqs, INT64_MAX, true},
                          lanes::offsets(m.begins, "offsets"),
                          m.capacity};
  std::conditional_t<kBackward, Jagged2SoftmaxBackwardParams, Jagged2SoftmaxParams> params{};
  if constexpr (kBackward) {
    params.grad_out = grad, params.out = x, params.grad_a = out;
  } else {
    params.a = x, params.out = out;
  }
  params.matrices = view;
  params.over_rows = true;
  params.scale = kScale;
  if (softmax::launch_strips<Element>(params, nullptr) != cudaSuccess) lanes::fail("no launch");
  if (!is_spoilt) {
    lanes::compare("out", out, expected, sizeof(Element) == 2 ? 0.01 : 1e-4,
                   kBackward ? 5e-3 : 2e-5);
  }
  return std::string(kBackward ? "backward" : "forward") + ", " + std::to_string(num_seqs) +
         " matrices, " + std::to_string(m.capacity) + " elements" + (is_spoilt ? ", spoilt" : "");
}

}  // namespace

int main(int argc, char** argv) {
  return lanes::main_of(argc, argv, [](Draw& draw) {
    switch (draw.below(5)) {
      case 0:
        return run<__nv_bfloat16, false>(draw);
      case 1:
        return run<__nv_bfloat16, true>(draw);
      case 2:
        return run<__half, false>(draw);
      case 3:
        return run<__half, true>(draw);
      default:
        return run<float, true>(draw);
    }
  });
}
