"""The operators of jagged_cuda in Triton: plain, correct before fast, as a second opinion.

Same names and arguments as the public functions of jagged_cuda, differentiable, in fp32, fp16 and
bf16 on a GPU. With TRITON_INTERPRET=1 in the environment before Triton is imported, they run on
CPU tensors in fp32, fp16 and fp64.
"""

from .array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
from .hstu_key_ranges import hstu_key_ranges
from .jagged2_softmax import jagged2_softmax
from .jagged_broadcast import jagged_broadcast
from .jagged_dense_bmm import jagged_dense_bmm
from .jagged_flash_attention import jagged_flash_attention
from .jagged_hstu_attention import jagged_hstu_attention
from .jagged_jagged_bmm import jagged_jagged_bmm
from .jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
from .jagged_mean import jagged_mean
from .jagged_softmax import jagged_softmax
from .jagged_sum import jagged_sum
from .jagged_target_attention import jagged_target_attention
from .jagged_to_padded import jagged_to_padded
from .padded_to_jagged import padded_to_jagged

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
