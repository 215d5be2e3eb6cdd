"""jagged_topk: which rows of each sequence are its best.

The case keeps these rows of the scores, and zeros for the others: that is exact in every dtype, and
has a gradient. tests/test_topk.py looks at ties, integers and what is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._counts import tensor_and_int
from jagged_cuda.testing.case import ROW_PROFILES, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_positions import count_of
from jagged_cuda.testing.padding import inside, pad, unpad
from jagged_cuda.testing.samples import Sample, Spec


def definition(score: Tensor, layout: Layout, k: int | Tensor) -> Tensor:
    """score `[T]` -> `[T]` bool"""
    padded, is_row = pad(score, layout), inside(layout, score.device)
    # Stable sorts, the most important one last: later rows first, by value, and NaN behind what
    # is a number, padding behind NaN.
    order = torch.arange(layout.max_len, device=score.device).flip(0).expand(padded.shape)
    rank = is_row.int() + (is_row & ~padded.isnan()).int()
    for key in (padded.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), rank):
        sorted_key = key.gather(1, order).sort(dim=1, descending=True, stable=True)
        order = order.gather(1, sorted_key.indices)
    counts = torch.as_tensor(k, device=score.device).expand(layout.num_seqs)
    best = torch.arange(layout.max_len, device=score.device) < counts[:, None]
    return unpad(torch.zeros_like(is_row).scatter(1, order, best) & is_row, layout)


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    x = t["x"]
    keep = ops.jagged_topk(x, offsets, count_of(spec.choices["k"], offsets))
    return {"out": torch.where(keep, x, 0.0)}


def _reference(spec: Spec, t: Tensors) -> Tensors:
    x = t["x"]
    k = count_of(spec.choices["k"], spec.layout.offsets(x.device))
    return {"out": torch.where(definition(x.detach(), spec.layout, k), x, 0.0)}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    k = count_of(sample.spec.choices["k"], sample.offsets)
    return {
        "jagged_topk": (
            sample.tensors["x"],
            sample.offsets,
            *tensor_and_int("jagged_topk", "k", k),
        )
    }


CASE = Case(
    name="jagged_topk",
    choices={"k": (1, 0, 3, 40, "each")},
    shapes=lambda spec: {"x": (spec.layout.total,)},
    rows={"x": "q", "out": "q"},
    function=_function,
    registered=_registered,
    reference=_reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    differentiable=False,
)
