"""layer_norm_mul_dropout: what is dropped, wide rows, dtypes, strides and wrong calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import DTYPE, sentence, spec_of
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.layer_norm_mul_dropout import keep_of, random_words
from jagged_cuda.testing.samples import STORAGES, Sample, draw_cotangents

OP = CASES["layer_norm_mul_dropout"]


def keep_by_operator(
    rows: int, columns: int, p: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """With a norm of 1 and u of 1, the result is what is kept."""
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    weight, bias = x.new_zeros(columns), x.new_ones(columns)
    given = torch.tensor([seed], device=device)
    return jagged_cuda.layer_norm_mul_dropout(x, torch.ones_like(x), weight, bias, p=p, seed=given)


# --- what is dropped


def test_known_answers_of_philox() -> None:
    """One that its authors publish (Random123, kat_vectors)."""
    assert [hex(w) for w in random_words(0, 1, 1, "cpu")[0, 0].tolist()] == [
        *("0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8")
    ]


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3, -(2**63)])
@pytest.mark.parametrize("columns", [1, 3, 4, 7, 8, 64, 65, 520, 1032])
@DTYPE
def test_drops_what_the_seed_says(
    seed: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The same elements in every dtype and on every path."""
    for p in (1e-4, 0.25, 0.9):
        found = keep_by_operator(67, columns, p, seed, device, dtype)
        expected = keep_of(torch.zeros(67, columns, device=device).double(), p, seed)
        assert torch.equal(found != 0, expected != 0)
        torch.testing.assert_close(found, expected.to(dtype))


def test_drops_one_in_ten() -> None:
    """Of each column, of each row and of neighbours, within five standard deviations."""
    rows, columns, p = 4096, 512, 0.1
    dropped = (
        keep_by_operator(rows, columns, p, 3, torch.device("cpu"), torch.float32) == 0
    ).double()

    def near(rate: float, found: Tensor, count: int) -> bool:
        return bool(((found - rate).abs() < 5 * math.sqrt(rate / count)).all())

    assert near(p, dropped.mean(), rows * columns)
    assert near(p, dropped.mean(0), rows)
    assert near(p, dropped.mean(1), columns)
    other = (
        keep_by_operator(rows, columns, p, 4, torch.device("cpu"), torch.float32) == 0
    ).double()
    neighbours = (dropped[1:] * dropped[:-1], dropped[:, 1:] * dropped[:, :-1], dropped * other)
    assert all(near(p * p, both.mean(), both.numel()) for both in neighbours)


