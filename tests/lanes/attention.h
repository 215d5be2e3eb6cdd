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

// Sequences of queries and keys, and what a query sees.
struct AttentionShape {
  int heads, kv_heads, dim_qk, dim_v;
  std::vector<int64_t> q_offsets{0}, kv_offsets{0};
  int64_t queries, keys;  // rows of q, and of k and v
  int64_t left, right;
  double scale;

  int64_t num_seqs() const { return int64_t(q_offsets.size()) - 1; }
  bool sees(int64_t seq, int64_t query, int64_t key) const {
    const int64_t diagonal =
        kv_offsets[seq + 1] - kv_offsets[seq] - (q_offsets[seq + 1] - q_offsets[seq]);
    return key >= query + diagonal - left && key <= query + diagonal + right;
  }
  // Draws one to `most` sequences, each of at least `shortest` queries or keys, rows outside them, what
  // a query sees, and the scale; length() draws a length.
  template <typename Length>
  void draw_rows(Draw& draw, int most, Length length, int shortest = 0) {
    const bool is_cross = draw.one_in(3);
    q_offsets[0] = draw.one_in(3) ? draw.below(70) : 0;
    kv_offsets[0] = is_cross ? draw.below(20) : q_offsets[0];
    for (int missing = 1 + draw.below(most); missing > 0;) {
      const int rows = length(), own_keys = is_cross ? length() : rows;
      if (std::max(rows, own_keys) < shortest) continue;
      q_offsets.push_back(q_offsets.back() + rows);
      kv_offsets.push_back(kv_offsets.back() + own_keys);
      --missing;
    }
    const int64_t behind = draw.one_in(3) ? draw.below(100) : 0;
    queries = std::max<int64_t>(q_offsets.back() + behind, 1);
    keys = is_cross ? std::max<int64_t>(kv_offsets.back() + draw.below(30), 1) : queries;
    left = right = jagged_cuda::AttentionParams::kUnbounded;
    if (draw.one_in(3)) right = 0;
    if (draw.one_in(4)) {
      left = draw.below(90);
      right = draw.below(9);
    }
    scale = draw.one_in(6) ? -0.2 : 1 / std::sqrt(double(dim_qk));
  }
};

// Writes out and lse.
template <typename Element>
AttentionGradients reference(const AttentionShape& s, const AttentionTensors<Element>& t) {
  AttentionGradients grad;
  grad.q.assign(size_t(s.queries * s.heads * s.dim_qk), 0.0);
  grad.k.assign(size_t(s.keys * s.kv_heads * s.dim_qk), 0.0);
  grad.v.assign(size_t(s.keys * s.kv_heads * s.dim_v), 0.0);
  for (int64_t seq = 0; seq < s.num_seqs(); ++seq) {
    const int64_t queries = s.q_offsets[seq + 1] - s.q_offsets[seq],
                  all_keys = s.kv_offsets[seq + 1] - s.kv_offsets[seq];
    for (int64_t i = 0; i < queries * s.heads; ++i) {
      const int64_t head = i % s.heads, row = (s.q_offsets[seq] + i / s.heads) * s.heads + head;
      std::vector<int64_t> keys;
      for (int64_t j = 0; j < all_keys; ++j) {
        if (s.sees(seq, i / s.heads, j))
          keys.push_back((s.kv_offsets[seq] + j) * s.kv_heads + head / (s.heads / s.kv_heads));
      }
      differentiate(t, grad, row, keys, s.dim_qk, s.dim_v, s.scale);
    }
  }
  return grad;
}

// A backward pass of random tensors: what it is given, and its gradients. A sixth have wrong offsets.
template <typename Element>
struct BackwardBatch {
  AttentionShape s;
  AttentionGradients expected;
  Element *grad_q, *grad_k, *grad_v;
  bool is_spoilt;

