"""The modules of jagged_cuda.nn, each with its padded twin of torch.nn, and how they are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from jagged_cuda.nn import (
    DINAttention,
    HSTULayer,
    JaggedFeatureInteraction,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)
from jagged_cuda.testing.comparison import compare, operand_eps
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import inside, pad, unpad

E, H, N = 16, 4, 3
LAYOUT, KEYS = Layout((5, 0, 1, 9, 3, 2), base=2, tail=1), Layout((2, 3, 0, 7, 1, 4), tail=2)
# Neither T nor B is that of the first.
OTHER, OTHER_KEYS = Layout((4, 21, 0, 6, 1, 7, 2, 8), base=3), Layout((0, 2, 5, 1, 9, 2, 4, 1), 1)

Tensors = dict[str, Tensor]


# --- the padded forms


def visible(layout: Layout, keys: Layout, window: tuple[int, int], device: torch.device) -> Tensor:
    """`[B, M, Mk]`: the keys that a row sees."""
    i = torch.arange(layout.max_len, device=device)[None, :, None]
    j = torch.arange(keys.max_len, device=device)[None, None, :]
    lengths = (torch.tensor(each.lengths, device=device)[:, None, None] for each in (layout, keys))
    len_q, len_k = lengths
    left, right = (10**6 if side < 0 else side for side in window)
    position = i + len_k - len_q
    near = (position - left <= j) & (j <= position + right)
    return near & inside(keys, device)[:, None, :]


def attend(
    module: Any, parameters: Tensors, q: Tensor, k: Tensor, v: Tensor, sees: Tensor
) -> Tensor:
    """torch.nn.MultiheadAttention with the module's parameters, where rows see keys."""
    twin = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=True,
        device="meta",
    )
    if module.num_kv_heads != module.num_heads:
        parameters = with_all_heads(module, parameters)
    # A row that sees nothing sees the first key here, and its result is put right below.
    blind = ~sees.any(2, keepdim=True)
    mask = sees | (blind & (torch.arange(sees.shape[2], device=sees.device) == 0))
    mask = (~mask).repeat_interleave(module.num_heads, dim=0)
    out = functional_call(twin, parameters, (q, k, v), {"attn_mask": mask, "need_weights": False})[
        0
    ]
    bias = parameters.get("out_proj.bias", out.new_zeros(()))
    return torch.where(blind, bias.to(out.dtype), out)


def with_all_heads(module: Any, parameters: Tensors) -> Tensors:
    """A head of keys and values for each of queries, as torch.nn knows it."""
    group = module.num_heads // module.num_kv_heads
    kv_features = module.num_kv_heads * module.head_dim

    def repeated(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, module.head_dim))
        return heads.repeat_interleave(group, dim=0).flatten(0, 1)

    def whole(rows: Tensor) -> Tensor:
        q, k, v = rows.split([module.embed_dim, kv_features, kv_features])
        return torch.cat([q, repeated(k), repeated(v)])

    kinds = {"in_proj_weight": whole, "in_proj_bias": whole}
    kinds |= dict.fromkeys(("k_proj_weight", "v_proj_weight"), repeated)
    return {name: kinds.get(name, lambda rows: rows)(p) for name, p in parameters.items()}


def part_of(parameters: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}


# --- the modules, each with its padded form


@dataclasses.dataclass(frozen=True)
class Example:
    """A module, how it is called, and what its result must be.

    Args:
        make: (dtype, device) -> the module.
        shapes: the features of each input: of a row, or `(N, E)` of the targets of each sequence.
        call: (module, inputs, offsets, offsets of keys) -> the result.
        twin: (module, parameters, padded inputs, layout, layout of keys) -> the padded result.
    """

    make: Callable[..., nn.Module]
    shapes: Mapping[str, tuple[int, ...]]
    call: Callable[[Any, Tensors, Tensor, Tensor], Tensor]
    twin: Callable[[Any, Tensors, Tensors, Layout, Layout], Tensor]

    @property
    def has_jagged_out(self) -> bool:
        return "x" in self.shapes

    def layout_of(self, name: str, layouts: tuple[Layout, Layout]) -> Layout | None:
        """None: of the inputs that are dense."""
        layout, keys = layouts
        return {"x": layout, "kv": keys, "values": keys, "history": layout}.get(name)


