"""Target attention: parts of long sequences, passes over queries, neighbours."""

from __future__ import annotations

import itertools

import pytest
import torch
from on_cuda import CUDA, HALF_DTYPES, HOPPER, memory_at_rest, requested_bytes
from plain import assert_same_bits, calls, spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

pytestmark = pytest.mark.cuda

# Beside the lengths at which target attention splits a sequence, 256, 512 and 1,024.
LONG = Layout((1300, 0, 511, 512, 513, 3, 2049, 255, 256, 257, 1024), base=5, tail=9)


@pytest.mark.parametrize(
    ("dim", "queries"),
    [(64, 1), (64, 40), (256, 8), (128, 16), (128, 32), (128, 100), (32, 3), (32, 128)],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_target_attention_merges_the_parts_of_long_sequences(
    dtype: torch.dtype, dim: int, queries: int
) -> None:
    case = CASES["jagged_target_attention"]
    crowded = Layout((3,) * 40 + (2049, 600, 0, 1025))  # the other numbering of parts
    for layout, heads in ((LONG, None), (LONG, (2, 2)), (crowded, None)):
        judge(case, spec_of(layout, dims=(dim, dim), queries=queries, heads=heads), dtype, CUDA)


@pytest.mark.parametrize(("dim", "queries", "heads"), [(64, 33, (2, 2)), (128, 40, (1, 1))])
def test_target_attention_shares_its_items_out(
    dim: int, queries: int, heads: tuple[int, int]
) -> None:
    """More chunks than CTAs, whole ones and others, and tiles of rows outside all sequences."""
    layout = Layout((2048, 5, 0, 1030, 700, 64, 1024) * 30, base=1500, tail=2100)
    spec = spec_of(layout, dims=(dim, dim), queries=queries, heads=heads)
    judge(CASES["jagged_target_attention"], spec, torch.bfloat16, CUDA)


def test_target_attention_merges_few_among_many() -> None:
    """Where most of many sequences are short, the few long ones have the bits of these alone."""
    dim, queries, short = 64, 3, 3500
    lengths = torch.cat([torch.full((short,), 3), torch.tensor([2049, 600, 0, 1025])])
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(ends[-1])
    q, grad = (
        torch.randn(len(lengths), queries, 1, dim, device=CUDA, dtype=torch.bfloat16)
        for _ in range(2)
    )
    k, v = (torch.randn(total, 1, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(2))

    def results(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *operands, offsets, cotangent = tensors
        inputs = [operand.clone().requires_grad_() for operand in operands]
        out, lse = jagged_cuda.jagged_target_attention(*inputs, offsets, return_lse=True)
        return out, lse, torch.autograd.grad(out, inputs, cotangent)[0]

    whole = results(q, k, v, ends.to(CUDA), grad)
    begin = int(ends[short])
    rest = (ends[short:] - begin).to(CUDA)
    alone = results(q[short:], k[begin:], v[begin:], rest, grad[short:])
    assert all(torch.equal(some, all_of[short:]) for some, all_of in zip(alone, whole, strict=True))


def test_target_attention_takes_many_queries_in_passes() -> None:
    """The parts take no more than 256 MB, and the bits are those of one pass."""
    total, step, queries = 2**18, 2**12, 1000
    k, v = (torch.randn(total, 4, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(total // step, queries, 4, 64, device=CUDA, dtype=torch.bfloat16)
    offsets = torch.arange(0, total + 1, step, device=CUDA)
    before = memory_at_rest()
    out = jagged_cuda.jagged_target_attention(q, k, v, offsets)
    peak = requested_bytes("peak") - before
    assert peak <= 2 * out.numel() + 4 * out.numel() // 64 + 2**28 + 2**20
    for first in range(0, queries, 250):
        some = q[:, first : first + 250]
        alone = jagged_cuda.jagged_target_attention(some, k, v, offsets)
        assert torch.equal(alone, out[:, first : first + 250])


@pytest.mark.parametrize("queries", [1, 20, 70])
def test_target_attention_does_not_depend_on_neighbours(queries: int) -> None:
    """A long sequence alone, and with max_len, gives the bits that it gives in a batch."""
    case = CASES["jagged_target_attention"]
    sample = case.sample(spec_of(LONG, queries=queries), torch.bfloat16, CUDA)
    whole = run(case, sample, calls(case), None)
    ends = LONG.offsets().tolist()
    for seq, (begin, end) in enumerate(itertools.pairwise(ends)):
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("k", "v")}
        alone = rows | {"q": sample.tensors["q"][seq : seq + 1]}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        for max_len in (False, True):
            spec = spec_of(Layout((end - begin,)), queries=queries, max_len=max_len)
            found = run(case, Sample(spec, alone, offsets, None), calls(case), None)
            assert_same_bits(found, {name: t[seq : seq + 1] for name, t in whole.items()})


# Tiles of the backward kernel on wgmma have 64 keys, and two warpgroups take them in turn.
EDGES = Layout((1, 0, 63, 64, 65, 127, 128, 129, 0, 191, 449, 511), base=5, tail=9)


@pytest.mark.parametrize(
    ("dims", "queries", "heads", "path"),
    [
        ((64, 64), 33, (1, 1), "d64.r64"),
        ((40, 64), 40, (6, 2), "d64.r128"),
        ((128, 72), 32, (2, 1), "d128.r64"),
        ((96, 128), 128, (2, 2), "d128.r128"),
        ((128, 128), 20, (1, 1), "d128.r64"),
        ((72, 128), 16, (4, 2), "d128.r64"),
    ],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_target_attention_at_the_edges_of_tiles(
    dtype: torch.dtype, dims: tuple[int, int], queries: int, heads: tuple[int, int], path: str
) -> None:
    spec = spec_of(EDGES, dims=dims, queries=queries, heads=heads)
    judge(CASES["jagged_target_attention"], spec, dtype, CUDA)
    dim = path.split(".")[0]
    rows = 32 if queries * heads[0] // heads[1] <= 32 else 128
    expected = f"wgmma.{path}" if HOPPER else f"mma_sync.{dim}.r{rows}"
    assert last_kernel("cuda") == f"cuda.target.backward.{expected}"


@pytest.mark.parametrize("queries", [5, 20, 60])
def test_target_gradients_do_not_depend_on_neighbours(queries: int) -> None:
    """Those of a long sequence alone have the bits that they have in a batch, and once more."""
    heads, dim, total = 2, 64, int(LONG.offsets()[-1]) + 9
    q, grad = (
        torch.randn(len(LONG.lengths), queries, heads, dim, device=CUDA, dtype=torch.bfloat16)
        for _ in range(2)
    )
    k, v = (torch.randn(total, 1, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(2))

    def gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *operands, offsets, cotangent = tensors
        inputs = [operand.clone().requires_grad_() for operand in operands]
        out = jagged_cuda.jagged_target_attention(*inputs, offsets)
        return torch.autograd.grad(out, inputs, cotangent)

    offsets = LONG.offsets().to(CUDA)
    whole = gradients(q, k, v, offsets, grad)
    assert all(map(torch.equal, gradients(q, k, v, offsets, grad), whole))
    for seq, (begin, end) in enumerate(itertools.pairwise(LONG.offsets().tolist())):
        one, rows = slice(seq, seq + 1), slice(begin, end)
        ends = torch.tensor([0, end - begin], device=CUDA)
        alone = gradients(q[one], k[rows], v[rows], ends, grad[one])
        assert all(map(torch.equal, alone, (whole[0][one], whole[1][rows], whole[2][rows])))
