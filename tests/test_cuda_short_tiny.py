"""Attention of short and tiny sequences, alone and among longer ones."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from on_cuda import CUDA, HALF_DTYPES, HOPPER
from plain import assert_same_bits, calls, spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

pytestmark = pytest.mark.cuda

# Lengths beside those of a block of 16 rows and of the longest tiny sequence, among empty ones.
TINY = Layout((*(0,) * 70, 64, 1, 63, 0, 17, 16, 33, 48, *(0,) * 70), base=5, tail=70)
TINY_KEYS = Layout((*(0,) * 69, 3, 1, 64, 0, 5, 32, 16, 64, 49, *(0,) * 70), base=2, tail=4)
TINY_WIDE = Layout((*(0,) * 70, 32, 1, 31, 0, 17, 16, 15, 8, *(0,) * 70), base=5, tail=70)
TINY_WIDE_KEYS = Layout((*(0,) * 69, 3, 1, 32, 0, 5, 32, 16, 17, 9, *(0,) * 70), base=2, tail=4)
MIXED = Layout((64, 65, 63, 0, 64, 128, 1, 3, 200), base=5, tail=70)
# So many short ones that the longer ones are looked for in slabs of rows.
SLABS = Layout(
    (*(3,) * 60, 65, 64, 128, 200, *(0,) * 30, 66, 65, 65, 300, *(1,) * 40), base=5, tail=70
)


def slab_edges() -> Layout:
    """Longer sequences whose tiles begin beside the edges of slabs of 32 and 64 rows."""
    base, lengths = 5, []
    for place in (63, 1, 31, 33, 0):
        begin = base + sum(lengths)
        lengths += [(place - begin) % 64, 130]
    return Layout((*lengths, *(0,) * 200), base=base, tail=70)


# With eight heads so many that a CTA looks in more than one slab (looped_grid).
# The padded reference has a matrix of the longest for each sequence and head: hence no longer ones.
CROWD = Layout((*(24, 3, 0, 9, 33, 1) * 60, 65, 200, 129, *(2,) * 90, 40), base=5, tail=70)
# Some between short and long ones, among so many others that they are looked for in slabs.
BETWEEN = Layout((*(3, 90, 70) * 30, 257, 330, 256, *(1,) * 20, 300), base=5, tail=70)
MIXED_KEYS = Layout((65, 64, 0, 70, 64, 10, 64, 100, 63), base=2, tail=66)
# Beside the edges of blocks of 16 rows, of steps of 32, 64 and 128, and of tiny and long sequences.
SHORT = Layout(
    (65, 0, 80, 64, 81, 256, 1, 129, 255, 16, 66, 0, 96, 97, 160, 161, 192, 193), base=5, tail=70
)
SHORT_KEYS = Layout(
    (70, 100, 0, 65, 256, 3, 128, 64, 176, 90, 7, 0, 145, 33, 129, 1, 65, 224), base=2, tail=66
)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 4)])  # the last by twos
@pytest.mark.parametrize(("dims", "bucket"), [((32, 16), 32), ((8, 32), 32), ((64, 40), 64)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_tiny_sequences(
    dtype: torch.dtype, dims: tuple[int, int], bucket: int, heads: tuple[int, int], cross: bool
) -> None:
    """Where the caller says that none is longer, nothing but the kernel for tiny sequences runs."""
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (5, 3)}):
        spec = spec_of(TINY, dims=dims, heads=heads, max_len=True, **options)
        spec = dataclasses.replace(spec, kv_layout=TINY_KEYS if cross else None)
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        pairs = ".pairs" if heads == (4, 4) else ""
        assert last_kernel("cuda") == f"cuda.attention.forward.tiny.d{bucket}{pairs}"
        judge(case, spec, dtype, CUDA)
        assert last_kernel("cuda") == f"cuda.attention.backward.tiny.d{bucket}"


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize(
    ("dims", "bucket"),
    [
        *(((72, 128), 128), ((128, 96), 128), ((72, 96), 128)),
        *(((136, 256), 256), ((208, 24), 256), ((136, 192), 256)),
    ],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_tiny_sequences_of_wide_rows(
    dtype: torch.dtype, dims: tuple[int, int], bucket: int, cross: bool
) -> None:
    """Head dims above 64: half as many rows; backward each head has keys of its own."""
    case = CASES["jagged_flash_attention"]
    for heads, options in (
        ((3, 3), {}),
        ((3, 3), {"causal": True}),
        ((2, 2), {"window_size": (5, 3), "scale": -0.3}),
        ((4, 2), {"causal": True}),
    ):
        spec = spec_of(TINY_WIDE, dims=dims, heads=heads, max_len=True, **options)
        spec = dataclasses.replace(spec, kv_layout=TINY_WIDE_KEYS if cross else None)
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        columns = min(c for c in (96, 128, 192, 256) if c >= max(dims))
        assert last_kernel("cuda") == f"cuda.attention.forward.tiny.d{columns}"
        judge(case, spec, dtype, CUDA)
        is_tiny = last_kernel("cuda") == f"cuda.attention.backward.tiny.d{bucket}"
        assert is_tiny == (heads[0] == heads[1])


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("path", ["best", "mma_sync"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_tiny_among_longer_sequences(
    dim: int, path: str, cross: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels share a batch; each row is written by one of them."""
    if path == "mma_sync":
        monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "mma_sync")
    case = CASES["jagged_flash_attention"]
    for layout, causal, heads in (
        (MIXED, False, (4, 2)),
        (MIXED, True, (4, 2)),
        (SLABS, False, (4, 2)),
        (slab_edges(), True, (4, 2)),
        (CROWD, True, (8, 8)),
        (BETWEEN, False, (3, 3)),
    ):
        spec = spec_of(layout, dims=(dim, dim), causal=causal, heads=heads)
        spec = dataclasses.replace(
            spec, kv_layout=MIXED_KEYS if cross and layout is MIXED else None
        )
        judge(case, spec, torch.bfloat16, CUDA)


