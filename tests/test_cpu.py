"""The CPU kernels: each instruction set, and threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from plain import run_python

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, EVERY


def cpu_flags() -> set[str]:
    """What this processor can do, by the kernel's names; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    return set(lines[0].split()) if lines else set()


NEEDS = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"},
}
AVAILABLE = [isa for isa, needed in NEEDS.items() if needed <= cpu_flags()]


@pytest.mark.parametrize("isa", AVAILABLE)
def test_instruction_set(isa: str) -> None:
    """JAGGED_CUDA_CPU_ISA forces an instruction set; every operator is right on it."""
    seeds = [str(seed) for seed in range(2)]
    command = ["-m", "jagged_cuda.testing", "--profile", "edge", "--seed", *seeds]
    command += ["--dtype", "float32", "float64", "float16", "bfloat16"]
    done = run_python(*command, JAGGED_CUDA_CPU_ISA=isa, OMP_NUM_THREADS="2")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == list(EVERY)
    assert {line.rsplit(" ", 1)[1] for line in lines} == {f"cpu.{isa}"}


def test_best_instruction_set_is_the_default() -> None:
    case = CASES["jagged_softmax"]
    forced = os.environ.get("JAGGED_CUDA_CPU_ISA")
    case.call(jagged_cuda, case.sample(case.spec("edge", 3), torch.float32, "cpu"))
    assert last_kernel("cpu") == f"cpu.{forced or AVAILABLE[-1]}"
