"""jagged_dense_add: the padded row at the same place, added to each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_to_padded import PADDED_LENS, padded_len
from jagged_cuda.testing.padding import pad, unpad
from jagged_cuda.testing.samples import Spec


def cut_or_fill(y: Tensor, length: int) -> Tensor:
    """y `[B, M, ...]` -> `[B, length, ...]`, with zeros where M is less."""
    missing = max(0, length - y.shape[1])
    beyond = y.new_zeros((y.shape[0], missing, *y.shape[2:]))
    return torch.cat([y, beyond], 1)[:, :length]


def definition(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]`, y `[B, M, ...]` -> like x"""
    return unpad(pad(x, layout) + cut_or_fill(y, layout.max_len), layout)


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    trailing = spec.choices["trailing"]
    return {
        "x": (spec.layout.total, *trailing),
        "y": (spec.layout.num_seqs, padded_len(spec), *trailing),
    }


CHOICES: dict[str, Any] = {"trailing": TRAILING, "padded_len": PADDED_LENS}

CASE = Case(
    name="jagged_dense_add",
    choices=CHOICES,
    shapes=shapes,
    rows={"x": "q", "y": "seq", "out": "q"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_dense_add(t["x"], t["y"], offsets)},
    registered=lambda s: {
        "jagged_dense_add": (s.tensors["x"], s.tensors["y"], s.offsets),
        "jagged_dense_add_backward": (
            torch.randn_like(s.tensors["x"]).requires_grad_(),
            s.offsets,
            s.tensors["y"].shape[1],
        ),
    },
    reference=lambda spec, t: {"out": definition(t["x"], t["y"], spec.layout)},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 128},
)
