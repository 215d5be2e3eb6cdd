"""jagged_flash_attention: attention within each sequence, or to another tensor's sequence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.ops._bias import flatten
from jagged_cuda.testing.case import Case, Kind, Profile, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_softmax import masked_softmax
from jagged_cuda.testing.padding import inside, pad, unpad
from jagged_cuda.testing.samples import Sample, Spec

# As users have them; and "one" range a row, which reaches past both ends of its sequence; and two
# "scattered" ones in any order, either or both of them empty.
RANGES = ("semi-local", "one", "scattered", "hstu", "hstu near")


def key_ranges(kind: str, q: Tensor, offsets: Tensor, kv_offsets: Tensor | None) -> Tensor:
    """`[Tq, 2]` or `[Tq, 2, 2]`, made on the device of offsets, so that any test can draw them.

    They depend on a row's place in its sequence alone, as a sequence's result must.
    """
    keys = offsets if kv_offsets is None else kv_offsets
    hstu = functools.partial(
        jagged_cuda.hstu_key_ranges, offsets, kv_offsets=kv_offsets, total=q.shape[0]
    )
    targets = jagged_cuda.lengths_from_offsets(keys) % 4
    if kind == "hstu":
        return hstu(num_targets=targets, contextual_len=2)
    if kind == "hstu near":
        near = hstu(num_targets=targets, max_attn_len=17, min_full_attn_len=5, target_group=2)
        return near.flip(1)
    end = hstu()[:, 0, 1]  # one more than the row's place among the keys
    if kind == "one":
        return torch.stack((end - 21, end + 3), -1)
    if kind == "semi-local":  # the first four keys and the last nine
        bounds = (torch.zeros_like(end), torch.full_like(end, 4), (end - 9).clamp(min=4), end)
    else:
        begin = end * 5 % 13
        middle = begin + end * 3 % 7
        bounds = (begin, middle, middle + end % 70, middle + end % 70 + end * 2 % 11 - 1)
    ranges = torch.stack(bounds, -1).unflatten(1, (2, 2))
    return torch.where((end % 2 == 0)[:, None, None], ranges.flip(1), ranges)


def three_dims(ranges: Tensor) -> Tensor:
    return ranges.unsqueeze(1) if ranges.dim() == 2 else ranges


def _in_ranges(spec: Spec, q: Tensor) -> Tensor:
    """`[B, M, N]`: whether key j is in a range of row i."""
    kv = None if spec.kv_layout is None else spec.kv_layout.offsets(q.device)
    ranges = key_ranges(spec.choices["ranges"], q, spec.layout.offsets(q.device), kv)
    begin, end = pad(three_dims(ranges), spec.layout)[..., None].unbind(3)
    j = torch.arange(spec.kv.max_len, device=q.device)
    return ((begin <= j) & (j < end)).any(2)


# --- biases

# Times grow with the square of a row's place, in steps of this: no float32 holds their distances,
# or 32 bits hold those of neighbouring rows.
_TIME_UNITS = {"coarse": 3_000_000_017, "fine": 1_009}
BIAS_CHOICES: dict[str, tuple[Any, ...]] = {
    "ranges": (None, None, "hstu", "scattered"),
    "kv_lengths": (False, True),
    "hidden": (False, False, True),
    # kv_bias and both tables, or kv_bias alone, or that and this table, or times alone.
    "tables": (True, False, "position", "time"),
    # Heads of a bias, one for all (1) or one each (True); and R of a table, or None for no table.
    "bias_heads": (1, True),
    "time": ("symmetric", "past"),
    "clock": tuple(_TIME_UNITS),
    "first": (0, -2, 3),
    "buckets": (1, 5, 7, 33, 70),  # R of both tables
}


def used_lengths(spec: Spec) -> tuple[int, ...]:
    """Lk of each sequence: with kv_lengths about two thirds of what is there, or nothing."""
    if not spec.choices.get("kv_lengths"):
        return spec.kv.lengths
    return tuple(length * 2 // 3 for length in spec.kv.lengths)


def _places(layout: Layout, device: torch.device) -> Tensor:
    """`[T]`: a row's place in its sequence; 0 outside."""
    rows = torch.arange(layout.max_len, device=device).expand(layout.num_seqs, -1)
    return unpad(rows[..., None], layout)[:, 0]


