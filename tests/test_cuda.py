"""What only a GPU can show: kernel paths, streams, graphs, devices, memory, large sizes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import CASE, DTYPE, TWO_DTYPES, assert_same_bits, calls, cotangents_of, spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, EVERY, INDEX_OPERATORS, Case, Tensors
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec

pytestmark = pytest.mark.cuda

CUDA = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

# Every kernel path: operator, dtype, TF32 allowed, choices, the names after forward and backward.
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# Softmaxes of matrices over their rows by clusters, and over their columns by staged shares.
_CLUSTERS, _STAGED = (".words", ".staged_words") if HOPPER else ("", ".words")
_DENSE, _JAGGED = "cuda.jagged_dense_bmm", "cuda.jagged_jagged_bmm"
_MATRICES, _WEIGHTED = "cuda.jagged_jagged_bmm_jagged_out", "cuda.array_jagged_bmm_jagged_out"


def _best(product: str, path: str) -> str:
    """The path of a product with one matrix per sequence and few columns."""
    stays = not HOPPER or path.endswith(".f32" if product == _MATRICES else (".tf32", ".f32"))
    return f"{product}.{path if stays else path.replace('mma_sync', 'wgmma')}"


def _target_forward(path: str) -> str:
    """The forward path of target attention: on wgmma where it names no rows."""
    if ".r" in path:
        return f"cuda.target.forward.mma_sync.{path}"
    return f"cuda.target.forward.{f'wgmma.{path}' if HOPPER else f'mma_sync.{path}.r128'}"


# Of a product, whatever its kind: dtype, TF32 allowed, path.
_PRODUCT_PATHS = (
    (torch.float32, False, "mma_sync.f32"),
    (torch.float32, True, "mma_sync.tf32"),
    (torch.float64, False, "fma.f64"),
    (torch.float16, True, "mma_sync.f16"),
    (torch.bfloat16, False, "mma_sync.bf16"),
)
# The forward path of attention, where its name is not that of the backward path.
_FORWARD = {"wgmma.d64": "short.d64", "wide.d192": "long.d192", "wide.d256": "long.d256"}


def _forward(path: str, dims: tuple[int, int]) -> str:
    """The path of the forward pass, by that of the backward pass."""
    return "wgmma.d96" if path == "wgmma.d128" and max(dims) <= 96 else _FORWARD.get(path, path)


PATHS: list[tuple[str, torch.dtype, bool, dict[str, Any], str, str]] = [
    *(
        (
            name,
            dtype,
            tf32,
            choices,
            _best(first, path),
            _best(last, path),
        )
        for name, choices, first, last in (
            ("jagged_jagged_bmm_jagged_out", {}, _MATRICES, f"{_WEIGHTED}.transposed"),
            ("array_jagged_bmm_jagged_out", {}, _WEIGHTED, f"{_WEIGHTED}.transposed"),
            (
                "array_jagged_bmm_jagged_out",
                {"transpose": True},
                f"{_WEIGHTED}.transposed",
                _WEIGHTED,
            ),
        )
        for dtype, tf32, path in _PRODUCT_PATHS
    ),
    *(
        (name, dtype, tf32, {}, f"{first}.{path}", f"{_JAGGED if dense else _DENSE}.{path}")
        for name, first, dense in (
            ("jagged_dense_bmm", _DENSE, True),
            ("jagged_jagged_bmm", _JAGGED, False),
        )
        for dtype, tf32, path in _PRODUCT_PATHS
    ),
    # Few terms per sum, y with stride 1 along N, and along D in gradients.
    *(
        (name, dtype, False, {"D": dim, "N": 72}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in _DTYPES.items()
        for dim in (8, 16)
        for name, first, last in (
            ("jagged_dense_bmm", f"{_DENSE}.thin", f"{_JAGGED}.mma_sync"),
            ("jagged_jagged_bmm", f"{_JAGGED}.mma_sync", f"{_DENSE}.thin"),
        )
    ),
    # One term per sum.
    *(
        (name, dtype, False, {"D": 1, "N": 72}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in _DTYPES.items()
        for name, first, last in (
            ("jagged_dense_bmm", f"{_DENSE}.outer", f"{_JAGGED}.mma_sync"),
            ("jagged_jagged_bmm", f"{_JAGGED}.mma_sync", f"{_DENSE}.outer"),
        )
    ),
    # Few columns, of y with stride 1 along N, and along D in gradients, or with one column.
    *(
        (name, dtype, False, {"D": dim, "N": columns}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in _DTYPES.items()
        for dim, columns in ((64, 8), (128, 8), (256, 8), (256, 1))
        for name, first, last in (
            ("jagged_dense_bmm", f"{_DENSE}.few_columns", f"{_JAGGED}.mma_sync"),
            ("jagged_jagged_bmm", f"{_JAGGED}.mma_sync", f"{_DENSE}.few_columns"),
        )
    ),
    *(
        (
            "jagged_softmax",
            dtype,
            False,
            {},
            f"cuda.jagged_softmax.{name}",
            f"cuda.jagged_softmax_backward.{name}",
        )
        for name, dtype in (_DTYPES | {"f32": torch.float32, "f64": torch.float64}).items()
    ),
    *(
        (
            "jagged2_softmax",
            dtype,
            False,
            {"dim": dim},
            f"cuda.jagged2_softmax.{path}{first.get(dtype, '')}",
            f"cuda.jagged2_softmax_backward.{path}{last if dtype != torch.float64 else ''}",
        )
        for dim, path, first, last in (
            (
                -1,
                "columns",
                dict.fromkeys(_DTYPES.values(), _STAGED) | {torch.float32: ".words"},
                ".words",
            ),
            (-2, "rows", dict.fromkeys(_DTYPES.values(), ".tiles"), ".tiles"),
        )
        for dtype in (*_DTYPES.values(), torch.float32, torch.float64)
    ),
    *(
        (name, dtype, False, {}, f"cuda.{name}", f"cuda.{gradient}")
        for name, gradient in (
            ("jagged_to_padded", "padded_to_jagged"),
            ("padded_to_jagged", "jagged_to_padded"),
            ("jagged_sum", "jagged_broadcast"),
            ("jagged_mean", "jagged_broadcast"),
            ("jagged_broadcast", "jagged_sum"),
            ("jagged_dense_add", "jagged_dense_add_backward"),
            ("jagged_dense_mul", "jagged_dense_mul_backward"),
            ("jagged_take", "jagged_take"),
        )
        for dtype in (*_DTYPES.values(), torch.float32, torch.float64)
    ),
    # Rows of one unit of 16 bytes are moved as numbers are.
    *(
        (
            *("jagged_concat", dtype, False, {}),
            *(f"cuda.{name}{last}" for name in ("jagged_concat", "jagged_concat_backward")),
        )
        for dtypes, last in (
            (_DTYPES.values(), ".numbers"),
            ((torch.float32, torch.float64), ""),
        )
        for dtype in dtypes
    ),
    *(
        (name, dtype, False, {}, *(f"cuda.{name}",) * 2)
        for name in (
            "jagged_positions",
            "jagged_sessionize",
            "jagged_topk",
            "matrix_offsets",
        )
        for dtype in (*_DTYPES.values(), torch.float32, torch.float64)
    ),
    *(
        (
            "layer_norm_mul_dropout",
            dtype,
            False,
            {"D": columns, "p": p},
            f"cuda.layer_norm_mul_dropout.{path}",
            f"cuda.layer_norm_mul_dropout_backward.{path}",
        )
        for dtype in (*_DTYPES.values(), torch.float32)
        for p in (0.0, 0.3)
        for columns, path in (
            *((8, "warp"), (48, "warp"), (128, "warp"), (1040, "cta"), (2056, "cta")),
            *((4096, "cta"), (7, "plain"), (16392, "plain")),
            (512, "warp" if dtype.itemsize == 2 else "cta"),
        )
    ),
    (
        "layer_norm_mul_dropout",
        torch.float64,
        False,
        {"D": 64, "p": 0.3},
        "cuda.layer_norm_mul_dropout.plain",
        "cuda.layer_norm_mul_dropout_backward.plain",
    ),
    # After its plan, the move is what runs last.
    *(
        (name, dtype, False, {}, f"cuda.{move}", f"cuda.{gradient}")
        for name, move, gradient in (
            ("jagged_select", "jagged_take", "jagged_take"),
            ("jagged_slice", "jagged_take", "jagged_take"),
            (
                "jagged_index_select",
                "jagged_index_select.copies",
                "jagged_index_select_backward",
            ),
        )
        for dtype in (*_DTYPES.values(), torch.float32, torch.float64)
    ),
    *(
        (
            "jagged_flash_attention",
            dtype,
            False,
            # Else the kernel for long sequences comes last; it takes the heads of groups together.
            {"dims": dims, "max_len": True, "heads": (2, 2)},
            f"cuda.attention.forward.{_forward(path, dims)}",
            f"cuda.attention.backward.{path}",
        )
        for dtype in _DTYPES.values()
        for dims, path in (
            ((1, 1), "wgmma.d32" if HOPPER else "mma_sync.d32"),
            ((32, 16), "wgmma.d32" if HOPPER else "mma_sync.d32"),
            ((33, 8), "wgmma.d64" if HOPPER else "mma_sync.d64"),
            ((64, 64), "wgmma.d64" if HOPPER else "mma_sync.d64"),
            ((40, 16), "wgmma.d64" if HOPPER else "mma_sync.d64"),
            ((16, 65), "wgmma.d128" if HOPPER else "mma_sync.d128"),
            ((128, 128), "wgmma.d128" if HOPPER else "mma_sync.d128"),
            ((8, 72), "wgmma.d128" if HOPPER else "mma_sync.d128"),
            ((129, 1), "wide.d192" if HOPPER else "mma_sync.d256"),
            ((136, 8), "wide.d192" if HOPPER else "mma_sync.d256"),
            ((8, 192), "wide.d192" if HOPPER else "mma_sync.d256"),
            ((256, 256), "wide.d256" if HOPPER else "mma_sync.d256"),
            ((16, 200), "wide.d256" if HOPPER else "mma_sync.d256"),
        )
    ),
    *(
        (
            "jagged_flash_attention",
            torch.float32,
            tf32,
            {"dims": dims, "max_len": True},  # as above
            *(f"cuda.attention.{way}.mma_sync.{path}.{name}" for way in ("forward", "backward")),
        )
        for name, tf32 in (("f32", False), ("tf32", True))
        for dims, path in (
            *(((1, 1), "d32"), ((32, 16), "d32"), ((33, 8), "d64"), ((64, 64), "d64")),
            *(((16, 65), "d128"), ((128, 128), "d128"), ((129, 1), "d256"), ((256, 256), "d256")),
        )
    ),
    (
        "jagged_flash_attention",
        torch.float64,
        False,
        {},
        "cuda.attention.forward.fma.f64",
        "cuda.attention.backward.fma.f64",
    ),
    *(
        (
            "jagged_hstu_attention",
            dtype,
            False,
            {"dims": dims, "ranges": ranges, "row_scale": ranges is None},
            f"cuda.attention.forward.{'long' if long and HOPPER else 'mma_sync'}.{path}.silu",
            f"cuda.attention.backward.{backward if HOPPER else f'mma_sync.{path}'}.silu",
        )
        for dtype in _DTYPES.values()
        for ranges in (None, "hstu near")
        for dims, path, long, backward in (
            ((1, 1), "d32", False, "wgmma.d64"),
            ((8, 32), "d32", False, "wgmma.d64"),
            ((64, 40), "d64", True, "wgmma.d64"),
            ((128, 128), "d128", True, "wgmma.d128"),
            ((129, 1), "d256", False, "mma_sync.d256"),
        )
    ),
    *(
        (
            "jagged_hstu_attention",
            dtype,
            False,
            {"row_scale": True},
            f"cuda.attention.forward.fma.{name}",
            f"cuda.attention.backward.fma.{name}",
        )
        for name, dtype in (("f32", torch.float32), ("f64", torch.float64))
    ),
    *(
        (
            "jagged_target_attention",
            dtype,
            False,
            {"dims": dims, "heads": heads, "queries": queries},
            _target_forward(forward),
            f"cuda.target.backward.mma_sync.{backward}",
        )
        for dtype in _DTYPES.values()
        for dims, heads, queries, forward, backward in (
            ((1, 1), (1, 1), 1, "d32.r16", "d32.r32"),
            ((32, 16), (4, 2), 9, "d32.r32", "d32.r32"),
            ((32, 32), (3, 1), 40, "d32.r128", "d32.r128"),
            ((64, 64), None, 1, "d64.r16", "d64.r32"),
            ((33, 8), (8, 1), 4, "d64.r32", "d64.r32"),
            ((64, 64), (2, 2), 32, "d64.r32", "d64.r32"),
            ((40, 64), (2, 2), 33, "d64", "d64.r128"),
            ((64, 64), (4, 2), 64, "d64", "d64.r128"),
            ((128, 128), (2, 2), 16, "d128.r16", "d128.r32"),
            ((16, 65), (1, 1), 32, "d128.r32", "d128.r32"),
            ((128, 128), (1, 1), 100, "d128", "d128.r128"),
            ((127, 128), (1, 1), 100, "d128.r128", "d128.r128"),
            ((256, 256), (1, 1), 8, "d256.r16", "d256.r32"),
            ((129, 1), (4, 2), 16, "d256.r32", "d256.r32"),
            ((256, 256), (2, 1), 32, "d256.r64", "d256.r64"),
        )
    ),
    # Too many rows for one CTA: the backward kernels of jagged_flash_attention.
    *(
        (
            "jagged_target_attention",
            torch.bfloat16,
            False,
            {"dims": dims, "heads": (4, 2), "queries": 65},
            _target_forward(forward),
            f"cuda.attention.backward.mma_sync.{backward}",
        )
        for dims, forward, backward in (
            ((33, 8), "d64.r128", "d64"),
            ((256, 256), "d256.r64", "d256"),
        )
    ),
    *(
        (
            "jagged_target_attention",
            torch.float32,
            tf32,
            {"dims": (64, 64)},
            *(f"cuda.attention.{way}.mma_sync.d64.{name}" for way in ("forward", "backward")),
        )
        for name, tf32 in (("f32", False), ("tf32", True))
    ),
    (
        "jagged_target_attention",
        torch.float64,
        False,
        {},
        "cuda.attention.forward.fma.f64",
        "cuda.attention.backward.fma.f64",
    ),
]


PATH = pytest.mark.parametrize("path", ["best", "mma_sync"], indirect=True)
# Of a product on tensor cores, as its kernels are named.
PRECISION = pytest.mark.parametrize("precision", [*_DTYPES, "tf32", "f32"])


def _in_precision(precision: str, request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of a product in this precision, which it allows."""
    if precision == "tf32":
        request.getfixturevalue("tf32")
    return _DTYPES.get(precision, torch.float32)


