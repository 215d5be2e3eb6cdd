// CUDA entry of jagged_target_attention: parse, fill Params, launch.
//
// 16-bit elements take kernels of their own. For the others, and backward with more rows a
// key/value head than those hold, the queries are a jagged tensor whose sequences all have N rows,
// and the kernels of jagged_flash_attention serve.

#include "cuda/kernels/jagged_target_attention.h"

#include "cuda/glue.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

namespace jagged_cuda {
namespace {

// A [B, N, H, dim] tensor with a contiguous last dimension; strides of dimensions of size 1 become
// 0.
QueriesView view_queries(const Tensor& tensor) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; };
  return {tensor.const_data_ptr(), stride(0), stride(1), stride(2)};
}

// --- kernels of its own

int64_t part_columns(int64_t dim) { return (dim + 7) / 8 * 8; }

int chunk_log2(const Sizes& sizes) { return target_chunk_log2(sizes.N * (sizes.H / sizes.G)); }

TargetSlots slots_of(const Sizes& sizes) {
  return target_slots(sizes.T, sizes.B, chunk_log2(sizes));
}

// Whether some sequence may have more than one chunk.
bool may_split(const Sizes& sizes, std::optional<int64_t> max_len) {
  const int64_t chunk = int64_t{1} << chunk_log2(sizes);
  return sizes.T > chunk && !(max_len && *max_len <= chunk);
}

// For each slot and each of `queries` queries, `columns` sums and `stats` statistics.
Tensor allocate_parts(const char* op, const Sizes& sizes, const Tensor& like, int64_t queries,
                      int64_t columns, int64_t stats) {
  return allocate(op, like,
                  {slots_of(sizes).count, queries * sizes.H, part_columns(columns) + stats},
                  ScalarType::Float);
}

// The counter of persistent kernels, where these may serve.
std::optional<Tensor> allocate_counter(const char* op, TargetAttentionParams& params,
                                       const Sizes& sizes, const Tensor& like) {
  if (sizes.N * (sizes.H / sizes.G) < kPersistentTargetRows) return std::nullopt;
  const Tensor counter = allocate(op, like, {1}, ScalarType::Long);
  params.next_item = reinterpret_cast<unsigned long long*>(counter.mutable_data_ptr<int64_t>());
  return counter;
}

// How many queries a pass over the keys takes, if all sequences may be split: so many that the
// workspace stays below kWorkspaceBytes, or else, since a pass reads all keys, kPassRows rows of
// each key/value head, whose parts take about half as much memory as k and v.
int64_t queries_per_pass(const Sizes& sizes) {
  constexpr int64_t kWorkspaceBytes = int64_t{256} << 20, kPassRows = 256;
  const int64_t query_bytes = slots_of(sizes).count * sizes.H * (part_columns(sizes.Dv) + 2) *
                              static_cast<int64_t>(sizeof(float));
  const int64_t most =
      std::max({kWorkspaceBytes / query_bytes, kPassRows / (sizes.H / sizes.G), int64_t{1}});
  const int64_t passes = (sizes.N + most - 1) / most;
  return (sizes.N + passes - 1) / passes;
}

// Queries [first, first + count) of each sequence.
TargetAttentionParams select_queries(const TargetAttentionParams& params, int64_t first,
                                     int64_t count) {
  constexpr int64_t kElementBytes = 2;
  TargetAttentionParams pass = params;
  pass.num_queries = static_cast<int>(count);
  pass.q.data =
      static_cast<const char*>(params.q.data) + first * params.q.row_stride * kElementBytes;
  pass.out = static_cast<char*>(params.out) + first * params.heads * params.dim_v * kElementBytes;
  pass.lse = params.lse + first * params.heads;
  return pass;
}

// Sets the fields that the Params of both kinds of kernels share.
template <typename Params>
void fill_common(Params& params, const Sizes& sizes, const Tensor& q, const Tensor& k,
                 const Tensor& v, const Tensor& out) {
  params.type = element_type(q.scalar_type());
  params.k = view_heads(k);
  params.v = view_heads(v);
  params.heads = static_cast<int>(sizes.H);
  params.kv_heads = static_cast<int>(sizes.G);
  params.dim_qk = static_cast<int>(sizes.D);
  params.dim_v = static_cast<int>(sizes.Dv);
  params.aligned = has_aligned_lines(q, {0, 1, 2}) && has_aligned_lines(k, {0, 1}) &&
                   has_aligned_lines(v, {0, 1}) && has_aligned_lines(out, {0, 1, 2});
}

