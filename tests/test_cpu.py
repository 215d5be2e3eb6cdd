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
from jagged_cuda.testing.draws import Draw, judge_draw


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


@pytest.mark.parametrize("op", ["jagged_flash_attention", "jagged_target_attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_the_rounding_of_out_does_not_reach_gradients(op: str, dtype: torch.dtype) -> None:
    """One query, one key with P of about 0.95, and values far from 0: dP - delta is small."""
    torch.manual_seed(0)
    num_seqs, keys, dim = 64, 3, 8
    q = torch.full((num_seqs, 1, dim), dim**-0.5)
    k = torch.randn(num_seqs, keys, 1, dim) + torch.tensor([3.5, 0.0, 0.0])[:, None, None]
    v = 32 + torch.randn(num_seqs, keys, 1, dim)
    leaves = [t.to(dtype).requires_grad_() for t in (q, k.flatten(0, 1), v.flatten(0, 1))]
    grad_out = torch.randn(num_seqs, 1, dim).to(dtype)

    q64, k64, v64 = (t.detach().double().requires_grad_() for t in leaves)
    scores = torch.einsum("bhd,blhd->bl", q64, k64.unflatten(0, (num_seqs, keys)))
    probs = (scores * dim**-0.5).softmax(1)
    out = torch.einsum("bl,blhd->bhd", probs, v64.unflatten(0, (num_seqs, keys)))
    exact = torch.autograd.grad(out, (q64, k64), grad_out.double())

    offsets = keys * torch.arange(num_seqs + 1)
    if op == "jagged_target_attention":
        found = jagged_cuda.jagged_target_attention(leaves[0][:, None], *leaves[1:], offsets)[:, 0]
    else:
        rows = torch.arange(num_seqs + 1)
        found = jagged_cuda.jagged_flash_attention(*leaves, rows, kv_offsets=offsets)
    gradients = torch.autograd.grad(found, leaves[:2], grad_out)
    for gradient, right in zip(gradients, exact, strict=True):
        error, largest = (
            t.detach().abs().view(num_seqs, -1).amax(1) for t in (gradient.double() - right, right)
        )
        assert bool((error <= 2 * torch.finfo(dtype).eps * largest).all())


# A draw of the fuzzer's on which dk was beyond the rule.
NEAR_ONE = """{"op": "jagged_target_attention", "spec": {"seed": 489682, "layout":
{"lengths": [5, 15, 0, 3]}, "choices": {"heads": [2, 2], "dims": [3, 5], "queries": 1,
"scale": null, "max_len": false}, "poisoned": false}, "dtype": "bfloat16", "backend": "cpu",
"device": "cpu", "outputs": ["out"]}"""


def test_the_draw_that_found_it() -> None:
    judge_draw(Draw.from_json(NEAR_ONE))