def attention(causal: bool = False, window: tuple[int, int] = (-1, -1), **options: Any) -> Example:
    """Self-attention."""

    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        x = padded["x"]
        band = (window[0], 0) if causal else window
        return attend(m, p, x, x, x, visible(layout, layout, band, x.device))

    return Example(
        lambda **kind: JaggedMultiheadAttention(E, H, **options, **kind),
        {"x": (E,)},
        lambda m, t, o, ko: m(t["x"], o, causal=causal, window_size=window),
        twin,
    )


def cross_attention(pair: bool = False, **options: Any) -> Example:
    """Against other sequences, with the causal mask that ends with their last row."""

    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        x, kv = padded["x"], padded["kv"]
        sees = visible(layout, keys, (-1, 0), x.device)
        return attend(m, p, x, kv, padded.get("values", kv), sees)

    def call(m: Any, t: Tensors, offsets: Tensor, kv_offsets: Tensor) -> Tensor:
        kv = (t["kv"], t["values"]) if pair else t["kv"]
        return m(t["x"], offsets, kv=kv, kv_offsets=kv_offsets, causal=True)

    shapes = {"x": (E,), "kv": (options.get("kdim", E),)}
    shapes |= {"values": (options.get("vdim", E),)} if pair else {}
    return Example(
        lambda **kind: JaggedMultiheadAttention(E, H, **options, **kind), shapes, call, twin
    )


def transformer(activation: str, causal: bool) -> Example:
    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        window = (-1, 0) if causal else (-1, -1)

        def self_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor]:
            sees = visible(layout, layout, window, q.device)
            return (attend(m.self_attn, part_of(p, "self_attn."), q, k, v, sees),)

        layer = nn.TransformerEncoderLayer(
            E, H, 4 * E, 0.0, activation, norm_first=True, batch_first=True, device="meta"
        )
        layer.self_attn.forward = self_attention
        others = {name: value for name, value in p.items() if not name.startswith("self_attn.")}
        return functional_call(layer, others, padded["x"], strict=False)

    return Example(
        lambda **kind: JaggedTransformerLayer(E, H, activation=activation, **kind),
        {"x": (E,)},
        lambda m, t, o, ko: m(t["x"], o, causal=causal),
        twin,
    )


def hstu(window: tuple[int, int] = (-1, 0), **options: Any) -> Example:
    """As a padded model writes it."""

    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        x = padded["x"]

        def norm(name: str, rows: Tensor) -> Tensor:
            weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
            return F.layer_norm(rows, weight.shape, weight, bias, 1e-6)

        def linear(name: str, rows: Tensor) -> Tensor:
            return F.linear(rows, p[f"{name}.weight"], p.get(f"{name}.bias"))

        of_v, of_qk = m.num_heads * m.v_dim, m.num_heads * m.qk_dim
        projected = F.silu(linear("uvqk_proj", norm("input_norm", x)))
        u, *vqk = projected.split([of_v, of_v, of_qk, of_qk], dim=-1)
        v, q, k = (t.unflatten(2, (m.num_heads, -1)).transpose(1, 2) for t in vqk)
        sees = visible(layout, layout, window, x.device)[:, None]
        weights = F.silu(q @ k.mT / m.qk_dim**0.5).masked_fill(~sees, 0.0)
        divisor = m.divisor
        if divisor == "length":
            divisor = inside(layout, x.device).sum(1).clamp(min=1)[:, None, None]
        read = (weights @ v).transpose(1, 2).flatten(2) / divisor
        return x + linear("out_proj", u * norm("output_norm", read))

    return Example(
        lambda **kind: HSTULayer(E, H, **options, **kind),
        {"x": (E,)},
        lambda m, t, o, ko: m(t["x"], o, causal=window == (-1, 0), window_size=window),
        twin,
    )


