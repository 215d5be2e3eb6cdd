"""Modules for models on jagged tensors: everything stays packed, forward and backward.

A module takes rows `[T, E]` with their offsets `[B + 1]`, or, in place of both, TorchRec's
JaggedTensor or a nested tensor with layout=torch.jagged; where the result has one row for each of
the input's, it is of the same kind.
"""

from jagged_cuda.nn.din_attention import DINAttention
from jagged_cuda.nn.hstu_layer import HSTULayer
from jagged_cuda.nn.jagged_feature_interaction import JaggedFeatureInteraction
from jagged_cuda.nn.jagged_multihead_attention import JaggedMultiheadAttention
from jagged_cuda.nn.jagged_transformer_layer import JaggedTransformerLayer
from jagged_cuda.nn.target_attention import TargetAttention

__all__ = [
    "DINAttention",
    "HSTULayer",
    "JaggedFeatureInteraction",
    "JaggedMultiheadAttention",
    "JaggedTransformerLayer",
    "TargetAttention",
]
