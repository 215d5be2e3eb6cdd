"""The public operators, one module each."""

from jagged_cuda.ops.array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
from jagged_cuda.ops.hstu_key_ranges import hstu_key_ranges
from jagged_cuda.ops.jagged2_softmax import jagged2_softmax
from jagged_cuda.ops.jagged_broadcast import jagged_broadcast
from jagged_cuda.ops.jagged_dense_bmm import jagged_dense_bmm
from jagged_cuda.ops.jagged_flash_attention import jagged_flash_attention
from jagged_cuda.ops.jagged_hstu_attention import jagged_hstu_attention
from jagged_cuda.ops.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_cuda.ops.jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
from jagged_cuda.ops.jagged_mean import jagged_mean
from jagged_cuda.ops.jagged_softmax import jagged_softmax
from jagged_cuda.ops.jagged_sum import jagged_sum
from jagged_cuda.ops.jagged_target_attention import jagged_target_attention
from jagged_cuda.ops.jagged_to_padded import jagged_to_padded
from jagged_cuda.ops.padded_to_jagged import padded_to_jagged

__all__ = [
    "array_jagged_bmm_jagged_out",
    "hstu_key_ranges",
    "jagged2_softmax",
    "jagged_broadcast",
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_hstu_attention",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_mean",
    "jagged_softmax",
    "jagged_sum",
    "jagged_target_attention",
    "jagged_to_padded",
    "padded_to_jagged",
]