@DTYPE
def test_a_dropped_element_is_zero_whatever_it_was(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Infinite ones too, and no gradient comes through."""
    rows, columns, p, seed = 9, 24, 0.5, torch.tensor([5], device=device)
    dropped = keep_of(torch.zeros(rows, columns), p, 5).to(device) == 0
    x = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    u = torch.where(dropped, math.inf, 1.0).to(dtype).requires_grad_()
    weight, bias = torch.ones(2, columns, device=device, dtype=dtype)
    out = jagged_cuda.layer_norm_mul_dropout(x, u, weight, bias, p=p, seed=seed)
    assert (out[dropped] == 0).all()
    assert out.isfinite().all()
    everything = jagged_cuda.layer_norm_mul_dropout(x, u, weight, bias, p=1.0, seed=seed)
    assert (everything == 0).all()
    gradients = torch.autograd.grad(everything.sum(), (u,))
    assert all((g == 0).all() for g in gradients)
    (grad_u,) = torch.autograd.grad(out.sum(), u)
    assert (grad_u[dropped] == 0).all()


def test_nothing_is_dropped_without_p(device: torch.device) -> None:
    x, weight = torch.randn(5, 8, device=device), torch.randn(8, device=device)
    seed = torch.tensor([5], device=device)
    call = jagged_cuda.layer_norm_mul_dropout
    assert torch.equal(call(x, x, weight, weight), call(x, x, weight, weight, seed=seed))


@pytest.mark.cuda
def test_a_graph_replays_with_another_seed() -> None:
    seed = torch.tensor([1], device="cuda")
    leaves = [torch.randn(40, 64, device="cuda", requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(64, device="cuda", requires_grad=True) for _ in range(2)]

    def step() -> tuple[Tensor, ...]:
        out = jagged_cuda.layer_norm_mul_dropout(*leaves, p=0.5, seed=seed)
        return (out.detach(), *torch.autograd.grad(out.sum(), leaves))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for value in (1, 2, -7):
        seed.fill_(value)
        graph.replay()
        for ours, expected in zip(found, step(), strict=True):
            assert torch.equal(ours, expected)


# --- shapes, dtypes, strides


@pytest.mark.parametrize("columns", [1, 2, 255, 256, 1000, 2048, 2056, 4096, 8192, 8200])
@DTYPE
def test_wide_rows(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    judge(OP, spec_of(Layout((5, 0, 3)), D=columns, p=0.2), dtype, device)


@DTYPE
def test_many_rows(dtype: torch.dtype, device: torch.device) -> None:
    """More than one part of the sums for weight and bias."""
    judge(OP, spec_of(Layout((3000, 1, 2500)), D=24, p=0.1), dtype, device)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("columns", [5, 8, 264])
@DTYPE
def test_operands_in_place(
    columns: int, storage: str, dtype: torch.dtype, device: torch.device
) -> None:
    """x, u and the incoming gradient as slices, transposed, expanded."""
    spec = spec_of(Layout((7, 2)), poisoned=False, D=columns, p=0.2)
    given = OP.sample(spec, dtype, device)
    tensors = given.tensors | {name: STORAGES[storage](given.tensors[name]) for name in ("x", "u")}
    sample = Sample(spec, tensors, given.offsets, None)

    def call(sample: Sample) -> dict[str, Tensor]:
        t, seed = sample.tensors, OP.registered(sample)["layer_norm_mul_dropout"][4]
        return {"out": jagged_cuda.layer_norm_mul_dropout(*t.values(), p=0.2, seed=seed)}

    cotangents = {}

    def draw(found: dict[str, Tensor]) -> dict[str, Tensor]:
        drawn = draw_cotangents(found, spec, OP.rows)
        cotangents.update({name: STORAGES[storage](t) for name, t in drawn.items()})
        return cotangents

    found = run(OP, sample, call, draw)
    check(OP, sample, found, cotangents)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_weights_of_either_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Their gradients are of their own dtype, and all else has the same bits."""
    x, u = (torch.randn(6, 16, device=device, dtype=dtype) for _ in range(2))
    columns = [torch.randn(16, device=device, dtype=dtype) for _ in range(2)]
    results = []
    for kind in (dtype, torch.float32):
        leaves = [t.to(kind).requires_grad_() for t in columns]
        out = jagged_cuda.layer_norm_mul_dropout(x, u, *leaves)
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert {g.dtype for g in gradients} == {kind}
        results.append([out, *(g.to(dtype) for g in gradients)])
    assert all(map(torch.equal, *results))


def test_autocast_leaves_the_weights(device: torch.device) -> None:
    leaves = [torch.randn(6, 16, device=device, requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(16, device=device, requires_grad=True) for _ in range(2)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = jagged_cuda.layer_norm_mul_dropout(*leaves)
    assert out.dtype == torch.bfloat16
    expected = jagged_cuda.layer_norm_mul_dropout(*(t.bfloat16() for t in leaves[:2]), *leaves[2:])
    assert torch.equal(out, expected)
    assert {g.dtype for g in torch.autograd.grad(out.sum(), leaves)} == {torch.float32}


# --- memory and sizes


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [64, 1024, 7])
def test_memory(columns: int) -> None:
    """Forward takes its result; backward its gradients, and a little for partial sums."""
    leaves = [
        torch.randn(
            2**25 // columns, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(2)
    ]
    leaves += [torch.randn(columns, device="cuda", requires_grad=True) for _ in range(2)]
    seed, size = torch.tensor([1], device="cuda"), leaves[0].nbytes

    def peak() -> int:
        return torch.cuda.max_memory_allocated()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = jagged_cuda.layer_norm_mul_dropout(*leaves, p=0.1, seed=seed)
    assert peak() - before <= size + 2**16
    grad = torch.ones_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, grad)
    statistics = 8 * len(out) if columns == 7 else 0
    assert peak() - before <= 2 * size + statistics + 2**24


@pytest.mark.cuda
def test_out_of_memory() -> None:
    x = torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16)
    rows = 2 * torch.cuda.mem_get_info()[1] // x.nbytes
    wide, weight = x.expand(rows, 64), torch.ones(64, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA layer_norm_mul_dropout: out of memory"):
        jagged_cuda.layer_norm_mul_dropout(wide, wide, weight, weight)


@pytest.mark.cuda
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_31_elements() -> None:
    """The last rows have the bits that they have alone; so has what is dropped."""
    rows, columns, last = 2**22 + 3, 512, 5
    x, u, g = (
        torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)
        for _ in range(3)
    )
    columns_of = [torch.randn(columns, device="cuda") for _ in range(2)]

    def run(count: int) -> list[Tensor]:
        leaves = [t[-count:].requires_grad_() for t in (x, u)]
        out = jagged_cuda.layer_norm_mul_dropout(*leaves, *columns_of)
        return [t[-last:].clone() for t in (out, *torch.autograd.grad(out, leaves, g[-count:]))]

    for whole, alone in zip(run(rows), run(last), strict=True):
        assert torch.equal(whole, alone)


# --- wrong calls

X, WEIGHT = torch.ones(2, 3), torch.ones(3)
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "p": (lambda f: f(X, X, WEIGHT, WEIGHT, p=1.5), "p must be from 0 to 1, got 1.5"),
    "no seed": (
        lambda f: f(X, X, WEIGHT, WEIGHT, p=0.5),
        "seed must be a tensor of [1] int64, since p is not 0, got None",
    ),
    "a number as seed": (
        lambda f: f(X, X, WEIGHT, WEIGHT, p=0.5, seed=3),
        "seed must be a tensor or None, got a int",
    ),
    "seeds": (
        lambda f: f(X, X, WEIGHT, WEIGHT, p=0.5, seed=torch.tensor([1, 2])),
        "seed must be [1], got [2]",
    ),
    "a seed of int32": (
        lambda f: f(X, X, WEIGHT, WEIGHT, p=0.5, seed=torch.tensor([1], dtype=torch.int32)),
        "seed must be int64, got int32",
    ),
    "other rows": (lambda f: f(X, X[1:], WEIGHT, WEIGHT), "u must be [2, 3], got [1, 3]"),
    "wide weight": (
        lambda f: f(X, X, torch.ones(4), WEIGHT),
        "weight must be [3], got [4]",
    ),
    "weight of another dtype": (
        lambda f: f(X, X, WEIGHT.half(), WEIGHT),
        "weight must be float32, got float16",
    ),
    "three dimensions": (
        lambda f: f(X[None], X[None], WEIGHT, WEIGHT),
        "x must be [T, D], got [1, 2, 3]",
    ),
}


@pytest.mark.parametrize(("call", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call: Callable[[Any], Any], expected: str) -> None:
    found = sentence(call, jagged_cuda.layer_norm_mul_dropout)
    assert found == f"layer_norm_mul_dropout: {expected}"


def test_the_kernel_refuses_a_wrong_p() -> None:
    op = torch.ops.jagged_cuda.layer_norm_mul_dropout.default
    text = sentence(op, X, X, WEIGHT, WEIGHT, torch.tensor([1]), 1e-6, -0.5)
    assert text == "layer_norm_mul_dropout: p must be from 0 to 1, got -0.500000"
