"""jagged_cuda.nn: each module equals a padded twin of torch.nn, and is at home in PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import importlib
import io
import pickle
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import run_python, sentence
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jagged_cuda
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
from jagged_cuda.testing.ops.layer_norm_mul_dropout import keep_of
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


# --- agreement


@EXAMPLE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_equals_its_padded_twin(example: Example, dtype: torch.dtype, device: torch.device) -> None:
    """Outputs, and gradients of all inputs and parameters."""
    module, inputs = make(example, device), draw(example, (LAYOUT, KEYS), device)
    cotangent = cotangent_of(example, module, inputs)
    exact = run_twin(example, module, inputs, cotangent)
    module, cotangent = module.to(dtype), cotangent.to(dtype)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    found = run(example, module, inputs, cotangent)
    judge(example, found, run_twin(example, module, inputs, cotangent), exact)


@EACH_MODULE
def test_autocast(example: Example, device: torch.device) -> None:
    """As wrong as the padded twin is under autocast, and of its dtypes."""
    module, inputs = make(example, device), draw(example, (LAYOUT, KEYS), device)
    cotangent = cotangent_of(example, module, inputs)
    exact = run_twin(example, module, inputs, cotangent)
    module = module.float()
    inputs = {name: x.float() for name, x in inputs.items()}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = run(example, module, inputs, cotangent)
        twin = run_twin(example, module, inputs, cotangent)
    assert {name: t.dtype for name, t in found.items()} == {n: t.dtype for n, t in twin.items()}
    # Gradients of float32 parameters were computed in bfloat16, and rounded to it.
    found, twin = ({name: t.bfloat16() for name, t in each.items()} for each in (found, twin))
    judge(example, found, twin, exact)


@EACH_MODULE
def test_compile_and_export(example: Example, device: torch.device) -> None:
    """One graph without breaks, forward and backward, for every T and B."""
    torch._dynamo.reset()
    module = make(example, device)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, t: Tensors, offsets: Tensor, kv_offsets: Tensor) -> Tensor:
            return example.call(self.m, t, offsets, kv_offsets)

    caller = Caller()
    compiled = torch.compile(caller, fullgraph=True, dynamic=True, backend="aot_eager")
    rows, keys, batch = (torch.export.Dim(name, min=2) for name in ("T", "K", "B"))
    dims = {"x": rows, "history": rows, "kv": keys, "values": keys, "targets": batch}
    first = (draw(example, (LAYOUT, KEYS), device), *offsets_of((LAYOUT, KEYS), device))
    shapes = {name: {0: dims[name]} for name in example.shapes}
    program = torch.export.export(
        caller, first, dynamic_shapes=(shapes, {0: batch + 1}, {0: batch + 1})
    )
    exported = program.module()
    for index, layouts in enumerate(((LAYOUT, KEYS), (OTHER, OTHER_KEYS))):
        inputs, offsets = draw(example, layouts, device), offsets_of(layouts, device)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            out = compiled(inputs, *offsets)
            gradients = torch.autograd.grad(out.sum(), list(module.parameters()))
        expected = caller(inputs, *offsets)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(exported(inputs, *offsets), expected)
        wanted = torch.autograd.grad(expected.sum(), list(module.parameters()))
        torch.testing.assert_close(gradients, wanted)


# --- torch.nn's own parameters


@pytest.mark.parametrize("features", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}], ids=str)
@pytest.mark.parametrize("module", [JaggedMultiheadAttention, TargetAttention])
def test_parameters_of_multihead_attention(module: Any, features: dict[str, Any]) -> None:
    torch.manual_seed(3)
    twin = nn.MultiheadAttention(E, H, **features)
    torch.manual_seed(3)
    ours = module(E, H, **features)
    expected = twin.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    ours.reset_parameters()
    ours.load_state_dict(expected)
    twin.load_state_dict(ours.state_dict())
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


def test_parameters_of_transformer_encoder_layer() -> None:
    torch.manual_seed(3)
    twin = nn.TransformerEncoderLayer(E, H, 24, norm_first=True, batch_first=True)
    torch.manual_seed(3)
    ours = JaggedTransformerLayer(E, H, dim_feedforward=24)
    expected = twin.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    ours = JaggedTransformerLayer(E, H, dim_feedforward=24)
    ours.load_state_dict(expected)
    x = torch.randn(2, 5, E)
    offsets = torch.tensor([0, 5, 10])
    torch.testing.assert_close(ours(x.flatten(0, 1), offsets), twin.eval()(x).flatten(0, 1))


def test_attention_with_ranges_and_biases(device: torch.device) -> None:
    """As torch.nn.MultiheadAttention with a mask of numbers for each head; gradients of tables."""
    kind: Any = {"device": device, "dtype": torch.float64}
    module = JaggedMultiheadAttention(E, H, **kind)
    plain = torch.nn.MultiheadAttention(E, H, batch_first=True, **kind)
    plain.load_state_dict(module.state_dict())
    lengths, total = (5, 0, 9), 14
    offsets = torch.tensor([0, 5, 5, 14], device=device)
    x, time = torch.randn(total, E, **kind), torch.randint(0, 99, (total,), device=device).cumsum(0)
    begin = torch.randint(0, 3, (total,), device=device, dtype=torch.int32)
    ranges = torch.stack((begin, begin + 4), 1)
    tables = [torch.randn(H, 6, **kind).requires_grad_() for _ in range(2)]
    kv_bias = torch.randn(total, H, **kind).requires_grad_()
    boundaries = torch.tensor([1, 40, 90, 150, 300], device=device)
    found = module(
        x,
        offsets,
        key_ranges=ranges,
        kv_bias=kv_bias,
        time_bias=jagged_cuda.TimeBias(tables[0], time, time, boundaries),
        position_bias=jagged_cuda.PositionBias(tables[1], -2),
    )
    expected = []
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        rows = slice(int(offsets[b]), int(offsets[b]) + length)
        place = torch.arange(length, device=device)
        apart = (time[rows, None] - time[None, rows]).abs()
        bias = tables[0][:, torch.bucketize(apart, boundaries, right=True)]
        bias = bias + tables[1][:, (place[:, None] - place + 2).clamp(0, 5)]
        bias = bias + kv_bias[rows].T[:, None]
        sees = (place >= ranges[rows, :1]) & (place < ranges[rows, 1:])
        # A row that sees none of its keys is the output layer's bias; PyTorch would give NaN.
        blind = ~sees.any(1, keepdim=True)
        bias = bias.masked_fill(~(sees | blind), -torch.inf)
        out = plain(*[x[None, rows]] * 3, attn_mask=bias, need_weights=False)[0][0]
        expected.append(torch.where(blind, plain.out_proj.bias, out))
    wanted = torch.cat(expected)
    torch.testing.assert_close(found, wanted)
    leaves = (*tables, kv_bias)
    gradients = torch.autograd.grad(found.sin().sum(), leaves)
    for gradient, other in zip(
        gradients, torch.autograd.grad(wanted.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(gradient, other)


def test_layers_pass_biases_on(device: torch.device) -> None:
    x, offsets = torch.randn(8, E, device=device), torch.tensor([0, 3, 8], device=device)
    options = {
        "key_ranges": torch.tensor([[0, 2]] * 8, dtype=torch.int32, device=device),
        "kv_bias": torch.randn(8, device=device),
        "position_bias": jagged_cuda.PositionBias(torch.randn(H, 5, device=device)),
    }
    layer = JaggedTransformerLayer(E, H).to(device)
    y = x + layer.self_attn(layer.norm1(x), offsets, **options)
    expected = y + layer.linear2(F.relu(layer.linear1(layer.norm2(y))))
    torch.testing.assert_close(layer(x, offsets, **options), expected)

    targets, target = torch.randn(2, 3, E, device=device), TargetAttention(E, H).to(device)
    used = torch.tensor([2, 4], device=device)
    kept = torch.tensor([0, 1, 3, 4, 5, 6], device=device)
    bias = options["kv_bias"]
    found = target(targets, x, offsets, kv_lengths=used, kv_bias=bias)
    fewer = target(targets, x[kept], torch.tensor([0, 2, 6], device=device), kv_bias=bias[kept])
    torch.testing.assert_close(found, fewer)
    assert not torch.allclose(found, target(targets, x, offsets, kv_lengths=used))


@pytest.mark.parametrize("module", [JaggedTransformerLayer, HSTULayer])
def test_dropout_in_training_only(module: Any) -> None:
    layer = module(E, H, dropout=0.5)
    x, offsets = torch.randn(8, E), torch.tensor([0, 3, 8])
    assert not torch.equal(layer(x, offsets), layer(x, offsets))
    layer.eval()
    assert torch.equal(layer(x, offsets), layer(x, offsets))


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_of_hstu_layer(recompute: bool, device: torch.device) -> None:
    """It drops in what out_proj takes, by the seed alone; a recomputed pass drops the same."""
    layer = HSTULayer(E, H, dropout=0.4, recompute=recompute).double().to(device)
    plain = copy.deepcopy(layer).eval()
    x = torch.randn(LAYOUT.total, E, dtype=torch.float64, device=device)
    offsets, seed = LAYOUT.offsets(device), torch.tensor([77], device=device)
    taken: list[Tensor] = []
    for each in (layer, plain):
        each.out_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    out = layer(leaves[0], offsets, seed=seed)
    plain(leaves[1], offsets)
    keep = keep_of(taken[1], 0.4, 77)
    torch.testing.assert_close(taken[0], taken[1] * keep)
    expected = leaves[1] + F.linear(taken[1] * keep, *plain.out_proj.parameters())
    torch.testing.assert_close(out, expected)
    found, wanted = (
        torch.autograd.grad(y.sin().sum(), leaf)
        for y, leaf in zip((out, expected), leaves, strict=True)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_biases_of_hstu_layer(recompute: bool, device: torch.device) -> None:
    """They reach attention, and their tables get gradients."""
    layer = HSTULayer(E, H, recompute=recompute).to(device)
    x, offsets = torch.randn(8, E, device=device), torch.tensor([0, 3, 8], device=device)
    table = torch.randn(H, 5, device=device, requires_grad=True)
    time = torch.arange(8, device=device)
    given = {
        "position_bias": jagged_cuda.PositionBias(table, 0),
        "time_bias": jagged_cuda.TimeBias(
            table, time, time, torch.tensor([1, 2, 4, 6], device=device)
        ),
        "kv_bias": torch.randn(8, device=device, requires_grad=True),
    }
    for name, bias in given.items():
        out = layer(x, offsets, **{name: bias})
        assert not torch.equal(out, layer(x, offsets))
        leaf = bias if name == "kv_bias" else table
        (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
        assert gradient.abs().sum() > 0


def test_a_drawn_seed_is_of_the_generator() -> None:
    layer, x, offsets = HSTULayer(E, H, dropout=0.4), torch.randn(5, E), torch.tensor([0, 2, 5])
    found = []
    for _ in range(2):
        torch.manual_seed(8)
        found.append(layer(x, offsets))
    assert torch.equal(*found)
    assert not torch.equal(layer(x, offsets), found[0])


def test_recompute_keeps_less() -> None:
    """Bytes that autograd keeps, beyond the rows and the parameters."""
    kept = {}
    for recompute in (False, True):
        layer = HSTULayer(64, 4, recompute=recompute)
        x = torch.randn(400, 64, requires_grad=True)
        offsets = torch.tensor([0, 150, 400])
        known = {t.untyped_storage().data_ptr() for t in (x, offsets, *layer.parameters())}
        sizes: dict[int, int] = {}
        attended: list[Tensor] = []

        def pack(t: Tensor, known=known, sizes=sizes, attended=attended) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
                attended.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x, offsets).sum().backward()
        kept[recompute] = sum(sizes.values())
    assert kept[False] - kept[True] > 4 * 400 * 64 * 8


def test_recompute_computes_all_but_attention_again() -> None:
    """What autograd does not see is kept by the policy of checkpoints: its kernels run once."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    of_backward = {}
    for recompute in (False, True):
        layer = HSTULayer(E, H, recompute=recompute)
        loss = layer(torch.randn(5, E, requires_grad=True), torch.tensor([0, 2, 5])).sum()
        with Names() as names:
            loss.backward()
        of_backward[recompute] = set(names.seen)
    again = of_backward[True] - of_backward[False]
    assert {"silu.default", "native_layer_norm.default"} <= again
    assert "jagged_hstu_attention.default" not in again
    assert "jagged_hstu_attention_backward.default" in of_backward[True]


