"""Promises of every operator, whatever it computes: sizes, storages, logits, neighbours."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import CASE, DTYPE, TWO_DTYPES, assert_same_bits, calls, general, spec_of
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import CASES, EVERY, Case, Tensors
from jagged_cuda.testing.draws import Draw, judge_draw
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import STORAGES, Sample, Spec, draw_cotangents
from jagged_cuda.unfused import jagged_attention

LAYOUT = Layout((70, 0, 33, 1), base=5, tail=9)


# With each case the kernels that its device takes, and on a GPU those of all GPUs where there are
# others: for attention and the products of matrices.
CASE_AND_PATH = [
    pytest.param(
        case,
        torch.device(device),
        path,
        id=f"{name}-{device[:4]}-{path}",
        marks=[pytest.mark.cuda] if device != "cpu" else [],
    )
    for name, case in EVERY.items()
    for device, path in (("cpu", "best"), ("cuda:0", "best"), ("cuda:0", "mma_sync"))
    if path == "best" or "dims" in case.choices or name.endswith("jagged_out")
]
NAMES = ("case", "device", "path")
CHOSEN = pytest.mark.parametrize(NAMES, CASE_AND_PATH, indirect=["path"])


# --- sizes

# By their names in the table: each of these may be zero.
ZERO: dict[str, tuple[Any, ...]] = {
    "D": (0,),
    "N": (0,),
    "trailing": ((0,), (2, 0)),
    "heads": ((0, 0), (0, 2)),
    "queries": (0,),
    "padded_len": (0,),
    "capacity": (0,),
}
ZEROS = [
    pytest.param(case, {name: value}, id=f"{key}-{name}-{value}")
    for key, case in EVERY.items()
    for name, values in ZERO.items()
    for value in values
    if name in case.choices
]


@pytest.mark.parametrize(("case", "zero"), ZEROS)
@TWO_DTYPES
def test_a_size_of_zero(
    case: Case, zero: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    for layout in (LAYOUT, Layout((0, 0)), Layout(())):
        judge(case, spec_of(layout, **zero), dtype, device)


@CASE
@TWO_DTYPES
def test_200_000_sequences_on_the_cpu(case: Case, dtype: torch.dtype) -> None:
    """The same 500 sequences 400 times: the bits of the 500, which are judged.

    test_cuda_sizes.py judges 200,000 on a GPU, where that is quick.
    """
    rng = random.Random(3)
    lengths = tuple(rng.choice((0, 1, 1, 2, 5)) for _ in range(500))
    sizes = {"D": 8, "N": 8, "dims": (16, 16), "padded_len": 4, "queries": 2}
    few = case.sample(spec_of(Layout(lengths), **sizes), dtype, "cpu")
    given = draw_cotangents(case.call(jagged_cuda, few), few.spec, case.rows)
    expected = run(case, few, calls(case), lambda _: given)
    check(case, few, expected, given)
    layout = Layout(lengths * 400)
    assert layout.num_seqs == 200_000
    spec = dataclasses.replace(few.spec, layout=layout)
    many = Sample(spec, repeated(case, few.tensors, 400), layout.offsets(), None)
    found = run(case, many, calls(case), lambda _: repeated(case, given, 400))
    # Sums over the whole batch are 400 times as large.
    of_batch = {name for name in found if rows_of(case, name) in SHARED}
    expected = repeated(case, expected, 400)
    assert_same_bits(
        *({n: t for n, t in each.items() if n not in of_batch} for each in (found, expected))
    )
    for name in of_batch:
        whole = 400 * expected[name]
        limit = (1e-4 + 2 * torch.finfo(whole.dtype).eps) * float(whole.abs().max())
        torch.testing.assert_close(found[name], whole, rtol=0, atol=limit)


# Rows that belong to the batch as a whole.
SHARED = ("features", "table")


def rows_of(case: Case, name: str) -> Any:
    """What the rows of an argument, an output or a gradient are."""
    return case.rows[name.removeprefix("grad_")]


def repeated(case: Case, tensors: Tensors, times: int) -> Tensors:
    return {
        name: t if rows_of(case, name) in SHARED else t.repeat(times, *[1] * (t.dim() - 1))
        for name, t in tensors.items()
    }


# The definition pads: of attention and of matrices it would take a square of the length.
LONG = {name: case for name, case in EVERY.items() if {"q", "a"}.isdisjoint(case.rows)}
LONG.pop("jagged_jagged_bmm_jagged_out")


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_sequences_on_the_cpu(case: Case) -> None:
    """Longer than the parts that threads share; the fuzzer draws none, since definitions pad."""
    layout = Layout((3, 9_001, 0, 2), base=1, tail=2)
    sizes = {"D": 3, "N": 2, "trailing": (2,), "padded_len": layout.max_len}
    judge(case, spec_of(layout, **sizes), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dim", [-1, -2])
def test_softmax_of_long_lines_on_the_cpu(dim: int) -> None:
    """A line of more elements than are kept is read twice."""
    short, long = Layout((2, 1, 0)), Layout((33_000, 5, 7))
    spec = spec_of(short, kv_layout=long, cross=True, dim=dim)
    judge(CASES["jagged2_softmax"], spec, torch.float32, torch.device("cpu"))


# --- storages


@CASE
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_storage(case: Case, storage: str, dtype: str, device: torch.device) -> None:
    """All arguments, and incoming gradients, lie in memory like this."""
    op = next(key for key, each in EVERY.items() if each is case)
    inputs = list(case.inputs)
    for offsets_dtype, choices in (
        (torch.int32, {"D": 8, "N": 8, "dims": (16, 8), "trailing": (2, 4)}),
        (torch.int64, {"D": 5, "N": 3, "dims": (7, 5), "trailing": (3,), "heads": (3, 1)}),
    ):
        spec = dataclasses.replace(
            spec_of(LAYOUT, **choices, **general(case)),
            storage=dict.fromkeys(inputs, storage),
            offsets_dtype=offsets_dtype,
        )
        given = dict.fromkeys(case.outputs, storage)
        judge_draw(Draw(op, spec, dtype, device.type, str(device), gradient_storage=given))


# --- extreme logits

LOGIT = 200.0
WITH_LOGITS = [each for each in CASE_AND_PATH if "scale" in each.values[0].choices]


def signs(layout: Layout, device: torch.device) -> Tensor:
    """`[rows]`: of the sequences in turn all 1, all -1, and both."""
    seq = layout.seq_of_row(device)
    both = torch.where(torch.arange(layout.total, device=device) % 3 == 0, 1.0, -1.0)
    return torch.where(seq % 3 == 0, 1.0, torch.where(seq % 3 == 1, -1.0, both))


def with_logits(case: Case, spec: Spec, dtype: torch.dtype, device: torch.device) -> Sample:
    """A sample whose logits are +200 and -200: scale is 1, and a key is 1 or -1 everywhere."""
    sample = case.sample(spec, dtype, device)
    for name, tensor in sample.tensors.items():
        if name == "v":
            continue
        if name == "q":
            values = torch.full_like(tensor, LOGIT / tensor.shape[-1])
        else:
            size = 1.0 if name == "k" else LOGIT
            rows = size * signs(spec.rows_layout(case.rows[name]), device)
            values = rows.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape)
        sample.tensors[name] = values.to(dtype).contiguous()
    return sample


LOGIT_LAYOUT = Layout((130, 7, 33, 1, 64, 65, 0, 3, 129), base=2, tail=1)


@pytest.mark.parametrize(NAMES, WITH_LOGITS, indirect=["path"])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (128, 64)], ids=str)
@DTYPE
def test_logits_of_200_and_minus_200(
    case: Case, path: str, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Nothing overflows, and a row of very negative logits is not taken for an empty one."""
    for dim, causal in ((-1, False), (-2, True)):
        choices = {"scale": 1.0, "dims": dims, "dim": dim, "causal": causal, "queries": 5}
        spec = spec_of(LOGIT_LAYOUT, poisoned=False, **choices)
        sample = with_logits(case, spec, dtype, device)
        given = draw_cotangents(case.call(jagged_cuda, sample), spec, case.rows)
        found = run(case, sample, calls(case), lambda _, given=given: given)
        assert all(t.isfinite().all() for each, t in found.items() if each != "lse")
        check(case, sample, found, given)


