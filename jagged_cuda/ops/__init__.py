"""The public operators, one module each."""

from jagged_cuda.ops.array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
from jagged_cuda.ops.jagged_dense_bmm import jagged_dense_bmm
from jagged_cuda.ops.jagged_flash_attention import jagged_flash_attention
from jagged_cuda.ops.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_cuda.ops.jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
from jagged_cuda.ops.jagged_softmax import jagged_softmax

__all__ = [
    "array_jagged_bmm_jagged_out",
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_softmax",
]
