"""Target attention, items against histories: forward, and forward and backward together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from jagged_cuda.bench import implementations, shapes
from jagged_cuda.bench.checking import AttentionCheck
from jagged_cuda.bench.operands import Operands
from jagged_cuda.bench.session import HINTED, OURS, Row, Session
from jagged_cuda.bench.shapes import Precision

PEERS = ("varlen", "sdpa", "sll", "fa3", "cudnn_frontend", "cudnn")
DEFAULT_PEERS = ("varlen", "sdpa", "sll", "fa3")
QUICK_QUERIES, QUICK_DIM = 5, 16


@dataclass(frozen=True)
class Case:
    """N queries of one head of D a sequence; goals are of bf16 on one H100."""

    name: str
    draw: Callable[[random.Random], list[int]]
    dim: int
    queries: int
    goal_us: tuple[float, float]  # forward, forward and backward


TARGET_CASES = (
    Case("paper", shapes.uniform(1024, 200), 256, 8, (46, 140)),
    Case("din", shapes.log_normal(4096, 60, 1.2, 1024), 64, 1, (49, 150)),
    Case("long", shapes.log_normal(256, 1500, 1.0, 10000), 128, 32, (113, 350)),
    Case("u10000", shapes.uniform(64, 10000), 128, 100, (75, 240)),
)
CASES = tuple(case.name for case in TARGET_CASES)
# The others take minutes on a CPU: there they are run when they are named.
CASES_ON_CPU = ("paper",)


def run(session: Session) -> None:
    def run_case(case: Case, precision: Precision) -> None:
        _run_case(session, case, precision)

    session.each_case("target", TARGET_CASES, run_case, cases_on_cpu=CASES_ON_CPU)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    queries, dim = (QUICK_QUERIES, QUICK_DIM) if quick else (case.queries, case.dim)
    layout = shapes.layout(case.draw, quick)
    operands = Operands.draw(layout, 1, dim, session.device, precision.dtype, queries=queries)

    def row(pass_name: str, moved: tuple[int, ...], flops: float, index: int) -> Row:
        new = Row(
            command="target",
            case=case.name,
            pass_name=pass_name,
            precision=precision.name,
            shape=operands.shape(),
            seed=shapes.SEED,
            bytes=moved,
            flops=flops,
        )
        if session.is_reference_machine and precision.name == "bf16":
            new.goal_us = case.goal_us[index]
        return session.add(new)

    both = (operands.forward_bytes, operands.backward_bytes)
    rows = (
        row("forward", (operands.forward_bytes,), operands.flops, 0),
        row("forward+backward", both, 3.5 * operands.flops, 1),
    )
    makers = implementations.makers(operands, precision)
    names = (OURS, HINTED, *session.peers(PEERS, DEFAULT_PEERS))
    check = AttentionCheck(operands, precision.limit)
    session.run(rows, {name: makers[name] for name in names}, check)
