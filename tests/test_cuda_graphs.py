"""No host synchronisation; captured graphs replay with other lengths."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from on_cuda import CASE_AND_CROSS, CUDA, KEYS, LAYOUT, no_synchronisation
from plain import DTYPE, cotangents_of, spec_of

import jagged_cuda
from jagged_cuda.testing.cases import Case, Tensors
from jagged_cuda.testing.judge import check
from jagged_cuda.testing.lengths import Layout

pytestmark = pytest.mark.cuda


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
        [*tiny[:300], 500, *tiny[301:]],  # from 512 rows on dq depends on the order of its sums
    ):
        assert len(lengths) == len(tiny)
        offsets = offsets_of(lengths)
        static.copy_(offsets)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for found, wanted in zip(results, step(offsets), strict=True):
            assert torch.equal(found, wanted)
