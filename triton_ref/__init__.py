"""The operators of jagged_cuda in Triton: plain, correct before fast, as a second opinion.

Same names and arguments as the public functions of jagged_cuda, differentiable, in fp32, fp16 and
bf16 on a GPU. With TRITON_INTERPRET=1 in the environment before Triton is imported, they run on
CPU tensors in fp32, fp16 and fp64. What moves rows takes any dtype, and jagged_dense_add,
jagged_topk and jagged_sessionize take integers too.
"""

from .array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
from .hstu_key_ranges import hstu_key_ranges
from .jagged2_softmax import jagged2_softmax
from .jagged_broadcast import jagged_broadcast
from .jagged_concat import jagged_concat
from .jagged_dense_add import jagged_dense_add
from .jagged_dense_bmm import jagged_dense_bmm
from .jagged_dense_mul import jagged_dense_mul
from .jagged_flash_attention import jagged_flash_attention
from .jagged_hstu_attention import jagged_hstu_attention
from .jagged_index_select import jagged_index_select
from .jagged_jagged_bmm import jagged_jagged_bmm
from .jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
from .jagged_mean import jagged_mean
from .jagged_positions import jagged_positions
from .jagged_select import jagged_select
from .jagged_sessionize import jagged_sessionize
from .jagged_slice import jagged_slice
from .jagged_softmax import jagged_softmax
from .jagged_sum import jagged_sum
from .jagged_take import jagged_take
from .jagged_target_attention import jagged_target_attention
from .jagged_to_padded import jagged_to_padded
from .jagged_topk import jagged_topk
from .layer_norm_mul_dropout import layer_norm_mul_dropout
from .matrix_offsets import matrix_offsets
from .padded_to_jagged import padded_to_jagged
from .rows import jagged_first, jagged_last, jagged_split

__all__ = [
    "array_jagged_bmm_jagged_out",
    "hstu_key_ranges",
    "jagged2_softmax",
    "jagged_broadcast",
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_first",
    "jagged_flash_attention",
    "jagged_hstu_attention",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_last",
    "jagged_mean",
    "jagged_positions",
    "jagged_select",
    "jagged_sessionize",
    "jagged_slice",
    "jagged_softmax",
    "jagged_split",
    "jagged_sum",
    "jagged_take",
    "jagged_target_attention",
    "jagged_to_padded",
    "jagged_topk",
    "layer_norm_mul_dropout",
    "matrix_offsets",
    "padded_to_jagged",
]
