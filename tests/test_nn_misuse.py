"""Wrong calls of the modules of jagged_cuda.nn get one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_examples import EACH_MODULE, E, Example, H, N, make
from plain import sentence
from torch import nn

import jagged_cuda
from jagged_cuda.nn import (
    DINAttention,
    HSTULayer,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)

X, OFFSETS = torch.randn(5, E), torch.tensor([0, 2, 5])
NESTED = jagged_cuda.nested.from_jagged(X, OFFSETS)
ATTENTION, TARGET = JaggedMultiheadAttention(E, H), TargetAttention(E, H)
WRONG = {
    "heads": (
        lambda: JaggedMultiheadAttention(E, 3),
        "JaggedMultiheadAttention: embed_dim must be a multiple of num_heads 3, got 16",
    ),
    "heads of keys": (
        lambda: TargetAttention(E, H, num_kv_heads=3),
        "TargetAttention: num_kv_heads must be a divisor of num_heads 4, got 3",
    ),
    "activation": (
        lambda: JaggedTransformerLayer(E, H, activation="dice"),
        "JaggedTransformerLayer: activation must be relu, gelu, silu or a function, got 'dice'",
    ),
    "dropout": (
        lambda: JaggedTransformerLayer(E, H, dropout=2.0),
        "JaggedTransformerLayer: dropout must be from 0 to 1, got 2.0",
    ),
    "heads of an HSTU layer": (
        lambda: HSTULayer(E, 3, qk_dim=4),
        "HSTULayer: embed_dim must be a multiple of num_heads 3, got 16",
    ),
    "wide heads": (
        lambda: HSTULayer(E, H, qk_dim=257),
        "HSTULayer: qk_dim must be from 1 to 256, got 257",
    ),
    "divisor": (
        lambda: HSTULayer(E, H, divisor="longest"),
        "HSTULayer: divisor must be a finite number other than 0, or \"length\", got 'longest'",
    ),
    "no hidden layer": (
        lambda: DINAttention(E, hidden_dims=()),
        "DINAttention: hidden_dims must be one or more numbers above 0, got ()",
    ),
    "activation of a scorer": (
        lambda: DINAttention(E, activation="dice"),
        "DINAttention: activation must be relu, gelu, sigmoid, silu or tanh, got 'dice'",
    ),
    "no offsets": (
        lambda: ATTENTION(X),
        "JaggedMultiheadAttention: offsets must be given with x, unless that is a JaggedTensor or a"
        " nested tensor, got None",
    ),
    "offsets twice": (
        lambda: ATTENTION(NESTED, OFFSETS),
        "JaggedMultiheadAttention: offsets must be None, since x has its own, got a tensor",
    ),
    "offsets of no kv": (
        lambda: ATTENTION(X, OFFSETS, kv_offsets=OFFSETS),
        "JaggedMultiheadAttention: kv_offsets must be None without kv, got a tensor",
    ),
    "features": (
        lambda: ATTENTION(X[:, 1:], OFFSETS),
        "JaggedMultiheadAttention: x must be [T, 16], got [5, 15]",
    ),
    "features of kv": (
        lambda: ATTENTION(X, OFFSETS, kv=X[:, 1:]),
        "JaggedMultiheadAttention: kv must be [T, 16], got [5, 15]",
    ),
    "kv of other features": (
        lambda: JaggedMultiheadAttention(E, H, kdim=6)(X, OFFSETS),
        "JaggedMultiheadAttention: kv must be given, since kdim is 6 and vdim 16, got None",
    ),
    "one for two": (
        lambda: TargetAttention(E, H, vdim=6)(torch.ones(2, N, E), X, OFFSETS),
        "TargetAttention: history must be a pair, since kdim is 16 and vdim 6, got one",
    ),
    "a list": (
        lambda: ATTENTION([X]),
        "JaggedMultiheadAttention: x must be a tensor, a JaggedTensor or a nested tensor,"
        " got a list",
    ),
    "nothing, with offsets": (
        lambda: ATTENTION(None, OFFSETS),
        "JaggedMultiheadAttention: x must be a tensor, a JaggedTensor or a nested tensor, got None",
    ),
    "a pair of nested tensors": (
        lambda: ATTENTION(X, OFFSETS, kv=(NESTED, NESTED)),
        "JaggedMultiheadAttention: kv must be a pair of tensors, or one JaggedTensor or nested"
        " tensor, got a pair with a nested tensor",
    ),
    "three for two": (
        lambda: TARGET(torch.ones(2, N, E), (X, X, X), OFFSETS),
        "TargetAttention: history must be a pair of tensors, got 3",
    ),
    "jagged targets": (
        lambda: TARGET(NESTED, X, OFFSETS),
        "TargetAttention: targets must be a tensor, got a nested tensor",
    ),
    "targets of one sequence": (
        lambda: TARGET(torch.ones(N, E), X, OFFSETS),
        "TargetAttention: targets must be [B, N, 16], got [3, 16]",
    ),
    "targets of other sequences": (
        lambda: TARGET(torch.ones(3, N, E), X, OFFSETS),
        "jagged_target_attention: offsets must be [4], got [3]",
    ),
}


@pytest.mark.parametrize(("call", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call: Callable[[], Any], expected: str) -> None:
    assert sentence(call) == expected


@EACH_MODULE
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripts_are_refused_in_a_sentence(example: Example) -> None:
    """Also in a model."""
    module = make(example)
    expected = (
        f"{type(module).__name__}: torch.jit.script is not supported; use torch.export or"
        " torch.compile"
    )
    for model in (module, nn.Sequential(module)):
        assert sentence(torch.jit.script, model) == expected
