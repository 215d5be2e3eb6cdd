"""Is a result right: compared in float64, sequence by sequence, before it is timed.

This is a gate, not the test suite: the limits only tell a wrong result from a rounded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.operands import Operands
from jagged_cuda.testing.lengths import Layout

# The gradients of a shorter sequence may cancel to nearly nothing (of one row: to nothing), so that
# their relative error says nothing; the tests judge those. A result may too (one sum of products):
# it is judged by the size of the other sequences' rows where that is larger.
MIN_ROWS_OF_GRADIENTS = 16
CHUNK = 1024


class WrongResultError(AssertionError):
    """A result that must not be timed."""


def relative_errors(actual: Tensor, reference: Tensor, owner: Tensor, num_owners: int) -> Tensor:
    """`[num_owners]`: |actual - reference| / |reference| over the rows of each owner.

    An owner of few rows is taken for no smaller than as many rows of average size.
    """
    exact = reference.double().reshape(reference.shape[0], -1)
    difference = actual.detach().double().reshape(exact.shape) - exact

    def sum_of(values: Tensor) -> Tensor:
        return values.new_zeros(num_owners).index_add(0, owner, values)

    squares = exact.square().sum(1)
    error, size = sum_of(difference.square().sum(1)).sqrt(), sum_of(squares).sqrt()
    rows = sum_of(torch.ones_like(squares))
    average = (rows * squares.sum() / max(1, squares.numel())).sqrt()
    size = torch.where(rows < MIN_ROWS_OF_GRADIENTS, torch.maximum(size, average), size)
    return torch.where((error == 0) & (size == 0), 0.0, error / size)


def require(name: str, errors: Tensor, limit: float) -> None:
    """Raise WrongResultError unless every error is within the limit; NaN is not."""
    if errors.numel() == 0 or bool((errors <= limit).all()):
        return
    worst = int(torch.where(errors.isnan(), math.inf, errors).argmax())
    raise WrongResultError(
        f"wrong {name}: relative error {float(errors[worst]):.3g} in sequence {worst}, limit"
        f" {limit:.3g}, {int((~(errors <= limit)).sum())} of {errors.numel()} fail"
    )


def require_jagged(
    name: str, actual: Tensor, reference: Tensor, layout: Layout, limit: float, min_rows: int = 1
) -> None:
    """Check `[T, ...]`, or `[B, ...]`, in sequences of at least min_rows rows."""
    device = reference.device
    if actual.shape != reference.shape:
        raise WrongResultError(
            f"wrong {name}: shape {list(actual.shape)}, expected {list(reference.shape)}"
        )
    if reference.shape[0] == layout.total:
        owner = layout.seq_of_row(device)
    else:
        owner = torch.arange(layout.num_seqs, device=device)
    errors = relative_errors(actual, reference, owner, layout.num_seqs)
    lengths = torch.tensor(layout.lengths, device=device)
    require(name, errors.where(lengths >= min_rows, 0.0), limit)


def attention_of_one_head(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of one sequence and head and its gradients, in float64, some queries at a time.

    Args:
        q, k, v, grad_out: `[L, D]`.

    Returns:
        out, dq, dk, dv, each `[L, D]`.
    """
    q, k, v, grad_out = (tensor.double() for tensor in (q, k, v, grad_out))
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, q.shape[0], CHUNK):
        q_rows, grad_rows = q[begin : begin + CHUNK], grad_out[begin : begin + CHUNK]
        logits = scale * (q_rows @ k.T)  # [CHUNK, L]
        if causal:
            row = torch.arange(begin, begin + q_rows.shape[0], device=q.device)
            hidden = torch.arange(k.shape[0], device=q.device) > row[:, None]
            logits.masked_fill_(hidden, -math.inf)
        weights = logits.softmax(1)
        out = weights @ v
        delta = (grad_rows * out).sum(1, keepdim=True)
        grad_logits = weights * (grad_rows @ v.T - delta)
        outs.append(out)
        dqs.append(scale * (grad_logits @ k))
        dk += scale * (grad_logits.T @ q_rows)
        dv += weights.T @ grad_rows
    return torch.cat(outs), torch.cat(dqs), dk, dv


