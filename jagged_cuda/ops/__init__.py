"""The public operators, one module each."""

from jagged_cuda.ops.array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
from jagged_cuda.ops.hstu_key_ranges import hstu_key_ranges
from jagged_cuda.ops.jagged2_softmax import jagged2_softmax
from jagged_cuda.ops.jagged_broadcast import jagged_broadcast
from jagged_cuda.ops.jagged_concat import jagged_concat
from jagged_cuda.ops.jagged_dense_add import jagged_dense_add
from jagged_cuda.ops.jagged_dense_bmm import jagged_dense_bmm
from jagged_cuda.ops.jagged_dense_mul import jagged_dense_mul
from jagged_cuda.ops.jagged_flash_attention import jagged_flash_attention
from jagged_cuda.ops.jagged_hstu_attention import jagged_hstu_attention
from jagged_cuda.ops.jagged_index_select import jagged_index_select
from jagged_cuda.ops.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_cuda.ops.jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
from jagged_cuda.ops.jagged_mean import jagged_mean
from jagged_cuda.ops.jagged_positions import jagged_positions
from jagged_cuda.ops.jagged_select import jagged_select
from jagged_cuda.ops.jagged_sessionize import jagged_sessionize
from jagged_cuda.ops.jagged_slice import jagged_slice
from jagged_cuda.ops.jagged_softmax import jagged_softmax
from jagged_cuda.ops.jagged_sum import jagged_sum
from jagged_cuda.ops.jagged_take import jagged_take
from jagged_cuda.ops.jagged_target_attention import jagged_target_attention
from jagged_cuda.ops.jagged_to_padded import jagged_to_padded
from jagged_cuda.ops.jagged_topk import jagged_topk
from jagged_cuda.ops.layer_norm_mul_dropout import layer_norm_mul_dropout
from jagged_cuda.ops.matrix_offsets import matrix_offsets
from jagged_cuda.ops.padded_to_jagged import padded_to_jagged

__all__ = [
    "array_jagged_bmm_jagged_out",
    "hstu_key_ranges",
    "jagged2_softmax",
    "jagged_broadcast",
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_flash_attention",
    "jagged_hstu_attention",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_mean",
    "jagged_positions",
    "jagged_select",
    "jagged_sessionize",
    "jagged_slice",
    "jagged_softmax",
    "jagged_sum",
    "jagged_take",
    "jagged_target_attention",
    "jagged_to_padded",
    "jagged_topk",
    "layer_norm_mul_dropout",
    "matrix_offsets",
    "padded_to_jagged",
]
