"""Products: kernel paths by shape, few columns, one term, deep sums, infinite operands."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from on_cuda import (
    CUDA,
    DENSE,
    HALF_DTYPES,
    HOPPER,
    JAGGED,
    LAYOUT,
    MATRICES,
    PATH,
    PRECISION,
    WEIGHTED,
    best_path,
    in_precision,
)
from plain import spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, EVERY
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_dense_bmm import ACTIVATIONS

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    "lengths",
    [(150, 0, 33, 64, 1, 417), (40, 0, 33, 64, 1, 7, 0, 17)],
    ids=["", "short"],
)
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@PATH
@pytest.mark.parametrize("columns", [32, 40, 128, 200, 264])
@PRECISION
def test_path_of_array_products(
    precision: str,
    columns: int,
    path: str,
    transpose: bool,
    lengths: tuple[int, ...],
    request: pytest.FixtureRequest,
) -> None:
    """One tile of columns of each width, and two; matrices of many steps, with any pitch.

    32 columns or fewer, of f32 64, go without wgmma. Where sequences are short on average, tiles of
    f32 have fewer rows.
    """
    dtype = in_precision(precision, request)
    case = CASES["array_jagged_bmm_jagged_out"]
    layout = Layout(lengths, base=5, tail=9)
    spec = spec_of(layout, N=columns, transpose=transpose)
    is_wgmma = HOPPER and path == "best" and columns > (32 if precision in HALF_DTYPES else 64)
    kernel = f"{'wgmma' if is_wgmma else 'mma_sync'}.{precision}"
    names = [f"{WEIGHTED}.{kernel}", f"{WEIGHTED}.transposed.{kernel}"]
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == names[transpose]
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == names[not transpose]


@pytest.mark.parametrize("length", [700, 1200])
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("columns", [64, 128, 264])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_array_products_of_many_long_sequences(
    dtype: torch.dtype, columns: int, transpose: bool, length: int
) -> None:
    """Longer steps, and tiles of columns that follow each other."""
    layout = Layout((1, length, 0, 65) * 50, base=5, tail=9)
    spec = spec_of(layout, N=columns, transpose=transpose)
    case = CASES["array_jagged_bmm_jagged_out"]
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize(
    "lengths",
    [
        (0,) * 100 + (1, 2, 0, 3) * 50 + (0,) * 70 + (5, 40, 16),
        (37, 0, 211, 5) * 300,
        (37, 0, 211, 5) * 700,
    ],
    ids=["tiny", "many", "more"],
)
@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("inner", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_few_columns(
    dtype: torch.dtype, inner: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """Sequences that end anywhere within 16 rows, many of them or none; one to four times 16 rows
    for a warp."""
    case = CASES["jagged_dense_bmm"]
    spec = spec_of(Layout(lengths, base=5, tail=9), D=inner, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    are_long = sum(lengths) >= 48 * len(lengths)
    engine = HOPPER and inner == 256 and columns == 8 and are_long
    assert last_kernel("cuda") == f"{DENSE}.{'mma_sync' if engine else 'few_columns'}.{element}"
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("name", HALF_DTYPES)
def test_few_columns_have_the_same_bits_among_short_sequences(name: str, transposed: bool) -> None:
    """Of 256 terms, whichever kernel the lengths of the batch choose."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 200, (300,))
    total, count = int(lengths.sum()), len(lengths)
    x = torch.randn(total + 1000, 256, device=CUDA).to(HALF_DTYPES[name])
    y = torch.randn(count + 1000, 256, 8, device=CUDA).to(x.dtype)
    if transposed:
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for short, path in ((0, "mma_sync" if HOPPER else "few_columns"), (1000, "few_columns")):
        batch = torch.cat([lengths, torch.ones(short, dtype=torch.int64)]).to(CUDA)
        offsets = jagged_cuda.offsets_from_lengths(batch)
        out = jagged_cuda.jagged_dense_bmm(x[: total + short], y[: count + short], offsets)
        assert last_kernel("cuda") == f"{DENSE}.{path}.{name}"
        found.append(out[:total])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "name",
    [
        "jagged_dense_bmm",
        "jagged_jagged_bmm",
        "jagged_jagged_bmm_jagged_out",
        "array_jagged_bmm_jagged_out",
    ],
)
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
def test_both_gradients_beside_each_other(name: str, copied: bool) -> None:
    """One product starts while the other one runs: neither may write where the other one reads, be
    it the copy of an operand, and what follows on the stream sees both."""
    lengths = torch.arange(700, device=CUDA) % 201
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total, sizes = int(offsets[-1]), (lengths * lengths).sum().item()
    shapes = {
        "jagged_dense_bmm": ((total, 256), (700, 256, 8)),
        "jagged_jagged_bmm": ((total, 256), (total, 8)),
        "jagged_jagged_bmm_jagged_out": ((total, 256), (total, 256)),
        "array_jagged_bmm_jagged_out": ((int(sizes),), (total, 256)),
    }[name]

    def apart(operand: torch.Tensor) -> torch.Tensor:
        """With strides that no kernel takes."""
        wide = operand.new_empty(*operand.shape, 2)
        wide[..., 0] = operand
        return wide[..., 0]

    x, y = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes)
    leaves = [operand.requires_grad_() for operand in (x, y)]
    out = getattr(jagged_cuda, name)(*leaves, offsets)
    grad_out = torch.randn_like(out)
    alone = [torch.autograd.grad(out, leaf, grad_out, retain_graph=True)[0] for leaf in leaves]
    if copied:
        leaves = [apart(operand.detach()).requires_grad_() for operand in (x, y)]
        out = getattr(jagged_cuda, name)(*leaves, offsets)
        grad_out = apart(grad_out)
    for _ in range(20):
        both = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        seen = [gradient.clone() for gradient in both]
        del both  # the next pass takes this memory, whatever it holds
        assert all(torch.equal(a, b) for a, b in zip(seen, alone, strict=True))


