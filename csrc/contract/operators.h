// Every operator of jagged_cuda on one screen: its schema, and the line that its arguments must
// fit. Kernels are registered in cpu/<op>.cpp and cuda/<op>.cpp; the public function and autograd
// are in jagged_cuda/ops/<op>.py. Arguments are only ever appended, with defaults.
//
// A line is executed: by each kernel (contract/shapes.h), and by the fake kernels and triton_ref
// (jagged_cuda/ops/_contract.py), which also take the results from it.
//
//   line      arguments; relations -> results
//   argument  name: class [dims]
//   class     float (float32, float64, float16, bfloat16), index (int32, int64), any (all these,
//             int16, int8, uint8, bool), a dtype, the name of an earlier argument (its dtype),
//             acc(argument) (its dtype of sums: float64 for float64, else float32); ?: may be None
//   dims      sizes, size + 1, numbers, and last ..., any further dimensions. A size's first
//             occurrence sets it, each other one must agree; all tensors are on the first one's
//             device
//   relation  between sizes, numbers and the integers among the arguments: <=, >=, ==, of products
//             and remainders (H % G == 0 means that H is a multiple of G, also for G == 0).
//             `unless argument`: not if that is given. An integer that is None passes, and a size
//             of tensors that are
//   result    class [dims]
//
// The first argument that does not fit, left to right, is named, and then the first relation.
//
// B sequences, T rows of a jagged tensor, M the padded length, D, N features, H query and G
// key/value heads; N dense queries of each sequence in target attention (docs/notation.md).
#pragma once

