"""Target attention, items against histories: forward, and forward and backward together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, Session
from benchmarks.shapes import Precision

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
    session.each_case("target", TARGET_CASES, _run_case, cases_on_cpu=CASES_ON_CPU)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    queries, dim = (QUICK_QUERIES, QUICK_DIM) if quick else (case.queries, case.dim)
    layout = shapes.layout(case.draw, quick)
    operands = Operands.draw(layout, 1, dim, session.device, precision.dtype, queries=queries)
    rows = []
    for index, pass_name in enumerate(("forward", "forward+backward")):
        row = implementations.row("target", case.name, pass_name, operands, precision)
        if session.has_attention_goals(precision):
            row.goal_us = case.goal_us[index]
        rows.append(session.add(row))
    names = (OURS, HINTED, *session.peers(PEERS, DEFAULT_PEERS))
    implementations.measure(session, rows, operands, precision, names)