@pytest.mark.parametrize("columns", [32, 72, 200, 264])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_one_term(dtype: torch.dtype, columns: int) -> None:
    """8, 16 and all lanes for a row, and two steps of columns; tiles of 64 rows, many sequences."""
    case = CASES["jagged_dense_bmm"]
    layout = Layout((0, 1, 63, 64, 65, 0, 150) + (3, 0, 7) * 40, base=5, tail=9)
    spec = spec_of(layout, D=1, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    assert last_kernel("cuda") == f"{DENSE}.outer.{element}"
    judge(case, spec, dtype, CUDA)


# Sequences around the places where sums are cut (256 rows for few columns, 1,024 for many, 2,048 of
# large matrices), short ones, and one whose parts are dealt out among warps.
CUT_LENGTHS = (
    (0, 1, 15, 16, 17, 0, 255, 256, 257, 31, 513, 1023, 1024, 1025, 0, 3, 2500, 0),
    (0,) * 40 + (5, 0, 40, 1) * 60 + (700,),
    (3, 35_000, 0, 18),
)
CUT = pytest.mark.parametrize("lengths", CUT_LENGTHS, ids=["around", "tiny", "giant"])


@CUT
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(64, 1), (40, 3), (64, 8), (520, 1), (8, 8), (1, 64), (5, 40), (8, 264)],
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_weighted_sums(
    dtype: torch.dtype, rows: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """Up to 8 columns of either operand, whole and partial groups of 64 of the other one's."""
    case = CASES["jagged_jagged_bmm"]
    spec = spec_of(Layout(lengths, base=5, tail=9), D=rows, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    assert last_kernel("cuda") == f"{JAGGED}.weighted_sums.{element}"
    judge(case, spec, dtype, CUDA)


@CUT
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 256), (128, 136), (264, 320), (512, 64), (72, 128), (520, 16)]
)
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
@PATH
def test_path_of_jagged_products(
    path: str, dtype: torch.dtype, rows: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """Tiles of each shape, whole and partial ones, one and many of a matrix."""
    case = CASES["jagged_jagged_bmm"]
    spec = spec_of(Layout(lengths, base=5, tail=9), D=rows, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    kernel = "wgmma" if HOPPER and path == "best" else "mma_sync"
    assert last_kernel("cuda") == f"{JAGGED}.{kernel}.{element}"
    judge(case, spec, dtype, CUDA)


def test_small_matrices_before_large_ones() -> None:
    """Shared memory is asked for once per process: for all choices of warpgroups of a kernel."""
    shapes = [(64, 128), (128, 128), (64, 256), (512, 16), (520, 64)]
    code = f"""
import torch, jagged_cuda
for rows, columns in {shapes}:
    x, y = (torch.ones(40, size, device="cuda", dtype=torch.bfloat16) for size in (rows, columns))
    out = jagged_cuda.jagged_jagged_bmm(x, y, torch.tensor([0, 3, 40], device="cuda"))
    assert out[0].eq(3).all() and out[1].eq(37).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("lengths", [*CUT_LENGTHS[:2], (8500, 2, 0) * 3000], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 8), (1, 40), (64, 128), (512, 64)])
def test_cut_sums_do_not_depend_on_neighbours(
    rows: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """The bits of each sequence alone, wherever it begins, and beside sequences of NaN."""
    lengths = tuple(length if i < 30 else min(length, 30) for i, length in enumerate(lengths))
    generator = torch.Generator(CUDA).manual_seed(rows)
    x, y = (
        torch.randn(sum(lengths), size, device=CUDA, generator=generator).bfloat16()
        for size in (rows, columns)
    )
    offsets = torch.tensor((0, *lengths), device=CUDA).cumsum(0)
    bounds = offsets.tolist()
    found = jagged_cuda.jagged_jagged_bmm(x, y, offsets)
    for seq in [*range(min(len(lengths), 30)), len(lengths) - 1]:
        begin, end = bounds[seq : seq + 2]
        alone = jagged_cuda.jagged_jagged_bmm(
            x[begin:end].clone(), y[begin:end].clone(), offsets[seq : seq + 2] - begin
        )
        torch.testing.assert_close(found[seq], alone[0], rtol=0, atol=0)
    odd = torch.arange(len(lengths), device=CUDA) % 2 == 1
    rows_of_even = (~odd).repeat_interleave(torch.tensor(lengths, device=CUDA))
    x[rows_of_even], y[rows_of_even] = torch.nan, torch.nan
    beside = jagged_cuda.jagged_jagged_bmm(x, y, offsets)
    torch.testing.assert_close(beside[odd], found[odd], rtol=0, atol=0)


@PATH
@pytest.mark.parametrize("columns", [64, 72, 136, 256, 264])
@pytest.mark.parametrize("inner", [64, 72, 200, 8200])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_dense_products(dtype: torch.dtype, inner: int, columns: int, path: str) -> None:
    """Tiles of each width, full and not, and several; one step of D and many, the last of which is
    not whole; rows by 32 and of two warpgroups. The gradient of x has y with stride 1 along D.

    128 columns or fewer, of more than 128 terms, go without wgmma.
    """
    case = CASES["jagged_dense_bmm"]
    layout = Layout((1, 31, 33, 0, 64, 65, 128, 129, 300, 0, 0), base=5, tail=150)
    spec = spec_of(layout, D=inner, N=columns)
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    is_wgmma = HOPPER and path == "best" and (columns > 128 or inner <= 128)
    kernel = f"{'wgmma' if is_wgmma else 'mma_sync'}.{element}"
    sample = case.sample(spec, dtype, CUDA)
    x, y = sample.tensors["x"], sample.tensors["y"]
    for operand in (y, y.transpose(1, 2).contiguous().transpose(1, 2)):
        jagged_cuda.jagged_dense_bmm(x, operand, sample.offsets)
        assert last_kernel("cuda") == f"{DENSE}.{kernel}"
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [64, 104, 200])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_biased_dense_products(
    dtype: torch.dtype, columns: int, activation: str | None
) -> None:
    """Bias and activation take the sums 32 columns at a time."""
    case = EVERY["jagged_dense_bmm_biased"]
    spec = spec_of(LAYOUT, D=64, N=columns, activation=activation)
    element = next(name for name, value in HALF_DTYPES.items() if value is dtype)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == f"{DENSE}.{'wgmma' if HOPPER else 'mma_sync'}.{element}"
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
def test_dense_products_of_many_sequences(transpose: bool, columns: int) -> None:
    """Several tiles for each CTA, behind few sequences and many empty ones.

    A sequence alone gives the bits that it gives among others.
    """
    lengths = (37, 0, 211, 5) * 200 + (0,) * 700 + (70, 0, 1) * 100 + (0,) * 300 + (500,)
    layout = Layout(lengths, base=300, tail=9)
    case = CASES["jagged_dense_bmm"]
    spec = spec_of(layout, D=64, N=columns)
    judge(case, spec, torch.bfloat16, CUDA)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    x, y = sample.tensors["x"], sample.tensors["y"]
    if transpose:
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
    found = jagged_cuda.jagged_dense_bmm(x, y, sample.offsets)
    bounds = layout.offsets().tolist()
    for seq in (0, 2, 802, 1500, layout.num_seqs - 1):
        rows = slice(bounds[seq], bounds[seq + 1])
        offsets = torch.tensor([0, lengths[seq]], device=CUDA)
        alone = jagged_cuda.jagged_dense_bmm(x[rows], y[seq : seq + 1], offsets)
        assert torch.equal(alone, found[rows])


@PATH
@pytest.mark.parametrize(
    ("which", "inner"),
    [(which, inner) for which in ("few", "many", "long") for inner in (8, 64, 200)]
    + [("longest", 264), ("many_long", 264)],
)
@PRECISION
def test_path_of_matrices(
    precision: str, which: str, inner: int, path: str, request: pytest.FixtureRequest
) -> None:
    """Sequences of one tile of columns and of many, any pitch, one step of D and several.

    Where there are many, tiles are wider. Where there are few with long rows, and of large D where
    there are many, CTAs share the tiles of a sequence evenly; the longest have tiles of 128 rows.
    """
    dtype = in_precision(precision, request)
    case = CASES["jagged_jagged_bmm_jagged_out"]
    layout, keys = Layout((150, 0, 33, 64, 1, 170), base=5, tail=9), None
    if which == "long":
        layout = Layout((150, 0, 33, 64, 1, 417, 1500, 65, 900), base=5, tail=9)
        keys = Layout((417, 5, 64, 0, 300, 1000, 1300, 33, 3), base=2, tail=3)
    if which == "longest":
        layout = Layout((2000, 0, 2100, 33, 70), base=5, tail=9)
    if which == "many_long":
        layout = Layout((700, 690, 1) * 45, base=5, tail=9)
    if which == "many":
        layout = Layout((1, 3, 65, 2, 0, 5, 17, 1, 33, 4, 2, 1) * 86, base=5, tail=9)
        keys = Layout((30, 64, 65, 128, 129, 192, 193, 224, 225, 460, 0, 1) * 86, base=2, tail=3)
    spec = spec_of(layout, kv_layout=keys, cross=keys is not None, D=inner)
    kernel = f"mma_sync.{precision}"
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    kernel = best_path(MATRICES, kernel) if path == "best" else f"{MATRICES}.{kernel}"
    assert last_kernel("cuda") == kernel
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize(
    ("precision", "limit"), [("f16", 2**-10.5), ("tf32", 2**-12.0), ("f32", 2**-15.0)]
)
def test_deep_sums_do_not_drift(
    precision: str, limit: float, request: pytest.FixtureRequest
) -> None:
    """Tensor cores truncate as they add: over 2^20 terms of one sign, by more than f16 rounds.

    Of f32, up to 2^15 sums are added up, and each addition rounds.
    """
    depth, short = 2**20, 16
    dtype = in_precision(precision, request)
    wide, deep = (
        torch.rand(rows, columns, device=CUDA).mul_(0.1).add_(0.1).to(dtype)
        for rows, columns in ((short, depth), (depth, 72))
    )
    rows, columns = (torch.tensor([0, length], device=CUDA) for length in (short, depth))
    expected = wide.double() @ deep.double()
    found = {
        "A y": jagged_cuda.array_jagged_bmm_jagged_out(
            wide.flatten(), deep, rows, y_offsets=columns, total=short
        ),
        "A^T y": jagged_cuda.array_jagged_bmm_jagged_out(
            wide.t().flatten(), deep, columns, y_offsets=rows, transpose=True, total=short
        ),
        "x y^T": jagged_cuda.jagged_jagged_bmm_jagged_out(
            wide,
            deep.t().contiguous(),
            rows,
            y_offsets=torch.tensor([0, 72], device=CUDA),
            total_out=short * 72,
        ).view(short, 72),
    }
    for name, result in found.items():
        error = ((result.double() - expected).abs() / expected).max()
        assert error <= limit, name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_infinite_operands_in_full_precision(value: float, request: pytest.FixtureRequest) -> None:
    """Small parts of operands, beside an infinite one, must not make it NaN."""
    dtype = in_precision("f32", request)
    lengths = (70, 0, 200, 5)
    generator = torch.Generator(CUDA).manual_seed(1)
    offsets = torch.tensor((0, *lengths), device=CUDA).cumsum(0)
    x, y = (
        torch.randn(sum(lengths), 128, device=CUDA, dtype=dtype, generator=generator)
        for _ in range(2)
    )
    x[[3, 90, 200], [7, 0, 127]] = value
    y[[5, 100], [1, 126]] = value
    y[150] = 0.0
    parts = [x.split(lengths), y.split(lengths)]
    matrices = jagged_cuda.jagged_jagged_bmm_jagged_out(x, y, offsets)
    expected = [a.double() @ b.double().T for a, b in zip(*parts, strict=True)]
    found = {"x y^T": (matrices, torch.cat([matrix.flatten() for matrix in expected]))}
    a = [torch.randn_like(matrix, dtype=dtype) for matrix in expected]
    a[0][4, 9] = a[2][150, 199] = value
    flat = torch.cat([matrix.flatten() for matrix in a])
    for transpose in (False, True):
        result = jagged_cuda.array_jagged_bmm_jagged_out(flat, y, offsets, transpose=transpose)
        ends = [
            (m.T if transpose else m).double() @ b.double()
            for m, b in zip(a, parts[1], strict=True)
        ]
        found["A^T y" if transpose else "A y"] = (result, torch.cat(ends))
    assert last_kernel("cuda").endswith(".wgmma.f32" if HOPPER else ".mma_sync.f32")
    for name, (result, reference) in found.items():
        torch.testing.assert_close(
            result.double(), reference, rtol=1e-4, atol=1e-4, equal_nan=True, msg=name
        )
