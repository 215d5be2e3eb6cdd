"""The three commands of attention: self-attention, target attention, and the paper's Figure 2."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, UNFUSED, Command, Goal, Session
from benchmarks.shapes import Precision

QUICK_HEADS, QUICK_DIM, QUICK_QUERIES = 2, 16, 5


@dataclass(frozen=True)
class Case:
    """Attention of H heads of D over a batch of sequences, in one row for each pass.

    Args:
        goals: of each pass, for bf16 on one H100.
        queries: N of target attention; None is self-attention.
    """

    name: str
    draw: Callable[[random.Random], list[int]]
    heads: int
    dim: int
    goals: tuple[Goal, ...]
    causal: bool = False
    queries: int | None = None
    goal_mib: float | None = None


def _of(what: str, *values: float) -> tuple[Goal, ...]:
    return tuple(Goal(value, what) for value in values)


_us = functools.partial(_of, "us")


LONG = _of("best peer", 0.95, 0.97)
LEVEL = _of("best peer", 1.0, 1.0)
SELF_CASES = (
    Case("short", shapes.uniform(1024, 200), 4, 64, _us(95, 195)),
    Case("tail", shapes.log_normal(512, 250, 1.2, 4096), 4, 64, LONG),
    Case("u1024", shapes.uniform(256, 1024), 4, 128, LONG),
    Case("u4096_causal", shapes.uniform(64, 4096), 4, 128, LONG, causal=True),
    Case("full4096", shapes.constant(8, 4096), 16, 128, LONG),
    Case("full4096_causal", shapes.constant(8, 4096), 16, 128, LEVEL, causal=True),
    Case("full4096_d64", shapes.constant(8, 4096), 16, 64, LEVEL),
    Case("d256_causal", shapes.uniform(64, 2048), 4, 256, _of("best peer", 1.0, 0.82), causal=True),
    Case("giant", shapes.giant(1024, 16384, 64), 4, 64, _us(600, 1500)),
    Case("tiny", shapes.uniform(4096, 50), 2, 32, _us(28, 55)),
    # Last: peers fail on so many sequences, and one of them might take the GPU along.
    Case("crowd", shapes.uniform(65536, 24, min_len=0), 2, 32, _of("floor", 1.5, 1.8)),
)

# What peers took on the machine of the goals, forward and backward, where the lengths, or the bytes
# that must move, are the same whatever the seed.
RECORDED_US: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "short": ({"varlen": 218, "cudnn_frontend": 302}, {"varlen": 716}),
    "full4096": (
        {"varlen": 3038, "fa3": 1781, "cudnn_frontend": 1756},
        {"varlen": 9100, "cudnn_frontend": 5787},
    ),
    "full4096_causal": (
        {"varlen": 1697, "fa3": 848, "cudnn_frontend": 974},
        {"varlen": 4982, "cudnn_frontend": 3000},
    ),
    "full4096_d64": (
        {"varlen": 1783, "fa3": 1059, "cudnn_frontend": 1341},
        {"varlen": 5222, "cudnn_frontend": 3352},
    ),
    "tiny": ({"varlen": 162, "sll": 133}, {"varlen": 528, "sll": 257}),
}

TARGET_CASES = (
    Case("paper", shapes.uniform(1024, 200), 1, 256, _us(46, 140), queries=8),
    Case("din", shapes.log_normal(4096, 60, 1.2, 1024), 1, 64, _us(50, 150), queries=1),
    Case("long", shapes.log_normal(256, 1500, 1.0, 10000), 1, 128, _us(113, 350), queries=32),
    Case("u10000", shapes.uniform(64, 10000), 1, 128, _us(80, 240), queries=100),
)
TARGET_LAUNCH_US = 6.0  # launch_us of the bar: a second kernel merges the parts of long histories

FIGURE2_GOALS = {512: (180, 100), 1024: (440, 200), 2048: (1270, 390), 4096: (4650, 790)}
FIGURE2_CASES = tuple(
    Case(str(max_len), shapes.uniform(256, max_len), 1, 128, _us(us), goal_mib=mib)
    for max_len, (us, mib) in FIGURE2_GOALS.items()
)


def _run_case(
    command: str,
    passes: tuple[str, ...],
    ours: tuple[str, ...],
    session: Session,
    case: Case,
    precision: Precision,
) -> None:
    quick = session.options.quick
    heads, dim, queries = case.heads, case.dim, case.queries
    if quick:
        heads, dim = min(heads, QUICK_HEADS), QUICK_DIM
        queries = queries and QUICK_QUERIES
    operands = Operands.draw(
        shapes.layout(case.draw, quick),
        heads,
        dim,
        session.device,
        precision.dtype,
        causal=case.causal,
        queries=queries,
    )
    rows = []
    for index, pass_name in enumerate(passes):
        row = implementations.row(command, case.name, pass_name, operands, precision)
        row.has_memory = command == "figure2"
        row.launch_us = TARGET_LAUNCH_US if command == "target" else None
        if session.has_goal(case.goals[index], precision):
            row.goal = case.goals[index]
        if precision.name == "bf16" and session.is_reference_machine:
            row.goal_mib = case.goal_mib
            row.recorded_us = RECORDED_US[case.name][index] if case.name in RECORDED_US else {}
        rows.append(session.add(row))
    names = (*ours, *session.peers(COMMANDS[command]))
    implementations.measure(session, rows, operands, precision, names)


def _command(
    name: str,
    cases: tuple[Case, ...],
    cases_on_cpu: tuple[str, ...],
    passes: tuple[str, ...],
    ours: tuple[str, ...],
    default_peers: tuple[str, ...],
    more_peers: tuple[str, ...] = (),
) -> Command:
    """cases_on_cpu: the other cases take minutes there, and run only if they are named."""
    run_case = functools.partial(_run_case, name, passes, ours)

    def run(session: Session) -> None:
        session.each_case(name, cases, run_case, cases_on_cpu=cases_on_cpu)

    peers = (*default_peers, *more_peers)
    return Command(tuple(case.name for case in cases), run, peers, default_peers)


COMMANDS = {
    "attention": _command(
        "attention",
        SELF_CASES,
        ("short", "tiny"),
        ("forward", "backward"),
        (OURS, HINTED),
        ("varlen", "sdpa", "fa3", "cudnn_frontend", "sll"),
        ("flex",),
    ),
    "figure2": _command(
        "figure2",
        FIGURE2_CASES,
        ("512",),
        ("forward+backward",),
        (OURS, HINTED, UNFUSED),
        ("dense", "sdpa", "varlen", "cudnn_frontend", "sll"),
        ("fa3",),
    ),
    "target": _command(
        "target",
        TARGET_CASES,
        ("paper",),
        ("forward", "forward+backward"),
        (OURS, HINTED),
        ("varlen", "sdpa", "sll", "fa3"),
        ("cudnn_frontend",),
    ),
}