@pytest.mark.parametrize("dim", [32, 64, 128, 192])
def test_no_sequence_but_rows(dim: int) -> None:
    """All rows are outside; new memory holds NaN in deterministic mode, so none may be left."""
    case = CASES["jagged_flash_attention"]
    torch.use_deterministic_algorithms(True)
    try:
        for base, tail in ((150, 150), (0, 70), (1100, 0)):
            spec = spec_of(Layout((), base=base, tail=tail), dims=(dim, dim), heads=(2, 1))
            judge(case, spec, torch.bfloat16, CUDA)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dim", [32, 64, 128, 192])
def test_the_same_offsets_for_fewer_keys(dim: int) -> None:
    """Offsets past the end of k, given as kv_offsets too, never reach rows behind k."""
    q = torch.randn(300, 2, dim, device=CUDA, dtype=torch.bfloat16)
    behind = torch.full((400, 2, dim), float("nan"), device=CUDA, dtype=torch.bfloat16)
    keys = behind[:200].copy_(q[:200])
    for lengths in ((20,) * 15, (60,) * 5, (150,) * 2, (300,)):
        offsets = jagged_cuda.offsets_from_lengths(torch.tensor(lengths, device=CUDA))
        leaves = [tensor.requires_grad_() for tensor in (q.clone(), keys.detach(), keys.detach())]
        out = jagged_cuda.jagged_flash_attention(*leaves, offsets, kv_offsets=offsets)
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert all(bool(t.isfinite().all()) for t in (out, *gradients)), lengths


# So many that other kernels take them than one of them alone.
MANY_SHORT = Layout(SHORT.lengths * 12)


