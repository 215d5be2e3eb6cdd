"""jagged_cuda.nn: each module equals its padded twin of torch.nn; parameters, biases, dropout."""

from __future__ import annotations

import copy
import doctest
import importlib
import pkgutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_examples import (
    EACH_MODULE,
    EXAMPLE,
    KEYS,
    LAYOUT,
    E,
    Example,
    H,
    cotangent_of,
    draw,
    judge,
    make,
    run,
    run_twin,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_cuda
from jagged_cuda.nn import (
    HSTULayer,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops import hstu_key_ranges as masks
from jagged_cuda.testing.ops.layer_norm_mul_dropout import keep_of

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


@pytest.mark.parametrize("recompute", [False, True])
def test_hstu_layer_with_masks_and_biases(recompute: bool, device: torch.device) -> None:
    """As plain PyTorch, one sequence after another, by HSTU's rules for pairs of rows."""
    kind: Any = {"device": device, "dtype": torch.float64}
    layer = HSTULayer(E, H, recompute=recompute, **kind)
    setting = masks.Setting(
        Layout((9, 0, 14, 3)),
        targets=(3, 0, 4, 1),
        contextual=(2, 0, 3, 1),
        each=True,
        max_attn_len=4,
        min_full_attn_len=2,
        target_group=2,
    )
    total, offsets = setting.layout.total, setting.layout.offsets(device)
    x = torch.randn(total, E, **kind).requires_grad_()
    tables = [torch.randn(H, 6, **kind).requires_grad_() for _ in range(2)]
    kv_bias, row_scale = torch.randn(total, H, **kind).requires_grad_(), torch.rand(total, **kind)
    time = torch.randint(0, 99, (total,), device=device).cumsum(0)
    boundaries = torch.tensor([1, 40, 90, 150, 300], device=device)
    found = layer(
        x,
        offsets,
        causal=False,
        key_ranges=setting.call(jagged_cuda, device),
        row_scale=row_scale,
        kv_bias=kv_bias,
        time_bias=jagged_cuda.TimeBias(tables[0], time, time, boundaries),
        position_bias=jagged_cuda.PositionBias(tables[1], -2),
    )
    expected = []
    for seq, length in enumerate(setting.layout.lengths):
        rows = slice(int(offsets[seq]), int(offsets[seq]) + length)
        projected = F.silu(layer.uvqk_proj(layer.input_norm(x[rows])))
        u, *vqk = projected.chunk(4, 1)
        v, q, k = (t.unflatten(1, (H, -1)).transpose(0, 1) for t in vqk)
        place = torch.arange(length, device=device)
        apart = (time[rows, None] - time[None, rows]).abs()
        bias = tables[0][:, torch.bucketize(apart, boundaries, right=True)]
        bias = bias + tables[1][:, (place[:, None] - place + 2).clamp(0, 5)]
        scores = q @ k.mT / layer.qk_dim**0.5 + bias + kv_bias[rows].T[:, None]
        weights = F.silu(scores) * masks.definition(setting, seq).to(device)
        read = (weights @ v).transpose(0, 1).flatten(1) / max(length, 1) * row_scale[rows, None]
        expected.append(x[rows] + layer.out_proj(u * layer.output_norm(read)))
    wanted = torch.cat(expected)
    torch.testing.assert_close(found, wanted)
    leaves = (x, *tables, kv_bias, *layer.parameters())
    gradients = (torch.autograd.grad(out.sin().sum(), leaves) for out in (found, wanted))
    torch.testing.assert_close(*gradients)


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


def test_examples_in_docstrings() -> None:
    for found in pkgutil.iter_modules(jagged_cuda.nn.__path__, "jagged_cuda.nn."):
        assert doctest.testmod(importlib.import_module(found.name)).failed == 0
