// Items of kernels whose CTAs plan for themselves (attention/long_plan.cuh): each is taken once, longer
// sequences first, the rows outside all of them last.
#include "runtime.h"

// Of the plan's own kernel, which does not run here.
inline unsigned __activemask() { lanes::fail("__activemask"); }

#include "cuda/kernels/attention/long_plan.cuh"

#include "driver.h"

using namespace jagged_cuda;
using namespace jagged_cuda::attention;
using lanes::Draw;

namespace {

constexpr int kEdges[] = {0,   1,   31,  32,  33,  63,  64,  65, 127,
                          128, 129, 191, 192, 193, 255, 256, 257};

struct Taken {
  int seq, begin, rows, index;
};
struct ListParams {
  AttentionParams attention;
  Taken* taken;  // [CTAs, rounds]
  int* counts;   // [CTAs]
  int* found;    // [CTAs]: what any_planned() says, of queries
  int heads, rounds;
};

template <int kTile, bool kOfKeys>
__global__ void list_items(const __grid_constant__ ListParams params) {
  auto items = PlannedItems::of<kTile, kOfKeys>(params.attention, params.heads);
  PlannedSequence sequence;
  int64_t index;
  int count = 0;
  for (; count < params.rounds && items.next(sequence, index); ++count) {
    if (threadIdx.x == 0)
      params.taken[blockIdx.x * params.rounds + count] = {sequence.seq, sequence.begin,
                                                          sequence.num_queries, int(index)};
  }
  const bool found = any_planned<32>(params.attention);
  if (threadIdx.x == 0) {
    params.counts[blockIdx.x] = count;
    params.found[blockIdx.x] = found;
  }
}

void expect(bool holds, const char* what, int item) {
  if (!holds && ++lanes::wrong < 9) printf("WRONG %s: item %d\n", what, item);
}

template <bool kOfKeys>
std::string run_of(Draw& draw) {
  constexpr int kTile = 128;
  const bool is_wide = kOfKeys || draw.one_in(3), is_cross = draw.one_in(3);
  AttentionBackwardParams p{};
  p.type = ElementType::kBf16;
  p.dim_qk = p.dim_v = is_wide ? 192 : draw.one_in(2) ? 48 : 128;
  p.kv_heads = 1 + draw.below(2);
  p.heads = p.kv_heads * (1 << draw.below(4));
  p.packed_shift = !is_wide && draw.one_in(2) ? packing_shift(p) : 0;
  p.split_by_length = draw.one_in(2);
  p.plans_itself = true;
  char plan;  // not looked at
  p.long_plan = &plan;
  p.planned = kOfKeys ? planned_lengths(p) : planned_lengths<AttentionParams>(p);

  // Lengths, of which at most kOwnPlanSeqs are planned.
  std::vector<int64_t> offsets{draw.one_in(3) ? draw.below(300) : 0}, kv_offsets{0};
  const int num_seqs = draw.below(draw.one_in(2) ? kOwnPlanSeqs + 1 : 129);
  std::vector<int> of_seq;  // its keys, -1 where it is not planned
  int planned = 0;
  for (int seq = 0; seq < num_seqs; ++seq) {
    int rows = draw.one_in(3) ? draw.of(kEdges) : draw.below(700);
    int keys = is_cross ? draw.one_in(3) ? draw.of(kEdges) : draw.below(700) : rows;
    const auto is_planned = [&] {
      const bool is_tiny = p.split_by_length && std::max(rows, keys) <= tiny_limit(p);
      const bool is_taken = kOfKeys ? true : is_long<AttentionParams>(p, rows, keys);
      return is_taken && !is_tiny && (!kOfKeys || std::max(rows, keys) > 0);
    };
    if (is_planned() && planned == kOwnPlanSeqs) rows = keys = 0;
    of_seq.push_back(is_planned() ? keys : -1);
    planned += is_planned();
    offsets.push_back(offsets.back() + rows);
    kv_offsets.push_back(kv_offsets.back() + keys);
  }
  const int64_t total = offsets.back() + (draw.one_in(3) ? draw.below(300) : 0),
                kv_total = is_cross ? kv_offsets.back() + draw.below(300) : total;
  const std::vector<int64_t> right = offsets, right_keys = is_cross ? kv_offsets : offsets;
  const bool is_spoilt = draw.one_in(6);
  if (is_spoilt) lanes::spoil(draw, offsets, total);
  lanes::judge_bounds_alone(is_spoilt);
  p.q_offsets = {lanes::offsets(offsets, "offsets"), num_seqs, total, true};
  p.kv_offsets = p.q_offsets;
  if (is_cross) p.kv_offsets = {lanes::offsets(kv_offsets, "kv_offsets"), num_seqs, kv_total, true};

  const int heads = kOfKeys ? p.kv_heads : p.heads >> p.packed_shift, ctas = 1 + draw.below(9);
  const auto tiles_of = [&](int64_t rows) { return int((rows + kTile - 1) / kTile); };
  std::vector<std::vector<int>> times;  // how often each item is taken: of sequences, and outside
  const std::vector<int64_t>& tiled = kOfKeys ? right_keys : right;
  int all = 0;
  const auto add = [&](int tiles) {
    times.emplace_back(tiles * heads, 0);
    all += tiles * heads;
  };
  for (int seq = 0; seq < num_seqs; ++seq) {
    const int64_t rows = tiled[seq + 1] - tiled[seq];
    add(of_seq[seq] < 0 ? 0 : tiles_of(kOfKeys ? rows : rows << p.packed_shift));
  }
  const bool has_outside = is_wide && !p.split_by_length;
  const int64_t tiled_total = kOfKeys ? kv_total : total;
  add(has_outside ? tiles_of(tiled[0]) : 0);
  add(has_outside ? tiles_of(tiled_total - tiled.back()) : 0);

  const int rounds = all / ctas + 2;
  ListParams list{p,
                  lanes::unwritten<Taken>(ctas * rounds, "taken"),
                  lanes::unwritten<int>(ctas, "counts"),
                  lanes::unwritten<int>(ctas, "found"),
                  heads,
                  rounds};
  if (launch<list_items<kTile, kOfKeys>>(list, Grid{ctas}, 32, 0, nullptr, nullptr) != cudaSuccess)
    lanes::fail("no launch");
  std::vector<int> lengths(ctas * rounds, -2);  // by item
  for (int cta = 0; cta < ctas && !is_spoilt; ++cta) {
    for (int round = 0; round < list.counts[cta]; ++round) {
      const Taken& taken = list.taken[cta * rounds + round];
      const int item = round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
      const bool is_last = taken.seq < 0 && taken.begin > 0;
      auto& its = times[taken.seq >= 0 ? taken.seq : num_seqs + is_last];
      lengths[item] = taken.seq >= 0 ? of_seq[taken.seq] : -1;
      expect(taken.index >= 0 && taken.index < int(its.size()) && ++its[taken.index] == 1,
             "taken twice, or outside", item);
      if (taken.seq >= 0)
        expect(taken.begin == right[taken.seq] &&
                   taken.rows == right[taken.seq + 1] - right[taken.seq],
               "rows", item);
      --all;
    }
  }
  if (!is_spoilt) expect(all == 0, "items that nobody takes", all);
  for (int cta = 0; cta < ctas && !kOfKeys && !is_spoilt; ++cta)
    expect(list.found[cta] == (planned > 0), "whether any is planned", cta);
  for (int item = 1; item < ctas * rounds && !is_spoilt; ++item)
    expect(lengths[item] <= lengths[item - 1], "longer than the one before", item);
  return std::to_string(num_seqs) + " sequences, " + std::to_string(planned) + " planned, " +
         std::to_string(ctas) + " CTAs, " + std::to_string(heads) + " heads of " +
         std::to_string(p.dim_qk) + (is_spoilt ? ", spoilt" : "");
}

std::string run(Draw& draw) { return draw.one_in(3) ? run_of<true>(draw) : run_of<false>(draw); }

}  // namespace

int main(int argc, char** argv) { return lanes::main_of(argc, argv, run); }
