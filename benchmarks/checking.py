"""Judge a result by the tests' own rule, sequence by sequence, before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from benchmarks.operands import Operands
from jagged_cuda.testing import judge, unfused
from jagged_cuda.testing.cases import CASES, Case, Tensors
from jagged_cuda.testing.comparison import MismatchError
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec


class WrongResultError(AssertionError):
    """A result that must not be timed."""


class Check(Protocol):
    """Raises WrongResultError unless a result, or gradients, are right."""

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """slack: the factor by which the limit is widened."""

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Check the gradients of the inputs, in the order of the inputs."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a case and the incoming gradient, judged as one batch."""

    name: str
    case: Case
    sample: Sample
    grad_out: Tensor

    @classmethod
    def of(
        cls,
        name: str,
        case: Case,
        layout: Layout,
        tensors: Sequence[Tensor],
        grad_out: Tensor,
        **choices: Any,
    ) -> Batch:
        """tensors: one for each input of the case."""
        by_name = dict(zip(case.inputs, tensors, strict=True))
        offsets = layout.offsets(grad_out.device)
        return cls(name, case, Sample(Spec(0, layout, choices), by_name, offsets, None), grad_out)

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        self._require("result", {"out": out}, None, slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        names = (f"grad_{name}" for name in self.case.inputs)
        found = dict(zip(names, gradients, strict=True))
        self._require("gradient", found, {"out": self.grad_out})

    def _require(
        self, what: str, found: Tensors, cotangents: Tensors | None, slack: float = 1.0
    ) -> None:
        try:
            judge.check(self.case, self.sample, found, cotangents, slack=slack)
        except MismatchError as error:
            text = str(error).split("\n  reproduce:")[0].replace("\n ", ";")
            raise WrongResultError(f"wrong {what} of {self.name}: {text}") from None


class AttentionCheck:
    """Judges results of attention on a few sequences and heads.

    With `scores_in_memory` it is judged as three operators in a row, which round their scores.
    """

    def __init__(self, operands: Operands, scores_in_memory: bool = False) -> None:
        self.operands = operands
        is_target = operands.queries is not None
        case = CASES["jagged_target_attention" if is_target else "jagged_flash_attention"]
        choices = {
            "heads": None,
            "dims": (operands.q.shape[-1],) * 2,
            "scale": operands.scale,
            "causal": operands.causal,
            "window_size": (-1, -1),
            "queries": operands.queries,
        }
        case = unfused.CASE if scores_in_memory else case
        lengths = operands.layout.lengths
        order = sorted(filter(lengths.__getitem__, range(len(lengths))), key=lengths.__getitem__)
        # The shortest, the median and the longest; and the last sequence of the batch.
        seqs = {order[0], order[len(order) // 2], order[-1], len(lengths) - 1}
        self.parts = []
        for seq in sorted(seqs):
            layout = Layout((lengths[seq],))
            for name, of_q, of_k in operands.parts(seq):
                qkv = (operands.q[of_q], operands.k[of_k], operands.v[of_k])
                batch = Batch.of(name, case, layout, qkv, operands.grad_out[of_q], **choices)
                self.parts.append((batch, of_q, of_k))

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """Check the result, of q's shape; a peer's may come in another dtype."""
        self._same_shapes("result", (out,), (self.operands.q,))
        if slack > 1:
            out = out.to(self.operands.q.dtype)
        for batch, of_q, _ in self.parts:
            batch.require_out(out[of_q], slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Check dq, dk and dv."""
        self._same_shapes("gradient", gradients, self.operands.qkv)
        dq, dk, dv = gradients
        for batch, of_q, of_k in self.parts:
            batch.require_gradients((dq[of_q], dk[of_k], dv[of_k]))

    def _same_shapes(self, what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for each, like in zip(found, expected, strict=True):
            if each.shape != like.shape:
                shapes = f"shape {list(each.shape)}, expected {list(like.shape)}"
                raise WrongResultError(f"wrong {what}: {shapes}")
            if not bool(each.isfinite().all()):
                raise WrongResultError(f"wrong {what}: it is not finite")
