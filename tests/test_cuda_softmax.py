"""Softmaxes, of rows and of matrices: their kernel paths, any width, infinities, many terms."""

from __future__ import annotations

import itertools

import pytest
import torch
from on_cuda import CLUSTERS, CUDA, HALF_DTYPES, STAGED, STRIPS
from plain import spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dim", [-1, -2], ids=["columns", "rows"])
@pytest.mark.parametrize(
    ("lengths", "keys", "rows_forward", "rows_backward"),
    [
        ((5, 0, 30, 17) * 60, None, ".windows", ".windows"),
        ((1500, 3, 0, 40) * 12, (2, 800, 7, 33) * 12, ".tiles", ".tiles"),
        ((40, 60) * 15, (40, 20) * 15, ".tiles", ".tiles"),
        ((210, 250) * 30, None, STRIPS or ".tiles", ".large_tiles"),
        ((600, 400), None, ".tiles", ""),
        ((3, 13_000), (13_000, 19), ".tiles", ""),
        # Whole matrices by clusters, and beside them what does not fit: too many rows or columns
        ((130, 180, 75, 1) * 30, None, CLUSTERS or ".tiles", CLUSTERS or ".large_tiles"),
        (
            (900, 4, 0, 120, 300, 17) * 9,
            (20, 900, 7, 90, 170, 5) * 9,
            CLUSTERS or ".tiles",
            CLUSTERS,
        ),
    ],
    ids=[
        "small",
        "long_lines",
        "mean",
        "strips",
        "wide_strips",
        "global_memory",
        "clusters",
        "clusters_and_strips",
    ],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_softmax_of_matrices(
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    keys: tuple[int, ...] | None,
    rows_forward: str,
    rows_backward: str,
    dim: int,
) -> None:
    """How the vector is cut follows from the matrices' mean size."""
    case, path = CASES["jagged2_softmax"], "columns" if dim == -1 else "rows"
    kv_layout = None if keys is None else Layout(keys)
    spec = spec_of(Layout(lengths), kv_layout=kv_layout, dim=dim, cross=keys is not None)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    forward = STAGED if dim == -1 else rows_forward
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.{path}{forward}"
    judge(case, spec, dtype, CUDA)
    backward = ".words" if dim == -1 else rows_backward
    assert last_kernel("cuda") == f"cuda.jagged2_softmax_backward.{path}{backward}"


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((1300, 40, 0, 511, 1001), (901, 33, 7, 450, 700)),
        ((9000, 8176, 8177), (60, 70, 60)),
    ],
    ids=["strips", "many_rows"],
)
@pytest.mark.parametrize("dtype", [*HALF_DTYPES.values(), torch.float32], ids=[*HALF_DTYPES, "f32"])
def test_softmax_of_large_matrices(
    dtype: torch.dtype, rows: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    """Over rows, by strips of a CTA or of a cluster, or by lines too long for them."""
    case = CASES["jagged2_softmax"]
    spec = spec_of(Layout(rows), kv_layout=Layout(columns), cross=True, dim=-2)
    if STRIPS is not None and dtype != torch.float32:
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        assert last_kernel("cuda") == f"cuda.jagged2_softmax.rows{STRIPS}"
    judge(case, spec, dtype, CUDA)
    if STRIPS is not None:
        assert last_kernel("cuda") == f"cuda.jagged2_softmax_backward.rows{STRIPS}"


def test_path_of_gradients_over_rows_in_f32() -> None:
    """Whole matrices by clusters, and beside them what does not fit."""
    lengths, keys = Layout((130, 180, 75, 1, 900, 40) * 5), Layout((130, 150, 75, 900, 20, 300) * 5)
    spec = spec_of(lengths, kv_layout=keys, cross=True, dim=-2)
    judge(CASES["jagged2_softmax"], spec, torch.float32, CUDA)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax_backward.rows{CLUSTERS}"


@pytest.mark.parametrize("columns", [385, 769, 1537, 8193, 16_321, 32_641])
@pytest.mark.parametrize("dtype", [*HALF_DTYPES.values(), torch.float32], ids=[*HALF_DTYPES, "f32"])
def test_softmax_of_rows_of_many_words(dtype: torch.dtype, columns: int) -> None:
    """By lanes, by a warp or by a CTA, wherever a row begins."""
    case = CASES["jagged2_softmax"]
    keys = Layout((columns, 7, columns + 1, 0, 1))
    spec = spec_of(Layout((3, 1, 5, 2, 9)), kv_layout=keys, cross=True, dim=-1)
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == "cuda.jagged2_softmax_backward.columns.words"


@pytest.mark.parametrize(
    ("count", "rows", "columns", "path"),
    [(1500, 101, 99, ".words"), (400, 201, 199, STAGED)],
    ids=["not_staged", "waves"],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_softmax_of_more_rows_than_all_sms_hold(
    dtype: torch.dtype, count: int, rows: int, columns: int, path: str
) -> None:
    """Large shares, or small ones in several waves, and the same bits of what fits into one."""
    a = torch.randn(count * rows * columns, device=CUDA).to(dtype)

    def of(first: int) -> torch.Tensor:
        offsets, y_offsets = (torch.arange(first + 1, device=CUDA) * n for n in (rows, columns))
        return jagged_cuda.jagged2_softmax(
            a[: first * rows * columns], offsets, y_offsets=y_offsets
        )

    every = of(count)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.columns{path}"
    expected = torch.softmax(a.view(-1, columns).double(), 1).flatten()
    torch.testing.assert_close(every.double(), expected, rtol=8e-3, atol=1e-6)
    some = of(40)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.columns{STAGED}"
    assert torch.equal(some, every[: some.numel()])


@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_softmax_of_long_rows_in_shares(dtype: torch.dtype) -> None:
    """Rows that end in a warp's share, and those that end far behind it, wherever they begin."""
    columns = (900, 1501, 3001, 4600, 4700)
    rows = (400, 300, 333, 200, 200)
    spec = spec_of(Layout(rows), kv_layout=Layout(columns), cross=True, dim=-1)
    case = CASES["jagged2_softmax"]
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.columns{STAGED}"
    judge(case, spec, dtype, CUDA)


# Of a warp, of a CTA, and of one that reads twice
_LENGTHS = (0, 1, 31, 33, 130, 700, 0, 2500)


@pytest.mark.parametrize("repeats", [300, 2100])
@pytest.mark.parametrize("columns", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softmax_of_many_sequences(dtype: torch.dtype, columns: int, repeats: int) -> None:
    """The same bits as of a few sequences."""
    lengths = (0, 1, 31, 33, 130, 900, 0, 67)

    def of(x: torch.Tensor, seqs: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        offsets = torch.tensor([0, *itertools.accumulate(seqs)], device=CUDA)
        out = jagged_cuda.jagged_softmax(x, offsets)
        (gradient,) = torch.autograd.grad(out, x, x.detach())
        return out.detach(), gradient

    x = torch.randn(sum(lengths), columns, device=CUDA).to(dtype)
    expected = of(x, lengths)
    found = of(x.detach().repeat(repeats, 1), lengths * repeats)
    for each, like in zip(found, expected, strict=True):
        assert torch.equal(each.view(repeats, *like.shape), like.expand(repeats, *like.shape))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("columns", [4, 8, 24, 64])
@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_long_sequences_by_a_ring(name: str, columns: int, backward: bool) -> None:
    """Where sequences are long on average, and many, or few of wide rows; else the same bits."""
    dtype = (HALF_DTYPES | {"f32": torch.float32})[name]
    op = "jagged_softmax_backward" if backward else "jagged_softmax"
    ring, other = (f"cuda.{op}.{path}{name}" for path in ("ring.", ""))
    has_vectors = columns * dtype.itemsize % 16 == 0 and (columns > 16 or dtype.itemsize == 4)
    of_few = ring if has_vectors else other
    of_many = ring if backward or columns >= (8 if dtype == torch.float32 else 24) else other
    # Of a warp, of one stage or some for each thread, and of more than the ring has
    lengths = (700, 0, 33, 130, 2500, 1, 129, 385, 513)
    layout = Layout(lengths, base=3, tail=5)

    def of(x: torch.Tensor, seqs: tuple[int, ...], path: str) -> torch.Tensor:
        offsets = torch.tensor([0, *itertools.accumulate(seqs)], device=CUDA)
        # Any out, since one with NaN makes gradients NaN alone
        if backward:
            found = torch.ops.jagged_cuda.jagged_softmax_backward(x, x.sigmoid(), offsets, -1.3)
        else:
            found = jagged_cuda.jagged_softmax(x, offsets, scale=-1.3)
        assert last_kernel("cuda") == path
        return _bits(found)

    spec = spec_of(layout, trailing=(columns,), scale=-1.3)
    case = CASES["jagged_softmax"]
    if backward:
        judge(case, spec, dtype, CUDA)
    else:
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == of_few

    rows = sum(lengths)
    x = torch.randn(rows, columns, device=CUDA).to(dtype)
    with_infinities = x.clone()
    for begin, end in itertools.pairwise(itertools.accumulate((0, *lengths))):
        with_infinities[begin:end, 0] = float("inf")
        with_infinities[(begin + end) // 2 : end, 1] = float("inf")
        with_infinities[(begin + end) // 2 : end, 2] = -float("inf")
        if end > begin:
            with_infinities[end - 1, 3] = float("nan") if end % 2 else -float("inf")
    for each in (x, with_infinities):
        expected = of(each, lengths, of_few)
        beside_short_ones = of(torch.cat([each, each[:200]]), (*lengths, *(1,) * 200), other)
        assert torch.equal(beside_short_ones[:rows], expected)
        # Two or four of a CTA, one behind another
        repeats = 250
        many = of(each.repeat(repeats, 1), lengths * repeats, of_many)
        many = many.view(repeats, *expected.shape)
        assert torch.equal(many, expected.expand_as(many))
        for begin, end in itertools.pairwise(itertools.accumulate((0, *lengths))):
            if end > begin:
                path = of_few if end - begin > (64 if backward else 104) else other
                assert torch.equal(of(each[begin:end], (end - begin,), path), expected[begin:end])


@pytest.mark.parametrize("columns", [8, 12, 24, 64, 72, 264])
@pytest.mark.parametrize("dtype", [*HALF_DTYPES.values(), torch.float32, torch.float64])
def test_softmax_of_any_width(dtype: torch.dtype, columns: int) -> None:
    """By vectors of 16 bytes and of 8, whole groups of columns and a part of one."""
    layout = Layout(_LENGTHS, base=3, tail=5)
    for scale in (0.7, -1.3):
        spec = spec_of(layout, trailing=(columns,), scale=scale)
        judge(CASES["jagged_softmax"], spec, dtype, CUDA)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("columns", [3, 8, 64])
@pytest.mark.parametrize("dtype", [*HALF_DTYPES.values(), torch.float32, torch.float64])
def test_softmax_of_infinities(dtype: torch.dtype, columns: int, scale: float) -> None:
    """NaN where torch has it, and in no other column."""
    layout = Layout(_LENGTHS)
    offsets = torch.tensor([0, *itertools.accumulate(layout.lengths)], device=CUDA)
    x = torch.randn(int(offsets[-1]), columns, device=CUDA).to(dtype)
    inf = float("inf")
    for begin, end in itertools.pairwise(offsets.tolist()):
        x[begin:end, 0] = -inf
        x[(begin + end) // 2 : end, 1] = -inf
        if end > begin:
            x[end - 1, 2] = (inf, float("nan"), -inf)[end % 3]
    found = jagged_cuda.jagged_softmax(x, offsets, scale=scale)
    parts = x.double().split(layout.lengths)
    expected = torch.cat([torch.softmax(scale * part, 0) for part in parts])
    torch.testing.assert_close(
        found.double(),
        expected,
        equal_nan=True,
        rtol=8e-3,
        atol=1e-6 if dtype.itemsize > 2 else 1e-4,
    )


@pytest.mark.parametrize("rows", [768, 769, 1023, 1025, 3000])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_softmax_counts_many_rows(dtype: torch.dtype, rows: int) -> None:
    """A sum of as many exponentials of 1 as a column has rows."""
    columns = 14_000 // rows
    a = torch.zeros(rows * columns, device=CUDA, dtype=dtype)
    offsets, y_offsets = (torch.tensor([0, n], device=CUDA) for n in (rows, columns))
    found = jagged_cuda.jagged2_softmax(a, offsets, y_offsets=y_offsets, dim=-2)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.rows{CLUSTERS or '.tiles'}"
    torch.testing.assert_close(found, torch.full_like(a, 1 / rows))


@pytest.mark.parametrize("columns", [768, 8192, 8194, 32_640, 40_000])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_softmax_counts_many_small_terms(dtype: torch.dtype, columns: int) -> None:
    """Exponentials next to 2^-23 are nothing beside 1, but thousands of them are not."""
    rows = 3
    a = torch.full((rows, columns), -15.9453125, device=CUDA, dtype=dtype)
    a[:, 0] = 0
    offsets, y_offsets = (torch.tensor([0, n], device=CUDA) for n in (rows, columns))
    found = jagged_cuda.jagged2_softmax(a.flatten(), offsets, y_offsets=y_offsets)
    expected = torch.softmax(a.double(), 1)
    error = (found.view(rows, columns).double() - expected).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps
