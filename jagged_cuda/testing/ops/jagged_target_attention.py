"""jagged_target_attention: N dense queries for each sequence, which attend to its rows.

They are jagged queries of sequences of length N each, so the room of jagged_flash_attention applies
to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.ops._bias import flatten
from jagged_cuda.testing.case import Case, Kind, Profile, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops import jagged_flash_attention as flash
from jagged_cuda.testing.samples import Sample, Spec


def _flash_spec(spec: Spec) -> Spec:
    return dataclasses.replace(
        spec,
        layout=Layout((spec.choices["queries"],) * spec.layout.num_seqs),
        kv_layout=spec.layout,
        choices={**spec.choices, "causal": False, "window_size": (-1, -1), "tables": False},
    )


def _rows(tensors: Tensors) -> Tensors:
    """A dense tensor `[B, N, ...]` as rows `[B * N, ...]`."""
    dense = ("q", "out", "lse")
    return {name: t.flatten(0, 1) if name in dense else t for name, t in tensors.items()}


def _dense(spec: Spec, tensors: Tensors) -> Tensors:
    size = (spec.layout.num_seqs, spec.choices["queries"])
    dense = ("grad_q", "out", "lse")
    return {name: t.unflatten(0, size) if name in dense else t for name, t in tensors.items()}


def reference(spec: Spec, tensors: Tensors) -> Tensors:
    return _dense(spec, flash.reference(_flash_spec(spec), _rows(tensors)))


def rounded(divide_last: bool, parts: int = 1) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    of_flash = flash.rounded(divide_last, parts)
    return lambda spec, tensors, storage: _dense(
        spec, of_flash(_flash_spec(spec), _rows(tensors), storage)
    )


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    given = None if cotangents is None else _rows(cotangents)
    return _dense(spec, flash.terms(_flash_spec(spec), _rows(tensors), given))


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    (_, *of_query), *of_keys = flash.CASE.shapes(dataclasses.replace(spec, kv_layout=None)).values()
    q = (spec.layout.num_seqs, spec.choices["queries"], *of_query)
    return dict(zip("qkv", (q, *of_keys), strict=True))


def _biased_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    heads = (spec.choices["heads"] or (1, 1))[0] if spec.choices["bias_heads"] is True else 1
    return _shapes(spec) | {"kv_bias": (spec.layout.total, heads)}


def _bias_options(spec: Spec, tensors: Tensors, offsets: Tensor) -> dict[str, Any]:
    """kv_bias and kv_lengths; nothing for the case without them."""
    # A proxy of torch.fx has no names yet; the spec of a case that it traces names no more than it.
    is_traced = not isinstance(tensors, Mapping)
    if ("bias_heads" not in spec.choices) if is_traced else ("kv_bias" not in tensors):
        return {}
    given = tensors["kv_bias"]
    kv_bias = given.to(torch.float64 if given.dtype is torch.float64 else torch.float32)
    if spec.choices["hidden"]:
        places = jagged_cuda.jagged_positions(offsets, total=given.shape[0])
        kv_bias = kv_bias.masked_fill((places % 3 == 1)[:, None], -math.inf)
    options = {"kv_bias": kv_bias if spec.choices["bias_heads"] is True else kv_bias.squeeze(1)}
    if spec.choices["kv_lengths"]:
        options["kv_lengths"] = jagged_cuda.lengths_from_offsets(offsets) * 2 // 3
    return options


def _call(ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    choices = spec.choices
    out, lse = ops.jagged_target_attention(
        *(tensors[name] for name in "qkv"),
        offsets,
        scale=None if choices["scale"] is None else flash.attention_scale(spec),
        max_len=spec.layout.max_len if choices["max_len"] else None,
        return_lse=True,
        **_bias_options(spec, tensors, offsets),
    )
    return {"out": out, "lse": lse}


def _registered_biased(sample: Sample) -> dict[str, tuple[Any, ...]]:
    """Beside its own those of jagged_flash_attention, whose kernels it takes."""
    spec, offsets = sample.spec, sample.offsets
    given = _bias_options(spec, sample.tensors, offsets)
    biases = flatten("", sample.tensors["q"], given.get("kv_lengths"), given["kv_bias"], None, None)
    biases = (biases[0], biases[1].detach().requires_grad_(), *biases[2:])
    begins = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    name = "jagged_flash_attention"
    calls = flash.registered(
        *(name, dataclasses.replace(sample, tensors=_rows(sample.tensors))),
        *(begins * spec.choices["queries"], offsets, -1, -1, flash.attention_scale(spec)),
        *(None, False, False, None, *biases),
    )
    calls[f"{name}_backward"] = (*flash.detach(calls[f"{name}_backward"]), True, True)
    return CASE.registered(sample) | calls


CASE = Case(
    name="jagged_target_attention",
    choices={
        # None is the [B, N, D] form; else (H, G).
        "heads": (None, (1, 1), (2, 2), (4, 2), (3, 1), (8, 1)),
        "dims": (
            *((1, 1), (3, 5), (8, 8), (16, 32), (24, 16), (32, 32), (40, 64), (64, 64), (65, 63)),
            *((96, 96), (128, 128), (128, 64), (192, 128), (250, 7), (256, 256)),
        ),
        # Beside the edges of the kernels' tiles of rows: 16, 32, 64 and 128.
        "queries": (8, 1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129),
        "scale": (None, None, 0.3, "large", -0.2, 0.0),
        "max_len": (False, True),
    },
    shapes=_shapes,
    rows={"q": "seq", "k": "q", "v": "q", "out": "seq", "lse": "seq"},
    function=_call,
    registered=lambda s: flash.registered(
        "jagged_target_attention", s, s.offsets, flash.attention_scale(s.spec), None, False
    ),
    reference=reference,
    profiles={
        "small": Profile(
            (1, 2, 4),
            (1, 9, 24),
            {"dims": ((1, 1), (3, 5), (8, 8), (16, 32)), "queries": (8, 1, 2, 5, 16, 17)},
        ),
        # Sequences of more than 512 rows are split.
        "edge": Profile((1, 3, 5), (33, 65, 130, 600)),
        "large": Profile(
            (16, 64),
            (300, 2100),
            {
                "heads": ((1, 1), (2, 2), (4, 1)),
                "dims": ((32, 32), (64, 64), (128, 128), (256, 256)),
                "queries": (1, 8, 32, 100),
            },
        ),
    },
    autocast="lower_precision",
    # By head dims and by rows of a tile, queries times the heads of a group.
    kinds=tuple(
        Kind((1, 5), (20, 130), {"dims": dims, "heads": heads, "queries": queries})
        for dims in (
            ((24, 16), (40, 64), (64, 64)),
            ((96, 96), (128, 128)),
            ((192, 128), (256, 256)),
        )
        for heads, queries in (
            ((None, (1, 1), (2, 2)), (1, 8, 16)),
            (((4, 2), (2, 1)), (9, 12, 16)),
            (((1, 1), (2, 2), (4, 2), (8, 1)), (33, 50, 100)),
        )
    ),
    product=True,
    # With few queries there is nothing but the keys to divide.
    rounded=(
        rounded(divide_last=False),
        rounded(divide_last=True),
        rounded(divide_last=True, parts=4),
    ),
    terms=terms,
    huge={"dims": (64, 64), "heads": (8, 8), "queries": 8},
    huge_dense={"dims": (64, 64), "heads": (8, 8), "queries": 128},
)

BIASED = dataclasses.replace(
    CASE,
    choices={
        **CASE.choices,
        "dims": ((3, 5), (8, 8), (16, 32), (40, 64), (64, 64), (128, 128), (192, 128)),
        **{name: flash.BIAS_CHOICES[name] for name in ("kv_lengths", "hidden", "bias_heads")},
    },
    shapes=_biased_shapes,
    rows={name: CASE.rows[name] for name in "qkv"} | {"kv_bias": "q", "out": "seq", "lse": "seq"},
    registered=_registered_biased,
    kinds=(),
)

# Judged and fuzzed like an operator of its own, in Triton too.
VARIANTS = {"jagged_target_attention_biased": BIASED}