def target_attention(**options: Any) -> Example:
    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        q, history = padded["targets"], padded["history"]
        sees = inside(layout, q.device)[:, None, :].expand(-1, N, -1)
        return attend(m, p, q, history, history, sees)

    return Example(
        lambda **kind: TargetAttention(E, H, **options, **kind),
        {"targets": (N, E), "history": (options.get("kdim", E),)},
        lambda m, t, o, ko: m(t["targets"], t["history"], o),
        twin,
    )


def din(**options: Any) -> Example:
    def twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
        history = padded["history"].unsqueeze(1)
        q, k = torch.broadcast_tensors(padded["targets"].unsqueeze(2), history)
        rows = torch.cat([q, k, q - k, q * k], dim=-1)  # [B, N, M, 4 E]
        scores = functional_call(m.scorer, part_of(p, "scorer."), rows).squeeze(3)
        is_row = inside(layout, q.device)[:, None, :]
        if m.softmax:
            scores = scores.masked_fill(~is_row, torch.finfo(scores.dtype).min).softmax(2)
        return scores.masked_fill(~is_row, 0.0) @ padded["history"].to(scores.dtype)

    return Example(
        lambda **kind: DINAttention(E, hidden_dims=(12, 8), **options, **kind),
        {"targets": (N, E), "history": (E,)},
        lambda m, t, o, ko: m(t["targets"], t["history"], o),
        twin,
    )


def interaction_twin(m: Any, p: Tensors, padded: Tensors, layout: Layout, keys: Layout) -> Tensor:
    targets, history = padded["targets"], padded["history"]
    is_row = inside(layout, targets.device)
    q = functional_call(m.query, part_of(p, "query."), targets).unflatten(2, (m.num_heads, -1))
    values = history.unflatten(2, (m.num_heads, -1)).transpose(1, 2)
    some = is_row | (torch.arange(layout.max_len, device=is_row.device) == 0)
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2), values.to(q.dtype), values.to(q.dtype), some[:, None, None, :]
    )
    lengths = is_row.sum(1)[:, None, None]
    found = found.transpose(1, 2).flatten(2).masked_fill(lengths == 0, 0.0)
    mean = history.masked_fill(~is_row.unsqueeze(2), 0.0).sum(1, keepdim=True)
    return torch.cat([targets, found, (mean / lengths.clamp(min=1)).expand_as(targets)], dim=2)


EXAMPLES = {
    "attention": attention(),
    "attention-causal": attention(causal=True, bias=False),
    "attention-window-grouped": attention(window=(2, 1), num_kv_heads=2),
    "attention-cross": cross_attention(),
    "attention-cross-other-features": cross_attention(kdim=6, vdim=6, num_kv_heads=1),
    "attention-pair": cross_attention(pair=True),
    "attention-pair-other-features": cross_attention(pair=True, kdim=6, vdim=10, bias=False),
    "transformer": transformer("relu", causal=False),
    "transformer-causal": transformer("gelu", causal=True),
    "hstu": hstu(),
    "hstu-recompute": hstu(recompute=True, qk_dim=6, v_dim=8, divisor=20.0),
    "hstu-window": hstu(window=(2, 1), bias=False),
    "target": target_attention(),
    "target-grouped": target_attention(num_kv_heads=2, kdim=6, vdim=6),
    "din": din(),
    "din-softmax": din(softmax=True, activation="silu"),
    "interaction": Example(
        lambda **kind: JaggedFeatureInteraction(E, 2, **kind),
        {"targets": (N, E), "history": (E,)},
        lambda m, t, o, ko: m(t["targets"], t["history"], o),
        interaction_twin,
    ),
}
# One of each module.
PLAIN = ("attention", "attention-cross", "transformer", "hstu", "hstu-recompute", "target", "din")
PLAIN += ("interaction",)
EXAMPLE = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
EACH_MODULE = pytest.mark.parametrize("example", [EXAMPLES[name] for name in PLAIN], ids=PLAIN)