def _times(spec: Spec, places: Tensor) -> Tensor:
    return places.long() ** 2 * _TIME_UNITS[spec.choices["clock"]] + places % 3


def _boundaries(spec: Spec, device: torch.device) -> Tensor:
    unit = _TIME_UNITS[spec.choices["clock"]]
    return jagged_cuda.log_boundaries(spec.choices["buckets"], 0.6, unit).to(device)


def bias_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Of kv_bias, and of tables, of which each column is one of the function's rows."""
    heads = (spec.choices["heads"] or (1, 1))[0] if spec.choices["bias_heads"] is True else 1
    table = (spec.choices["buckets"], heads)
    return {"kv_bias": (spec.kv.total, heads), "time_table": table, "position_table": table}


BIAS_ROWS = {"kv_bias": "kv", "time_table": "table", "position_table": "table"}


def _has_key_bias(spec: Spec) -> bool:
    return spec.choices.get("tables") != "time"


def _hide(spec: Spec, kv_bias: Tensor, places: Tensor) -> Tensor:
    """`[Tk, Hb]`, with -inf at every third key where some are hidden."""
    if not spec.choices["hidden"]:
        return kv_bias
    return kv_bias.masked_fill((places % 3 == 1)[:, None], -math.inf)


def bias_options(
    spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> dict[str, Any]:
    """The options of attention's public functions; nothing for cases without biases."""
    # A proxy of torch.fx has no names yet; the spec of a case that it traces names no more than it.
    is_traced = not isinstance(tensors, Mapping)
    if ("buckets" not in spec.choices) if is_traced else ("kv_bias" not in tensors):
        return {}
    given = tensors["kv_bias"]
    sums = torch.float64 if given.dtype is torch.float64 else torch.float32
    kv_bias, time_table, position_table = (
        tensors[name].to(sums) for name in ("kv_bias", "time_table", "position_table")
    )
    keys = offsets if kv_offsets is None else kv_offsets
    places = jagged_cuda.jagged_positions(offsets, total=tensors["q"].shape[0])
    key_places = jagged_cuda.jagged_positions(keys, total=given.shape[0])
    kv_bias = _hide(spec, kv_bias, key_places)
    if bias_shapes(spec)["kv_bias"][1] == 1:
        kv_bias, time_table, position_table = (
            t.squeeze(1) for t in (kv_bias, time_table, position_table)
        )
    time = _times(spec, places), _times(spec, key_places), _boundaries(spec, given.device)
    symmetric = spec.choices["time"] == "symmetric"
    options: dict[str, Any] = {"kv_bias": kv_bias} if _has_key_bias(spec) else {}
    if spec.choices["tables"] in (True, "time"):
        options["time_bias"] = jagged_cuda.TimeBias(time_table.t(), *time, symmetric)
    if spec.choices["tables"] in (True, "position"):
        options["position_bias"] = jagged_cuda.PositionBias(
            position_table.t(), spec.choices["first"]
        )
    if spec.choices["kv_lengths"]:
        options["kv_lengths"] = jagged_cuda.lengths_from_offsets(keys) * 2 // 3
    return options


def padded_bias(spec: Spec, tensors: Tensors) -> Tensor | None:
    """`[B, H, M, N]`: what is added to scores."""
    if "kv_bias" not in tensors:
        return None
    heads = (spec.choices["heads"] or (1, 1))[0]
    device = tensors["kv_bias"].device

    def each_head(bias: Tensor) -> Tensor:
        """The second dimension for each query head."""
        return bias.repeat_interleave(heads // bias.shape[1], dim=1)

    keys = pad(_hide(spec, tensors["kv_bias"], _places(spec.kv, device)), spec.kv)
    bias = each_head(keys.transpose(1, 2)[:, :, None, :])
    bias = bias.expand(-1, -1, spec.layout.max_len, -1)
    if not _has_key_bias(spec):
        bias = torch.zeros_like(bias)
    if not spec.choices["tables"]:
        return bias
    if spec.choices["tables"] in (True, "time"):
        then = pad(_times(spec, _places(spec.kv, device)), spec.kv)
        now = pad(_times(spec, _places(spec.layout, device)), spec.layout)
        away = now[:, :, None] - then[:, None]
        away = away.abs() if spec.choices["time"] == "symmetric" else away.clamp(min=0)
        bucket = torch.searchsorted(_boundaries(spec, device), away.contiguous(), right=True)
        bias = bias + each_head(tensors["time_table"][bucket].permute(0, 3, 1, 2))
    if spec.choices["tables"] == "time":
        return bias
    len_q, len_k = (
        torch.tensor(lengths, dtype=torch.int64, device=device)[:, None, None]
        for lengths in (spec.layout.lengths, used_lengths(spec))
    )
    i = torch.arange(spec.layout.max_len, device=device)[:, None]
    j = torch.arange(spec.kv.max_len, device=device)
    table = tensors["position_table"]
    bucket = (i + len_k - len_q - j - spec.choices["first"]).clamp(0, table.shape[0] - 1)
    return bias + each_head(table[bucket].permute(0, 3, 1, 2))


def visible_keys(spec: Spec, tensors: Tensors) -> Tensor:
    """`[B, H or 1, M, N]`: whether query i sees key j.

    That is ``i + Lk - Lq - left <= j <= i + Lk - Lq + right``, where -1 is unbounded, and with
    ranges j is in one of the row's, and its bias is not -inf.
    """
    q = tensors["q"]
    layout, kv_layout, device = spec.layout, spec.kv, q.device
    left, right = window(spec)
    len_q, len_k = (
        torch.tensor(lengths, dtype=torch.int64, device=device)[:, None, None]
        for lengths in (layout.lengths, used_lengths(spec))
    )
    last = torch.arange(layout.max_len, device=device)[:, None] + len_k - len_q
    j = torch.arange(kv_layout.max_len, device=device)
    visible = inside(layout, device)[:, :, None] & (j < len_k)
    if left >= 0:
        visible = visible & (j >= last - left)
    if right >= 0:
        visible = visible & (j <= last + right)
    if spec.choices.get("ranges") is not None:
        visible = visible & _in_ranges(spec, q)
    if not spec.choices.get("hidden") or not _has_key_bias(spec):
        return visible[:, None]
    hidden = pad(_places(kv_layout, device)[:, None], kv_layout)[..., 0] % 3 == 1
    return (visible & ~hidden[:, None])[:, None]


def pad_heads(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, kv_layout: Layout
) -> tuple[Tensor, ...]:
    """`[B, H, M, D]` each, a key/value head repeated for the query heads that read it."""

    def heads_first(values: Tensor, rows: Layout) -> Tensor:
        group = q.shape[1] // max(values.shape[1], 1)
        return pad(values, rows).transpose(1, 2).repeat_interleave(group, dim=1)

    return heads_first(q, layout), heads_first(k, kv_layout), heads_first(v, kv_layout)


def _unpadded(out: Tensor, lse: Tensor, layout: Layout, outside: float) -> Tensors:
    return {
        "out": unpad(out.transpose(1, 2), layout),
        "lse": unpad(lse.transpose(1, 2), layout, outside),
    }


def _lse(logits: Tensor, visible: Tensor) -> Tensor:
    some = visible.any(3, keepdim=True)
    masked = logits.where(visible, -math.inf).where(some, 0.0)
    return masked.logsumexp(3).where(some[..., 0], -math.inf)


def definition(spec: Spec, tensors: Tensors) -> Tensors:
    """q `[Tq, H, D]`, k `[Tk, G, D]`, v `[Tk, G, Dv]` -> out `[Tq, H, Dv]`, lse `[Tq, H]`"""
    visible, bias = visible_keys(spec, tensors), padded_bias(spec, tensors)
    q, k, v = pad_heads(tensors["q"], tensors["k"], tensors["v"], spec.layout, spec.kv)
    logits = attention_scale(spec) * (q @ k.transpose(2, 3))
    if bias is not None:
        logits = (logits + bias).where(visible, -math.inf)
    out = masked_softmax(logits, visible, dim=3) @ v
    return _unpadded(out, _lse(logits, visible), spec.layout, -math.inf)


class _Rounded(torch.autograd.Function):
    """Attention on padded tensors that rounds what it stores between two products: P, the result
    and dS.

    P is stored after its division by the sum, as softmax and a product do, or before it
    (`divide_last`), as an online softmax must; relative to the row's maximum or, where `parts`
    share the keys, 16 at a time in turn, each to its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        scale: float,
        storage: torch.dtype,
        divide_last: bool,
        parts: int,
    ) -> tuple[Tensor, Tensor]:
        logits = scale * (q @ k.transpose(2, 3))
        if bias is not None:
            logits = (logits + bias).where(visible, -math.inf)
        probs = masked_softmax(logits, visible, dim=3)
        part_of_key = torch.arange(k.shape[2], device=k.device) // 16 % parts
        out = v.new_zeros(*q.shape[:3], v.shape[3])
        for part in range(parts):
            keys = part_of_key == part
            # The largest probability of a part of a row is 1 before the division.
            own = probs[..., keys]
            divisor = own.amax(3, keepdim=True) if divide_last and own.numel() > 0 else 1.0
            stored = (own / divisor).nan_to_num().to(storage).to(q.dtype)
            out = out + (stored @ v[:, :, keys]) * divisor
        out = out.to(storage).to(q.dtype)
        ctx.save_for_backward(q, k, v, probs, out)
        ctx.scale, ctx.storage = scale, storage
        return out, _lse(logits, visible)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs, out = ctx.saved_tensors
        delta = (grad_out * out).sum(3, keepdim=True) - grad_lse[..., None]
        grad_logits = probs * (grad_out @ v.transpose(2, 3) - delta)
        grad_bias = grad_logits if ctx.needs_input_grad[3] else None
        grad_logits = grad_logits.to(ctx.storage).to(q.dtype)
        stored_probs = probs.to(ctx.storage).to(q.dtype)
        return (
            ctx.scale * (grad_logits @ k),
            ctx.scale * (grad_logits.transpose(2, 3) @ q),
            stored_probs.transpose(2, 3) @ grad_out,
            grad_bias,
            *(None,) * 5,
        )


# --- of a spec


def window(spec: Spec) -> tuple[int, int]:
    left, right = spec.choices["window_size"]
    return (left, 0) if spec.choices["causal"] else (left, right)


def attention_scale(spec: Spec) -> float:
    """The scale as a number: None is 1 / sqrt(D), "large" gives logits of about +-200."""
    scale, dim = spec.choices["scale"], spec.choices["dims"][0]
    if scale == "large":
        return 10 * dim**-0.5
    return dim**-0.5 if scale is None else scale


def with_heads(spec: Spec, tensors: Tensors) -> Tensors:
    """The tensor with a dimension of heads, which it lacks if the spec has none."""
    if spec.choices["heads"] is not None:
        return tensors
    return {
        name: t if name in BIAS_ROWS else t.unsqueeze(-1 if name == "lse" else -2)
        for name, t in tensors.items()
    }


def without_heads(spec: Spec, tensors: Tensors) -> Tensors:
    if spec.choices["heads"] is not None:
        return tensors
    return {
        name: t
        if name.removeprefix("grad_") in BIAS_ROWS
        else t.squeeze(-1 if name == "lse" else -2)
        for name, t in tensors.items()
    }


def reference(spec: Spec, tensors: Tensors) -> Tensors:
    return without_heads(spec, definition(spec, with_heads(spec, tensors)))


def rounded(divide_last: bool, parts: int = 1) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def way(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        tensors = with_heads(spec, tensors)
        padded = pad_heads(tensors["q"], tensors["k"], tensors["v"], spec.layout, spec.kv)
        bias, visible = padded_bias(spec, tensors), visible_keys(spec, tensors)
        scale = attention_scale(spec)
        out, lse = _Rounded.apply(*padded, bias, visible, scale, storage, divide_last, parts)
        return without_heads(spec, _unpadded(out, lse, spec.layout, -math.inf))

    return way


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    """A logit is a sum of terms of size ``a = scale * sum(|q| * |k|)``, so that its error is one of
    P of ``P * (a + sum(P * a))``."""
    layout, scale = spec.layout, attention_scale(spec)
    leaves = {n: t.detach().requires_grad_() for n, t in with_heads(spec, tensors).items()}
    padded: tuple[Tensor, ...] = pad_heads(leaves["q"], leaves["k"], leaves["v"], layout, spec.kv)
    visible, bias = visible_keys(spec, leaves), padded_bias(spec, leaves)
    q, k, v = (t.detach() for t in padded)
    logits = scale * (q @ k.transpose(2, 3))
    logit_terms = abs(scale) * (q.abs() @ k.abs().transpose(2, 3))
    if bias is not None:
        padded = (*padded, bias)
        finite = bias.detach().where(visible, 0.0)
        logits, logit_terms = logits + finite, logit_terms + finite.abs()
    probs = masked_softmax(logits, visible, dim=3)
    mean_logit_terms = (probs * logit_terms).sum(3, keepdim=True)
    prob_terms = probs * (1 + logit_terms + mean_logit_terms)
    out_terms = prob_terms @ v.abs()
    found = _unpadded(out_terms, 1 + mean_logit_terms[..., 0], layout, 0.0)
    if cotangents is not None:
        given = with_heads(spec, cotangents)
        grad_out, grad_lse = (pad(given[n], layout).transpose(1, 2) for n in ("out", "lse"))
        grad_lse = grad_lse[..., None]
        delta = (grad_out * (probs @ v)).sum(3, keepdim=True) - grad_lse
        delta_terms = (grad_out.abs() * out_terms).sum(3, keepdim=True) + grad_lse.abs()
        grad_probs = grad_out @ v.transpose(2, 3)
        grad_logit_terms = (prob_terms - probs) * (grad_probs - delta).abs() + probs * (
            grad_out.abs() @ v.abs().transpose(2, 3) + delta_terms
        )
        # Through the padding, and summed over the query heads that read one key/value head.
        by_padded = (
            abs(scale) * (grad_logit_terms @ k.abs()),
            abs(scale) * (grad_logit_terms.transpose(2, 3) @ q.abs()),
            prob_terms.transpose(2, 3) @ grad_out.abs(),
            *(() if bias is None else (grad_logit_terms,)),
        )
        gradients = torch.autograd.grad(
            padded, list(leaves.values()), by_padded, materialize_grads=True
        )
        found |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return without_heads(spec, found)


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    dim_qk, dim_v = spec.choices["dims"]
    heads = [(n,) for n in spec.choices["heads"] or ()]
    of_q, of_kv = heads or ((), ())
    return {
        "q": (spec.layout.total, *of_q, dim_qk),
        "k": (spec.kv.total, *of_kv, dim_qk),
        "v": (spec.kv.total, *of_kv, dim_v),
    }


def call_options(spec: Spec) -> dict[str, Any]:
    """The options of attention's public functions."""
    choices = spec.choices
    left, right = choices["window_size"]
    return {
        "causal": choices["causal"],
        # Later keys and causal contradict each other: the functions refuse both together.
        "window_size": (left, min(right, 0) if choices["causal"] else right),
        "scale": None if choices["scale"] is None else attention_scale(spec),
        "max_len": max(spec.layout.max_len, spec.kv.max_len) if choices["max_len"] else None,
    }


def _call(
    ops: Any,
    spec: Spec,
    tensors: Tensors,
    offsets: Tensor,
    kv_offsets: Tensor | None,
) -> Tensors:
    more = call_options(spec) | bias_options(spec, tensors, offsets, kv_offsets)
    if spec.choices.get("ranges") is not None:
        more["key_ranges"] = key_ranges(spec.choices["ranges"], tensors["q"], offsets, kv_offsets)
    out, lse = ops.jagged_flash_attention(
        *(tensors[name] for name in "qkv"),
        offsets,
        kv_offsets=kv_offsets,
        return_lse=True,
        **more,
    )
    return {"out": out, "lse": lse}


def registered(name: str, sample: Sample, *options: Any) -> dict[str, tuple[Any, ...]]:
    """The arguments of an attention operator and of its gradient; `options` follow q, k and v."""
    qkv = tuple(with_heads(sample.spec, sample.tensors)[n] for n in "qkv")
    detached = tuple(t.detach() for t in qkv)
    out, lse = getattr(torch.ops.jagged_cuda, name)(*detached, *options)
    gradients = (torch.randn_like(out), torch.randn_like(lse))
    return {
        name: (*qkv, *options),
        f"{name}_backward": (*gradients, *detached, out, lse, *options),
    }


# By length and head dims, which choose among the kernels (jagged_flash_attention.cu).
_HALVES = ("float16", "bfloat16")
_FEW_HEADS = ((1, 1), (2, 2), (2, 1), (4, 1), (3, 1))
_UP_TO_64 = ((24, 32), (64, 64), (40, 64), (64, 48))
_UP_TO_128 = ((72, 96), (96, 80), (128, 128), (104, 128))
_UP_TO_256 = ((136, 192), (192, 64), (256, 200), (256, 256))
_LONG = ("nearly_full", "constant", "giant_among_tiny")
KINDS = (
    Kind((1, 3), (33, 300), {"heads": _FEW_HEADS, "dims": _UP_TO_256}),
    *(
        kind
        for dims in (_UP_TO_64, _UP_TO_128)
        for choices in ({"heads": _FEW_HEADS, "dims": dims},)
        for kind in (
            # Long sequences; those of 1,024 queries and more have a backward kernel of their own.
            Kind((1, 3), (260, 900), choices, dtypes=_HALVES),
            Kind((1, 2), (1030, 1400), choices, _LONG, _HALVES),
            Kind((1, 2), (500, 1400), choices, _LONG, ("float32",)),
            # Few queries, whose heads share tiles of keys.
            Kind((2, 5), (10, 90), choices | {"heads": ((2, 1), (8, 2), (8, 1))}, dtypes=_HALVES),
        )
    ),
    # Between short and long: few queries of many keys, of heads that share nothing.
    Kind(
        (1, 3),
        (60, 300),
        {
            "heads": ((1, 1), (2, 2), (3, 1)),
            "dims": _UP_TO_64[1:],
            "cross": (True,),
            "max_len": (False,),
        },
        dtypes=_HALVES,
    ),
    # Many short sequences, and many tiny ones.
    *(
        Kind(
            num_seqs,
            max_len,
            {"heads": heads, "dims": dims, "max_len": (True, True, False)},
            dtypes=_HALVES,
        )
        for num_seqs, max_len, heads, dims in (
            ((140, 300), (20, 130), ((2, 2), (4, 4)), _UP_TO_64[1:]),
            ((280, 500), (3, 40), ((2, 2), (4, 4), (2, 1)), _UP_TO_64),
            ((280, 500), (3, 30), ((1, 1), (2, 2)), (*_UP_TO_128, *_UP_TO_256)),
        )
    ),
)


CASE = Case(
    name="jagged_flash_attention",
    choices={
        # None is the [T, D] form; else (H, G).
        "heads": (None, (1, 1), (2, 2), (4, 2), (3, 1)),
        "dims": (
            *((1, 1), (3, 5), (8, 8), (8, 200), (16, 32), (24, 16), (32, 32), (40, 64), (64, 64)),
            *((64, 16), (65, 63), (72, 72), (96, 96), (128, 128), (128, 64), (192, 128), (250, 7)),
            (256, 256),
        ),
        "causal": (False, True),
        "window_size": ((-1, -1), (-1, -1), (0, 0), (3, 0), (0, 5), (7, -1), (-1, 2), (40, 40)),
        "scale": (None, None, 0.3, "large", -0.2, 0.0),
        "cross": (False, True),
        "max_len": (False, True),
    },
    shapes=_shapes,
    rows={"q": "q", "k": "kv", "v": "kv", "out": "q", "lse": "q"},
    function=_call,
    registered=lambda s: registered(
        *("jagged_flash_attention", s, s.offsets, s.kv_offsets, *window(s.spec)),
        *(attention_scale(s.spec), None, False),
    ),
    reference=reference,
    profiles={
        "small": Profile((1, 2, 4), (1, 9, 24), {"dims": ((1, 1), (3, 5), (8, 8), (16, 32))}),
        "edge": Profile((1, 3, 5), (33, 65, 130)),
        "large": Profile(
            (16,),
            (300, 700),
            {
                "heads": ((2, 2), (4, 1)),
                "dims": ((32, 32), (64, 64), (128, 128), (256, 256)),
                "window_size": ((-1, -1), (-1, -1), (100, 100), (256, 0)),
            },
        ),
    },
    autocast="lower_precision",
    kinds=KINDS,
    product=True,
    rounded=(rounded(divide_last=False), rounded(divide_last=True)),
    terms=terms,
    huge={"dims": (64, 64), "heads": (8, 8)},
)


def flat_biases(sample: Sample) -> tuple[Any, ...]:
    """The last arguments of the registered operators."""
    given = bias_options(sample.spec, sample.tensors, sample.offsets, sample.kv_offsets)
    names = ("kv_lengths", "kv_bias", "time_bias", "position_bias")
    flat = flatten("", sample.tensors["q"], *(given.get(name) for name in names))
    return tuple(
        t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in flat
    )


def _registered_more(sample: Sample) -> dict[str, tuple[Any, ...]]:
    offsets, kv_offsets = sample.offsets, sample.kv_offsets
    kind = sample.spec.choices["ranges"]
    ranges = None
    if kind is not None:
        ranges = three_dims(key_ranges(kind, sample.tensors["q"], offsets, kv_offsets))
    options = (*window(sample.spec), attention_scale(sample.spec), None, False, False, ranges)
    name, biases = "jagged_flash_attention", flat_biases(sample)
    calls = registered(name, sample, offsets, kv_offsets, *options, *biases)
    if biases:
        calls[f"{name}_backward"] = (*detach(calls[f"{name}_backward"]), True, True)
    return calls


def detach(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)


_FEWER = {"dims": ((1, 1), (8, 8), (16, 32), (64, 64), (40, 24), (128, 128), (192, 128), (7, 250))}
# For ranges, biases and SiLU: the kernel for long sequences takes those of more than 64 queries,
# but no time_bias beside other biases; with it alone it has warps of its own for it.
GENERAL_KINDS = (
    Kind((1, 4), (66, 300), {"heads": _FEW_HEADS, "dims": _UP_TO_64}, dtypes=_HALVES),
    Kind((1, 4), (66, 300), {"heads": _FEW_HEADS, "dims": _UP_TO_128}, dtypes=_HALVES),
    Kind((1, 4), (33, 130), {"heads": _FEW_HEADS, "dims": _UP_TO_256}),
)
BIASED_KINDS = tuple(
    dataclasses.replace(kind, choices={**kind.choices, "tables": tables})
    for kind in GENERAL_KINDS[:2]
    for tables in (("time",), (False, "position"))
)
WITH_RANGES = dataclasses.replace(
    CASE,
    choices={**CASE.choices, **_FEWER, "ranges": RANGES},
    kinds=GENERAL_KINDS,
    registered=_registered_more,
)
BIASED = dataclasses.replace(
    WITH_RANGES,
    choices={**CASE.choices, **_FEWER, **BIAS_CHOICES},
    kinds=BIASED_KINDS,
    shapes=lambda spec: _shapes(spec) | bias_shapes(spec),
    rows={name: CASE.rows[name] for name in "qkv"} | BIAS_ROWS | {"out": "q", "lse": "q"},
)

# Judged and fuzzed like operators of their own, in Triton too.
VARIANTS = {
    "jagged_flash_attention_ranges": WITH_RANGES,
    "jagged_flash_attention_biased": BIASED,
}