@EXAMPLE
def test_copies(example: Example) -> None:
    """Deep copies, pickles and state_dicts give the same bits; so does a module made on meta."""
    module, inputs = make(example), draw(example, (LAYOUT, KEYS))
    offsets = offsets_of((LAYOUT, KEYS))
    expected = example.call(module, inputs, *offsets)
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    loaded = example.make(device="meta", dtype=torch.float64)
    loaded.to_empty(device="cpu").load_state_dict(torch.load(stored, weights_only=True))
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(example.call(each, inputs, *offsets), expected)


@EACH_MODULE
def test_activation_checkpointing(example: Example) -> None:
    module, inputs = make(example), draw(example, (LAYOUT, KEYS))
    offsets = offsets_of((LAYOUT, KEYS))
    gradients = []
    for run_forward in (
        lambda: example.call(module, inputs, *offsets),
        lambda: checkpoint(example.call, module, inputs, *offsets, use_reentrant=False),
    ):
        gradients.append(torch.autograd.grad(run_forward().sum(), list(module.parameters())))
    assert all(map(torch.equal, *gradients))


DISTRIBUTED = """
import os, sys
os.environ |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import jagged_cuda
from jagged_cuda import nn


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.JaggedTransformerLayer(16, 2, dtype=torch.float64)
        self.cross = nn.JaggedMultiheadAttention(16, 2, num_kv_heads=1, dtype=torch.float64)
        self.target = nn.TargetAttention(16, 2, dtype=torch.float64)
        self.din = nn.DINAttention(16, dtype=torch.float64)
        self.interaction = nn.JaggedFeatureInteraction(16, dtype=torch.float64)
        self.hstu = nn.HSTULayer(16, 2, recompute=True, dtype=torch.float64)

    def forward(self, targets, x, offsets):
        y = self.layer(self.hstu(x, offsets), offsets, causal=True)
        x = y + self.cross(x, offsets, kv=y)
        found = self.target(targets, x, offsets) + self.din(targets, x, offsets)
        return found.sin().sum() + self.interaction(targets, x, offsets).cos().sum()


torch.manual_seed(0)
model = Model()
targets, x = torch.randn(6, 3, 16).double(), torch.randn(20, 16).double()
offsets = torch.tensor([0, 4, 4, 9, 15, 16, 20])
halves = [(targets[i : i + 3], x, offsets[i : i + 4]) for i in (0, 3)]  # their offsets: a slice
ranks = []
for rank in (0, 1):
    if (child := os.fork()) == 0:  # before autograd has threads, which a fork would lose
        mean = sum(model(*half) for half in halves) / 2
        expected = torch.autograd.grad(mean, list(model.parameters()))
        store = "file://" + sys.argv[1]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        parallel = DistributedDataParallel(model)
        parallel(*halves[rank]).backward()
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted)
        model.zero_grad(set_to_none=True)
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
        model(*halves[rank]).backward()
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), wanted)
        dist.destroy_process_group()
        os._exit(0)
    ranks.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in ranks]))
"""


