"""What tests share: marks, samples with every option at a plain value, another interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jagged_cuda
from jagged_cuda.testing.cases import DTYPES, EVERY, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec, draw_cotangents

CASE = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
TWO_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)

# D and N: whole vectors of 16 bits, and enough of them for the products on wgmma.
PLAIN: dict[str, Any] = {"D": 40, "N": 48, "trailing": (8,), "dims": (64, 64), "heads": (4, 2)}
PLAIN |= {"causal": False, "window_size": (-1, -1), "scale": 0.25, "cross": False}
PLAIN |= {"max_len": False, "transpose": False, "capacity": "exact"}
PLAIN |= {"padded_len": 100, "fill": 0.0, "total": None, "dim": -1}
PLAIN = {name: c[0] for case in EVERY.values() for name, c in case.choices.items()} | PLAIN


# Options of some operators, of which PLAIN has the least: no ranges, a table of one number for all
# heads. No size is equal to another one of test_compile.py.
GENERAL: dict[str, Any] = {"ranges": "hstu", "kv_lengths": True, "row_scale": True}
GENERAL |= {"bias_heads": True, "buckets": 12}


def general(case: Case) -> dict[str, Any]:
    """GENERAL's choices that a case has."""
    return {name: value for name, value in GENERAL.items() if name in case.choices}


def spec_of(
    layout: Layout,
    seed: int = 0,
    poisoned: bool = True,
    kv_layout: Layout | None = None,
    **choices: Any,
) -> Spec:
    return Spec(seed, layout, PLAIN | choices, kv_layout, poisoned=poisoned)


def cotangents_of(case: Case, sample: Sample) -> Callable[[Tensors], Tensors]:
    return lambda outputs: draw_cotangents(outputs, sample.spec, case.rows)


def calls(case: Case) -> Callable[[Sample], Tensors]:
    return lambda sample: case.call(jagged_cuda, sample)


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)


def sentence(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What a call raises, or nothing."""
    try:
        function(*arguments, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def run_python(
    *arguments: str, cwd: Path | None = None, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run another interpreter, with these variables in its environment; it must end like this."""
    done = subprocess.run(
        [sys.executable, *map(textwrap.dedent, arguments)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done