@DTYPE
def test_logits_of_200_and_minus_200_unfused(dtype: torch.dtype, device: torch.device) -> None:
    case = CASES["jagged_flash_attention"]
    spec = spec_of(LOGIT_LAYOUT, poisoned=False, scale=1.0, dims=(8, 8), heads=None)
    sample = with_logits(case, spec, dtype, device)

    def call(given: Sample) -> Tensors:
        q, k, v = (given.tensors[name] for name in "qkv")
        return {"out": jagged_attention(q, k, v, given.offsets, scale=1.0)}

    given = draw_cotangents(call(sample), spec, case.rows)
    found = run(case, sample, call, lambda _: given)
    assert all(t.isfinite().all() for t in found.values())
    check(case, sample, found, given)


@pytest.mark.parametrize(
    ("name", "dim"), [("jagged_softmax", -2), ("jagged2_softmax", -1), ("jagged2_softmax", -2)]
)
@DTYPE
def test_softmax_of_huge_logits(
    name: str, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Unscaled, differences of logits are exact, however large the logits."""
    case = CASES[name]
    spec = spec_of(LOGIT_LAYOUT, poisoned=False, scale=1.0, dim=dim)
    sample = case.sample(spec, dtype, device)
    largest = 6e4 if dtype == torch.float16 else 1e7
    for each, tensor in sample.tensors.items():
        values = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1))
        sample.tensors[each] = (largest * (0.5 + 0.5 * values)).to(device, dtype)
    given = draw_cotangents(case.call(jagged_cuda, sample), spec, case.rows)
    check(case, sample, run(case, sample, calls(case), lambda _: given), given)


# --- determinism and neighbours


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only around the operators: the definition has no deterministic kernel on a GPU."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def joined(case: Case, first: Sample, second: Sample) -> Sample:
    """One batch of the sequences of two."""
    device = first.offsets.device
    layout = Layout(first.spec.layout.lengths + second.spec.layout.lengths)
    tensors = {
        name: t if case.rows[name] in SHARED else torch.cat((t, second.tensors[name]))
        for name, t in first.tensors.items()
    }
    spec = dataclasses.replace(first.spec, layout=layout)
    return Sample(spec, tensors, layout.offsets(device), None)


def alone(case: Case, sample: Sample, seq: int) -> Sample:
    """One sequence of a sample."""
    tensors = {}
    for name, tensor in sample.tensors.items():
        if case.rows[name] in SHARED:
            tensors[name] = tensor
            continue
        begin, end = sample.spec.rows_layout(case.rows[name]).offsets()[seq : seq + 2]
        tensors[name] = tensor[begin:end].clone()
    layout = Layout((sample.spec.layout.lengths[seq],))
    spec = dataclasses.replace(sample.spec, layout=layout)
    return Sample(spec, tensors, layout.offsets(sample.offsets.device), None)


@CHOSEN
@DTYPE
@pytest.mark.parametrize("choice", [0, 1])
def test_forward_does_not_depend_on_the_batch(
    case: Case,
    path: str,
    choice: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Sequences alone, among many short ones and among long ones: the same bits.

    The kernels choose tiles and the order of work by what a batch is like as a whole.
    """
    on_gpu = device.type == "cuda"
    lengths = (1300, 1, 511, 129, 3, 64) if on_gpu else (300, 1, 65, 33, 3)
    options = {
        "transpose": bool(choice),
        "dim": -1 - choice,
        "causal": bool(choice),
        "queries": (4, 70)[choice],
        "D": (24, 257)[choice],
        # On Hopper the transposed product of matrices is another kernel, if rows are whole vectors.
        "N": (40, 136 if "transpose" in case.choices else 129)[choice],
        "trailing": ((8,), (33,))[choice],
        "dims": ((64, 64), (40, 128))[choice],
        **general(case),
    }

    def drawn(lengths: tuple[int, ...], seed: int) -> Sample:
        return case.sample(spec_of(Layout(lengths), seed, False, **options), dtype, device)

    rng = random.Random(0)
    short = tuple(rng.choice((0, 1, 2, 3)) for _ in range(1500 if on_gpu else 100))
    sample = drawn(lengths, 1)
    with deterministic():
        expected = [case.call(jagged_cuda, alone(case, sample, i)) for i in range(len(lengths))]
    for others in ((), short, (lengths[0],) * 3):
        batch = joined(case, sample, drawn(others, 2))
        with deterministic():
            found = case.call(jagged_cuda, batch)
        for seq, one in enumerate(expected):
            part = {}
            for name, values in found.items():
                begin, end = batch.spec.rows_layout(case.rows[name]).offsets()[seq : seq + 2]
                part[name] = values[begin:end]
            assert_same_bits(part, one)


@CHOSEN
@DTYPE
def test_deterministic_mode_repeats(
    case: Case, path: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Forward and backward, on long and on short sequences, with everything written."""
    longest = 700 if device.type == "cuda" else 70
    for lengths in ((longest, 0, 130, 65), (3, 0, 40, 1) * 30):
        spec = spec_of(Layout(lengths, base=2, tail=3), queries=5, **general(case))
        sample = case.sample(spec, dtype, device)
        given = draw_cotangents(case.call(jagged_cuda, sample), spec, case.rows)
        with deterministic():
            first = run(case, sample, calls(case), lambda _, given=given: given)
            for _ in range(3):
                again = run(case, sample, calls(case), lambda _, given=given: given)
                assert_same_bits(again, first)
        check(case, sample, first, given)
