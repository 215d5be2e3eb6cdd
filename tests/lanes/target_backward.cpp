// Target attention's backward of many queries on wgmma (attention/target_backward_wgmma.cuh), bf16; in
// target_few.cpp of few, on mma.sync.
#include "cuda/kernels/attention/target_backward_wgmma.cuh"

#include "attention.h"

using namespace jagged_cuda;
using namespace jagged_cuda::attention;
using lanes::Draw;

namespace {

using Element = __nv_bfloat16;
#ifdef JAGGED_CUDA_FEW_QUERIES
constexpr bool kFew = true;
#else
constexpr bool kFew = false;
#endif
constexpr int kMostKeys = 700;  // of a sequence: more than one chunk
constexpr int kEdges[] = {0,   0,   1,   15,  16,  17,  63,  64,  65,
                          127, 128, 129, 511, 512, 513, 575, 576, 577};

struct Shape {
  int heads, kv_heads, queries, dim_qk, dim_v;
  std::vector<int64_t> offsets{0};
  int64_t total;  // rows of k and v
  double scale;

  int64_t num_seqs() const { return int64_t(offsets.size()) - 1; }
  int64_t query(int64_t seq, int i, int head) const { return (seq * queries + i) * heads + head; }
};

Shape draw_shape(Draw& draw) {
  Shape s;
  const int group = 1 + draw.below(3),
            rows = kFew ? 1 + draw.below(16) : 33 + draw.below(96);  // rows: queries * group
  s.kv_heads = 1 + draw.below(2);
  s.heads = s.kv_heads * group;
  s.queries = std::max(rows / group, kFew ? 1 : (33 + group - 1) / group);
  const int most = kFew ? 4 << draw.below(4) : 16;
  s.dim_qk = 8 * (1 + draw.below(most));
  s.dim_v = 8 * (1 + draw.below(most));
  if (kFew) {
    if (draw.one_in(4)) s.dim_qk -= draw.below(8);
    if (draw.one_in(8)) s.dim_v -= draw.below(8);
  } else if (std::max(s.dim_qk, s.dim_v) <= 32) {
    s.dim_v = 40;
  }
  s.offsets[0] = draw.one_in(3) ? draw.below(70) : 0;
  for (int left = 1 + draw.below(3); left > 0; --left) {
    const int keys = draw.one_in(2) ? draw.of(kEdges) : draw.below(kMostKeys);
    s.offsets.push_back(s.offsets.back() + keys);
  }
  s.total = std::max<int64_t>(s.offsets.back() + (draw.one_in(3) ? draw.below(100) : 0), 1);
  if (kFew) {
    if (draw.one_in(8)) s.queries = (17 + draw.below(16)) / group;
  } else if (draw.one_in(3)) {
    s.queries = (20 + draw.below(13) + group - 1) / group;
    s.dim_v = std::max(s.dim_v, 72);
  }
  s.scale = draw.one_in(6) ? 0.0 : draw.one_in(6) ? -0.2 : 1 / std::sqrt(double(s.dim_qk));
  return s;
}

using Tensors = lanes::AttentionTensors<Element>;
using Gradients = lanes::AttentionGradients;

// Writes out and lse.
Gradients reference(const Shape& s, const Tensors& t) {
  Gradients grad;
  grad.q.assign(size_t(s.num_seqs() * s.queries * s.heads * s.dim_qk), 0.0);
  grad.k.assign(size_t(s.total * s.kv_heads * s.dim_qk), 0.0);
  grad.v.assign(size_t(s.total * s.kv_heads * s.dim_v), 0.0);
  for (int64_t seq = 0; seq < s.num_seqs(); ++seq) {
    for (int i = 0; i < s.queries * s.heads; ++i) {
      const int head = i % s.heads;
      std::vector<int64_t> keys;
      for (int64_t j = s.offsets[seq]; j < s.offsets[seq + 1]; ++j)
        keys.push_back(j * s.kv_heads + head / (s.heads / s.kv_heads));
      lanes::differentiate(t, grad, s.query(seq, i / s.heads, head), keys, s.dim_qk, s.dim_v,
                           s.scale);
    }
  }
  return grad;
}

cudaError_t launch(const TargetAttentionBackwardParams& p, int rows) {
  const bool is_wide = std::max(p.dim_qk, p.dim_v) > 64;
  if (rows > 64) {
    return is_wide
               ? launch_target_backward_wgmma<TargetBackwardWgmmaConfig<Element, 128, 128>>(p, 0)
               : launch_target_backward_wgmma<TargetBackwardWgmmaConfig<Element, 64, 128>>(p, 0);
  }
  return is_wide ? launch_target_backward_wgmma<TargetBackwardWgmmaConfig<Element, 128, 64>>(p, 0)
                 : launch_target_backward_wgmma<TargetBackwardWgmmaConfig<Element, 64, 64>>(p, 0);
}

std::string run(Draw& draw) {
  Shape s = draw_shape(draw);
  const int64_t rows = s.num_seqs() * s.queries * s.heads, keys = s.total * s.kv_heads;
  auto *k = draw.normals<Element>(keys * s.dim_qk, "k"),
       *v = draw.normals<Element>(keys * s.dim_v, "v");
  Tensors t{draw.normals<Element>(rows * s.dim_qk, "q"),
            k,
            v,
            draw.normals<Element>(rows * s.dim_v, "grad_out"),
            draw.normals<Element>(rows * s.dim_v, "out"),
            draw.normals<float>(rows, "lse"),
            draw.one_in(2) ? draw.normals<float>(rows, "grad_lse") : nullptr};
  lanes::spoil_outside(s.offsets, s.total, k, s.kv_heads * s.dim_qk);
  lanes::spoil_outside(s.offsets, s.total, v, s.kv_heads * s.dim_v);
  const Gradients expected = reference(s, t);
  auto *grad_q = lanes::unwritten<Element>(rows * s.dim_qk, "grad_q"),
       *grad_k = lanes::unwritten<Element>(keys * s.dim_qk, "grad_k"),
       *grad_v = lanes::unwritten<Element>(keys * s.dim_v, "grad_v");
  const bool is_spoilt = draw.one_in(6);
  if (is_spoilt) lanes::spoil(draw, s.offsets, s.total);
  lanes::judge_bounds_alone(is_spoilt);

  TargetAttentionBackwardParams p{};
  const int64_t qk = s.dim_qk, dv = s.dim_v, heads = s.heads, kv_heads = s.kv_heads;
  p.type = ElementType::kBf16;
  p.offsets = {lanes::offsets(s.offsets, "offsets"), s.num_seqs(), s.total, true};
  p.q = {t.q, s.queries * heads * qk, heads * qk, qk};
  p.grad_out = {t.grad_out, s.queries * heads * dv, heads * dv, dv};
  p.k = {k, kv_heads * qk, qk};
  p.v = {v, kv_heads * dv, dv};
  p.out = t.out;
  p.lse = t.lse;
  p.grad_lse = t.grad_lse;
  p.grad_q = grad_q;
  p.grad_k = grad_k;
  p.grad_v = grad_v;
  p.out_queries = p.num_queries = s.queries;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.dim_qk = s.dim_qk;
  p.dim_v = s.dim_v;
  p.scale = float(s.scale);
  p.aligned = s.dim_qk % 8 == 0 && s.dim_v % 8 == 0;
  p.slot_log2 = p.chunk_log2 = target_chunk_log2(target_rows(p));
  const auto slots = target_slots(s.total, s.num_seqs(), p.slot_log2);
  p.slots_as_tiles = slots.as_tiles;
  if (!kFew) p.next_item = lanes::unwritten<unsigned long long>(1, "next_item");
  if (s.total > 1 << p.chunk_log2) {
    p.parts =
        lanes::unwritten<float>(slots.count * s.queries * heads * round_up_to_8(s.dim_qk), "parts");
  }
  if (!kFew && !takes_target_backward_wgmma(p)) lanes::fail("this shape takes another kernel");
  const cudaError_t launched = kFew ? launch_target_backward_mma_sync<Element>(p, 0)
                                    : launch(p, s.queries * s.heads / s.kv_heads);
  if (launched != cudaSuccess) lanes::fail("no launch");
  if (!is_spoilt) {
    lanes::compare_gradient("grad_q", grad_q, expected.q);
    lanes::compare_gradient("grad_k", grad_k, expected.k);
    lanes::compare_gradient("grad_v", grad_v, expected.v);
  }
  return std::to_string(s.num_seqs()) + " sequences, " + std::to_string(s.total) + " keys, " +
         std::to_string(s.queries) + " queries, heads " + std::to_string(s.heads) + " of " +
         std::to_string(s.kv_heads) + ", dims " + std::to_string(s.dim_qk) + ", " +
         std::to_string(s.dim_v) + (is_spoilt ? ", spoilt" : "");
}

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
