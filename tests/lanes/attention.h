// What drivers of attention's backward share: P = softmax(scale q k^T), dS = P (dO v^T - delta),
// delta = rowsum(dO out) - dlse, dq = scale dS k, dk = scale dS^T q, dv = P^T dO, in float64.
#pragma once

#include "driver.h"

namespace lanes {

template <typename Element>
struct AttentionTensors {
  const Element *q, *k, *v, *grad_out;
  Element* out;
  float* lse;
  const float* grad_lse;  // or null
};
struct AttentionGradients {
  std::vector<double> q, k, v;
};

template <typename Element>
double dot(const Element* a, const Element* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += double(float(a[i])) * double(float(b[i]));
  return sum;
}

// One query and head, row `row` of q, which sees these rows of k and v: writes its out and lse, and adds to
// the gradients.
template <typename Element>
void differentiate(const AttentionTensors<Element>& t, AttentionGradients& grad, int64_t row,
                   const std::vector<int64_t>& keys, int dim_qk, int dim_v, double scale) {
  const auto add = [](double* sum, double factor, const Element* from, int count) {
    for (int i = 0; i < count; ++i) sum[i] += factor * double(float(from[i]));
  };
  const Element *q = t.q + row * dim_qk, *grad_out = t.grad_out + row * dim_v;
  std::vector<double> p, out(dim_v, 0.0);
  double largest = -INFINITY, sum = 0;
  for (const int64_t key : keys) {
    p.push_back(scale * dot(q, t.k + key * dim_qk, dim_qk));
    largest = std::max(largest, p.back());
  }
  for (double& x : p) sum += x = exp(x - largest);
  t.lse[row] = keys.empty() ? -INFINITY : float(largest + log(sum));
  for (size_t j = 0; j < keys.size(); ++j)
    add(out.data(), p[j] /= sum, t.v + keys[j] * dim_v, dim_v);
  double delta = t.grad_lse != nullptr ? -t.grad_lse[row] : 0.0;
  for (int d = 0; d < dim_v; ++d) {
    t.out[row * dim_v + d] = Element(float(out[d]));
    delta += out[d] * double(float(grad_out[d]));
  }
  for (size_t j = 0; j < keys.size(); ++j) {
    const double dp = dot(grad_out, t.v + keys[j] * dim_v, dim_v), ds = scale * p[j] * (dp - delta);
    add(&grad.v[keys[j] * dim_v], p[j], grad_out, dim_v);
    add(&grad.k[keys[j] * dim_qk], ds, q, dim_qk);
    add(&grad.q[row * dim_qk], ds, t.k + keys[j] * dim_qk, dim_qk);
  }
}

// Rows of no sequence are NaN: nothing may use them.
template <typename T>
void spoil_outside(const std::vector<int64_t>& offsets, int64_t total, T* rows, int columns) {
  for (int64_t row = 0; row < total; ++row) {
    if (row >= offsets.front() && row < offsets.back()) continue;
    std::fill_n(rows + row * columns, columns, T(NAN));
  }
}

template <typename Element>
void compare_gradient(const char* name, const Element* got, const std::vector<double>& reference) {
  double largest = 0;
  for (const double x : reference) largest = std::max(largest, std::abs(x));
  compare(name, got, reference, 0, 0.03 * largest + 1e-6);
}

}  // namespace lanes