namespace jagged_cuda {

struct Operator {
  const char* schema;
  const char* line;
};

// clang-format off
// Shared by several lines; MATRICES: one matrix [Lx, Ly] per sequence.
#define MATRICES "offsets: index [B + 1], y_offsets: offsets? [B + 1], matrix_offsets: int64 [B + 1]"
#define FLASH \
  "q: float [Tq, H, D], k: q [Tk, G, D], v: q [Tk, G, Dv], offsets: index [B + 1], kv_offsets: offsets? [B + 1]"
// Ranges of keys, R of them for each query
#define FLASH_RANGES "key_ranges: int32? [Tq, R, 2]"
#define FLASH_RELATIONS \
  "Tk == Tq unless kv_offsets; 1 <= D <= 256; 1 <= Dv <= 256; H % G == 0; H <= 65535;" \
  " window_left >= -1; window_right >= -1; max_len >= 0; 1 <= R <= 2"
#define TARGET "q: float [B, N, H, D], k: q [T, G, D], v: q [T, G, Dv], offsets: index [B + 1]"
#define TARGET_RELATIONS \
  "1 <= D <= 256; 1 <= Dv <= 256; H % G == 0; H <= 65535; N * H <= 16777216 * G; max_len >= 0"

constexpr Operator kOperators[] = {
  // activation is one of contract/activation.h
  {"jagged_dense_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False, Tensor? bias=None, int activation=0)"
   " -> Tensor",
   "x: float [T, D], offsets: index [B + 1], y: x [B, D, N], bias: x? [B, N]; 0 <= activation <= 5 -> x [T, N]"},

  {"jagged_jagged_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False) -> Tensor",
   "x: float [T, D], y: x [T, N], offsets: index [B + 1] -> x [B, D, N]"},

  {"jagged_jagged_bmm_jagged_out(Tensor x, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
   " SymInt total_out, bool allow_tf32=False) -> Tensor",
   "x: float [Tx, D], y: x [Ty, D], " MATRICES "; Ty == Tx unless y_offsets; total_out >= 0 -> x [total_out]"},

  // transpose: the rows of y are those of the matrices, total of their columns
  {"array_jagged_bmm_jagged_out(Tensor a, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
   " SymInt total, bool transpose=False, bool allow_tf32=False) -> Tensor",
   "a: float [sum Lx*Ly], y: a [T, N], " MATRICES "; total >= 0 -> a [total, N]"},

  {"jagged_softmax(Tensor x, Tensor offsets, float scale=1.0) -> Tensor",
   "x: float [T, ...], offsets: index [B + 1] -> x [T, ...]"},
  {"jagged_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, float scale=1.0) -> Tensor",
   "out: float [T, ...], offsets: index [B + 1], grad_out: out [T, ...] -> out [T, ...]"},

  // over columns (dim -1) or rows (-2)
  {"jagged2_softmax(Tensor a, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets, int dim=-1, float scale=1.0)"
   " -> Tensor",
   "a: float [sum Lx*Ly], " MATRICES "; -2 <= dim <= -1 -> a [sum Lx*Ly]"},
  {"jagged2_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
   " int dim=-1, float scale=1.0) -> Tensor",
   "out: float [sum Lx*Ly], " MATRICES ", grad_out: out [sum Lx*Ly]; -2 <= dim <= -1 -> out [sum Lx*Ly]"},

  {"jagged_to_padded(Tensor x, Tensor offsets, SymInt max_len, float fill=0.0) -> Tensor",
   "x: any [T, ...], offsets: index [B + 1]; max_len >= 0 -> x [B, max_len, ...]"},
  {"padded_to_jagged(Tensor x, Tensor offsets, SymInt total) -> Tensor",
   "x: any [B, M, ...], offsets: index [B + 1]; total >= 0 -> x [total, ...]"},

  {"jagged_sum(Tensor x, Tensor offsets) -> Tensor",
   "x: float [T, ...], offsets: index [B + 1] -> x [B, ...]"},
  {"jagged_mean(Tensor x, Tensor offsets) -> Tensor",
   "x: float [T, ...], offsets: index [B + 1] -> x [B, ...]"},
  {"jagged_broadcast(Tensor x, Tensor offsets, SymInt total) -> Tensor",
   "x: any [B, ...], offsets: index [B + 1]; total >= 0 -> x [total, ...]"},

  // contextual_lens: in place of contextual_len, one for each sequence
  {"hstu_key_ranges(Tensor offsets, Tensor? kv_offsets, Tensor? num_targets, Tensor? contextual_lens,"
   " int contextual_len, int max_attn_len, int min_full_attn_len, int target_group, bool causal, SymInt total)"
   " -> Tensor",
   "offsets: index [B + 1], kv_offsets: offsets? [B + 1], num_targets: index? [B], contextual_lens: index? [B];"
   " contextual_len >= 0; max_attn_len >= 0; min_full_attn_len >= 0; target_group >= 1; total >= 0"
   " -> int32 [total, 2, 2]"},

  // -> out, lse; the backward's dq, dk, dv
  {"jagged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? kv_offsets, int window_left,"
   " int window_right, float scale, int? max_len=None, bool allow_tf32=False, Tensor? key_ranges=None)"
   " -> (Tensor, Tensor)",
   FLASH ", " FLASH_RANGES "; " FLASH_RELATIONS " -> q [Tq, H, Dv], acc(q) [Tq, H]"},
  {"jagged_flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
   " Tensor lse, Tensor offsets, Tensor? kv_offsets, int window_left, int window_right, float scale,"
   " int? max_len=None, bool allow_tf32=False, Tensor? key_ranges=None) -> (Tensor, Tensor, Tensor)",
   FLASH ", out: q [Tq, H, Dv], grad_out: q [Tq, H, Dv], lse: acc(q) [Tq, H], grad_lse: acc(q)? [Tq, H], "
   FLASH_RANGES "; " FLASH_RELATIONS " -> q [Tq, H, D], q [Tk, G, D], q [Tk, G, Dv]"},

  // SiLU in place of softmax. divisor 0: the number of keys of the sequence
  {"jagged_hstu_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? kv_offsets, int window_left,"
   " int window_right, float scale, float divisor, Tensor? row_scale=None, Tensor? key_ranges=None,"
   " int? max_len=None, bool allow_tf32=False) -> Tensor",
   FLASH ", row_scale: acc(q)? [Tq], " FLASH_RANGES "; " FLASH_RELATIONS " -> q [Tq, H, Dv]"},
  {"jagged_hstu_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor offsets,"
   " Tensor? kv_offsets, int window_left, int window_right, float scale, float divisor, Tensor? row_scale=None,"
   " Tensor? key_ranges=None, int? max_len=None, bool allow_tf32=False) -> (Tensor, Tensor, Tensor)",
   FLASH ", grad_out: q [Tq, H, Dv], row_scale: acc(q)? [Tq], " FLASH_RANGES "; " FLASH_RELATIONS
   " -> q [Tq, H, D], q [Tk, G, D], q [Tk, G, Dv]"},

  {"jagged_target_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, float scale, int? max_len=None,"
   " bool allow_tf32=False) -> (Tensor, Tensor)",
   TARGET "; " TARGET_RELATIONS " -> q [B, N, H, Dv], acc(q) [B, N, H]"},
  {"jagged_target_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
   " Tensor lse, Tensor offsets, float scale, int? max_len=None, bool allow_tf32=False)"
   " -> (Tensor, Tensor, Tensor)",
   TARGET ", out: q [B, N, H, Dv], grad_out: q [B, N, H, Dv], lse: acc(q) [B, N, H], grad_lse: acc(q)? [B, N, H]; "
   TARGET_RELATIONS " -> q [B, N, H, D], q [T, G, D], q [T, G, Dv]"},
};
// clang-format on

}  // namespace jagged_cuda
