"""Attention on a batch that mixes all kinds of sequences, beside its parts, each a batch alone.

A sequence's own length decides which kernel takes it; a batch that mixes kinds should not be slower
than its parts one after another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, Command, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing.lengths import Layout

PASSES = ("forward", "backward")
GOAL = 1.1  # of the sum of the parts' times
HEADS, QUICK_HEADS, QUICK_DIM = 4, 2, 16
MIXED = "mixed"
# How many sequences of each kind, and between which lengths.
PARTS: dict[str, tuple[int, int, int]] = {
    "giant": (1, 16384, 16384),
    "long": (16, 1024, 4096),
    "short": (512, 65, 256),
    "tiny": (4096, 1, 64),
}


@dataclass(frozen=True)
class Case:
    """Self-attention over the mixed batch and over its parts."""

    dim: int
    causal: bool = False

    @property
    def name(self) -> str:
        return f"d{self.dim}_causal" if self.causal else f"d{self.dim}"


CASES = (Case(32), Case(64), Case(64, causal=True), Case(128), Case(256))


def draw(quick: bool = False) -> dict[str, tuple[int, ...]]:
    """The lengths of each part, and of all of them shuffled; the same on every machine."""
    rng = random.Random(shapes.SEED)
    longest = max(most for _, _, most in PARTS.values())

    def length(least: int, most: int) -> int:
        drawn = rng.randint(least, most)
        return -(-drawn * shapes.QUICK_MAX_LEN // longest) if quick else drawn

    found = {}
    for name, (count, least, most) in PARTS.items():
        number = min(count, shapes.QUICK_SEQS) if quick else count
        found[name] = tuple(length(least, most) for _ in range(number))
    together = [n for lengths in found.values() for n in lengths]
    rng.shuffle(together)
    return {MIXED: tuple(together), **found}


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    heads, dim = (QUICK_HEADS, QUICK_DIM) if quick else (HEADS, case.dim)
    for part, lengths in draw(quick).items():
        operands = Operands.draw(
            Layout(lengths), heads, dim, session.device, precision.dtype, causal=case.causal
        )
        rows = []
        for pass_name in PASSES:
            row = implementations.row(MIXED, f"{case.name}.{part}", pass_name, operands, precision)
            rows.append(session.add(row))
        implementations.measure(session, rows, operands, precision, (OURS, HINTED))


def summary(rows: list[Row]) -> dict[str, float]:
    """Of each case, pass and variant: the time of the mixed batch over the sum of its parts'."""
    found: dict[str, float] = {}
    for whole in rows:
        case, _, part = whole.case.partition(".")
        if whole.command != MIXED or part != MIXED:
            continue
        alike = {r.case: r for r in rows if (r.command, r.pass_name) == (MIXED, whole.pass_name)}
        for name in (OURS, HINTED):
            times = [alike[f"{case}.{p}"].median_us(name) for p in PARTS if f"{case}.{p}" in alike]
            time = whole.median_us(name)
            if time and len(times) == len(PARTS) and all(times):
                total = sum(each for each in times if each)
                found[f"{case} {whole.pass_name} {name}"] = round(time / total, 3)
    return found


def _run(session: Session) -> None:
    # On a CPU they would take minutes: there they must be named.
    session.each_case(MIXED, CASES, _run_case, cases_on_cpu=())
    found = summary(session.rows)
    if found:
        session.sections[MIXED] = found
    for name, ratio in found.items():
        verdict = "" if ratio <= GOAL else f", above {GOAL}"
        session.note(f"{MIXED} {name}: {ratio} of the sum of its parts{verdict}")


COMMAND = Command(tuple(case.name for case in CASES), _run)
