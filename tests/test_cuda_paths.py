"""Each kernel path of each operator by its name, and that it is right."""

from __future__ import annotations

from typing import Any

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
    STAGED,
    WEIGHTED,
    best_path,
)
from plain import spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, INDEX_OPERATORS
from jagged_cuda.testing.judge import judge

pytestmark = pytest.mark.cuda


def _target_forward(path: str) -> str:
    """The forward path of target attention: on wgmma where it names no rows."""
    if ".r" in path:
        return f"cuda.target.forward.mma_sync.{path}"
    return f"cuda.target.forward.{f'wgmma.{path}' if HOPPER else f'mma_sync.{path}.r128'}"


def _target_backward(forward: str, path: str) -> str:
    """The backward path: on wgmma where the forward pass is, there with fewer rows for fewer."""
    if ".r" in forward:
        return f"cuda.target.backward.mma_sync.{path}"
    dims = path.split(".")[0]
    return f"cuda.target.backward.{f'wgmma.{path}' if HOPPER else f'mma_sync.{dims}.r128'}"


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


# Every kernel path: operator, dtype, TF32 allowed, choices, the names after forward and backward.
PATHS: list[tuple[str, torch.dtype, bool, dict[str, Any], str, str]] = [
    *(
        (
            name,
            dtype,
            tf32,
            choices,
            best_path(first, path),
            best_path(last, path),
        )
        for name, choices, first, last in (
            ("jagged_jagged_bmm_jagged_out", {}, MATRICES, f"{WEIGHTED}.transposed"),
            ("array_jagged_bmm_jagged_out", {}, WEIGHTED, f"{WEIGHTED}.transposed"),
            (
                "array_jagged_bmm_jagged_out",
                {"transpose": True},
                f"{WEIGHTED}.transposed",
                WEIGHTED,
            ),
        )
        for dtype, tf32, path in _PRODUCT_PATHS
    ),
    *(
        (
            name,
            dtype,
            tf32,
            {"D": 64, "N": 64},
            dense if name == "jagged_dense_bmm" else f"{JAGGED}.{path}",
            dense,
        )
        for name in ("jagged_dense_bmm", "jagged_jagged_bmm")
        for dtype, tf32, path in _PRODUCT_PATHS
        for dense in (best_path(DENSE, path),)
    ),
    # Many columns.
    *(
        (name, dtype, False, {"D": 64, "N": 136}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in HALF_DTYPES.items()
        for kernel in ("wgmma" if HOPPER else "mma_sync",)
        for name, first, last in (
            ("jagged_dense_bmm", f"{DENSE}.{kernel}", f"{DENSE}.mma_sync"),
            ("jagged_jagged_bmm", f"{JAGGED}.{kernel}", f"{DENSE}.{kernel}"),
        )
    ),
    # Few terms per sum.
    *(
        (name, dtype, False, {"D": dim, "N": 72}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in HALF_DTYPES.items()
        for dim, product in ((8, f"{JAGGED}.weighted_sums"), (16, f"{JAGGED}.mma_sync"))
        for name, first, last in (
            ("jagged_dense_bmm", f"{DENSE}.thin", f"{DENSE}.mma_sync"),
            ("jagged_jagged_bmm", product, f"{DENSE}.thin"),
        )
    ),
    # One term per sum.
    *(
        (name, dtype, False, {"D": 1, "N": 72}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in HALF_DTYPES.items()
        for name, first, last in (
            ("jagged_dense_bmm", f"{DENSE}.outer", f"{DENSE}.mma_sync"),
            ("jagged_jagged_bmm", f"{JAGGED}.weighted_sums", f"{DENSE}.outer"),
        )
    ),
    # Few columns; the gradient of x, which comes last, has few terms.
    *(
        (name, dtype, False, {"D": dim, "N": columns}, f"{first}.{element}", f"{last}.{element}")
        for element, dtype in HALF_DTYPES.items()
        for dim, columns, product, gradient in (
            (64, 8, f"{JAGGED}.weighted_sums", f"{DENSE}.thin"),
            (128, 8, f"{JAGGED}.mma_sync", f"{DENSE}.thin"),
            (256, 8, f"{JAGGED}.mma_sync", f"{DENSE}.thin"),
            (256, 1, f"{JAGGED}.weighted_sums", f"{DENSE}.outer"),
        )
        for name, first, last in (
            ("jagged_dense_bmm", f"{DENSE}.few_columns", gradient),
            ("jagged_jagged_bmm", product, gradient),
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
        for name, dtype in (HALF_DTYPES | {"f32": torch.float32, "f64": torch.float64}).items()
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
                dict.fromkeys(HALF_DTYPES.values(), STAGED) | {torch.float32: ".words"},
                ".words",
            ),
            (-2, "rows", dict.fromkeys(HALF_DTYPES.values(), ".tiles"), ".tiles"),
        )
        for dtype in (*HALF_DTYPES.values(), torch.float32, torch.float64)
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
        for dtype in (*HALF_DTYPES.values(), torch.float32, torch.float64)
    ),
    # Rows of one unit of 16 bytes are moved as numbers are.
    *(
        (
            *("jagged_concat", dtype, False, {}),
            *(f"cuda.{name}{last}" for name in ("jagged_concat", "jagged_concat_backward")),
        )
        for dtypes, last in (
            (HALF_DTYPES.values(), ".numbers"),
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
        for dtype in (*HALF_DTYPES.values(), torch.float32, torch.float64)
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
        for dtype in (*HALF_DTYPES.values(), torch.float32)
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
        for dtype in (*HALF_DTYPES.values(), torch.float32, torch.float64)
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
        for dtype in HALF_DTYPES.values()
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
        for dtype in HALF_DTYPES.values()
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
            _target_backward(forward, backward),
        )
        for dtype in HALF_DTYPES.values()
        for dims, heads, queries, forward, backward in (
            ((1, 1), (1, 1), 1, "d32.r16", "d32.r16"),
            ((32, 16), (4, 2), 9, "d32.r32", "d32.r32"),
            ((32, 32), (3, 1), 40, "d32.r128", "d32.r128"),
            ((64, 64), None, 1, "d64.r16", "d64.r16"),
            ((33, 8), (8, 1), 4, "d64.r32", "d64.r32"),
            ((64, 64), (2, 2), 32, "d64.r32", "d64.r32"),
            ((40, 64), (2, 2), 33, "d64", "d64.r64"),
            ((64, 64), (4, 2), 64, "d64", "d64.r128"),
            ((63, 64), (1, 1), 40, "d64.r128", "d64.r128"),
            ((128, 128), (2, 2), 16, "d128.r16", "d128.r16"),
            ((16, 65), (1, 1), 32, "d128.r32", "d128.r32"),
            ((72, 128), (2, 1), 32, "d128", "d128.r64"),
            ((128, 128), (1, 1), 100, "d128", "d128.r128"),
            ((127, 128), (1, 1), 100, "d128.r128", "d128.r128"),
            ((256, 256), (1, 1), 8, "d256.r16", "d256.r16"),
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


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_mma_sync(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of all GPUs run on Hopper too, when they are asked for."""
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "mma_sync")
    case = CASES["jagged_flash_attention"]
    spec = spec_of(LAYOUT, dims=(dim, dim))
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    assert last_kernel("cuda") == f"cuda.attention.forward.mma_sync.d{dim}"
    judge(case, spec, dtype, CUDA)
    assert last_kernel("cuda") == f"cuda.attention.backward.mma_sync.d{dim}"


def test_unknown_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "wgmma")
    case = CASES["jagged_flash_attention"]
    sample = case.sample(spec_of(LAYOUT), torch.bfloat16, CUDA)
    with pytest.raises(RuntimeError, match="JAGGED_CUDA_TENSOR_CORES must be mma_sync or nothing"):
        case.call(jagged_cuda, sample)


# They return indices, by one kernel each, and have tests of their own.
INDICES = ("hstu_key_ranges",)


def test_every_operator_has_paths() -> None:
    assert {name for name, *_ in PATHS} == CASES.keys()
    assert set(INDICES) == INDEX_OPERATORS