@pytest.mark.parametrize("dim", [32, 64, 128, 192])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize(
    "layout", [MIXED, SLABS, SHORT, MANY_SHORT], ids=["mixed", "slabs", "short", "many"]
)
def test_tiny_and_short_sequences_do_not_depend_on_neighbours(
    layout: Layout, heads: tuple[int, int], dim: int
) -> None:
    """A sequence alone, and with max_len, gives the bits that it gives among others."""
    case = CASES["jagged_flash_attention"]
    sample = case.sample(spec_of(layout, heads=heads, dims=(dim, dim)), torch.bfloat16, CUDA)
    whole = run(case, sample, calls(case), None)
    for begin, end in itertools.pairwise(layout.offsets().tolist()[: len(SLABS.lengths)]):
        if begin == end:
            continue
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        for max_len in (False, True):
            spec = spec_of(Layout((end - begin,)), max_len=max_len, heads=heads, dims=(dim, dim))
            found = run(case, Sample(spec, rows, offsets, None), calls(case), None)
            assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


# So few tiles, most of them of tiny sequences, that one launch has all kernels and looks in slabs.
FEW_SLABS = Layout((*(5,) * 40, 70, 33, 130, 200, *(3,) * 20, 64, 65), base=3, tail=40)


@pytest.mark.parametrize("dim", [24, 64, 96, 128])
def test_few_tiles_among_tiny_sequences(dim: int) -> None:
    """They are found in slabs, and each sequence alone gives the bits that it gives there."""
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}):
        spec = spec_of(FEW_SLABS, dims=(dim, dim), heads=(2, 2), **options)
        judge(case, spec, torch.bfloat16, CUDA)
    sample = case.sample(spec_of(FEW_SLABS, dims=(dim, dim), heads=(2, 2)), torch.bfloat16, CUDA)
    whole = run(case, sample, calls(case), None)
    for begin, end in itertools.pairwise(FEW_SLABS.offsets().tolist()):
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        spec = spec_of(Layout((end - begin,)), dims=(dim, dim), heads=(2, 2))
        found = run(case, Sample(spec, rows, offsets, None), calls(case), None)
        assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(6, 6), (4, 2)])  # few tiles go elsewhere
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (48, 16)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_short_sequences(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    """Where the caller says that none is longer, no kernel runs behind that for short ones."""
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (50, 13)}, {"scale": -0.3}):
        spec = spec_of(SHORT, dims=dims, heads=heads, max_len=True, **options)
        spec = dataclasses.replace(spec, kv_layout=SHORT_KEYS if cross else None)
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        kernel = "short.d64" if HOPPER else "mma_sync.d64"
        assert last_kernel("cuda") == f"cuda.attention.forward.{kernel}"
        judge(case, spec, dtype, CUDA)
        if HOPPER:  # in the backward pass it takes heads without groups alone
            kernel = "short.d64" if heads[0] == heads[1] else "wgmma.d64"
            assert last_kernel("cuda") == f"cuda.attention.backward.{kernel}"


def test_many_short_sequences() -> None:
    """So many that the forward kernel hands them out in turn.

    Gradients are not judged: the rounding of the result that they start from alone exceeds the rule
    in one hostile sequence out of thousands.
    """
    draw = random.Random(0)
    layout = Layout(tuple(draw.choice((0, 1, 64, 65, 70, 120)) for _ in range(3000)))
    for max_len in (False, True):
        spec = spec_of(layout, heads=(1, 1), max_len=max_len)
        judge(CASES["jagged_flash_attention"], spec, torch.bfloat16, CUDA, backward=False)


@pytest.mark.parametrize("max_len", [False, True], ids=["", "max_len"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_groups_of_heads(dim: int, max_len: bool) -> None:
    """Many short sequences: on Hopper a CTA takes two heads, with max_len all four."""
    case = CASES["jagged_flash_attention"]
    draw = random.Random(0)
    layout = Layout(tuple(draw.choice((0, 1, 15, 64, 70)) for _ in range(1100)), base=2, tail=3)
    spec = spec_of(layout, dims=(dim, dim), max_len=max_len)
    judge(case, spec, torch.bfloat16, CUDA)