LAYOUT = Layout((70, 0, 33, 1, 128, 15), base=5, tail=9)
KEYS = Layout((3, 20, 0, 64, 1, 100), base=2, tail=4)

# With each case its options for keys, or columns, of other lengths.
CASE_AND_CROSS = pytest.mark.parametrize(
    ("case", "cross"),
    [
        pytest.param(case, cross, id=f"{name}{'-cross' if cross else ''}")
        for name, case in EVERY.items()
        for cross in case.choices.get("cross", (False,))
    ],
)


@CASE
def test_in_a_new_thread(case: Case) -> None:
    """A thread that has called nothing of CUDA before, as a backward pass's, has no context yet."""
    spec = spec_of(LAYOUT, D=64, N=64)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    # Its memory is then the allocator's, which need not ask CUDA for any.
    expected = {name: t.detach().cpu() for name, t in case.call(jagged_cuda, sample).items()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(case.call, jagged_cuda, sample).result()
    for name, values in expected.items():
        torch.testing.assert_close(found[name].cpu(), values, rtol=0, atol=0, equal_nan=True)


# --- kernel paths


@pytest.mark.parametrize(
    ("name", "dtype", "allow_tf32", "choices", "forward", "backward"),
    PATHS,
    ids=[
        f"{name}-{str(dtype)[6:]}-{'tf32' if tf32 else 'highest'}"
        f"-{choices.get('dims', choices.get('dim', ''))}"
        f"{'transpose' if choices.get('transpose') else ''}"
        f"-{choices.get('queries', choices.get('function', ''))}{choices.get('ranges') or ''}"
        for name, dtype, tf32, choices, *_ in PATHS
    ],
)
def test_path(
    name: str,
    dtype: torch.dtype,
    allow_tf32: bool,
    choices: dict[str, Any],
    forward: str,
    backward: str,
    request: pytest.FixtureRequest,
) -> None:
    """The path that is named is the one that runs, and it is right."""
    if allow_tf32:
        request.getfixturevalue("tf32")
    case = CASES[name]
    spec = spec_of(LAYOUT, **choices)
    sample = case.sample(spec, dtype, CUDA)
    case.call(jagged_cuda, sample)
    assert last_kernel("cuda") == forward
    judge(case, spec, dtype, CUDA)
    # The gradient of y is the other product, and comes last.
    assert last_kernel("cuda") == backward


@pytest.mark.parametrize("dim", [-1, -2], ids=["columns", "rows"])
@pytest.mark.parametrize(
    ("lengths", "keys", "rows_forward", "rows_backward"),
    [
        ((5, 0, 30, 17) * 60, None, ".windows", ".windows"),
        ((1500, 3, 0, 40) * 12, (2, 800, 7, 33) * 12, ".tiles", ".tiles"),
        ((40, 60) * 15, (40, 20) * 15, ".tiles", ".tiles"),
        ((210, 250) * 30, None, ".tiles", ".large_tiles"),
        ((600, 400), None, ".tiles", ""),
        ((3, 13_000), (13_000, 19), ".tiles", ""),
        # Whole matrices by clusters, and beside them what does not fit: too many rows or columns
        ((130, 180, 75, 1) * 30, None, _CLUSTERS or ".tiles", _CLUSTERS or ".large_tiles"),
        (
            (900, 4, 0, 120, 300, 17) * 9,
            (20, 900, 7, 90, 170, 5) * 9,
            _CLUSTERS or ".tiles",
            _CLUSTERS,
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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
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
    forward = _STAGED if dim == -1 else rows_forward
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.{path}{forward}"
    judge(case, spec, dtype, CUDA)
    backward = ".words" if dim == -1 else rows_backward
    assert last_kernel("cuda") == f"cuda.jagged2_softmax_backward.{path}{backward}"


def test_path_of_gradients_over_rows_in_f32() -> None:
    """Whole matrices by clusters, and beside them what does not fit."""
    lengths, keys = Layout((130, 180, 75, 1, 900, 40) * 5), Layout((130, 150, 75, 900, 20, 300) * 5)
    spec = spec_of(lengths, kv_layout=keys, cross=True, dim=-2)
    judge(CASES["jagged2_softmax"], spec, torch.float32, CUDA)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax_backward.rows{_CLUSTERS}"


@pytest.mark.parametrize("columns", [385, 769, 1537, 8193, 16_321, 32_641])
@pytest.mark.parametrize("dtype", [*_DTYPES.values(), torch.float32], ids=[*_DTYPES, "f32"])
def test_softmax_of_rows_of_many_words(dtype: torch.dtype, columns: int) -> None:
    """By lanes, by a warp or by a CTA, wherever a row begins."""
    case = CASES["jagged2_softmax"]
    keys = Layout((columns, 7, columns + 1, 0, 1))
    spec = spec_of(Layout((3, 1, 5, 2, 9)), kv_layout=keys, cross=True, dim=-1)
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == "cuda.jagged2_softmax_backward.columns.words"


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_softmax_of_more_rows_than_are_staged(dtype: torch.dtype) -> None:
    """More elements than all SMs hold at a time, and the same bits of those that they do."""
    count, rows, columns = 1500, 101, 99
    a = torch.randn(count * rows * columns, device=CUDA).to(dtype)

    def of(first: int) -> torch.Tensor:
        offsets, y_offsets = (torch.arange(first + 1, device=CUDA) * n for n in (rows, columns))
        return jagged_cuda.jagged2_softmax(
            a[: first * rows * columns], offsets, y_offsets=y_offsets
        )

    every = of(count)
    assert last_kernel("cuda") == "cuda.jagged2_softmax.columns.words"
    expected = torch.softmax(a.view(-1, columns).double(), 1).flatten()
    torch.testing.assert_close(every.double(), expected, rtol=8e-3, atol=1e-6)
    some = of(40)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.columns{_STAGED}"
    assert torch.equal(some, every[: some.numel()])


_LENGTHS = (0, 1, 31, 33, 130, 700, 0, 2500)  # of a warp, of a CTA, and of one that reads twice


@pytest.mark.parametrize("columns", [8, 12, 24, 64, 72, 264])
@pytest.mark.parametrize("dtype", [*_DTYPES.values(), torch.float32, torch.float64])
def test_softmax_of_any_width(dtype: torch.dtype, columns: int) -> None:
    """By vectors of 16 bytes and of 8, whole groups of columns and a part of one."""
    layout = Layout(_LENGTHS, base=3, tail=5)
    for scale in (0.7, -1.3):
        spec = spec_of(layout, trailing=(columns,), scale=scale)
        judge(CASES["jagged_softmax"], spec, dtype, CUDA)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("columns", [3, 8, 64])
@pytest.mark.parametrize("dtype", [*_DTYPES.values(), torch.float32, torch.float64])
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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_softmax_counts_many_rows(dtype: torch.dtype, rows: int) -> None:
    """A sum of as many exponentials of 1 as a column has rows."""
    columns = 14_000 // rows
    a = torch.zeros(rows * columns, device=CUDA, dtype=dtype)
    offsets, y_offsets = (torch.tensor([0, n], device=CUDA) for n in (rows, columns))
    found = jagged_cuda.jagged2_softmax(a, offsets, y_offsets=y_offsets, dim=-2)
    assert last_kernel("cuda") == f"cuda.jagged2_softmax.rows{_CLUSTERS or '.tiles'}"
    torch.testing.assert_close(found, torch.full_like(a, 1 / rows))


@pytest.mark.parametrize("columns", [768, 8192, 8194, 32_640, 40_000])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
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


@pytest.mark.parametrize("columns", [8, 40, 64, 72, 520])
@pytest.mark.parametrize("name", ["jagged_dense_add", "jagged_dense_mul"])
def test_gradients_beside_padded_rows_of_any_width(name: str, columns: int) -> None:
    """A warp takes 32, 16 or 8 rows, of several sequences, and as many padded ones."""
    layout = Layout((40, 0, 3, 1, 70, 9, 33), base=5, tail=9)
    for padded_len in (33, 100):
        spec = spec_of(layout, trailing=(columns,), padded_len=padded_len)
        judge(CASES[name], spec, torch.float32, CUDA)
        assert last_kernel("cuda") == f"cuda.{name}_backward"


@pytest.mark.parametrize("left_out", [0, 700, -70], ids=["exact", "short", "long"])
@pytest.mark.parametrize("columns", [16, 24, 64, 200, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_path_of_wide_moves(dtype: torch.dtype, columns: int, left_out: int) -> None:
    """The bits of the CPU's, wherever a warp's rows begin, and however wide they are."""
    columns //= dtype.itemsize // 2
    generator = torch.Generator().manual_seed(columns)
    lengths = (torch.rand(40, generator=generator) ** 2 * 400).long() * (torch.arange(40) % 7 > 0)
    layout = Layout(tuple(lengths.tolist()), base=5, tail=9)
    picked = (torch.rand(30, generator=generator) ** 2 * 40).long()
    x = torch.randn(layout.total, columns + 8, generator=generator).to(dtype)
    dense = torch.randn(40, 3, columns, generator=generator).to(dtype)

    def moved(device: str) -> list[torch.Tensor]:
        offsets = layout.offsets(device)
        # Rows that are further apart than they are long.
        rows = x.to(device)[:, :columns].requires_grad_()
        leaves = (rows, dense.to(device).requires_grad_())
        total = 2 * int(lengths.sum()) + 3 * 40 - left_out
        joined, planned = jagged_cuda.jagged_concat(
            [rows, leaves[1], rows], [offsets, None, offsets], total=total
        )
        paths = [last_kernel("cuda")]
        found = [joined, planned, *torch.autograd.grad(joined, leaves, joined.detach() * 2)]
        paths.append(last_kernel("cuda"))
        taken, _ = jagged_cuda.jagged_index_select(
            rows, offsets, picked.to(device), total=max(0, 3500 - left_out)
        )
        found += [taken, *torch.autograd.grad(taken, rows, taken.detach() + 1)]
        paths.append(last_kernel("cuda"))
        if device == CUDA:
            names = ("jagged_concat", "jagged_concat_backward", "jagged_index_select_backward")
            assert paths == [f"cuda.{name}" for name in names]
        return found

    for found, expected in zip(moved(CUDA), moved("cpu"), strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_path_of_mma_sync(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of all GPUs run on Hopper too, when they are asked for."""
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "mma_sync")
    case = CASES["jagged_flash_attention"]
    spec = spec_of(LAYOUT, dims=(dim, dim))
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == f"cuda.attention.forward.mma_sync.d{dim}"
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == f"cuda.attention.backward.mma_sync.d{dim}"


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
    dtype = _in_precision(precision, request)
    case = CASES["array_jagged_bmm_jagged_out"]
    layout = Layout(lengths, base=5, tail=9)
    spec = spec_of(layout, N=columns, transpose=transpose)
    is_wgmma = HOPPER and path == "best" and columns > (32 if precision in _DTYPES else 64)
    kernel = f"{'wgmma' if is_wgmma else 'mma_sync'}.{precision}"
    names = [f"{_WEIGHTED}.{kernel}", f"{_WEIGHTED}.transposed.{kernel}"]
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == names[transpose]
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == names[not transpose]


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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_few_columns(
    dtype: torch.dtype, inner: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """Sequences that end anywhere within 16 rows, many of them or none; one to four times 16 rows
    for a warp."""
    case = CASES["jagged_dense_bmm"]
    spec = spec_of(Layout(lengths, base=5, tail=9), D=inner, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in _DTYPES.items() if value is dtype)
    assert last_kernel("cuda") == f"{_DENSE}.few_columns.{element}"
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("columns", [32, 72, 200, 264])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_one_term(dtype: torch.dtype, columns: int) -> None:
    """8, 16 and all lanes for a row, and two steps of columns; tiles of 64 rows, many sequences."""
    case = CASES["jagged_dense_bmm"]
    layout = Layout((0, 1, 63, 64, 65, 0, 150) + (3, 0, 7) * 40, base=5, tail=9)
    spec = spec_of(layout, D=1, N=columns)
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    element = next(name for name, value in _DTYPES.items() if value is dtype)
    assert last_kernel("cuda") == f"{_DENSE}.outer.{element}"
    judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@PATH
@pytest.mark.parametrize("inner", [8, 64, 200])
@PRECISION
def test_path_of_matrices(
    precision: str, inner: int, path: str, many: bool, request: pytest.FixtureRequest
) -> None:
    """Sequences of one tile of columns and of many, any pitch, one step of D and several.

    Where there are many, tiles are wider.
    """
    dtype = _in_precision(precision, request)
    case = CASES["jagged_jagged_bmm_jagged_out"]
    layout, keys = Layout((150, 0, 33, 64, 1, 417), base=5, tail=9), None
    if many:
        layout = Layout((1, 3, 65, 2, 0, 5, 17, 1, 33, 4, 2, 1) * 86, base=5, tail=9)
        keys = Layout((30, 64, 65, 128, 129, 192, 193, 224, 225, 460, 0, 1) * 86, base=2, tail=3)
    spec = spec_of(layout, kv_layout=keys, cross=many, D=inner)
    kernel = f"mma_sync.{precision}"
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    kernel = _best(_MATRICES, kernel) if path == "best" else f"{_MATRICES}.{kernel}"
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
    dtype = _in_precision(precision, request)
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
    dtype = _in_precision("f32", request)
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


def test_unknown_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "wgmma")
    case = CASES["jagged_flash_attention"]
    sample = case.sample(spec_of(LAYOUT), torch.bfloat16, CUDA)
    with pytest.raises(RuntimeError, match="JAGGED_CUDA_TENSOR_CORES must be mma_sync or nothing"):
        case.call(jagged_cuda, sample)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@PATH
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_path_of_long_sequences(dtype: torch.dtype, dim: int, path: str, causal: bool) -> None:
    """Long on average, sequences are cut into larger tiles, or walked in larger steps."""
    case = CASES["jagged_flash_attention"]
    layout = Layout((1300, 129, 1100), base=5, tail=9)
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 2), causal=causal)
    wgmma = HOPPER and path == "best"
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    forward = f"mma_sync.d{dim}.rows128"
    if wgmma:
        forward = "wgmma.d32" if dim == 32 else f"long.d{dim}"
    assert last_kernel("cuda") == f"cuda.attention.forward.{forward}"
    judge(case, spec, dtype, CUDA)
    backward = f"mma_sync.d{dim}.rows128"
    if wgmma:
        backward = "wgmma.d32.step64" if dim == 32 else f"long.d{dim}"
    assert last_kernel("cuda") == f"cuda.attention.backward.{backward}"
    torch.use_deterministic_algorithms(True)
    try:
        judge(case, spec, dtype, CUDA)
    finally:
        torch.use_deterministic_algorithms(False)
    in_order = backward.replace("long", "long_ordered")
    assert last_kernel("cuda") == f"cuda.attention.backward.{in_order}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@PATH
@pytest.mark.parametrize(("dims", "bucket"), [((192, 136), 192), ((256, 256), 256)])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_path_of_wide_heads(
    dtype: torch.dtype, dims: tuple[int, int], bucket: int, path: str, causal: bool
) -> None:
    """Sequences of every length, in every mode, go one way."""
    case = CASES["jagged_flash_attention"]
    wgmma = HOPPER and path == "best"
    for layout in (LAYOUT, Layout((1300, 129, 1100), base=5, tail=9)):
        spec = spec_of(layout, dims=dims, causal=causal)
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        forward = f"long.d{bucket}" if wgmma else "mma_sync.d256"
        assert last_kernel("cuda") == f"cuda.attention.forward.{forward}"
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                judge(case, spec, dtype, CUDA)
            finally:
                torch.use_deterministic_algorithms(False)
            backward = f"wide.d{bucket}" if wgmma else "mma_sync.d256"
            assert last_kernel("cuda") == f"cuda.attention.backward.{backward}"


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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
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
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
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


# Beside the longest sequences that are not long, 192 and 256 queries, and edges of larger tiles.
LONG_MIXED = Layout(
    (255, 257, 0, 256, 900, 64, 1, 385, 40, 577, 128, 129, 192, 193), base=5, tail=70
)
LONG_MIXED_KEYS = Layout(
    (300, 129, 3, 700, 128, 64, 0, 0, 257, 800, 40, 130, 193, 64), base=2, tail=66
)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize(
    "dims",
    [
        *((32, 32), (24, 16), (64, 64), (40, 64), (128, 128), (72, 96), (64, 128), (192, 160)),
        *((256, 256), (16, 224)),
    ],
)
def test_long_among_shorter_sequences(
    dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}, {"window_size": (-1, 9)}):
        spec = spec_of(LONG_MIXED, dims=dims, heads=heads, **options)
        spec = dataclasses.replace(spec, kv_layout=LONG_MIXED_KEYS if cross else None)
        judge(case, spec, torch.bfloat16, CUDA)


# Queries that, with the heads of a group, fill a part of a tile, beside edges of tiles of 2, 4, 8.
PACKED = Layout((1, 33, 0, 4, 8, 9, 16, 17, 31, 32, 65, 128, 300, 257, 24), base=5, tail=7)
PACKED_KEYS = Layout((300, 33, 7, 129, 600, 0, 64, 1, 257, 40, 128, 130, 301, 9, 900), base=2)


@pytest.mark.parametrize("keys", [None, PACKED_KEYS], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(2, 1), (8, 2), (16, 2), (6, 1), (16, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 96)])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_packed_heads(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], keys: Layout | None
) -> None:
    """Heads of a group share a tile; a sequence alone gives the bits that it gives among others."""
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (70, 30)}, {"scale": -0.3}):
        spec = spec_of(PACKED, dims=dims, heads=heads, kv_layout=keys, **options)
        sample = case.sample(spec, dtype, CUDA)
        whole = run(case, sample, calls(case), None)
        if HOPPER:
            bucket = 64 if max(dims) <= 64 else 128
            assert last_kernel("cuda") == f"cuda.attention.forward.long.packed.d{bucket}"
        judge(case, spec, dtype, CUDA, backward=False)
        if keys is not None:
            continue
        begin, end = PACKED.offsets().tolist()[-4:-2]
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        alone = dataclasses.replace(spec, layout=Layout((end - begin,)))
        found = run(case, Sample(alone, rows, offsets, None), calls(case), None)
        assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


# The same for the backward pass, where those of 1,024 queries and more are long.
LONG_BACKWARD = Layout((1023, 1025, 0, 1024, 64, 1153, 1, 1300), base=5, tail=70)
LONG_BACKWARD_KEYS = Layout((300, 129, 3, 1200, 64, 0, 7, 1), base=2, tail=66)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 128), (72, 96), (64, 128)])
@pytest.mark.parametrize("in_order", [False, True], ids=["", "in_order"])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_long_among_shorter_sequences_backward(
    dtype: torch.dtype, in_order: bool, dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    case = CASES["jagged_flash_attention"]
    windows = ((100, 30), (-1, 9), (3, 0))  # with the last, items of two or three steps
    for options in ({}, {"causal": True}, *({"window_size": window} for window in windows)):
        spec = spec_of(LONG_BACKWARD, dims=dims, heads=heads, **options)
        spec = dataclasses.replace(spec, kv_layout=LONG_BACKWARD_KEYS if cross else None)
        torch.use_deterministic_algorithms(in_order)
        try:
            judge(case, spec, dtype, CUDA)
        finally:
            torch.use_deterministic_algorithms(False)
        if HOPPER:
            name = "long_ordered" if in_order else "long"
            bucket = 64 if max(dims) <= 64 else 128
            assert last_kernel("cuda") == f"cuda.attention.backward.{name}.d{bucket}"


# Beside so many others sequences of 1,024 rows and more have launches of their own, at D up to 32.
LONG_HIDDEN = Layout(
    (*(40, 0, 128, 70, 65, 1, 100) * 2, 1023, 1024, 1100, 300, 1025), base=5, tail=70
)


@pytest.mark.parametrize("dims", [(32, 32), (16, 24)])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_long_hidden_among_shorter_sequences_backward(
    dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}):
        for heads in ((2, 2), (3, 1)):
            spec = spec_of(LONG_HIDDEN, dims=dims, heads=heads, max_len=True, **options)
            judge(case, spec, dtype, CUDA)


def test_long_hidden_among_many_shorter_sequences_backward() -> None:
    """The same where there is so much to do that they are looked for without max_len."""
    lengths = torch.tensor((*(100,) * 4100, 2000, *(60,) * 2000, 1024), device=CUDA)
    offsets = jagged_cuda.offsets_from_lengths(lengths)
    total = int(lengths.sum())
    assert 2 * total >= 2**20
    torch.manual_seed(0)
    size = (total, 2, 32)
    leaves = [
        torch.randn(size, device=CUDA, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    out = jagged_cuda.jagged_flash_attention(*leaves, offsets, causal=True)
    given = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, given)
    for seq in (0, 4099, 4100, 5000, 6101):
        rows = slice(int(offsets[seq]), int(offsets[seq + 1]))
        part = [leaf[rows].detach().double().movedim(0, 1).requires_grad_() for leaf in leaves]
        wanted = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True),
            part,
            given[rows].double().movedim(0, 1),
        )
        for gradient, exact in zip(found, wanted, strict=True):
            expected = exact.movedim(0, 1)
            bound = 2**-6 * expected.abs().max() + 1e-2
            assert ((gradient[rows].double() - expected).abs() <= bound).all(), seq


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (700, 30), (300, -1)])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_gives_the_same_bits(dim: int, window_size: tuple[int, int]) -> None:
    """In deterministic mode tiles of keys add to dq in order, whatever CTAs take them and when."""
    case = CASES["jagged_flash_attention"]
    # The first has more tiles of keys than an H100 has CTAs of this kernel.
    layout = Layout((18000, 4096, 2000, 300, 1025))
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 1), window_size=window_size)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    given = cotangents_of(case, sample)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(case, sample, calls(case), given)
        if HOPPER:
            assert last_kernel("cuda") == f"cuda.attention.backward.long_ordered.d{dim}"
        for _ in range(99):
            assert_same_bits(run(case, sample, calls(case), given), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_repeats_all_but_dq(dim: int, causal: bool) -> None:
    """Else the sums of dq alone depend on the order in which CTAs add."""
    case = CASES["jagged_flash_attention"]
    spec = spec_of(Layout((4096, 2000, 1025)), dims=(dim, dim), heads=(4, 2), causal=causal)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    given = cotangents_of(case, sample)
    first, *others = (run(case, sample, calls(case), given) for _ in range(5))
    if HOPPER:
        assert last_kernel("cuda") == f"cuda.attention.backward.long.d{dim}"
    del first["grad_q"]
    for other in others:
        del other["grad_q"]
        assert_same_bits(other, first)


@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_does_not_depend_on_neighbours(dim: int) -> None:
    """Nor on the places that a sequence's sums have in the workspace."""
    layout = Layout((1100, 40, 2500, 1024, 4000), base=5, tail=7)
    torch.manual_seed(0)
    size = (layout.total, 2, dim)
    q, k, v, grad_out = (torch.randn(size, device=CUDA, dtype=torch.bfloat16) for _ in range(4))

    def gradients(rows: slice, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[rows].clone().requires_grad_() for tensor in (q, k, v)]
        offsets = torch.tensor(lengths, device=CUDA)
        torch.use_deterministic_algorithms(True)
        try:
            out = jagged_cuda.jagged_flash_attention(*leaves, offsets, causal=True)
            return torch.autograd.grad(out, leaves, grad_out[rows])
        finally:
            torch.use_deterministic_algorithms(False)

    ends = layout.offsets().tolist()
    among_others = gradients(slice(None), ends)
    for begin, end in itertools.pairwise(ends):
        if end - begin >= 1024:
            alone = gradients(slice(begin, end), [0, end - begin])
            for found, wanted in zip(among_others, alone, strict=True):
                assert torch.equal(found[begin:end], wanted), (begin, end)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (400, 30)])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_scores_that_rise_along_the_keys(
    dtype: torch.dtype, dim: int, window_size: tuple[int, int]
) -> None:
    """The long forward keeps the reference of a row's scores until sums show that it is behind."""
    lengths = (900, 300, 1300)
    generator = torch.Generator(device=CUDA).manual_seed(0)
    shape = (sum(lengths), 2, dim)
    q, k, v = (torch.randn(shape, device=CUDA, generator=generator) for _ in range(3))
    rises = torch.cat([torch.linspace(0.1, 16, length, device=CUDA) for length in lengths])
    rises[lengths[0] : lengths[0] + lengths[1]] /= 8  # some rows of a tile only
    q, k, v = q.to(dtype), (k * rises[:, None, None]).to(dtype), v.to(dtype)
    offsets = jagged_cuda.offsets_from_lengths(torch.tensor(lengths, device=CUDA))
    out, lse = jagged_cuda.jagged_flash_attention(
        q, k, v, offsets, window_size=window_size, return_lse=True
    )
    if HOPPER:
        assert last_kernel("cuda") == f"cuda.attention.forward.long.d{dim}"
    # P and the result are rounded once each.
    unit = torch.finfo(dtype).eps / 2
    left, right = (100_000 if rows < 0 else rows for rows in window_size)
    for begin, end in itertools.pairwise(offsets.tolist()):
        rows = slice(begin, end)
        places = torch.arange(end - begin, device=CUDA)
        distance = places[None] - places[:, None]
        hidden = (distance < -left) | (distance > right)
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), k[rows].double()) * dim**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        values, probs = v[rows].double(), scores.softmax(-1)
        expected = torch.einsum("hij,jhd->ihd", probs, values)
        bound = 3 * unit * torch.einsum("hij,jhd->ihd", probs, values.abs())
        assert ((out[rows].double() - expected).abs() <= bound).all()
        torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_long_sequences_do_not_depend_on_neighbours(dim: int) -> None:
    """A long sequence alone gives the bits that it gives among others."""
    case = CASES["jagged_flash_attention"]
    sample = case.sample(spec_of(LONG_MIXED, dims=(dim, dim)), torch.bfloat16, CUDA)
    whole = run(case, sample, calls(case), None)
    for begin, end in itertools.pairwise(LONG_MIXED.offsets().tolist()):
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        spec = spec_of(Layout((end - begin,)), dims=(dim, dim))
        found = run(case, Sample(spec, rows, offsets, None), calls(case), None)
        assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


@pytest.mark.parametrize("max_len", [False, True], ids=["", "max_len"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_groups_of_heads(dim: int, max_len: bool) -> None:
    """Many short sequences: on Hopper a CTA takes two heads, with max_len all four."""
    case = CASES["jagged_flash_attention"]
    draw = random.Random(0)
    layout = Layout(tuple(draw.choice((0, 1, 15, 64, 70)) for _ in range(1100)), base=2, tail=3)
    spec = spec_of(layout, dims=(dim, dim), max_len=max_len)
    judge(case, spec, torch.bfloat16, CUDA)


# Beside the length at which target attention splits a sequence, 512.
LONG = Layout((1300, 0, 511, 512, 513, 3, 2049), base=5, tail=9)


@pytest.mark.parametrize(("dim", "queries"), [(64, 1), (256, 8), (128, 32), (128, 100), (32, 128)])
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_target_attention_merges_the_parts_of_long_sequences(
    dtype: torch.dtype, dim: int, queries: int
) -> None:
    case = CASES["jagged_target_attention"]
    crowded = Layout((3,) * 40 + (2049, 600, 0, 1025))  # the other numbering of parts
    for layout, heads in ((LONG, None), (LONG, (2, 2)), (crowded, None)):
        judge(case, spec_of(layout, dims=(dim, dim), queries=queries, heads=heads), dtype, CUDA)


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


@CASE
@pytest.mark.parametrize("profile", ["edge", "large"])
def test_tf32_agrees_within_its_rounding(case: Case, profile: str, tf32: None) -> None:
    for seed in range(8 if profile == "edge" else 3):
        judge(case, case.spec(profile, seed), torch.float32, CUDA)


PRODUCTS = [name for name, case in CASES.items() if name.endswith(("_bmm", "_jagged_out"))]
TF32_CASES = pytest.mark.parametrize(
    "name", [*PRODUCTS, "jagged_flash_attention", "jagged_target_attention"]
)


@TF32_CASES
def test_tf32_is_taken_only_where_it_is_allowed(name: str, request: pytest.FixtureRequest) -> None:
    """The same inputs: the precise result is within the precise limit, the other one is not."""
    case = CASES[name]
    spec = spec_of(Layout((300, 300)), D=256, N=64)
    sample = case.sample(spec, torch.float32, CUDA)
    precise = case.call(jagged_cuda, sample)
    check(case, sample, precise, None)
    request.getfixturevalue("tf32")
    rounded = case.call(jagged_cuda, sample)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with pytest.raises(AssertionError):
        check(case, sample, rounded, None)


@TF32_CASES
def test_backward_keeps_the_precision_of_forward(name: str, tf32: None) -> None:
    case = CASES[name]
    sample = case.sample(spec_of(LAYOUT), torch.float32, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    out = case.call(jagged_cuda, dataclasses.replace(sample, tensors=leaves))["out"]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    out.sum().backward()
    assert last_kernel("cuda").endswith("tf32")


# Long on average, around the tiles of 64, 128 and 256 rows and the steps of 16 to 64.
LONG_F32 = Layout((700, 1300, 0, 255, 1025, 1537), base=3, tail=5)
LONG_F32_KEYS = Layout((1500, 700, 3, 128, 1025, 64), base=2, tail=4)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "f32"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_attention_of_long_sequences_in_f32(
    dim: int, precision: str, mask: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In TF32 warps have two blocks of rows, or wgmma runs; the path is named, the result right."""
    dtype, case = _in_precision(precision, request), CASES["jagged_flash_attention"]
    tiles = {64: ".rows128", 128: ".rows256"}.get(dim, "") if precision == "tf32" else ""
    for kv_layout, heads in ((None, (2, 2)), (LONG_F32_KEYS, (4, 2))):
        spec = spec_of(
            LONG_F32,
            kv_layout=kv_layout,
            cross=kv_layout is not None,
            dims=(dim, dim),
            heads=heads,
            **mask,
        )
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        path = f"mma_sync.d{dim}{tiles}"
        if HOPPER and precision == "tf32" and dim in (64, 128):
            path = f"long.d{dim}"
        assert last_kernel("cuda") == f"cuda.attention.forward.{path}.{precision}"
        judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("precision", ["tf32", "f32"])
@pytest.mark.parametrize("dim", [24, 64, 128, 200])
def test_attention_in_f32_is_deterministic_and_batch_invariant(
    dim: int, precision: str, request: pytest.FixtureRequest
) -> None:
    """The same bits at every run, and forward alone or among others, by either size of tiles."""
    dtype, case = _in_precision(precision, request), CASES["jagged_flash_attention"]
    layout = Layout((1300, 5, 700, 0, 1100))
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 2))
    sample = case.sample(spec, dtype, CUDA)
    cotangents = cotangents_of(case, sample)
    whole = run(case, sample, calls(case), cotangents)
    for _ in range(3):
        assert_same_bits(run(case, sample, calls(case), cotangents), whole)
    ends = layout.offsets().tolist()
    for begin, end in itertools.pairwise(ends):
        # 300 empty sequences: short on average.
        for empty in (0, 300):
            alone = Layout((end - begin, *(0,) * empty))
            rows = {name: t[begin:end].clone() for name, t in sample.tensors.items()}
            offsets = torch.tensor(alone.offsets().tolist(), device=CUDA)
            found = run(
                case,
                Sample(spec_of(alone, dims=(dim, dim), heads=(2, 2)), rows, offsets, None),
                calls(case),
                None,
            )
            assert_same_bits(found, {n: whole[n][begin:end] for n in found})


# They return indices, by one kernel each, and have tests of their own.
INDICES = ("hstu_key_ranges",)


def test_every_operator_has_paths() -> None:
    assert {name for name, *_ in PATHS} == CASES.keys()
    assert set(INDICES) == INDEX_OPERATORS


# --- no host synchronisation


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CASE_AND_CROSS
@DTYPE
def test_never_synchronises(case: Case, cross: bool, dtype: torch.dtype) -> None:
    spec = spec_of(LAYOUT, kv_layout=KEYS if cross else None)
    sample = case.sample(spec, dtype, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    sample = dataclasses.replace(sample, tensors=leaves)
    cotangents = {n: torch.ones_like(t) for n, t in case.call(jagged_cuda, sample).items()}
    with no_synchronisation():
        found = case.call(jagged_cuda, sample)
        torch.autograd.grad(list(found.values()), list(leaves.values()), list(cotangents.values()))


def filled_up(lengths: tuple[int, ...], total: int) -> Layout:
    """Rows outside added before and after the sequences, up to so many rows."""
    outside = total - sum(lengths)
    return Layout(lengths, base=outside - (outside > 0), tail=int(outside > 0))


@CASE_AND_CROSS
@DTYPE
def test_graph_replays_with_other_lengths(case: Case, cross: bool, dtype: torch.dtype) -> None:
    """Captured once, forward and backward; replayed with lengths of the same T and B."""
    # Room for one sequence of all 160 rows.
    captured = spec_of(Layout((40, 0, 100, 7, 3), base=2, tail=8), poisoned=False, capacity=160**2)
    if cross:
        captured = dataclasses.replace(captured, kv_layout=filled_up((10, 3, 60, 0, 30), 120))
    sample = case.sample(captured, dtype, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    static = dataclasses.replace(sample, tensors=leaves)
    # From tensors without gradients: an autograd graph from outside the capture must not live on.
    outputs = case.call(jagged_cuda, sample)
    cotangents = {n: t.clone() for n, t in cotangents_of(case, sample)(outputs).items()}

    def step() -> tuple[Tensors, tuple[torch.Tensor, ...]]:
        found = case.call(jagged_cuda, static)
        inputs = [leaves[name] for name in case.inputs]
        return found, torch.autograd.grad(list(found.values()), inputs, list(cotangents.values()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, gradients = step()
    replayed = (
        ((0, 0, 0, 0, 150), (0, 40, 0, 0, 80)),
        ((30, 30, 30, 30, 30), (1, 0, 64, 33, 2)),
        ((160, 0, 0, 0, 0), (120, 0, 0, 0, 0)),
    )
    for seed, (lengths, keys) in enumerate(replayed, 1):
        spec = dataclasses.replace(
            captured,
            seed=seed,
            layout=filled_up(lengths, 160),
            kv_layout=filled_up(keys, 120) if cross else None,
        )
        fresh = case.sample(spec, dtype, CUDA)
        with torch.no_grad():
            for name, tensor in fresh.tensors.items():
                leaves[name].copy_(tensor)
            static.offsets.copy_(fresh.offsets)
            if static.kv_offsets is not None and fresh.kv_offsets is not None:
                static.kv_offsets.copy_(fresh.kv_offsets)
            given = cotangents_of(case, fresh)(outputs)
            for name, tensor in given.items():
                cotangents[name].copy_(tensor)
        graph.replay()
        results = {n: t.detach().clone() for n, t in found.items()}
        names = (f"grad_{name}" for name in case.inputs)
        results |= {n: g.clone() for n, g in zip(names, gradients, strict=True)}
        check(case, fresh, results, given)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_graph_replays_with_longer_sequences_among_many_tiny_ones(dim: int) -> None:
    """Captured where all are tiny, and kernels behind have no work; replayed with some longer."""
    total, heads = 24_000, 2
    tiny = [10] * 2000  # so many that longer ones are looked for in slabs
    q, k, v, grad_out = (
        torch.randn(total, heads, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def offsets_of(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device=CUDA).cumsum(0)

    def step(offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = jagged_cuda.jagged_flash_attention(*leaves, offsets)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    static = offsets_of(tiny)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    for lengths in (
        tiny,
        [*tiny[:-9], 65, *tiny[:8]],
        [300, *tiny[9:], 0, 0, 0, 0, 0, 0, 0, 33],
        tiny,
        [*tiny[:300], 900, *tiny[301:]],
    ):
        assert len(lengths) == len(tiny)
        offsets = offsets_of(lengths)
        static.copy_(offsets)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for found, wanted in zip(results, step(offsets), strict=True):
            assert torch.equal(found, wanted)


@CASE
def test_current_stream(case: Case) -> None:
    """Inputs that are written late on a side stream are read after they are written."""
    sample = case.sample(spec_of(LAYOUT), torch.float32, CUDA)
    expected = run(case, sample, calls(case), cotangents_of(case, sample))
    late = {n: torch.full_like(t, 7.0) for n, t in sample.tensors.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name, tensor in late.items():
            tensor.copy_(sample.tensors[name])
        found = run(
            case,
            dataclasses.replace(sample, tensors=late),
            calls(case),
            cotangents_of(case, sample),
        )
    stream.synchronize()
    assert_same_bits(found, expected)


@CASE
@pytest.mark.multi_gpu
def test_second_device(case: Case) -> None:
    """Kernels run on the tensors' device, whatever the current one is."""
    assert torch.cuda.current_device() == 0
    judge(case, spec_of(LAYOUT), torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0


# --- memory


@contextlib.contextmanager
def memory_left(size_bytes: int) -> Iterator[None]:
    """PyTorch's allocator may take no more, and holds no free block of that size."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    blocks = []
    block_bytes = 2**34
    while block_bytes >= size_bytes:
        try:
            blocks.append(torch.empty(block_bytes, dtype=torch.uint8, device=CUDA))
        except torch.OutOfMemoryError:
            block_bytes //= 2
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# 64 MiB for each tensor, more than the allocator keeps for small ones.
BIG = Layout((1024,) * 2**7)
MANY = Layout((1,) * 2**17)
# The layouts with which a result, or a gradient, is large where it has one row per sequence.
LAYOUT_OF_RESULT = {
    "jagged_sum": MANY,
    "jagged_mean": MANY,
    "jagged_jagged_bmm": Layout((1,) * 500),
    "jagged_target_attention": Layout((1,) * 500),
}
# Their cases compute a mask or an index on the GPU too; tests/test_rows.py and
# test_layer_norm_mul_dropout.py look at their memory.
PLANNED = {
    "layer_norm_mul_dropout",
    "jagged_take",
    "jagged_select",
    "jagged_slice",
    "jagged_index_select",
    "jagged_concat",
}
# So do the cases of those whose results are numbers.
NUMBERS = [name for name, case in CASES.items() if not case.differentiable]
PLANNED |= set(NUMBERS)
LAYOUT_OF_GRADIENT = {"jagged_broadcast": MANY, "jagged_dense_bmm": Layout((100,) * 500)}
BIG_CHOICES = {"D": 256, "N": 256, "trailing": (256,), "dims": (64, 64), "heads": (4, 4)}
BIG_CHOICES |= {"queries": 256, "ranges": None, "row_scale": False}


def each_of(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [EVERY[name] for name in names], ids=names)


UNPLANNED_NAMES = [name for name, case in EVERY.items() if case.name not in PLANNED]
UNPLANNED = each_of(UNPLANNED_NAMES)
# Ranges of keys, and what biases are looked up by, are made in the call, and there is no room for
# them either.
WITHOUT_RANGES = each_of(
    [
        name
        for name in UNPLANNED_NAMES
        if None in EVERY[name].choices.get("ranges", (None,))
        and "kv_bias" not in EVERY[name].inputs
    ]
)


@WITHOUT_RANGES
@pytest.mark.parametrize("storage", ["contiguous", "expanded"])
def test_out_of_memory_forward(case: Case, storage: str) -> None:
    layout = LAYOUT_OF_RESULT.get(case.name, BIG)
    sample = case.sample(spec_of(layout, **BIG_CHOICES), torch.bfloat16, CUDA)
    if storage == "expanded":
        first = next(iter(sample.tensors))
        wide = torch.zeros(1, device=CUDA, dtype=torch.bfloat16)
        sample.tensors[first] = wide.expand(sample.tensors[first].shape)
    with memory_left(2**21), pytest.raises(torch.OutOfMemoryError) as caught:
        case.call(jagged_cuda, sample)
    assert f"CUDA {case.name}: out of memory on cuda:0 allocating a tensor of" in str(caught.value)
    assert "total capacity" in str(caught.value)
    assert "allocated by PyTorch" in str(caught.value)


@UNPLANNED
def test_out_of_memory_backward(case: Case) -> None:
    layout = LAYOUT_OF_GRADIENT.get(case.name, BIG)
    ranges = case.choices.get("ranges", (None,))[0]
    sample = case.sample(spec_of(layout, **BIG_CHOICES | {"ranges": ranges}), torch.bfloat16, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    out = case.call(jagged_cuda, dataclasses.replace(sample, tensors=leaves))["out"]
    cotangent = torch.ones_like(out)
    with memory_left(2**21), pytest.raises(torch.OutOfMemoryError, match="out of memory on"):
        torch.autograd.grad(out, list(leaves.values()), cotangent)


@pytest.mark.parametrize("name", NUMBERS)
def test_out_of_memory_of_numbers(name: str) -> None:
    x, offsets = torch.zeros(2**27, device=CUDA), torch.tensor([0, 2**27], device=CUDA)
    many = torch.zeros(2**27 + 1, dtype=torch.int32, device=CUDA)
    call = {
        "jagged_positions": lambda: jagged_cuda.jagged_positions(offsets, total=2**27),
        "jagged_sessionize": lambda: jagged_cuda.jagged_sessionize(x, offsets, 1, sessions=2**27),
        "jagged_topk": lambda: jagged_cuda.jagged_topk(x, offsets, 1),
        "matrix_offsets": lambda: jagged_cuda.matrix_offsets(many),
    }[name]
    with memory_left(2**21), pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    text = f"CUDA {name}: out of memory on cuda:0 allocating a tensor of [1342177"
    assert text in str(caught.value)


def requested_bytes(when: str = "current") -> int:
    """What tensors asked for: the free blocks that they got may be up to 1 MB larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def memory_at_rest() -> int:
    """What is requested, once backward passes of other tests have freed their memory.

    Their threads let go of it a moment after the pass returns. The peak counts from here.
    """
    gc.collect()
    before, now = -1, requested_bytes()
    while before != now:
        time.sleep(0.02)
        before, now = now, requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    return now


@UNPLANNED
@DTYPE
def test_memory_does_not_depend_on_the_longest_sequence(case: Case, dtype: torch.dtype) -> None:
    """No padded copy: forward takes its results, backward its gradients and one float32 copy."""
    layout = Layout((3000, *(1, 2, 0, 3) * 500))
    sample = case.sample(spec_of(layout, poisoned=False), dtype, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    sample = dataclasses.replace(sample, tensors=leaves)
    before = memory_at_rest()
    found = case.call(jagged_cuda, sample)
    after = requested_bytes()
    assert requested_bytes("peak") - before <= 1.1 * (after - before) + 2**16
    cotangents = [torch.ones_like(t) for t in found.values()]
    before = memory_at_rest()
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), cotangents)
    needed = sum(g.numel() * g.element_size() for g in gradients)
    needed += 4 * max(g.numel() for g in gradients)
    assert requested_bytes("peak") - before <= 1.1 * needed + 2**16


# --- sizes


@CASE
@TWO_DTYPES
def test_200_000_sequences(case: Case, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    lengths = tuple(rng.choice((0, 1, 1, 2, 5)) for _ in range(200_000))
    spec = spec_of(Layout(lengths, base=1), D=8, N=8, dims=(16, 16), padded_len=4)
    judge(case, spec, dtype, CUDA)


def last_sequences(case: Case, sample: Sample, found: Tensors, count: int) -> None:
    """Judge the last sequences of a sample that is too large to be judged whole."""
    spec = sample.spec
    part = dataclasses.replace(spec, layout=Layout(spec.layout.lengths[-count:]))

    def tail(name: str, values: torch.Tensor) -> torch.Tensor:
        kept = part.rows_layout(case.rows[name.removeprefix("grad_")]).total
        return values[-kept:]

    tensors = {name: tail(name, t) for name, t in sample.tensors.items()}
    ones = {name: torch.ones_like(tail(name, found[name])) for name in case.outputs}
    check(
        case,
        Sample(part, tensors, sample.offsets, None),
        {name: tail(name, t) for name, t in found.items()},
        ones,
    )


def run_huge(case: Case, spec: Spec, dtype: torch.dtype) -> None:
    """Forward and backward on more than 2^31 elements; the last sequences are judged."""
    # Made in place, and quickly: normal values take too many copies of this size.
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=CUDA).uniform_(-1, 1)
        for name, shape in case.shapes(spec).items()
    }
    sample = Sample(spec, tensors, spec.layout.offsets(CUDA), None)
    gc.collect()
    found = run(
        case,
        sample,
        calls(case),
        lambda outputs: {
            n: torch.ones((), dtype=t.dtype, device=CUDA).expand(t.shape)
            for n, t in outputs.items()
        },
    )
    assert max(t.numel() for t in (*tensors.values(), *found.values())) > 2**31
    last_sequences(case, sample, found, count=5)


# Float32 products have kernels of their own; with as many keys as queries they take 70 GB.
HUGE = [
    pytest.param(case, dtype, path, choices, id=f"{name}-{str(dtype)[6:]}-{path}")
    for name, case in CASES.items()
    if case.huge is not None
    for dtype, path, choices in (
        (torch.bfloat16, "best", case.huge),
        *([(torch.bfloat16, "mma_sync", case.huge)] if "dims" in case.choices else ()),
        *([(torch.float32, "best", {**case.huge, "heads": (8, 1)})] if case.product else ()),
    )
    if name != "jagged_target_attention" or dtype is torch.bfloat16
]


@pytest.mark.parametrize(("case", "dtype", "path", "choices"), HUGE, indirect=["path"])
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements(
    case: Case,
    dtype: torch.dtype,
    path: str,
    choices: dict[str, Any],
) -> None:
    layout = Layout((1,) * 3 + (128,) * 2**15 + (64, 0, 77))
    run_huge(case, spec_of(layout, poisoned=False, **choices), dtype)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.huge_dense is not None]
)
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements_of_one_row_a_sequence(name: str) -> None:
    case = CASES[name]
    layout = Layout((1, 0, 2) * 10_925)
    run_huge(case, spec_of(layout, poisoned=False, **(case.huge_dense or {})), torch.bfloat16)


MATRICES = [
    pytest.param(case, choices, path, id=f"{name}-{'-'.join(map(str, choices.values()))}-{path}")
    for name, case in CASES.items()
    if "matrix" in case.rows.values()
    for path in (("best", "mma_sync") if case.product else ("best",))
    for choices in (
        *([{"dim": -1}, {"dim": -2}] if "dim" in case.choices else ()),
        *([{"transpose": False}, {"transpose": True}] if "transpose" in case.choices else ()),
        *([{}] if not case.choices.keys() & {"dim", "transpose"} else ()),
    )
]


@pytest.mark.parametrize(("case", "choices", "path"), MATRICES, indirect=["path"])
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements_of_matrices(
    case: Case, choices: dict[str, Any], path: str
) -> None:
    layout = Layout((3, 0) + (1025,) * 2100 + (64, 0, 77))
    spec = spec_of(layout, poisoned=False, **choices)
    assert spec.capacity > 2**31
    run_huge(case, spec, torch.bfloat16)
