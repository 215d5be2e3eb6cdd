// Every schema of jagged_cuda on one screen. Kernels are registered in cpu/<op>.cpp and
// cuda/<op>.cpp; fake kernels and autograd stand beside the public function in
// jagged_cuda/ops/<op>.py. Arguments are only ever appended, with defaults.
//
// T rows of a jagged tensor, B sequences, offsets [B + 1] (int32 or int64), D, N features, H query
// and G key/value heads.

#include <torch/csrc/stable/library.h>

// clang-format off
STABLE_TORCH_LIBRARY(jagged_cuda, m) {
  // x [T, D], y [B, D, N], bias [B, N] -> [T, N]; activation is one of contract/activation.h
  m.def("jagged_dense_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False, Tensor? bias=None,"
        " int activation=0) -> Tensor");

  // x [T, D], y [T, N] -> [B, D, N]
  m.def("jagged_jagged_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32=False) -> Tensor");

  // x [Tx, D], y [Ty, D] -> [total_out], one matrix [Lx, Ly] a sequence
  m.def("jagged_jagged_bmm_jagged_out(Tensor x, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
        " SymInt total_out, bool allow_tf32=False) -> Tensor");

  // a [sum Lx*Ly], y [Ty, N] -> [total, N] with total = Tx; transpose: y [Tx, N], total = Ty
  m.def("array_jagged_bmm_jagged_out(Tensor a, Tensor y, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets,"
        " SymInt total, bool transpose=False, bool allow_tf32=False) -> Tensor");

  // x [T, ...] -> like x
  m.def("jagged_softmax(Tensor x, Tensor offsets, float scale=1.0) -> Tensor");
  m.def("jagged_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, float scale=1.0) -> Tensor");

  // a [sum Lx*Ly] -> like a, over columns (dim -1) or rows (-2)
  m.def("jagged2_softmax(Tensor a, Tensor offsets, Tensor? y_offsets, Tensor matrix_offsets, int dim=-1,"
        " float scale=1.0) -> Tensor");
  m.def("jagged2_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, Tensor? y_offsets,"
        " Tensor matrix_offsets, int dim=-1, float scale=1.0) -> Tensor");

  // x [T, ...] -> [B, max_len, ...]; x [B, M, ...] -> [total, ...]
  m.def("jagged_to_padded(Tensor x, Tensor offsets, SymInt max_len, float fill=0.0) -> Tensor");
  m.def("padded_to_jagged(Tensor x, Tensor offsets, SymInt total) -> Tensor");

  // x [T, ...] -> [B, ...]; x [B, ...] -> [total, ...]
  m.def("jagged_sum(Tensor x, Tensor offsets) -> Tensor");
  m.def("jagged_mean(Tensor x, Tensor offsets) -> Tensor");
  m.def("jagged_broadcast(Tensor x, Tensor offsets, SymInt total) -> Tensor");

  // q [Tq, H, D], k [Tk, G, D], v [Tk, G, Dv] -> out [Tq, H, Dv], lse [Tq, H]
  m.def("jagged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? kv_offsets, int window_left,"
        " int window_right, float scale, int? max_len=None, bool allow_tf32=False) -> (Tensor, Tensor)");
  // -> dq like q, dk like k, dv like v
  m.def("jagged_flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
        " Tensor lse, Tensor offsets, Tensor? kv_offsets, int window_left, int window_right, float scale,"
        " int? max_len=None, bool allow_tf32=False) -> (Tensor, Tensor, Tensor)");

  // q [B, N, H, D], k [T, G, D], v [T, G, Dv] -> out [B, N, H, Dv], lse [B, N, H]
  m.def("jagged_target_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, float scale, int? max_len=None,"
        " bool allow_tf32=False) -> (Tensor, Tensor)");
  // -> dq like q, dk like k, dv like v
  m.def("jagged_target_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
        " Tensor lse, Tensor offsets, float scale, int? max_len=None, bool allow_tf32=False)"
        " -> (Tensor, Tensor, Tensor)");
}
// clang-format on
