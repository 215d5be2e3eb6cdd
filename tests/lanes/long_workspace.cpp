// What comes before and behind the long backward (attention/long_workspace.cuh), bf16: lse and delta to
// the statistics, zeros, and the sums of dQ to dQ, at places of their own for each sequence.
#include "runtime.h"

// Of the plan's own kernel, which does not run here.
inline unsigned __activemask() { lanes::fail("__activemask"); }

#include "cuda/kernels/attention/long_backward_steps.cuh"

#include "driver.h"

using namespace jagged_cuda;
using namespace jagged_cuda::attention;
using lanes::Draw;

namespace {

using Element = __nv_bfloat16;
constexpr int kEdges[] = {0,   1,   63,  64,  65,  127,  128,  129,  510,
                          511, 512, 513, 575, 577, 1022, 1023, 1024, 1025};

struct Shape {
  int heads, dim_qk, dim_v;
  std::vector<int64_t> offsets{0}, kv_offsets{0};
  int64_t total, kv_total;

  int64_t num_seqs() const { return int64_t(offsets.size()) - 1; }
  int length(int64_t seq) const { return int(offsets[seq + 1] - offsets[seq]); }
};

Shape draw_shape(Draw& draw, int dim, bool is_cross) {
  Shape s;
  s.heads = 1 + draw.below(2);
  s.dim_qk = 8 * (1 + draw.below(dim / 8));
  s.dim_v = 8 * ((dim == 64 ? 1 : 9) + draw.below(8));
  s.offsets[0] = draw.one_in(3) ? draw.below(70) : 0;
  for (int left = 2 + draw.below(3); left > 0; --left) {
    const int rows = draw.one_in(2) ? 512 + draw.below(800) : draw.of(kEdges);
    s.offsets.push_back(s.offsets.back() + rows);
    s.kv_offsets.push_back(s.kv_offsets.back() + draw.below(300));
  }
  s.total = std::max<int64_t>(s.offsets.back() + (draw.one_in(3) ? draw.below(100) : 0), 1);
  s.kv_total = is_cross ? std::max<int64_t>(s.kv_offsets.back(), 1) : s.total;
  return s;
}

// Each float of a workspace that a step has, once.
class Places {
 public:
  explicit Places(int64_t floats) : taken_(size_t(floats), false) {}
  void take(int64_t place, const char* name) {
    if (place >= 0 && place < int64_t(taken_.size()) && !taken_[place]) {
      taken_[place] = true;
      return;
    }
    if (++lanes::wrong < 9) printf("WRONG %s: place %ld is taken, or outside\n", name, long(place));
  }