def test_data_parallel(tmp_path: Any) -> None:
    """Two ranks with a half of the batch each get the gradients of the whole: DDP, then FSDP."""
    run_python("-c", DISTRIBUTED, str(tmp_path / "store"), OMP_NUM_THREADS="1")


# --- containers


class Model(nn.Module):
    """One of each, for tracers; without annotations, which torch.fx does not store."""

    def __init__(self):
        super().__init__()
        self.layer = JaggedTransformerLayer(E, H)
        self.cross = JaggedMultiheadAttention(E, H)
        self.target = TargetAttention(E, H)
        self.din = DINAttention(E)
        self.interaction = JaggedFeatureInteraction(E)
        self.hstu = HSTULayer(E, H)

    def forward(self, targets, x, offsets):
        y = self.layer(x, offsets, causal=True)
        y = self.hstu(y, offsets)
        y = self.cross(y, offsets, kv=x, kv_offsets=offsets)
        found = self.target(targets, y, offsets) + self.din(targets, y, offsets)
        return found, self.interaction(targets, y, offsets)


def test_one_graph_for_every_kind_of_rows() -> None:
    """torch.fx does not know what will come."""
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    x, offsets = torch.randn(5, E), torch.tensor([0, 2, 5])
    targets = torch.randn(2, N, E)
    expected = model(targets, x, offsets)
    assert all(map(torch.equal, traced(targets, x, offsets), expected))
    nt = jagged_cuda.nested.from_jagged(x, offsets)
    assert all(map(torch.equal, traced(targets, nt, None), expected))
    stored = pickle.loads(pickle.dumps(traced))
    assert all(map(torch.equal, stored(targets, x, offsets), expected))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nested_tensors(compiled: bool, device: torch.device) -> None:
    """In and out; results fit the input, and its gradient is a nested tensor too."""
    torch._dynamo.reset()
    model = Model().to(device)
    layer, target = model.layer, model.target
    if compiled:
        layer, target = (
            torch.compile(m, fullgraph=True, backend="aot_eager") for m in (layer, target)
        )
    x, offsets = torch.randn(9, E, device=device), torch.tensor([0, 2, 2, 9], device=device)
    targets = torch.randn(3, N, E, device=device)
    nt = jagged_cuda.nested.from_jagged(x, offsets, min_len=0, max_len=7).requires_grad_()
    out = layer(nt, causal=True)
    assert out.shape == nt.shape
    torch.testing.assert_close(out.values(), model.layer(x, offsets, causal=True))
    found = target(targets, out + nt)
    torch.testing.assert_close(found, model.target(targets, out.values() + x, offsets))
    (gradient,) = torch.autograd.grad(found.sum(), nt)
    leaf = x.clone().requires_grad_()
    expected = model.target(targets, model.layer(leaf, offsets, causal=True) + leaf, offsets)
    torch.testing.assert_close(gradient.values(), *torch.autograd.grad(expected.sum(), leaf))


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu() -> None:
    """Forward and backward, of every kind of rows."""
    model = Model().cuda()
    x, offsets = torch.randn(5, E, device="cuda"), torch.tensor([0, 2, 5], device="cuda")
    targets = torch.randn(2, N, E, device="cuda")

    def step() -> None:
        for rows in ((x, offsets), (jagged_cuda.nested.from_jagged(x, offsets), None)):
            y = model.hstu(*rows) + model.layer(*rows, causal=True)
            found = model.target(targets, y, rows[1]) + model.din(targets, y, rows[1])
            (found.sum() + model.interaction(targets, y, rows[1]).sum()).backward()

    step()  # cuBLAS makes its workspace
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- wrong calls

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
        "HSTULayer: divisor must be a number other than 0, or \"length\", got 'longest'",
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


def test_examples_in_docstrings() -> None:
    for found in pkgutil.iter_modules(jagged_cuda.nn.__path__, "jagged_cuda.nn."):
        assert doctest.testmod(importlib.import_module(found.name)).failed == 0
