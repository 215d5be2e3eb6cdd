"""Properties of every operator for any input: hypothesis draws the inputs."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import CASE, assert_same_bits, calls, cotangents_of
from strategies import DTYPES, specs
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import Case, Tensors
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Rows, Sample, Spec


def everything_of(case: Case, sample: Sample) -> Tensors:
    """Outputs and gradients; the cotangents are drawn from the spec's seed."""
    return run(case, sample, calls(case), cotangents_of(case, sample))


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_agrees_with_the_definition(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    judge(case, data.draw(specs(case)), dtype, device)


def rows_of(values: Tensor, layout: Layout, seqs: list[int]) -> Tensor:
    """The rows of some sequences, one after another."""
    starts = layout.offsets().tolist()
    pieces = [values[starts[seq] : starts[seq + 1]] for seq in seqs]
    return torch.cat(pieces) if pieces else values[:0]


def selected(values: Tensor, rows: Rows, spec: Spec, seqs: list[int]) -> Tensor:
    if rows == "seq":
        return values[seqs].contiguous()
    if rows in ("features", "table"):  # the same for all
        return values.contiguous()
    return rows_of(values, spec.rows_layout(rows), seqs).contiguous()


def with_everything(spec: Spec) -> Spec:
    """Which matrices fit into too few elements depends on the whole batch, and so does which
    elements are dropped: let all of them fit, and drop none."""
    all_there = {"capacity": "exact", "p": 0.0}
    choices = {name: all_there.get(name, chosen) for name, chosen in spec.choices.items()}
    return dataclasses.replace(spec, choices=choices)


def chosen_layout(layout: Layout, seqs: list[int]) -> Layout:
    return Layout(tuple(layout.lengths[seq] for seq in seqs))


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_permuting_sequences_permutes_results(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    spec = with_everything(data.draw(specs(case, min_seqs=1)))
    order = data.draw(st.permutations(range(spec.layout.num_seqs)))
    sample = case.sample(spec, dtype, device)
    permuted = dataclasses.replace(
        spec,
        layout=chosen_layout(spec.layout, order),
        kv_layout=None if spec.kv_layout is None else chosen_layout(spec.kv_layout, order),
    )
    tensors = {
        name: selected(t, case.rows[name], spec, order) for name, t in sample.tensors.items()
    }
    # Copies, as the permuted tensors are: alignment may decide on the kernel.
    contiguous = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in sample.tensors.items()
    }
    straight = case.call(jagged_cuda, dataclasses.replace(sample, tensors=contiguous))
    kv_offsets = None
    if permuted.kv_layout is not None:
        kv_offsets = permuted.kv_layout.offsets(device, spec.offsets_dtype)
    offsets = permuted.layout.offsets(device, spec.offsets_dtype)
    shuffled = case.call(jagged_cuda, Sample(permuted, tensors, offsets, kv_offsets))
    expected = {name: selected(t, case.rows[name], spec, order) for name, t in straight.items()}
    assert_same_bits(shuffled, expected)


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_splitting_a_batch_changes_no_bit(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    """The two halves are slices of the batch's own offsets, over the same tensors."""
    spec = with_everything(data.draw(specs(case, min_seqs=1)))
    num_seqs = spec.layout.num_seqs
    cut = data.draw(st.integers(0, num_seqs))
    sample = case.sample(spec, dtype, device)
    whole = case.call(jagged_cuda, sample)
    for seqs in (list(range(cut)), list(range(cut, num_seqs))):
        part = slice(seqs[0], seqs[-1] + 2) if seqs else slice(cut, cut + 1)
        tensors = {
            name: t[part.start : part.start + len(seqs)] if case.rows[name] == "seq" else t
            for name, t in sample.tensors.items()
        }
        for name in tensors:
            if case.rows[name] == "matrix":
                tensors[name] = selected(tensors[name], "matrix", spec, seqs)
        kv_offsets = None if sample.kv_offsets is None else sample.kv_offsets[part]
        found = case.call(jagged_cuda, Sample(spec, tensors, sample.offsets[part], kv_offsets))
        for name, output in found.items():
            rows = case.rows[name]
            expected = selected(whole[name], rows, spec, seqs)
            if rows == "matrix" or callable(rows):  # those of a part begin at 0
                output = output[: expected.shape[0]]
            elif rows != "seq":
                output = rows_of(output, spec.rows_layout(rows), seqs)
            assert_same_bits({name: output}, {name: expected})


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_foreign_rows_never_leak(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    """NaN outside the sequences gives the bits that other values give, forward and backward."""
    spec = data.draw(specs(case))
    clean = dataclasses.replace(spec, poisoned=False)
    assert_same_bits(
        everything_of(case, case.sample(spec, dtype, device)),
        everything_of(case, case.sample(clean, dtype, device)),
    )


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_expanded_gradient(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    """out.sum().backward() passes one element expanded to the whole output."""
    sample = case.sample(data.draw(specs(case)), dtype, device)
    leaves = {name: t.detach().requires_grad_() for name, t in sample.tensors.items()}
    out = case.call(jagged_cuda, dataclasses.replace(sample, tensors=leaves))["out"]
    given = list(leaves.values())  # some of which a call may not take
    gradients = torch.autograd.grad(out.sum(), given, materialize_grads=True)
    found = {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    check(case, sample, found, {"out": torch.ones_like(out)})


@CASE
@given(data=st.data(), dtype=DTYPES)
def test_deterministic(
    case: Case, device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    """Two runs, and any number of threads, give the same bits, forward and backward."""
    spec = data.draw(specs(case))
    sample = case.sample(spec, dtype, device)
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        first = everything_of(case, sample)
        torch.set_num_threads(data.draw(st.sampled_from([1, 3])))
        second = everything_of(case, sample)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert_same_bits(second, first)
