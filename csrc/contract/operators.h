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
//             int16, int8, uint8, bool), a dtype (int32, int64, bool), the name of an earlier
//             argument (its dtype), acc(argument) (its dtype of sums: float64 for float64, else
//             float32); ?: may be None
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
// What is added to scores: to those of a key, by the distance of two times, by that of two rows
#define BIASES_SCHEMA \
  "Tensor? kv_lengths=None, Tensor? kv_bias=None, Tensor? time_table=None, Tensor? q_time=None," \
  " Tensor? kv_time=None, Tensor? boundaries=None, bool symmetric=True, Tensor? position_table=None," \
  " int position_first=0"
// Whether the gradients of kv_bias, and of the tables, are wanted; zeros are returned else
#define BIAS_GRADIENTS_SCHEMA "bool kv_bias_gradient=False, bool table_gradients=False"
#define BIASES \
  "kv_lengths: offsets? [B], kv_bias: acc(q)? [Tk, Hb], time_table: acc(q)? [Ht, Rt + 1], q_time: int64? [Tq]," \
  " kv_time: int64? [Tk], boundaries: int64? [Rt], position_table: acc(q)? [Hp, Rp]"
#define BIAS_GRADIENTS "acc(q) [Tk, Hb], acc(q) [Ht, Rt + 1], acc(q) [Hp, Rp]"
#define FLASH_RELATIONS \
  "Tk == Tq unless kv_offsets; 1 <= D <= 256; 1 <= Dv <= 256; H % G == 0; H <= 65535;" \
  " window_left >= -1; window_right >= -1; max_len >= 0; 1 <= R <= 2; H % Hb == 0; H % Ht == 0; H % Hp == 0;" \
  " Rt <= 2047; 1 <= Rp <= 2048"
#define TARGET "q: float [B, N, H, D], k: q [T, G, D], v: q [T, G, Dv], offsets: index [B + 1]"
#define TARGET_RELATIONS \
  "1 <= D <= 256; 1 <= Dv <= 256; H % G == 0; H <= 65535; N * H <= 16777216 * G; max_len >= 0"

