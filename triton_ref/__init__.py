"""The operators of jagged_cuda once more, in Triton: plain, right first, the second opinion.

Same names and arguments as the public functions of jagged_cuda, differentiable, in fp32, fp16 and
bf16 on a GPU. With TRITON_INTERPRET=1 in the environment before Triton is imported, they run on
CPU tensors in fp32, fp16 and fp64.
"""

from .jagged_dense_bmm import jagged_dense_bmm
from .jagged_flash_attention import jagged_flash_attention
from .jagged_jagged_bmm import jagged_jagged_bmm
from .jagged_softmax import jagged_softmax
from .jagged_target_attention import jagged_target_attention

__all__ = [
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_target_attention",
]
