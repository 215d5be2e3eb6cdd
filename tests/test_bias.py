"""Bias and activation of jagged_dense_bmm: each activation, beside what all operators promise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import DTYPE
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.comparison import MismatchError
from jagged_cuda.testing.judge import check, judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_dense_bmm import ACTIVATIONS, activate
from jagged_cuda.testing.ops.jagged_dense_bmm import BIASED as CASE
from jagged_cuda.testing.samples import Sample, Spec

ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)

LAYOUT = Layout((70, 0, 33, 1), base=2, tail=3)


def spec_of(activation: str | None, **choices: Any) -> Spec:
    return Spec(
        seed=1, layout=LAYOUT, choices={"D": 24, "N": 16, "activation": activation} | choices
    )


@ACTIVATION
@DTYPE
@pytest.mark.parametrize("columns", [5, 8, 32, 129])
def test_tiles(
    activation: str | None, dtype: torch.dtype, columns: int, device: torch.device
) -> None:
    judge(CASE, spec_of(activation, N=columns), dtype, device)


@pytest.mark.cuda
@ACTIVATION
def test_tf32(activation: str | None, tf32: None) -> None:
    judge(CASE, spec_of(activation), torch.float32, "cuda")
    assert last_kernel("cuda").endswith("jagged_sum")


@ACTIVATION
def test_gradients(activation: str | None, device: torch.device) -> None:
    """First and second derivatives, with an activation and without."""
    spec = dataclasses.replace(
        CASE.spec("small", 0),
        layout=Layout((3, 0, 1, 4), base=1, tail=1),
        choices={"D": 3, "N": 2, "activation": activation},
        storage={},
        poisoned=False,
    )
    sample = CASE.sample(spec, torch.float64, device)
    names = ("x", "y", "bias")

    def function(*values: Tensor) -> Tensor:
        tensors = dict(zip(names, values, strict=True))
        return CASE.function(jagged_cuda, spec, tensors, sample.offsets, None)["out"]

    leaves = [sample.tensors[name].clamp(-2, 2).requires_grad_() for name in names]
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@ACTIVATION
def test_without_a_bias_and_rows_outside(activation: str | None, device: torch.device) -> None:
    """Rows outside every sequence are 0, though sigmoid(0) is not."""
    offsets = torch.tensor([1, 4], device=device)
    x, y = torch.randn(6, 3, device=device), torch.randn(1, 3, 5, device=device)
    x[0] = x[4:] = math.nan
    out = jagged_cuda.jagged_dense_bmm(x, y, offsets, activation=activation)
    torch.testing.assert_close(out[1:4], activate(x[1:4] @ y[0], activation))
    assert not out[0].any() and not out[4:].any()


def test_one_bias_for_all(device: torch.device) -> None:
    """An expanded bias is read in place; its gradient is summed over the batch."""
    offsets = LAYOUT.offsets(device)
    x = torch.randn(LAYOUT.total, 3, device=device)
    y = torch.randn(4, 3, 5, device=device)
    bias = torch.randn(5, device=device, requires_grad=True)
    out = jagged_cuda.jagged_dense_bmm(x, y, offsets, bias=bias.expand(4, 5))
    plain = jagged_cuda.jagged_dense_bmm(x, y, offsets)
    inside = (LAYOUT.seq_of_row(device) < 4)[:, None]
    torch.testing.assert_close(out, (plain + bias).where(inside, 0.0))
    (grad,) = torch.autograd.grad(out.sum(), bias)
    torch.testing.assert_close(grad, torch.full_like(grad, sum(LAYOUT.lengths)))


@ACTIVATION
def test_nonfinite_sums(activation: str | None, device: torch.device) -> None:
    sums = torch.tensor([math.nan, math.inf, 200.0, -200.0, 1e-4, -0.0], device=device)
    x, y = torch.zeros(2, 1, device=device), torch.zeros(1, 1, 6, device=device)
    offsets = torch.tensor([0, 2], device=device)
    out = jagged_cuda.jagged_dense_bmm(x, y, offsets, bias=sums[None], activation=activation)
    expected = activate(sums, activation)
    if activation == "gelu":
        # Not by F.gelu, whose AVX-512 kernel makes NaN of inf.
        expected = sums * torch.special.ndtr(sums)
    torch.testing.assert_close(out, expected.expand(2, 6), equal_nan=True)


@pytest.mark.parametrize(
    ("activation", "dtype"), [*((name, None) for name in ACTIVATIONS), ("gelu", torch.bfloat16)]
)
def test_compile(activation: str | None, dtype: torch.dtype | None, device: torch.device) -> None:
    """Fullgraph, dynamic, forward and backward; autocast casts the bias too."""
    torch._dynamo.reset()

    def forward(x: Tensor, y: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return jagged_cuda.jagged_dense_bmm(x, y, offsets, bias=bias, activation=activation)

    def results(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(*leaves, sample.offsets)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    spec = dataclasses.replace(spec_of(activation), poisoned=False)
    sample = CASE.sample(spec, torch.float32, device)
    leaves = [t.detach().requires_grad_() for t in sample.tensors.values()]
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = results(forward)
    torch.testing.assert_close(results(compiled), expected)
    assert expected[0].dtype == (dtype or torch.float32)


# --- the judge


@pytest.mark.parametrize("z", [2.0**-22, -(2.0**-22), 2.0**-10, -(2.0**-10)])
def test_relu_may_open_or_close_within_rounding_of_zero_alone(z: float) -> None:
    spec = Spec(seed=1, layout=Layout((1,)), choices={"D": 2, "N": 1, "activation": "relu"})
    x, y = torch.ones(1, 2), torch.tensor([[[1.0], [z - 1.0]]])
    tensors = {"x": x, "y": y, "bias": torch.zeros(1, 1)}
    sample = Sample(spec, tensors, spec.layout.offsets("cpu"), None)
    gate = float(z <= 0)  # the wrong one
    found = {"out": torch.tensor([[max(z, 0.0)]]), "grad_bias": torch.full((1, 1), gate)}
    found |= {"grad_x": gate * y[0].T, "grad_y": gate * x.reshape(1, 2, 1)}
    for name in ("grad_x", "grad_y", "grad_bias"):
        judged = {"out": found["out"], name: found[name]}
        if abs(z) < 1e-6:
            check(CASE, sample, judged, {"out": torch.ones(1, 1)})
        else:
            with pytest.raises(MismatchError, match=name):
                check(CASE, sample, judged, {"out": torch.ones(1, 1)})


@pytest.mark.parametrize("near", [True, False])
def test_a_neighbouring_result_may_be_stored_near_their_middle_alone(near: bool) -> None:
    """Two rows whose gradients cancel, but for the stored result of one of them, from which tanh's
    gradient comes."""
    x = torch.linspace(0.5, 1.5, 1025, dtype=torch.float16)
    exact = torch.tanh(x.double() * 0.75)
    stored = exact.to(torch.float16)
    other = torch.nextafter(stored, torch.where(exact > stored, 2, 0).to(torch.float16))
    off_middle = ((stored.double() + other.double()) / 2 - exact).abs()
    chosen = int(off_middle.argmin() if near else off_middle.argmax())
    assert (off_middle[chosen] < 1e-6) == near

    spec = Spec(seed=1, layout=Layout((2,)), choices={"D": 1, "N": 1, "activation": "tanh"})
    tensors = {
        "x": x[chosen].expand(2, 1),
        "y": torch.full((1, 1, 1), 0.75),
        "bias": torch.zeros(1, 1),
    }
    tensors = {name: t.half() for name, t in tensors.items()}
    sample = Sample(spec, tensors, spec.layout.offsets("cpu"), None)
    slopes = 1 - torch.stack([other[chosen], stored[chosen]]).double() ** 2
    grad_y = float(x[chosen]) * (slopes[0] - slopes[1])
    found = {"out": stored[chosen].expand(2, 1), "grad_y": grad_y.reshape(1, 1, 1).half()}
    flow = {"out": torch.tensor([[1.0], [-1.0]], dtype=torch.float16)}
    if near:
        check(CASE, sample, found, flow)
    else:
        with pytest.raises(MismatchError, match="grad_y"):
            check(CASE, sample, found, flow)