constexpr Operator kOperators[] = {
  // activation is one of contract/activation.h
  {"jagged_dense_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False, Tensor? bias=None, int activation=0)"
   " -> Tensor",
   "x: float [T, D], offsets: index [B + 1], y: x [B, D, N], bias: x? [B, N]; 0 <= activation <= 5 -> x [T, N]"},
  // -> the gradients of x and y, without bias and activation
  {"jagged_dense_bmm_backward(Tensor grad_out, Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False)"
   " -> (Tensor, Tensor)",
   "x: float [T, D], offsets: index [B + 1], y: x [B, D, N], grad_out: x [T, N] -> x [T, D], x [B, D, N]"},

  {"jagged_jagged_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False) -> Tensor",
   "x: float [T, D], y: x [T, N], offsets: index [B + 1] -> x [B, D, N]"},
  // -> the gradients of x and y
  {"jagged_jagged_bmm_backward(Tensor grad_out, Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False)"
   " -> (Tensor, Tensor)",
   "x: float [T, D], y: x [T, N], offsets: index [B + 1], grad_out: x [B, D, N] -> x [T, D], x [T, N]"},

  {"jagged_jagged_bmm_jagged_out(Tensor x, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
   " SymInt total_out, bool allow_tf32=False) -> Tensor",
   "x: float [Tx, D], y: x [Ty, D], " MATRICES "; Ty == Tx unless y_offsets; total_out >= 0 -> x [total_out]"},
  // -> the gradients of x and y
  {"jagged_jagged_bmm_jagged_out_backward(Tensor grad_out, Tensor x, Tensor y, Tensor offsets, Tensor? y_offsets,"
   " Tensor matrix_offsets, bool allow_tf32=False) -> (Tensor, Tensor)",
   "x: float [Tx, D], y: x [Ty, D], grad_out: x [sum Lx*Ly], " MATRICES "; Ty == Tx unless y_offsets"
   " -> x [Tx, D], x [Ty, D]"},

  // transpose: the rows of y are those of the matrices, total of their columns
  {"array_jagged_bmm_jagged_out(Tensor a, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
   " SymInt total, bool transpose=False, bool allow_tf32=False) -> Tensor",
   "a: float [sum Lx*Ly], y: a [T, N], " MATRICES "; total >= 0 -> a [total, N]"},
  // -> the gradients of a and y
  {"array_jagged_bmm_jagged_out_backward(Tensor grad_out, Tensor a, Tensor y, Tensor offsets, Tensor? y_offsets,"
   " Tensor matrix_offsets, bool transpose=False, bool allow_tf32=False) -> (Tensor, Tensor)",
   "a: float [sum Lx*Ly], y: a [Ty, N], grad_out: a [Tx, N], " MATRICES " -> a [sum Lx*Ly], a [Ty, N]"},

  // where the matrix of each sequence begins
  {"matrix_offsets(Tensor offsets, Tensor? y_offsets=None) -> Tensor",
   "offsets: index [B + 1], y_offsets: offsets? [B + 1] -> int64 [B + 1]"},

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

  {"jagged_dense_add(Tensor x, Tensor y, Tensor offsets) -> Tensor",
   "x: any [T, ...], offsets: index [B + 1], y: x [B, M, ...] -> x [T, ...]"},
  // -> the gradients of x and y
  {"jagged_dense_add_backward(Tensor grad_out, Tensor offsets, SymInt max_len) -> (Tensor, Tensor)",
   "grad_out: float [T, ...], offsets: index [B + 1]; max_len >= 0 -> grad_out [T, ...], grad_out [B, max_len, ...]"},
  {"jagged_dense_mul(Tensor x, Tensor y, Tensor offsets) -> Tensor",
   "x: float [T, ...], offsets: index [B + 1], y: x [B, M, ...] -> x [T, ...]"},
  // -> the gradients of x and y
  {"jagged_dense_mul_backward(Tensor grad_out, Tensor x, Tensor y, Tensor offsets) -> (Tensor, Tensor)",
   "x: float [T, ...], offsets: index [B + 1], grad_out: x [T, ...], y: x [B, M, ...] -> x [T, ...], x [B, M, ...]"},

  // targets: of each sequence, or else same_targets of all
  {"jagged_positions(Tensor offsets, Tensor? targets, SymInt total, bool from_end=False, SymInt same_targets=0)"
   " -> Tensor",
   "offsets: index [B + 1], targets: index? [B]; total >= 0; same_targets >= 0 -> int32 [total]"},

  // k: of each sequence, or else same_k of all
  {"jagged_topk(Tensor score, Tensor offsets, Tensor? k, SymInt same_k=0) -> Tensor",
   "score: any [T], offsets: index [B + 1], k: index? [B]; same_k >= 0 -> bool [T]"},

  // -> session_offsets, first_session
  {"jagged_sessionize(Tensor time, Tensor offsets, float gap, SymInt sessions) -> (Tensor, Tensor)",
   "time: any [T], offsets: index [B + 1]; sessions >= 0 -> offsets [sessions + 1], offsets [B + 1]"},

  // The rows of each sequence in x, y, z and w, one tensor after another; those without offsets of their own are dense,
  // with as many rows of each sequence. offsets: any of these. -> out, and its offsets
  {"jagged_concat(Tensor x, Tensor? x_offsets, Tensor offsets, SymInt total, Tensor? y=None, Tensor? y_offsets=None,"
   " Tensor? z=None, Tensor? z_offsets=None, Tensor? w=None, Tensor? w_offsets=None) -> (Tensor, Tensor)",
   "x: any [T, ...], offsets: index [B + 1], x_offsets: offsets? [B + 1], y: x? [Tq, ...], y_offsets: offsets? [B + 1],"
   " z: x? [Tk, ...], z_offsets: offsets? [B + 1], w: x? [Tx, ...], w_offsets: offsets? [B + 1]; total >= 0"
   " -> x [total, ...], offsets [B + 1]"},
  // -> the gradients of x, y, z and w
  {"jagged_concat_backward(Tensor grad_out, Tensor offsets, SymInt x_rows, Tensor? x_offsets, SymInt y_rows,"
   " Tensor? y_offsets, SymInt z_rows, Tensor? z_offsets, SymInt w_rows, Tensor? w_offsets)"
   " -> (Tensor, Tensor, Tensor, Tensor)",
   "grad_out: any [N, ...], offsets: index [B + 1], x_offsets: offsets? [B + 1], y_offsets: offsets? [B + 1],"
   " z_offsets: offsets? [B + 1], w_offsets: offsets? [B + 1]; x_rows >= 0; y_rows >= 0; z_rows >= 0; w_rows >= 0"
   " -> grad_out [x_rows, ...], grad_out [y_rows, ...], grad_out [z_rows, ...], grad_out [w_rows, ...]"},

  // Rows of x by number; the backward says where each row went. Where whole sequences `chosen` of offsets `source` are
  // taken to offsets `taken`, the gradient uses that
  {"jagged_take(Tensor x, Tensor index, bool unique=False, Tensor? chosen=None, Tensor? source=None,"
   " Tensor? taken=None) -> Tensor",
   "x: any [T, ...], index: int64 [N], chosen: int64? [M], source: index? [B + 1], taken: index? [M + 1]"
   " -> x [N, ...]"},
  {"jagged_take_backward(Tensor index, SymInt total) -> Tensor",
   "index: int64 [N]; total >= 0 -> int64 [total]"},

  // -> index, offsets: which row each of total rows takes (-1: none), and the sequences of these.
  // function, the public function that asks, is one of contract/plan.h
  {"jagged_select(Tensor offsets, Tensor keep, SymInt total) -> (Tensor, Tensor)",
   "offsets: index [B + 1], keep: bool [T]; total >= 0 -> int64 [total], offsets [B + 1]"},
  // rows skip + begin[b] to skip + begin[b] + min(length[b], most) of each sequence of `rows` rows
  {"jagged_slice(Tensor offsets, Tensor? begin, Tensor? length, SymInt rows, SymInt total, SymInt skip=0,"
   " SymInt? most=None, bool from_end=False, int function=0) -> (Tensor, Tensor)",
   "offsets: index [B + 1], begin: offsets? [B], length: offsets? [B]; rows >= 0; total >= 0; skip >= 0; most >= 0;"
   " 0 <= function <= 3 -> int64 [total], offsets [B + 1]"},
  {"jagged_index_select_plan(Tensor offsets, Tensor index, SymInt rows, SymInt total) -> (Tensor, Tensor)",
   "offsets: index [B + 1], index: int64 [N]; rows >= 0; total >= 0 -> int64 [total], offsets [N + 1]"},
  // Moves the rows of one tensor without a plan -> out, and its offsets
  {"jagged_index_select(Tensor x, Tensor offsets, Tensor index, SymInt total) -> (Tensor, Tensor)",
   "x: any [T, ...], offsets: index [B + 1], index: int64 [N]; total >= 0 -> x [total, ...], offsets [N + 1]"},
  // Sums the copies of each row of `total`: the sequences of offsets `taken` are those of offsets `offsets` with the
  // numbers `chosen`. Grouped, sequence b is sequences order[groups[b]], ..., order[groups[b + 1] - 1] of `taken`;
  // without either the copies are grouped here, in time M (M + B)
  {"jagged_index_select_backward(Tensor grad_out, Tensor offsets, Tensor taken, Tensor chosen, Tensor? order,"
   " Tensor? groups, SymInt total) -> Tensor",
   "grad_out: float [N, ...], offsets: index [B + 1], taken: offsets [M + 1], chosen: int64 [M],"
   " order: int64? [M], groups: int64? [B + 1]; total >= 0 -> grad_out [total, ...]"},

  // contextual_lens: in place of contextual_len, one for each sequence
  {"hstu_key_ranges(Tensor offsets, Tensor? kv_offsets, Tensor? num_targets, Tensor? contextual_lens,"
   " int contextual_len, int max_attn_len, int min_full_attn_len, int target_group, bool causal, SymInt total)"
   " -> Tensor",
   "offsets: index [B + 1], kv_offsets: offsets? [B + 1], num_targets: index? [B], contextual_lens: index? [B];"
   " contextual_len >= 0; max_attn_len >= 0; min_full_attn_len >= 0; target_group >= 1; total >= 0"
   " -> int32 [total, 2, 2]"},

  // -> out, lse; the backward's dq, dk, dv
  {"jagged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? kv_offsets, int window_left,"
   " int window_right, float scale, int? max_len=None, bool allow_tf32=False, bool deterministic=False,"
   " Tensor? key_ranges=None, " BIASES_SCHEMA ") -> (Tensor, Tensor)",
   FLASH ", " FLASH_RANGES ", " BIASES "; " FLASH_RELATIONS " -> q [Tq, H, Dv], acc(q) [Tq, H]"},
  {"jagged_flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
   " Tensor lse, Tensor offsets, Tensor? kv_offsets, int window_left, int window_right, float scale,"
   " int? max_len=None, bool allow_tf32=False, bool deterministic=False, Tensor? key_ranges=None, "
   BIASES_SCHEMA ", " BIAS_GRADIENTS_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
   FLASH ", out: q [Tq, H, Dv], grad_out: q [Tq, H, Dv], lse: acc(q) [Tq, H], grad_lse: acc(q)? [Tq, H], "
   FLASH_RANGES ", " BIASES "; " FLASH_RELATIONS " -> q [Tq, H, D], q [Tk, G, D], q [Tk, G, Dv], " BIAS_GRADIENTS},

  // SiLU in place of softmax. divisor 0: the number of keys of the sequence
  {"jagged_hstu_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? kv_offsets, int window_left,"
   " int window_right, float scale, float divisor, Tensor? row_scale=None, Tensor? key_ranges=None,"
   " int? max_len=None, bool allow_tf32=False, " BIASES_SCHEMA ") -> Tensor",
   FLASH ", row_scale: acc(q)? [Tq], " FLASH_RANGES ", " BIASES "; " FLASH_RELATIONS " -> q [Tq, H, Dv]"},
  {"jagged_hstu_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor offsets,"
   " Tensor? kv_offsets, int window_left, int window_right, float scale, float divisor, Tensor? row_scale=None,"
   " Tensor? key_ranges=None, int? max_len=None, bool allow_tf32=False, " BIASES_SCHEMA ", " BIAS_GRADIENTS_SCHEMA ")"
   " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
   FLASH ", grad_out: q [Tq, H, Dv], row_scale: acc(q)? [Tq], " FLASH_RANGES ", " BIASES "; " FLASH_RELATIONS
   " -> q [Tq, H, D], q [Tk, G, D], q [Tk, G, Dv], " BIAS_GRADIENTS},

  {"jagged_target_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, float scale, int? max_len=None,"
   " bool allow_tf32=False) -> (Tensor, Tensor)",
   TARGET "; " TARGET_RELATIONS " -> q [B, N, H, Dv], acc(q) [B, N, H]"},
  {"jagged_target_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
   " Tensor lse, Tensor offsets, float scale, int? max_len=None, bool allow_tf32=False)"
   " -> (Tensor, Tensor, Tensor)",
   TARGET ", out: q [B, N, H, Dv], grad_out: q [B, N, H, Dv], lse: acc(q) [B, N, H], grad_lse: acc(q)? [B, N, H]; "
   TARGET_RELATIONS " -> q [B, N, H, D], q [T, G, D], q [T, G, Dv]"},

  // x, u: rows that are packed in any way. Without a seed nothing is dropped; contract/dropout.h says what is. The
  // backward's dx, du, dweight, dbias
  {"layer_norm_mul_dropout(Tensor x, Tensor u, Tensor weight, Tensor bias, Tensor? seed, float eps=1e-06, float p=0.0)"
   " -> Tensor",
   "x: float [T, D], u: x [T, D], weight: acc(x) [D], bias: acc(x) [D], seed: int64? [1] -> x [T, D]"},
  {"layer_norm_mul_dropout_backward(Tensor grad_out, Tensor x, Tensor u, Tensor weight, Tensor bias, Tensor? seed,"
   " float eps=1e-06, float p=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
   "x: float [T, D], u: x [T, D], weight: acc(x) [D], bias: acc(x) [D], grad_out: x [T, D], seed: int64? [1]"
   " -> x [T, D], x [T, D], acc(x) [D], acc(x) [D]"},
};
// clang-format on

}  // namespace jagged_cuda
