"""layer_norm_mul_dropout: a normed row times another one, with dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged_cuda.testing.case import FEATURES, ROW_PROFILES, Case, Kind, Profile, Tensors
from jagged_cuda.testing.samples import Sample, Spec

EPS = 1e-6
_LOW = 2**32 - 1


def random_words(seed: int, rows: int, blocks: int, device: torch.device | str) -> Tensor:
    """`[rows, blocks, 4]` words of 32 bits: Philox 4x32-10, written anew from its paper.

    The key is the seed, the counter (block, row, row / 2^32, 0).
    """
    row = torch.arange(rows, device=device)[:, None].expand(rows, blocks)
    block = torch.arange(blocks, device=device).expand(rows, blocks)
    key = [seed & _LOW, (seed >> 32) & _LOW]
    counter = [block, row & _LOW, row >> 32, torch.zeros_like(row)]

    def halves(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        """The high and the low word of a product, by parts that int64 holds."""
        low, high = (words & 0xFFFF) * factor, (words >> 16) * factor
        low += (high & 0xFFFF) << 16
        return (high >> 16) + (low >> 32), low & _LOW

    for _ in range(10):
        high0, low0 = halves(counter[0], 0xD2511F53)
        high2, low2 = halves(counter[2], 0xCD9E8D57)
        counter = [high2 ^ counter[1] ^ key[0], low2, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return torch.stack(counter, dim=-1)


def keep_of(x: Tensor, p: float, seed: int) -> Tensor:
    """What the elements of x `[T, D]` are multiplied by: 8 of a row share a counter, 2 a word."""
    words = random_words(seed, len(x), (x.shape[1] + 7) // 8, x.device)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, : x.shape[1]]
    dropped = int(p * 2**16 + 0.5)
    return (halves >= dropped).to(x.dtype) * (2**16 / max(1, 2**16 - dropped))


def definition(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """`[..., D]`, of padded or of packed rows: each row is alone."""
    out = u * F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return torch.where(keep == 0, 0.0, out * keep)


def _seed_of(spec: Spec) -> int:
    """With bits in both words; negative for small ones."""
    return (spec.seed + 1) * 1_000_000_007 - 2**36


def _options(spec: Spec, device: torch.device) -> dict[str, Any]:
    seed = torch.tensor([_seed_of(spec)], device=device) if spec.choices["p"] > 0 else None
    return {"eps": EPS, "p": spec.choices["p"], "seed": seed}


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    """The operator knows no sequences: rows outside of all are set to 0 before and behind it."""
    x, u = t["x"], t["u"]
    row = torch.arange(x.shape[0], device=x.device)
    inside = ((offsets[0] <= row) & (row < offsets[-1]))[:, None]
    if spec.poisoned and spec.layout.base + spec.layout.tail > 0:
        x, u = (torch.where(inside, rows, 0.0) for rows in (x, u))
    out = ops.layer_norm_mul_dropout(x, u, t["weight"], t["bias"], **_options(spec, x.device))
    return {"out": torch.where(inside, out, 0.0)}


def _inside(spec: Spec, rows: Tensor) -> Tensor:
    seq = spec.layout.seq_of_row(rows.device)
    return torch.where((seq < spec.layout.num_seqs)[:, None], rows, 0.0)


def _reference(spec: Spec, t: Tensors) -> Tensors:
    x, u = (_inside(spec, t[name]) for name in ("x", "u"))
    keep = keep_of(x, spec.choices["p"], _seed_of(spec))
    return {"out": _inside(spec, definition(x, u, t["weight"], t["bias"], keep))}


def _terms(spec: Spec, t: Tensors, cotangents: Tensors | None) -> Tensors:
    """An error e of the mean and of x moves xhat by e / std, and through the variance by xhat times
    as much."""
    x, u = (_inside(spec, t[name]) for name in ("x", "u"))
    if x.shape[1] == 0:
        zeros = {name: torch.zeros_like(t[name]) for name in t}
        return {"out": torch.zeros_like(x)} | {f"grad_{name}": z for name, z in zeros.items()}
    weight, bias = t["weight"].abs(), t["bias"].abs()
    keep = keep_of(x, spec.choices["p"], _seed_of(spec))
    rstd = (x.var(1, correction=0, keepdim=True) + EPS).rsqrt()
    size = rstd * x.abs().mean(1, keepdim=True)
    xhat = ((x - x.mean(1, keepdim=True)) * rstd).abs() * (1 + size) + rstd * x.abs() + size
    normed = xhat * weight + bias
    found = {"out": keep * u.abs() * normed}
    if cotangents is not None:
        g = keep * _inside(spec, cotangents["out"]).abs()
        h = g * u.abs() * weight
        means = h.mean(1, keepdim=True) + xhat * (h * xhat).mean(1, keepdim=True)
        found |= {"grad_x": rstd * (1 + size) * (h + means), "grad_u": g * normed}
        found |= {"grad_weight": (g * u.abs() * xhat).sum(0), "grad_bias": (g * u.abs()).sum(0)}
    return found


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    t, spec = sample.tensors, sample.spec
    sums = torch.float64 if t["x"].dtype is torch.float64 else torch.float32
    columns = [t[name].detach().to(sums) for name in ("weight", "bias")]
    leaves = (t["x"], t["u"], *(each.clone().requires_grad_() for each in columns))
    seed = torch.tensor([_seed_of(spec)], device=t["x"].device)
    fixed = (torch.randn_like(t["x"]), t["x"].detach(), t["u"].detach(), *columns)
    return {
        "layer_norm_mul_dropout": (*leaves, seed, EPS, 0.3),
        "layer_norm_mul_dropout_backward": (*fixed, seed, EPS, 0.3),
    }


PROFILES = ROW_PROFILES | {"large": Profile((64, 500), (200, 700), {"D": (64, 257)})}

CASE = Case(
    name="layer_norm_mul_dropout",
    # First nothing is dropped: what is depends on where a row lies in the batch.
    choices={"D": (*FEATURES, 256, 520), "p": (0.0, 0.1, 0.5, 1.0)},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "u": (spec.layout.total, spec.choices["D"]),
        "weight": (spec.choices["D"],),
        "bias": (spec.choices["D"],),
    },
    rows={"x": "q", "u": "q", "weight": "features", "bias": "features", "out": "q"},
    function=_function,
    registered=_registered,
    reference=_reference,
    profiles=PROFILES,
    # Rows of a whole CTA.
    kinds=(Kind((1, 6), (9, 40), {"D": (520, 1040, 2056)}),),
    autocast="lower_precision",
    terms=_terms,
)