void fill_target(const char* op, TargetAttentionParams& params, const Sizes& sizes, const Tensor& q,
                 const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                 const Tensor& offsets, double scale) {
  fill_common(params, sizes, q, k, v, out);
  params.offsets = view_offsets(offsets, sizes.T);
  params.q = view_queries(q);
  params.out = const_cast<void*>(out.const_data_ptr());
  params.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));
  params.slots_as_tiles = slots_of(sizes).as_tiles;
  params.slot_log2 = params.chunk_log2 = chunk_log2(sizes);
  params.out_queries = params.num_queries = static_cast<int>(sizes.N);
  params.scale = static_cast<float>(scale);
  params.mma_sync_only = mma_sync_only(op);
}

// --- kernels of jagged_flash_attention

// [B, N, H, dim] as [B * N, H, dim]; queries whose rows are not at one distance go through one
// copy.
HeadsView view_as_rows(const Tensor& tensor) {
  const int64_t row_stride = tensor.size(1) > 1 ? tensor.stride(1) : tensor.stride(0);
  return {const_cast<void*>(tensor.const_data_ptr()),
          tensor.size(0) * tensor.size(1) > 1 ? row_stride : 0,
          tensor.size(2) > 1 ? tensor.stride(2) : 0};
}

Tensor with_uniform_rows(const char* op, const Tensor& tensor) {
  const int64_t seqs = tensor.size(0), queries = tensor.size(1);
  const bool uniform = seqs <= 1 || queries <= 1 || tensor.stride(0) == queries * tensor.stride(1);
  return uniform ? tensor : as_contiguous(op, tensor);
}

// 0, N, 2 N, ...
Tensor query_offsets(const char* op, const Sizes& sizes, const Tensor& like) {
  Tensor offsets = allocate(op, like, {sizes.B + 1}, ScalarType::Long);
  check_cuda(op, launch_query_offsets(offsets.mutable_data_ptr<int64_t>(), sizes.B, sizes.N,
                                      current_stream(like)));
  return offsets;
}