 private:
  std::vector<bool> taken_;
};

void expect(const char* name, double got, double wanted, double error) {
  if (got == wanted || std::abs(got - wanted) <= error) return;
  if (++lanes::wrong < 9) printf("WRONG %s: %g, reference %g\n", name, got, wanted);
}

template <typename Config>
std::string run_of(Draw& draw) {
  using Workspace = LongWorkspace<Config>;
  constexpr int kStep = Config::kStep;
  const bool is_cross = draw.one_in(4), is_causal = draw.one_in(4);
  Shape s = draw_shape(draw, Config::kDim, is_cross);
  const int64_t rows = s.total * s.heads;
  const Element *out = draw.normals<Element>(rows * s.dim_v, "out"),
                *grad_out = draw.normals<Element>(rows * s.dim_v, "grad_out");
  float* lse = draw.normals<float>(rows, "lse");
  for (int64_t i = 0; i < rows; i += 1 + draw.below(99)) lse[i] = -INFINITY;
  const float* grad_lse = draw.one_in(2) ? draw.normals<float>(rows, "grad_lse") : nullptr;
  auto* grad_q = lanes::unwritten<Element>(rows * s.dim_qk, "grad_q");
  const bool is_spoilt = draw.one_in(6);
  const Shape right = s;
  if (is_spoilt) lanes::spoil(draw, s.offsets, s.total);
  lanes::judge_bounds_alone(is_spoilt);

  AttentionBackwardParams p{};
  const int64_t heads = s.heads, dv = s.dim_v, qk = s.dim_qk;
  p.type = ElementType::kBf16;
  p.q_offsets = {lanes::offsets(s.offsets, "offsets"), s.num_seqs(), s.total, true};
  p.kv_offsets = p.q_offsets;
  if (is_cross)
    p.kv_offsets = {lanes::offsets(s.kv_offsets, "kv_offsets"), s.num_seqs(), s.kv_total, true};
  p.window_left = is_cross && draw.one_in(2) ? 40 : AttentionParams::kUnbounded;
  p.window_right = is_causal ? 0 : AttentionParams::kUnbounded;
  p.out = {const_cast<Element*>(out), heads * dv, dv};
  p.grad_out = {const_cast<Element*>(grad_out), heads * dv, dv};
  p.grad_q = {grad_q, heads * qk, qk};
  p.lse = lse;
  p.grad_lse = grad_lse;
  p.heads = s.heads;
  // So many that half as many rows are enough, or first tiles store; nothing else looks at them here.
  p.kv_heads = draw.one_in(4) ? 1 : 1 << 16;
  p.dim_qk = s.dim_qk;
  p.dim_v = s.dim_v;
  p.scale = 0.5f;
  p.long_in_order = Config::kOrdered;
  const int64_t statistics = long_statistics_floats(p), sums = long_grad_q_floats(p),
                tickets = num_long_tickets(p);
  p.long_statistics = lanes::unwritten<float>(statistics, "statistics");
  auto* all_sums = static_cast<float*>(lanes::tensor(sums * sizeof(float), "sums", true));
  std::fill_n(all_sums, sums, NAN);
  p.long_grad_q = all_sums;
  p.long_tickets = Config::kOrdered || first_tile_may_store(p)
                       ? lanes::unwritten<int>(tickets, "tickets")
                       : nullptr;
  auto* plan = static_cast<LongPlan*>(lanes::tensor(sizeof(LongPlan), "plan", true));
  *plan = {};
  const auto is_taken = [&](int64_t seq) { return right.length(seq) > long_rows(p); };
  for (int64_t seq = 0; seq < s.num_seqs(); ++seq) plan->num_sequences += is_taken(seq);
  p.long_plan = plan;
  p.planned = planned_lengths(p);

  const Grid grid{1 + draw.below(4), s.heads};
  const auto launch_of = [&](auto kernel) {
    if (kernel(grid) != cudaSuccess) lanes::fail("no launch");
  };
  launch_of([&](const Grid& g) {
    return launch<prepare_long<Config>>(p, g, kPrepareThreads, 0, 0, nullptr);
  });
  Places statistics_places(statistics), sums_places(sums);
  const bool clears = !Config::kOrdered && !first_tile_stores<Config>(p);
  const auto for_steps = [&](auto visit) {
    for (int64_t seq = 0; seq < s.num_seqs() && !is_spoilt; ++seq) {
      if (!is_taken(seq)) continue;
      const int first_unit = Workspace::first_unit(p, right.offsets[seq], seq);
      for (int row = 0; row < right.length(seq); row += kStep) {
        for (int head = 0; head < s.heads; ++head)
          visit(seq, row, head, Workspace::step(p, first_unit, row, head));
      }
    }
  };
  for_steps([&](int64_t seq, int first, int head, int64_t step) {
    const float* own = Workspace::statistics(p, step);
    for (int i = 0; i < kStep; ++i) {
      const bool exists = first + i < right.length(seq);
      const int64_t at = (right.offsets[seq] + (exists ? first + i : 0)) * heads + head;
      double delta = exists && grad_lse != nullptr ? -grad_lse[at] : 0.0;
      for (int d = 0; d < s.dim_v && exists; ++d)
        delta += double(float(out[at * dv + d])) * double(float(grad_out[at * dv + d]));
      const int place = Workspace::statistics_place(i);
      statistics_places.take(own - p.long_statistics + place, "lse");
      statistics_places.take(own - p.long_statistics + kStep + place, "delta");
      const bool sees = exists && lse[at] != -INFINITY;
      expect("lse", own[place], sees ? lse[at] * 1.4426950408889634 : INFINITY, 1e-5);
      expect("delta", own[kStep + place], delta, 1e-4);
    }
    // In order dQ that no key is in gets its zeros here.
    const int keys = int(is_cross ? s.kv_offsets[seq + 1] - s.kv_offsets[seq] : right.length(seq));
    const TileRange<Config::kTileN, kStep> tiles(sequence_window(p, keys - right.length(seq)),
                                                 first, keys);
    if (Config::kOrdered && tiles.first == tiles.last) {
      for (int row = first; row < std::min(first + kStep, right.length(seq)); ++row) {
        const int64_t at = (right.offsets[seq] + row) * heads + head;
        for (int d = 0; d < s.dim_qk; ++d) expect("grad_q", float(grad_q[at * qk + d]), 0, 0);
      }
    }
    for (int part = 0; part < Config::kWarpgroups; ++part) {
      const float* own_sums = Workspace::grad_q(p, step, part);
      for (int i = 0; i < Workspace::kPart; ++i) {
        sums_places.take(own_sums - p.long_grad_q + i, "sums");
        if (clears) expect("sums", own_sums[i], 0, 0);
      }
    }
  });
  for (int64_t i = 0; i < tickets && !clears && !is_spoilt && plan->num_sequences > 0; ++i)
    expect("ticket", p.long_tickets[i], 0, 0);

  // Each element of dQ is its row and column, in the accumulators' order.
  const auto wanted = [&](int64_t row, int column) { return float(row % 61) - float(column % 7); };
  if constexpr (!Config::kOrdered) {
    for_steps([&](int64_t seq, int first, int, int64_t step) {
      float* own = Workspace::grad_q(p, step, 0);
      for (int row = 0; row < kStep; ++row) {
        for (int column = 0; column < Config::kDim; ++column) {
          const int chunk = column / 64 * 4 + row / 16, block = column % 64 / 8,
                    lane = row % 8 * 4 + column % 8 / 2;
          own[chunk * Workspace::kChunk + block * 128 + lane * 4 + row % 16 / 8 * 2 + column % 2] =
              wanted(right.offsets[seq] + first + row, column);
        }
      }
    });
    launch_of([&](const Grid& g) {
      return launch<finish_long<Config>>(p, g, kPrepareThreads, 0, 0, nullptr);
    });
    for (int64_t seq = 0; seq < s.num_seqs() && !is_spoilt; ++seq) {
      for (int64_t row = right.offsets[seq]; row < right.offsets[seq + 1] && is_taken(seq); ++row) {
        for (int i = 0; i < s.heads * s.dim_qk; ++i)
          expect("grad_q", float(grad_q[row * heads * qk + i]), 0.5 * wanted(row, i % s.dim_qk), 0);
      }
    }
  }
  return std::to_string(s.num_seqs()) + " sequences, " + std::to_string(s.total) + " rows, " +
         std::to_string(plan->num_sequences) + " of more than " + std::to_string(long_rows(p)) +
         ", " + std::to_string(s.heads) + " heads of " + std::to_string(s.dim_qk) + ", " +
         std::to_string(s.dim_v) + (Config::kOrdered ? ", in order" : "") +
         (is_spoilt ? ", spoilt" : "");
}

std::string run(Draw& draw) {
  const bool is_ordered = draw.one_in(3);
  if (draw.one_in(2)) {
    return is_ordered ? run_of<LongBackwardConfig<Element, 64, true>>(draw)
                      : run_of<LongBackwardConfig<Element, 64, false>>(draw);
  }
  return is_ordered ? run_of<LongBackwardConfig<Element, 128, true>>(draw)
                    : run_of<LongBackwardConfig<Element, 128, false>>(draw);
}

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
