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

struct Shape {
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
};

Shape draw_shape(Draw& draw) {
  Shape s;
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

using Tensors = lanes::AttentionTensors<Element>;
using Gradients = lanes::AttentionGradients;

// Writes out and lse.
Gradients reference(const Shape& s, const Tensors& t) {
  Gradients grad;
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
      lanes::differentiate(t, grad, row, keys, s.dim_qk, s.dim_v, s.scale);
    }
  }
  return grad;
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
  Shape s = draw_shape(draw);
  const int64_t rows = s.queries * s.heads, keys = s.keys * s.kv_heads;
  auto *q = draw.normals<Element>(rows * s.dim_qk, "q"),
       *grad_out = draw.normals<Element>(rows * s.dim_v, "grad_out"),
       *k = draw.normals<Element>(keys * s.dim_qk, "k"),
       *v = draw.normals<Element>(keys * s.dim_v, "v");
  Tensors t{q,
            k,
            v,
            grad_out,
            draw.normals<Element>(rows * s.dim_v, "out"),
            draw.normals<float>(rows, "lse"),
            draw.one_in(2) ? draw.normals<float>(rows, "grad_lse") : nullptr};
  const Gradients expected = reference(s, t);
  lanes::spoil_outside(s.q_offsets, s.queries, q, s.heads * s.dim_qk);
  lanes::spoil_outside(s.q_offsets, s.queries, grad_out, s.heads * s.dim_v);
  lanes::spoil_outside(s.q_offsets, s.queries, t.out, s.heads * s.dim_v);
  lanes::spoil_outside(s.q_offsets, s.queries, t.lse, s.heads);
  lanes::spoil_outside(s.kv_offsets, s.keys, k, s.kv_heads * s.dim_qk);
  lanes::spoil_outside(s.kv_offsets, s.keys, v, s.kv_heads * s.dim_v);
  auto *grad_q = lanes::unwritten<Element>(rows * s.dim_qk, "grad_q"),
       *grad_k = lanes::unwritten<Element>(keys * s.dim_qk, "grad_k"),
       *grad_v = lanes::unwritten<Element>(keys * s.dim_v, "grad_v");
  const bool is_self = s.q_offsets == s.kv_offsets && s.queries == s.keys;
  const bool is_spoilt = draw.one_in(6);
  if (is_spoilt) lanes::spoil(draw, s.q_offsets, s.queries);
  lanes::judge_bounds_alone(is_spoilt);

  BulkBackwardParams bulk{};
  AttentionBackwardParams& p = bulk.attention;
  const int64_t qk = s.dim_qk, dv = s.dim_v, heads = s.heads, kv_heads = s.kv_heads;
  p.type = ElementType::kBf16;
  p.q_offsets = {lanes::offsets(s.q_offsets, "offsets"), s.num_seqs(), s.queries, true};
  p.kv_offsets = p.q_offsets;
  if (!is_self)
    p.kv_offsets = {lanes::offsets(s.kv_offsets, "kv_offsets"), s.num_seqs(), s.keys, true};
  p.q = {q, heads * qk, qk};
  p.k = {k, kv_heads * qk, qk};
  p.v = {v, kv_heads * dv, dv};
  p.out = {t.out, heads * dv, dv};
  p.grad_out = {grad_out, heads * dv, dv};
  p.lse = t.lse;
  p.grad_lse = t.grad_lse;
  p.delta = lanes::unwritten<float>(rows, "delta");
  p.next_item = lanes::unwritten<int>(AttentionBackwardParams::kItemCounts, "next_item");
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
  const bool many_queries = draw.below(2), many_keys = draw.below(2);
  cudaError_t launched = encode_bulk_maps<Element>(bulk);
  if (launched == cudaSuccess) launched = launch(bulk, many_queries, many_keys);
  if (launched != cudaSuccess) lanes::fail("no launch");
  if (!is_spoilt) {
    lanes::compare_gradient("grad_q", grad_q, expected.q);
    lanes::compare_gradient("grad_k", grad_k, expected.k);
    lanes::compare_gradient("grad_v", grad_v, expected.v);
  }
  return std::to_string(s.num_seqs()) + " sequences, " + std::to_string(s.queries) + " queries, " +
         std::to_string(s.keys) + " keys, heads " + std::to_string(s.heads) + " of " +
         std::to_string(s.kv_heads) + ", dims " + std::to_string(s.dim_qk) + ", " +
         std::to_string(s.dim_v) + (many_queries ? ", dq by items" : "") +
         (many_keys ? ", dk and dv by items" : "") + (is_spoilt ? ", spoilt" : "");
}

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