class Check(Protocol):
    """Raises WrongResultError unless a result, or gradients, are right."""

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """slack: the factor by which the limit is widened."""

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Of the inputs, in their order."""


@dataclass(frozen=True)
class _Sample:
    """One head of one sequence: where it stands in q and in k, its exact results, their limits."""

    name: str
    length: int
    of_q: Any
    of_k: Any
    exact: tuple[Tensor, ...]  # out, dq, dk, dv
    limits: tuple[float, ...]


class AttentionCheck:
    """Judges results of attention on a few sequences and heads, against float64.

    With `scores_in_memory` scores and weights are rounded to the operands' dtype, which the
    exponential magnifies by the size of the scores. How far that carries is seen on PyTorch's own
    three steps in the same precision: the limit is twice their error where that is the larger.
    """

    def __init__(self, operands: Operands, limit: float, scores_in_memory: bool = False) -> None:
        self.shape = operands.q.shape
        lengths = operands.layout.lengths
        order = sorted(range(len(lengths)), key=lambda seq: lengths[seq])
        long_enough = [seq for seq in order if lengths[seq] >= MIN_ROWS_OF_GRADIENTS] or order
        # Of those whose gradients can be judged, the shortest, the median and the longest; and the
        # last sequence of the batch.
        seqs = {long_enough[0], long_enough[len(long_enough) // 2], long_enough[-1]}
        seqs.add(len(lengths) - 1)
        self.samples = []
        for seq in sorted(seqs):
            for name, of_q, of_k in operands.parts(seq):
                q, k, v = operands.q[of_q], operands.k[of_k], operands.v[of_k]
                grad_out, scale = operands.grad_out[of_q], operands.scale
                exact = attention_of_one_head(q, k, v, grad_out, scale, operands.causal)
                limits = [limit] * len(exact)
                if scores_in_memory:
                    rounded = _three_steps(q, k, v, grad_out, scale)
                    limits = [
                        max(limit, 2 * float(_relative_error(*pair)))
                        for pair in zip(rounded, exact, strict=True)
                    ]
                self.samples.append(_Sample(name, lengths[seq], of_q, of_k, exact, tuple(limits)))

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """Check the result, of q's shape."""
        if out.shape != self.shape:
            raise WrongResultError(
                f"wrong out: shape {list(out.shape)}, expected {list(self.shape)}"
            )
        self._require("out", out, 0, slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Check dq, dk and dv."""
        for index, name in enumerate(("dq", "dk", "dv"), 1):
            self._require(name, gradients[index - 1], index)

    def _require(self, name: str, actual: Tensor, index: int, slack: float = 1.0) -> None:
        if not bool(actual.isfinite().all()):
            raise WrongResultError(f"wrong {name}: it is not finite")
        for sample in self.samples:
            if index > 0 and sample.length < MIN_ROWS_OF_GRADIENTS:
                continue
            place = sample.of_q if index < 2 else sample.of_k
            errors = _relative_error(actual[place], sample.exact[index])
            require(f"{name} of {sample.name}", errors, slack * sample.limits[index])


def _relative_error(actual: Tensor, exact: Tensor) -> Tensor:
    """`[1]`: of one sequence's rows."""
    owner = torch.zeros(exact.shape[0], dtype=torch.int64, device=exact.device)
    return relative_errors(actual, exact, owner, 1)


def _three_steps(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Product, softmax, product in PyTorch: out, dq, dk, dv of one head, each `[L, D]`."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    scores = leaves[0] @ leaves[1].T
    weights = (scale * scores.float()).softmax(1).to(q.dtype)
    out = weights @ leaves[2]
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
