"""Running a case against its reference, forward and backward, by the rule of comparison.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import jagged_cuda
from jagged_cuda.testing.case import Case, Tensors, absolute_terms
from jagged_cuda.testing.comparison import (
    accumulator_eps,
    compare,
    operand_eps,
    surely_right,
)
from jagged_cuda.testing.samples import Sample, Spec, draw_cotangents


def run(
    case: Case,
    sample: Sample,
    call: Callable[[Sample], Tensors],
    cotangents: Callable[[Tensors], Tensors] | None,
) -> Tensors:
    """The outputs of a call and, given a way to draw cotangents, gradients (``grad_<name>``)."""
    leaves = {
        name: t.detach().requires_grad_(cotangents is not None and name in case.inputs)
        for name, t in sample.tensors.items()
    }
    outputs = call(Sample(sample.spec, leaves, sample.offsets, sample.kv_offsets))
    found = {name: output.detach() for name, output in outputs.items()}
    if cotangents is not None:
        inputs = [leaves[name] for name in case.inputs]
        given = cotangents(found)
        gradients = torch.autograd.grad(
            [outputs[name] for name in given],
            inputs,
            list(given.values()),
            materialize_grads=True,
        )
        found |= {f"grad_{name}": g for name, g in zip(case.inputs, gradients, strict=True)}
    return found


def _padded(
    case: Case,
    sample: Sample,
    cotangents: Tensors | None,
    dtype: torch.dtype,
    definition: Callable[[Tensors], Tensors],
) -> Tensors:
    """Outputs and gradients of a padded definition, run in a dtype."""
    inputs = Sample(sample.spec, cast(sample.tensors, dtype), sample.offsets, sample.kv_offsets)
    given = None if cotangents is None else cast(cotangents, dtype)
    draw = None if given is None else lambda _: given
    return run(case, inputs, lambda s: definition(s.tensors), draw)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: t.detach().to(dtype) for name, t in tensors.items()}


def exact_reference(case: Case, sample: Sample, cotangents: Tensors | None) -> Tensors:
    """Results of the float64 definition, by which others are judged."""
    spec = sample.spec

    def definition(tensors: Tensors) -> Tensors:
        return case.reference(spec, tensors)

    return _padded(case, sample, cotangents, torch.float64, definition)


def same_precision(case: Case, sample: Sample, cotangents: Tensors | None) -> list[Tensors]:
    """PyTorch in the operands' precision, in each way in which it can be written."""
    spec = sample.spec
    storage = next(iter(sample.tensors.values())).dtype
    sums = torch.float64 if storage is torch.float64 else torch.float32

    def in_storage(
        way: Callable[[Spec, Tensors, torch.dtype], Tensors],
    ) -> Callable[[Tensors], Tensors]:
        return lambda tensors: way(spec, tensors, storage)

    def definition(spec: Spec, tensors: Tensors, _: torch.dtype) -> Tensors:
        return case.reference(spec, tensors)

    rounded = []
    for way in case.rounded or (definition,):
        found = _padded(case, sample, cotangents, sums, in_storage(way))
        # LSE is stored in the dtype of sums, all else in the operands'.
        rounded.append({n: t if n == "lse" else t.to(storage) for n, t in found.items()})
    return rounded


def summed_terms(
    case: Case, sample: Sample, cotangents: Tensors | None, exact: Tensors, accuracy: float
) -> Tensors:
    """The size of the terms that are summed into each output and gradient, `accuracy` times which
    is its limit; a jump of the gradient counts as terms of that much."""
    given = None
    if cotangents is not None:
        absent = {name: torch.zeros_like(exact[name]) for name in case.outputs}
        given = absent | cast(cotangents, torch.float64)
    tensors = cast(sample.tensors, torch.float64)
    terms_of = case.terms or functools.partial(absolute_terms, case.reference)
    terms = terms_of(sample.spec, tensors, given)
    if case.jumps is not None and given is not None:
        storage = next(iter(sample.tensors.values())).dtype
        for name, jump in case.jumps(sample.spec, tensors, given, storage, accuracy).items():
            terms[name] = terms[name] + jump / accuracy
    return terms


def judge(
    case: Case,
    spec: Spec,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    backward: bool = True,
    outputs: tuple[str, ...] | None = None,
    ops: Any = jagged_cuda,
    command: Callable[[], str] | None = None,
) -> None:
    """Raise MismatchError unless the operator's outputs, and its gradients, are right for a spec.

    Args:
        case: the operator.
        spec: what to draw.
        dtype, device: of its tensors.
        backward: judge the gradients too.
        outputs: those that gradients flow from; by default all.
        ops: the module whose function is judged: jagged_cuda, or another with the same names.
        command: says what reproduces a failure; by default the test that runs.
    """
    sample = case.sample(spec, dtype, device)
    drawn: Tensors = {}

    def cotangents(found: Tensors) -> Tensors:
        chosen = {name: found[name] for name in outputs or case.outputs}
        drawn.update(draw_cotangents(chosen, spec, case.rows))
        return drawn

    actual = run(case, sample, lambda s: case.call(ops, s), cotangents if backward else None)
    check(case, sample, actual, drawn if backward else None, command=command)


def check(
    case: Case,
    sample: Sample,
    actual: Tensors,
    cotangents: Tensors | None,
    *,
    command: Callable[[], str] | None = None,
    slack: float = 1.0,
) -> None:
    """Raise MismatchError unless the outputs and gradients found for a sample are right.

    slack: the factor by which the limit is widened for a foreign implementation, which only has to
    compute the same function.
    """
    spec = sample.spec
    first = next(iter(sample.tensors.values()))
    exact = exact_reference(case, sample, cotangents)
    places: dict[str, dict[str, Any]] = {}
    for name in actual:
        layout = spec.rows_layout(case.rows[name.removeprefix("grad_")])
        places[name] = {"seq_of_row": layout.seq_of_row(first.device), "num_seqs": layout.num_seqs}
    sums = torch.float64 if first.dtype is torch.float64 else torch.float32
    accumulator = accumulator_eps(first.dtype)
    rounding = operand_eps(first.dtype, first.device) if case.product else 0.0

    def right(name: str, **more: Any) -> bool:
        return actual[name].dtype is (sums if name == "lse" else first.dtype) and surely_right(
            actual[name], exact[name], **places[name], **more
        )

    # Most results pass by the cheaper parts of the limit; the rest is computed where they do not.
    left = [name for name in actual if not right(name)]
    if not left:
        return
    accuracy = 64 * accumulator + rounding
    terms = summed_terms(case, sample, cotangents, exact, accuracy)
    left = [name for name in left if not right(name, terms=terms[name], accuracy=accuracy)]
    if not left:
        return
    rounded = same_precision(case, sample, cotangents)
    dtype = str(first.dtype).removeprefix("torch.")
    for name in left:
        compare(
            actual[name],
            exact[name],
            same_precision=[way[name] for way in rounded],
            terms=terms[name],
            label=f"{case.name}, {name} ({dtype}, {first.device.type}), {_text(spec)}",
            seed=spec.seed,
            command=command,
            rounding=rounding,
            accumulator=accumulator,
            slack=slack,
            **places[name],
        )


def _text(spec: Spec) -> str:
    lengths = str(list(spec.layout.lengths[:12]))
    more = "" if spec.layout.num_seqs <= 12 else f" and {spec.layout.num_seqs - 12} more"
    kept = {"storage": dict(spec.storage)} if spec.storage else {}
    return f"lengths {lengths}{more}, {dict(spec.choices) | kept}"