void fill_flash(const char* op, AttentionParams& params, const Sizes& sizes, const Tensor& q,
                const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                const Tensor& q_offsets, const Tensor& offsets, double scale, bool allow_tf32) {
  fill_common(params, sizes, q, k, v, out);
  params.type = element_type(q.scalar_type(), allow_tf32);
  params.q_offsets = view_offsets(q_offsets, sizes.B * sizes.N);
  params.kv_offsets = view_offsets(offsets, sizes.T);
  params.q = view_as_rows(q);
  params.out = view_as_rows(out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.window_left = params.window_right = AttentionParams::kUnbounded;
  params.scale = scale;
  params.mma_sync_only = mma_sync_only(op);
}

// --- entries

std::tuple<Tensor, Tensor> jagged_target_attention(const Tensor& q_any, const Tensor& k_any,
                                                   const Tensor& v_any, const Tensor& offsets_any,
                                                   double scale, std::optional<int64_t> max_len,
                                                   bool allow_tf32) {
  constexpr const char* op = "jagged_target_attention";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({q_any, k_any, v_any, offsets_any, scale, max_len, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  Tensor q = as_contiguous(op, q_any, -1);
  const Tensor k = as_contiguous(op, k_any, -1), v = as_contiguous(op, v_any, -1);
  const Tensor offsets = as_contiguous(op, offsets_any);
  maybe_validate_offsets(op, "offsets", offsets, sizes.T, max_len);
  Tensor out = allocate(op, q, {sizes.B, sizes.N, sizes.H, sizes.Dv});
  Tensor lse = allocate(op, q, {sizes.B, sizes.N, sizes.H}, sum_dtype(q.scalar_type()));
  if (sizes.B * sizes.N * sizes.H == 0) return {out, lse};

  if (is_16_bit(element_type(q.scalar_type()))) {
    TargetAttentionParams params{};
    fill_target(op, params, sizes, q, k, v, out, lse, offsets, scale);
    const std::optional<Tensor> counter = allocate_counter(op, params, sizes, q);
    std::optional<Tensor> parts;
    int64_t queries = sizes.N;
    if (may_split(sizes, max_len)) {
      queries = queries_per_pass(sizes);
      parts = allocate_parts(op, sizes, q, queries, sizes.Dv, 2);
      params.parts = parts->mutable_data_ptr<float>();
      params.part_stats = params.parts + parts->size(0) * parts->size(1) * part_columns(sizes.Dv);
    }
    for (int64_t first = 0; first < sizes.N; first += queries) {
      const TargetAttentionParams pass =
          select_queries(params, first, std::min(queries, sizes.N - first));
      check_cuda(op, launch_jagged_target_attention(pass, current_stream(q)));
    }
  } else {
    q = with_uniform_rows(op, q);
    const Tensor q_offsets = query_offsets(op, sizes, q);
    AttentionParams params{};
    fill_flash(op, params, sizes, q, k, v, out, lse, q_offsets, offsets, scale, allow_tf32);
    check_cuda(op, launch_jagged_flash_attention(params, current_stream(q)));
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> jagged_target_attention_backward(
    const Tensor& grad_out_any, const std::optional<Tensor>& grad_lse_any, const Tensor& q_any,
    const Tensor& k_any, const Tensor& v_any, const Tensor& out_any, const Tensor& lse_any,
    const Tensor& offsets_any, double scale, std::optional<int64_t> max_len, bool allow_tf32) {
  constexpr const char* op = "jagged_target_attention_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out_any, grad_lse_any, q_any, k_any, v_any, out_any,
                                      lse_any, offsets_any, scale, max_len, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  Tensor q = as_contiguous(op, q_any, -1), grad_out = as_contiguous(op, grad_out_any, -1);
  const Tensor k = as_contiguous(op, k_any, -1), v = as_contiguous(op, v_any, -1);
  const Tensor out = as_contiguous(op, out_any), lse = as_contiguous(op, lse_any);
  const std::optional<Tensor> grad_lse =
      grad_lse_any ? std::optional<Tensor>(as_contiguous(op, *grad_lse_any)) : std::nullopt;
  const Tensor offsets = as_contiguous(op, offsets_any);
  maybe_validate_offsets(op, "offsets", offsets, sizes.T, max_len);
  Tensor grad_q = allocate(op, q, {sizes.B, sizes.N, sizes.H, sizes.D});
  Tensor grad_k = allocate(op, q, {sizes.T, sizes.G, sizes.D});
  Tensor grad_v = allocate(op, q, {sizes.T, sizes.G, sizes.Dv});
  const int64_t queries = sizes.B * sizes.N * sizes.H;
  if (queries == 0) {
    if (sizes.T * sizes.G > 0) {
      torch::stable::zero_(grad_k);
      torch::stable::zero_(grad_v);
    }
    return {grad_q, grad_k, grad_v};
  }

  const int64_t rows = sizes.N * (sizes.H / sizes.G);
  if (is_16_bit(element_type(q.scalar_type())) && rows <= target_backward_rows(sizes.D, sizes.Dv)) {
    TargetAttentionBackwardParams params{};
    fill_target(op, params, sizes, q, k, v, out, lse, offsets, scale);
    params.grad_out = view_queries(grad_out);
    params.aligned = params.aligned && has_aligned_lines(grad_out, {0, 1, 2});
    params.grad_lse = grad_lse ? grad_lse->const_data_ptr<float>() : nullptr;
    params.grad_q = grad_q.mutable_data_ptr();
    params.grad_k = grad_k.mutable_data_ptr();
    params.grad_v = grad_v.mutable_data_ptr();
    const std::optional<Tensor> counter = allocate_counter(op, params, sizes, q);
    std::optional<Tensor> parts;
    if (may_split(sizes, max_len)) {
      parts = allocate_parts(op, sizes, q, sizes.N, sizes.D, 0);
      params.parts = parts->mutable_data_ptr<float>();
    }
    check_cuda(op, launch_jagged_target_attention_backward(params, current_stream(q)));
  } else {
    q = with_uniform_rows(op, q);
    grad_out = with_uniform_rows(op, grad_out);
    const Tensor q_offsets = query_offsets(op, sizes, q);
    const Tensor delta = allocate(op, q, {queries + AttentionBackwardParams::kItemCounts},
                                  sum_dtype(q.scalar_type()));
    AttentionBackwardParams params{};
    fill_flash(op, params, sizes, q, k, v, out, lse, q_offsets, offsets, scale, allow_tf32);
    params.grad_out = view_as_rows(grad_out);
    params.aligned = params.aligned && has_aligned_lines(grad_out, {0, 1, 2});
    params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
    params.delta = delta.mutable_data_ptr();
    if (is_16_bit(params.type)) params.next_item = static_cast<int*>(params.delta) + queries;
    params.grad_q = view_as_rows(grad_q);
    params.grad_k = view_heads(grad_k);
    params.grad_v = view_heads(grad_v);
    check_cuda(op, launch_jagged_flash_attention_backward(params, current_stream(q)));
  }
  return {grad_q, grad_k, grad_v};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_target_attention", TORCH_BOX(&jagged_target_attention));
  m.impl("jagged_target_attention_backward", TORCH_BOX(&jagged_target_attention_backward));
}

}  // namespace
}  // namespace jagged_cuda
