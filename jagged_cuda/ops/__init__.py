"""The public operators, one module each."""

from jagged_cuda.ops.jagged_dense_bmm import jagged_dense_bmm
from jagged_cuda.ops.jagged_flash_attention import jagged_flash_attention
from jagged_cuda.ops.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_cuda.ops.jagged_softmax import jagged_softmax
from jagged_cuda.ops.jagged_target_attention import jagged_target_attention

__all__ = [
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_target_attention",
]
