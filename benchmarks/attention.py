"""Self-attention, forward and backward apart, on batches from tiny histories to one giant."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, Session
from benchmarks.shapes import Precision

PEERS = ("varlen", "sdpa", "fa3", "cudnn_frontend", "sll", "cudnn", "flex")
# All but a second way to cuDNN, and what compiles for many seconds in each case.
DEFAULT_PEERS = ("varlen", "sdpa", "fa3", "cudnn_frontend", "sll")


@dataclass(frozen=True)
class Case:
    """Self-attention of H heads of D; goals and peers' recorded times are of bf16 on one H100."""

    name: str
    draw: Callable[[random.Random], list[int]]
    heads: int
    dim: int
    causal: bool
    goal_us: tuple[float, float]  # forward, backward
    # FlashAttention-2, where the lengths, or the bytes, are the same whatever the seed.
    recorded_us: tuple[float, float] | None = None


ATTENTION_CASES = (
    Case("short", shapes.uniform(1024, 200), 4, 64, False, (90, 210), (223, 728)),
    Case("tail", shapes.log_normal(512, 250, 1.2, 4096), 4, 64, False, (900, 2500)),
    Case("u1024", shapes.uniform(256, 1024), 4, 128, False, (400, 1250)),
    Case("u4096_causal", shapes.uniform(64, 4096), 4, 128, True, (665, 2080)),
    Case("full4096", shapes.constant(8, 4096), 16, 128, False, (1680, 4860), (2938, 9013)),
    Case("full4096_causal", shapes.constant(8, 4096), 16, 128, True, (890, 2670), (1648, 4919)),
    Case("full4096_d64", shapes.constant(8, 4096), 16, 64, False, (1240, 2650), (1733, 5165)),
    Case("giant", shapes.giant(1024, 16384, 64), 4, 64, False, (620, 2000)),
    Case("tiny", shapes.uniform(4096, 50), 2, 32, False, (28, 75), (167, 539)),
)
CASES = tuple(case.name for case in ATTENTION_CASES)
# The others take minutes on a CPU: there they are run when they are named.
CASES_ON_CPU = ("short", "tiny")


def run(session: Session) -> None:
    session.each_case("attention", ATTENTION_CASES, _run_case, cases_on_cpu=CASES_ON_CPU)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    layout = shapes.layout(case.draw, quick)
    heads, dim = (2, 16) if quick else (case.heads, case.dim)
    operands = Operands.draw(
        layout, heads, dim, session.device, precision.dtype, causal=case.causal
    )
    rows = []
    for index, pass_name in enumerate(("forward", "backward")):
        row = implementations.row("attention", case.name, pass_name, operands, precision)
        if session.has_attention_goals(precision):
            row.goal_us = case.goal_us[index]
            if case.recorded_us is not None:
                row.recorded_us = {"varlen": case.recorded_us[index]}
        rows.append(session.add(row))
    names = (OURS, HINTED, *session.peers(PEERS, DEFAULT_PEERS))
    implementations.measure(session, rows, operands, precision, names)