  BackwardBatch(Draw& draw, const AttentionShape& shape, jagged_cuda::AttentionBackwardParams& p)
      : s(shape) {
    using jagged_cuda::AttentionBackwardParams;
    const int64_t rows = s.queries * s.heads, keys = s.keys * s.kv_heads;
    auto *q = draw.normals<Element>(rows * s.dim_qk, "q"),
         *grad_out = draw.normals<Element>(rows * s.dim_v, "grad_out"),
         *k = draw.normals<Element>(keys * s.dim_qk, "k"),
         *v = draw.normals<Element>(keys * s.dim_v, "v");
    AttentionTensors<Element> t{q,
                                k,
                                v,
                                grad_out,
                                draw.normals<Element>(rows * s.dim_v, "out"),
                                draw.normals<float>(rows, "lse"),
                                draw.one_in(2) ? draw.normals<float>(rows, "grad_lse") : nullptr};
    expected = reference(s, t);
    spoil_outside(s.q_offsets, s.queries, q, s.heads * s.dim_qk);
    spoil_outside(s.q_offsets, s.queries, grad_out, s.heads * s.dim_v);
    spoil_outside(s.q_offsets, s.queries, t.out, s.heads * s.dim_v);
    spoil_outside(s.q_offsets, s.queries, t.lse, s.heads);
    spoil_outside(s.kv_offsets, s.keys, k, s.kv_heads * s.dim_qk);
    spoil_outside(s.kv_offsets, s.keys, v, s.kv_heads * s.dim_v);
    grad_q = unwritten<Element>(rows * s.dim_qk, "grad_q");
    grad_k = unwritten<Element>(keys * s.dim_qk, "grad_k");
    grad_v = unwritten<Element>(keys * s.dim_v, "grad_v");
    const bool is_self = s.q_offsets == s.kv_offsets && s.queries == s.keys;
    is_spoilt = draw.one_in(6);
    if (is_spoilt) spoil(draw, s.q_offsets, s.queries);
    judge_bounds_alone(is_spoilt);

    const int64_t qk = s.dim_qk, dv = s.dim_v, heads = s.heads, kv_heads = s.kv_heads;
    p.type = jagged_cuda::ElementType::kBf16;
    p.q_offsets = {offsets(s.q_offsets, "offsets"), s.num_seqs(), s.queries, true};
    p.kv_offsets = p.q_offsets;
    if (!is_self) p.kv_offsets = {offsets(s.kv_offsets, "kv_offsets"), s.num_seqs(), s.keys, true};
    p.q = {q, heads * qk, qk};
    p.k = {k, kv_heads * qk, qk};
    p.v = {v, kv_heads * dv, dv};
    p.out = {t.out, heads * dv, dv};
    p.grad_out = {grad_out, heads * dv, dv};
    p.lse = t.lse;
    p.grad_lse = t.grad_lse;
    p.delta = unwritten<float>(rows, "delta");
    p.next_item = unwritten<int>(AttentionBackwardParams::kItemCounts, "next_item");
    p.grad_q = {grad_q, heads * qk, qk};
    p.grad_k = {grad_k, kv_heads * qk, qk};
    p.grad_v = {grad_v, kv_heads * dv, dv};
    p.heads = s.heads;
    p.kv_heads = s.kv_heads;
    p.dim_qk = s.dim_qk;
    p.dim_v = s.dim_v;
    p.window_left = s.left;
    p.window_right = s.right;
    p.scale = s.scale;
    p.aligned = true;
  }

  // `outside`: the rows outside all sequences count, too.
  void judge(bool outside = true) const {
    if (is_spoilt) return;
    const auto judge_rows = [&](const char* name, const std::vector<int64_t>& offsets,
                                const Element* got, const std::vector<double>& wanted,
                                int64_t columns) {
      const int64_t first = outside ? 0 : offsets.front() * columns,
                    last = outside ? int64_t(wanted.size()) : offsets.back() * columns;
      compare_gradient(name, got + first, {wanted.begin() + first, wanted.begin() + last});
    };
    judge_rows("grad_q", s.q_offsets, grad_q, expected.q, s.heads * s.dim_qk);
    judge_rows("grad_k", s.kv_offsets, grad_k, expected.k, s.kv_heads * s.dim_qk);
    judge_rows("grad_v", s.kv_offsets, grad_v, expected.v, s.kv_heads * s.dim_v);
  }
  std::string describe() const {
    return std::to_string(s.num_seqs()) + " sequences, " + std::to_string(s.queries) +
           " queries, " + std::to_string(s.keys) + " keys, heads " + std::to_string(s.heads) +
           " of " + std::to_string(s.kv_heads) + ", dims " + std::to_string(s.dim_qk) + ", " +
           std::to_string(s.dim_v) + (is_spoilt ? ", spoilt" : "");
  }
};

}  // namespace lanes