def make(example: Example, device: torch.device | str = "cpu") -> nn.Module:
    """In float64; no parameter is 0, as biases are at first."""
    torch.manual_seed(0)
    module = example.make(device=device, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def draw(
    example: Example, layouts: tuple[Layout, Layout], device: torch.device | str = "cpu"
) -> Tensors:
    torch.manual_seed(1)
    found = {}
    for name, features in example.shapes.items():
        layout = example.layout_of(name, layouts)
        rows = layouts[0].num_seqs if layout is None else layout.total
        found[name] = torch.randn(rows, *features, dtype=torch.float64, device=device)
    return found


def offsets_of(
    layouts: tuple[Layout, Layout], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    return layouts[0].offsets(device), layouts[1].offsets(device)


def with_gradients(
    function: Callable[[Tensors, Tensors], Tensor],
    parameters: Tensors,
    inputs: Tensors,
    cotangent: Tensor,
) -> Tensors:
    """The result, and the gradients of parameters and inputs."""
    parameters, inputs = (
        {name: t.detach().requires_grad_() for name, t in each.items()}
        for each in (parameters, inputs)
    )
    out = function(parameters, inputs)
    gradients = torch.autograd.grad(
        out, [*parameters.values(), *inputs.values()], cotangent.to(out.dtype)
    )
    names = [*parameters, *inputs]
    return {"out": out.detach()} | dict(zip(names, gradients, strict=True))


def run(example: Example, module: nn.Module, inputs: Tensors, cotangent: Tensor) -> Tensors:
    layouts = (LAYOUT, KEYS)
    offsets = offsets_of(layouts, cotangent.device)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, t: Tensors) -> Tensor:
            return example.call(self.m, t, *offsets)

    def function(parameters: Tensors, inputs: Tensors) -> Tensor:
        named = {f"m.{name}": p for name, p in parameters.items()}
        return functional_call(Caller(), named, (inputs,))

    return with_gradients(function, dict(module.named_parameters()), inputs, cotangent)


def run_twin(example: Example, module: nn.Module, inputs: Tensors, cotangent: Tensor) -> Tensors:
    layouts = (LAYOUT, KEYS)

    def function(parameters: Tensors, inputs: Tensors) -> Tensor:
        padded = {}
        for name, x in inputs.items():
            layout = example.layout_of(name, layouts)
            padded[name] = x if layout is None else pad(x, layout)
        out = example.twin(module, parameters, padded, *layouts)
        return unpad(out, LAYOUT) if example.has_jagged_out else out

    return with_gradients(function, dict(module.named_parameters()), inputs, cotangent)


def cotangent_of(example: Example, module: nn.Module, inputs: Tensors) -> Tensor:
    """0 in rows outside every sequence: what they give is nobody's."""
    device = next(iter(inputs.values())).device
    out = example.call(module, inputs, *offsets_of((LAYOUT, KEYS), device))
    torch.manual_seed(2)
    cotangent = torch.randn_like(out)
    if example.has_jagged_out:
        cotangent[LAYOUT.seq_of_row(device) == LAYOUT.num_seqs] = 0.0
    return cotangent


def seq_of(example: Example, name: str, rows: int, device: torch.device) -> tuple[Tensor, int]:
    """The sequence of each row of a result or gradient; a parameter has one, of all its rows."""
    layout = example.layout_of("x" if name == "out" else name, (LAYOUT, KEYS))
    if layout is not None and (name != "out" or example.has_jagged_out):
        return layout.seq_of_row(device), layout.num_seqs
    if name in ("out", "targets"):
        return torch.arange(rows, device=device), rows
    return torch.zeros(rows, dtype=torch.int64, device=device), 1


def judge(example: Example, found: Tensors, twin: Tensors, exact: Tensors) -> None:
    """By the one rule."""
    for name, reference in exact.items():
        actual = found[name]
        seqs, num_seqs = seq_of(example, name, len(reference), reference.device)
        if name == "out" and example.has_jagged_out:
            actual = actual.where((seqs < num_seqs)[:, None], 0.0)
        compare(
            actual,
            reference,
            same_precision=[twin[name]],
            terms=reference.abs().amax().expand_as(reference),
            seq_of_row=seqs,
            num_seqs=num_seqs,
            label=name,
            seed=0,
            rounding=operand_eps(actual.dtype, actual.device),
        )
