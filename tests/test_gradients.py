"""Gradients against finite differences, and each registered operator against PyTorch's opcheck."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import CASE, TWO_DTYPES, spec_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import jagged_cuda
from jagged_cuda.testing.cases import CASES, EVERY, INDEX_OPERATORS, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

# Small enough that every element can be moved one by one.
SIZES: dict[str, Any] = {"D": 3, "N": 2, "trailing": (2, 2), "dims": (3, 2), "max_len": False}
SIZES |= {"transpose": False, "capacity": "spare", "padded_len": 3, "total": None}
SIZES |= {"queries": 3, "p": 0.3}
VARIANTS = {
    "plain": {"heads": (1, 1), "causal": False, "window_size": (-1, -1), "scale": 0.7}
    | {"dim": -1, "activation": "gelu"},
    "grouped_causal": {"heads": (2, 1), "causal": True, "window_size": (-1, -1), "scale": -0.4}
    | {"transpose": True, "dim": -2, "activation": "tanh"},
    "window": {"heads": None, "causal": False, "window_size": (1, 1), "scale": None}
    | {"activation": None},
}
# Options of some operators alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped_causal": {"ranges": "scattered", "bias_heads": True, "buckets": 5}
    | {"kv_lengths": True, "row_scale": True},
    "window": {"ranges": "hstu", "tables": "time", "time": "past", "buckets": 5, "divisor": -0.25},
}
LAYOUT, KV_LAYOUT = Layout((3, 0, 1, 4), base=1, tail=1), Layout((2, 2, 0, 5), tail=1)


def small_sample(
    case: Case, variant: str, dtype: torch.dtype, device: torch.device | str, *, cross: bool = False
) -> Sample:
    options = {n: value for n, value in OPTIONS[variant].items() if n in case.choices}
    choices = SIZES | VARIANTS[variant] | options
    if case.name.endswith("softmax") and choices["scale"] is None:
        choices["scale"] = 1.0
    keys = KV_LAYOUT if cross else None
    spec = spec_of(LAYOUT, poisoned=False, kv_layout=keys, **choices)
    return case.sample(spec, dtype, device)


def function_of(case: Case, sample: Sample) -> tuple[Callable[..., Any], list[Tensor]]:
    """The operator as a function of its differentiable arguments; LSE without its rows of -inf."""
    names = case.inputs

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        tensors = sample.tensors | dict(zip(names, values, strict=True))
        found = case.call(jagged_cuda, dataclasses.replace(sample, tensors=tensors))
        return tuple(t.where(t.isfinite(), 0.0) for t in found.values())

    # Outliers would make finite differences of a softmax inexact.
    return function, [sample.tensors[name].clamp(-2, 2).requires_grad_() for name in names]


CHECKED = [
    pytest.param(case, variant, cross, id=f"{name}-{variant}{'-cross' if cross else ''}")
    for name, case in EVERY.items()
    for variant in VARIANTS
    for cross in case.choices.get("cross", (False,))
]


@pytest.mark.parametrize(("case", "variant", "cross"), CHECKED)
def test_gradcheck(case: Case, variant: str, cross: bool, device: torch.device) -> None:
    function, inputs = function_of(
        case, small_sample(case, variant, torch.float64, device, cross=cross)
    )
    assert gradcheck(function, inputs)


PRODUCTS = [name for name, case in CASES.items() if name.endswith(("_bmm", "_jagged_out"))]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("variant", ["plain", "grouped_causal"])
def test_gradgradcheck_of_the_products(name: str, variant: str, device: torch.device) -> None:
    case = CASES[name]
    cross = "cross" in case.choices
    sample = small_sample(case, variant, torch.float64, device, cross=cross)
    function, inputs = function_of(case, sample)
    assert gradgradcheck(function, inputs)


ROWS = ["jagged_to_padded", "padded_to_jagged", "jagged_sum", "jagged_mean", "jagged_broadcast"]
ROWS += ["jagged_dense_add", "jagged_dense_mul"]


@pytest.mark.parametrize("name", ROWS)
def test_gradgradcheck_of_conversions_and_reductions(name: str, device: torch.device) -> None:
    case = CASES[name]
    function, inputs = function_of(case, small_sample(case, "plain", torch.float64, device))
    assert gradgradcheck(lambda *x: tuple(t.square() for t in function(*x)), inputs)


@pytest.mark.parametrize("name", [name for name in PRODUCTS if "capacity" in CASES[name].choices])
def test_gradients_where_a_matrix_does_not_fit(name: str, device: torch.device) -> None:
    case = CASES[name]
    sample = small_sample(case, "plain", torch.float64, device, cross=True)
    choices = dict(sample.spec.choices) | {"capacity": "short"}
    sample = case.sample(dataclasses.replace(sample.spec, choices=choices), torch.float64, device)
    function, inputs = function_of(case, sample)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize(
    "name",
    [
        *("jagged_softmax", "jagged2_softmax", "layer_norm_mul_dropout"),
        *("jagged_flash_attention", "jagged_hstu_attention", "jagged_target_attention"),
    ],
)
def test_there_is_no_double_backward(name: str, device: torch.device) -> None:
    """It raises; a silent zero would be wrong."""
    case = CASES[name]
    function, inputs = function_of(case, small_sample(case, "plain", torch.float64, device))
    first = torch.autograd.grad(function(*inputs)[0].pow(2).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}_backward: gradients .* not supported"):
        torch.autograd.grad(sum(g.sum() for g in first), inputs)


@CASE
@pytest.mark.parametrize("variant", ["plain", "grouped_causal"])
@TWO_DTYPES
def test_opcheck(case: Case, variant: str, dtype: torch.dtype, device: torch.device) -> None:
    cross = "cross" in case.choices and variant == "grouped_causal"
    sample = small_sample(case, variant, dtype, device, cross=cross)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in sample.tensors.items()}
    calls = case.registered(dataclasses.replace(sample, tensors=leaves))
    assert next(iter(calls)) == case.name
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.jagged_cuda, name).default, arguments)


def test_every_registered_operator_is_checked() -> None:
    """By test_opcheck, or tests of indices; `jagged_cuda` names them as operators.h does."""
    sample_of = functools.partial(small_sample, variant="plain", dtype=torch.float32, device="cpu")
    checked = {name for case in CASES.values() for name in case.registered(sample_of(case))}
    checked |= INDEX_OPERATORS
    names = torch._C._dispatch_get_all_op_names()
    assert {f"jagged_cuda::{name}" for name in checked} == {
        name for name in names if name.startswith("jagged_cuda::")
    }
