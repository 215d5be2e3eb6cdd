"""The benchmark: what it counts, and how it times."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from bench_runs import row_of
from torch import Tensor

from benchmarks import __main__ as command_line
from benchmarks import attention, peers, report, shapes, table1
from benchmarks import session as session_module
from benchmarks.candidate import Candidate
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, Goal, Options, Row, Session
from benchmarks.timing import CpuTimer, CudaTimer, Measurement
from jagged_cuda.testing.lengths import Layout

# --- what is counted


def test_lengths_are_those_of_the_record() -> None:
    assert shapes.layout(shapes.uniform(1024, 200), quick=False).total == 103_145
    for case in attention.SELF_CASES:
        lengths = shapes.layout(case.draw, quick=False).lengths
        assert lengths == shapes.layout(case.draw, quick=False).lengths
        assert min(lengths) >= (0 if case.name == "crowd" else 1) and max(lengths) <= 16384
    assert shapes.layout(shapes.giant(1024, 16384, 64), quick=False).lengths[0] == 16384


def test_bytes_and_operations() -> None:
    layout = shapes.layout(shapes.uniform(table1.NUM_SEQS, table1.MAX_LEN), quick=False)
    fp32 = shapes.PRECISIONS["fp32"]
    batch = table1.Batch.draw(layout, torch.device("cpu"), fp32)
    operators = {operator.name: operator for operator in table1.OPERATORS}
    dense, jagged = operators["jagged_dense_bmm"], operators["jagged_jagged_bmm"]
    softmax = operators["jagged_softmax"]
    # The floors of the record in microseconds, at 3.03 TB/s.
    assert 4 * dense.forward_elems(batch) / 3.03e6 == pytest.approx(38.8, abs=0.1)
    assert dense.forward_elems(batch) == jagged.forward_elems(batch)
    assert 4 * softmax.forward_elems(batch) / 3.03e6 == pytest.approx(2.2, abs=0.05)
    for name in ("jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"):
        assert 4 * operators[name].forward_elems(batch) / 3.03e6 == pytest.approx(88.3, abs=0.5)
    assert sum(softmax.backward_elems(batch)) == 3 * batch.y_jagged.numel()
    # The record's lengths have another sum of squares, and these bytes are proportional to it.
    squares = sum(length**2 for length in batch.layout.lengths)
    assert operators["jagged2_softmax"].forward_elems(batch) == 2 * squares
    assert 8 * squares / 3.03e6 == pytest.approx(36.9, rel=0.02)
    layout = Layout((4096,) * 8)
    with torch.device("meta"):
        q = torch.empty(layout.total, 16, 128, dtype=torch.bfloat16)
    operands = Operands(layout, q, q, q, q, torch.zeros(9), 1.0)
    assert operands.flops / 1680 / 1e6 == pytest.approx(655, abs=1)
    causal = dataclasses.replace(operands, causal=True)
    assert 2 * causal.flops == operands.flops
    assert operands.backward_bytes - operands.forward_bytes == 4 * 2 * q.numel()
    layout = Layout((20, 0, 40))
    target = Operands.draw(layout, 1, 8, torch.device("cpu"), torch.float32, queries=3)
    assert target.forward_bytes == 4 * (2 * 72 + 2 * 480 + 9)
    assert target.backward_bytes - target.forward_bytes == 4 * (2 * 72 + 2 * 480)
    assert target.flops == 4 * 3 * 480


def test_every_case_has_goals_and_every_peer_a_description() -> None:
    for case in attention.SELF_CASES + attention.TARGET_CASES:
        assert len(case.goals) == 2
    for command in command_line.COMMANDS.values():
        assert set(command.peers) <= set(peers.DESCRIPTIONS)
        assert set(command.default_peers) <= set(command.peers)


@pytest.mark.parametrize(
    ("row", "flops_per_us", "floor_us", "bar_us"),
    [
        (row_of(bytes=(30_300_000,) * 2), None, 20, 1.15 * 20 + 2 * 4),
        (row_of(bytes=(3_030_000,)), None, 1, 1.15 + 8),  # a short kernel
        (row_of(bytes=(30_300_000,), flops=9e9), 1e9, 10, 1.15 * 10 + 4),
        (row_of(bytes=(30_300_000,), flops=2e10), 1e9, 20, None),  # bound by its operations
        (row_of(bytes=(60_600_000,), bar_scale=1.5), None, 20, 1.5 * (1.15 * 20 + 4)),
        (row_of(bytes=(60_600_000,), launch_us=6.0), None, 20, 1.15 * 20 + 6),
        (row_of(bytes=(60_600_000,), launches=3), None, 20, 1.15 * 20 + 3 * 4),
        (row_of(bytes=(3_030_000,), launches=2), None, 1, 1.15 + 2 * 8),
    ],
)
def test_floor_and_bar(
    row: Row, flops_per_us: float | None, floor_us: float, bar_us: float | None
) -> None:
    row.set_floor(session_module.FLOOR_BYTES_PER_US, flops_per_us)
    assert row.floor_us == pytest.approx(floor_us)
    assert row.bar_us == (None if bar_us is None else pytest.approx(bar_us))


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (None, None),
        (Goal(90, "us"), 90),
        (Goal(1.5, "floor"), 30),
        (Goal(0.95, "best peer"), 38),
    ],
)
def test_goals(goal: Goal | None, expected: float | None) -> None:
    times = {OURS: 10.0, HINTED: 5.0, "varlen": 50.0, "fa3": 40.0}
    results = {name: {"median_us": time} for name, time in times.items()}
    row = row_of(goal=goal, floor_us=20.0, results=results | {"sll": {"absent": "no"}})
    assert row.goal_us() == (None if expected is None else pytest.approx(expected))
    assert row_of(goal=Goal(0.95, "best peer")).goal_us() is None


def test_a_copy_is_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    session, sizes = Session(CpuTimer(1), Options()), []
    copy = Tensor.copy_
    monkeypatch.setattr(
        Tensor, "copy_", lambda to, x: sizes.append(x.nbytes) or copy(to, x), raising=True
    )
    session._copy_us(2 * 4096 + 2)  # reads and writes 4,097 bytes
    assert sizes[0] == 2 * 4096
    assert session._copy_us(4 * 4096) == session._copy_us(2 * 4096 + 2)  # one measurement


# --- how it is timed


def test_rounds_are_in_turn_and_keep_both_medians() -> None:
    x, calls = torch.ones(3), []

    def candidate(name: str) -> Candidate:
        calls.append(name)
        return Candidate(torch.exp, (x,), x)

    check = mock.Mock(require_out=lambda *_: calls.append("check"))
    session = Session(CpuTimer(1), Options(rounds=2))
    row = session.add(row_of())
    candidates = {name: functools.partial(candidate, name) for name in (OURS, "fa3")}
    session.run((row,), candidates, check)
    assert calls == [OURS, "check", "fa3", "check", OURS, "fa3"]
    for entry in row.results.values():
        assert len(entry["medians_us"]) == 2
        assert entry["median_us"] == pytest.approx(sum(entry["medians_us"]) / 2, abs=1e-3)
    first, second = row.results[OURS]["medians_us"]
    assert f"{report._number(first)}/{report._number(second)}" == report._time(row, OURS)


def test_a_row_below_the_highest_clock_is_marked() -> None:
    timer = CpuTimer(1)
    timer.max_sm_mhz = 1980
    session = Session(timer, Options())
    for clocks in ((1980, 1980), (1980, 1755)):
        row = session.add(row_of())
        for name, clock in zip((OURS, "fa3"), clocks, strict=True):
            measurement = Measurement.of([1.0], "graph", clock)
            row.set_measurement(name, measurement, timer.max_sm_mhz)
    marks = [(row.as_json()["sm_mhz"], row.below_max_clock) for row in session.rows]
    assert marks == [(1980, False), (1755, True)]
    note = "the SM clock was below its maximum of 1980 MHz in 1 of 2 rows, 1755 MHz at the lowest"
    assert session.all_notes() == [note]
    table = report.tables(session, report.environment(timer))
    assert "1755*" in table and f"note: {note}" in table


@pytest.mark.cuda
def test_a_gpu_is_timed_with_a_cold_clean_cache_and_tells_its_clock() -> None:
    timer = CudaTimer(torch.device("cuda", torch.cuda.current_device()), 20)
    session = Session(timer, Options())
    session.calibrate()
    found = session.sections["calibration"]
    assert 1 < found["empty_kernel_us"]["median_us"] < 10
    assert timer.max_sm_mhz and 0 < found["empty_kernel_us"]["sm_mhz"] <= timer.max_sm_mhz
    with timer.context():
        x, out = torch.rand(2**22, device="cuda"), torch.empty((), device="cuda")  # 16 MB
        cold = timer.measure(lambda: torch.sum(x, 0, out=out)).median_us
        flush, timer._flush = timer._flush, x  # x itself is in the cache then
        warm = timer.measure(lambda: torch.sum(x, 0, out=out)).median_us
        timer._flush = flush
        least_us = x.nbytes / found["copy_tbytes_per_s"] / 1e6
        assert cold > least_us and cold > 1.1 * warm

        def refuse_to_be_captured() -> None:
            x.add_(1)
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("operation not permitted when stream is capturing")

        assert timer.measure(refuse_to_be_captured).method == "eager"


def test_a_peer_off_the_record_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "is_reference_machine", True)
    session = Session(CpuTimer(1), Options(quick=True, against=("padded",)))
    session.calibrate()
    # A record that no machine comes near, so that the note does not hang on this one's speed.
    records = {precision: {"padded": 1e-3} for precision in ("fp32", "bf16")}
    operator = dataclasses.replace(table1.OPERATORS[-1], recorded_us=records)
    monkeypatch.setattr(table1, "OPERATORS", (operator,))
    table1.COMMAND.run(session)
    assert any(note.startswith("padded took ") and "on record" in note for note in session.notes)
