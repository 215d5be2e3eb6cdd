"""Streams, threads and devices other than the current one."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import pytest
import torch
from on_cuda import CUDA, LAYOUT
from plain import CASE, assert_same_bits, calls, cotangents_of, spec_of

import jagged_cuda
from jagged_cuda.testing.cases import Case
from jagged_cuda.testing.judge import judge, run

pytestmark = pytest.mark.cuda


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
