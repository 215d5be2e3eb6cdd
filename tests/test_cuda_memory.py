"""Out of memory, forward and backward; no padded copy."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

import pytest
import torch
from on_cuda import CUDA, memory_at_rest, requested_bytes
from plain import DTYPE, spec_of

import jagged_cuda
from jagged_cuda.testing.cases import CASES, EVERY, Case
from jagged_cuda.testing.lengths import Layout

pytestmark = pytest.mark.cuda


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
