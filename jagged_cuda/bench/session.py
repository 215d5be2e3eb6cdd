"""One run of the benchmark: its timer, its options, what it has measured."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.bench.candidate import Candidate
from jagged_cuda.bench.checking import WrongResultError
from jagged_cuda.bench.peers import AbsentError
from jagged_cuda.bench.shapes import PRECISIONS, Precision
from jagged_cuda.bench.timing import Measurement, Timer

OURS = "jagged_cuda"
HINTED = "jagged_cuda max_len"  # the same, told the longest length
REFERENCE_GPU = "H100"  # goals and peers' recorded times are of this one
PEER_SLACK = 4.0  # a peer may round more than we may: it only has to be the same function
RECORDED_PART = 0.05  # a peer whose time is further from the recorded one is noted
COPY_BYTES = 2**30
QUICK_COPY_BYTES = 2**22
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    against: tuple[str, ...] | None = None  # None: each command's own choice
    cases: tuple[str, ...] = ("*",)
    precisions: tuple[str, ...] | None = None
    seconds_budget: float | None = None


@dataclass
class Row:
    """One line of the report: a case, a pass, a precision, and the time of each implementation.

    Args:
        bytes: of each kernel that must be launched: its inputs read once, its outputs written once.
        flops: useful floating-point operations; None where bytes alone matter.
        goal_us, goal_mib: time, and peak memory beyond the inputs, on the machine of the goals.
        recorded_us: what peers took on that machine.
    """

    command: str
    case: str
    pass_name: str
    precision: str
    shape: dict[str, Any]
    seed: int
    bytes: tuple[int, ...] = ()
    flops: float | None = None
    goal_us: float | None = None
    goal_mib: float | None = None
    recorded_us: dict[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    copy_us: float | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def median_us(self, name: str) -> float | None:
        return self.results.get(name, {}).get("median_us")

    def set_measurement(self, name: str, measurement: Measurement) -> None:
        entry = self.results.setdefault(name, {})
        entry.update(measurement.as_json())
        if self.flops is not None:
            entry["tflops"] = round(self.flops / measurement.median_us / 1e6, 2)
        if self.bytes:
            entry["gbytes_per_s"] = round(sum(self.bytes) / measurement.median_us / 1e3, 1)

    def ratios(self) -> dict[str, float]:
        """Our time over the floor and the copy, and each peer's time over ours."""
        ours = self.median_us(OURS)
        if ours is None:
            return {}
        found = {}
        for name, base in (("floor", self.floor_us), ("copy", self.copy_us)):
            if base:
                found[f"{OURS} / {name}"] = round(ours / base, 3)
        for name in self.results:
            other = self.median_us(name)
            if name != OURS and other is not None:
                found[f"{name} / {OURS}"] = round(other / ours, 3)
        return found

    def as_json(self) -> dict[str, Any]:
        names = ("command", "case", "pass_name", "precision", "shape", "seed", "flops")
        found = {name: getattr(self, name) for name in (*names, "goal_us", "goal_mib")}
        found["pass"] = found.pop("pass_name")
        found["bytes"] = list(self.bytes)
        for name in ("floor_us", "copy_us"):
            value = getattr(self, name)
            found[name] = None if value is None else round(value, 3)
        return found | {"results": self.results, "ratios": self.ratios()}


class Session:
    """What the commands share."""

    def __init__(self, timer: Timer, options: Options) -> None:
        self.timer = timer
        self.device = timer.device
        self.options = options
        self.rows: list[Row] = []
        self.sections: dict[str, Any] = {}  # what is no row: calibration, build
        self.notes: list[str] = []  # absences, failures, oddities: each once
        self.failed = False  # an operator of ours did, or was wrong
        self.after_row: Callable[[], None] = lambda: None
        self._began = time.monotonic()
        self._copies: dict[int, float] = {}
        self._bytes_per_us = 0.0

    # --- progress

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def progress(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.progress(text)

    @property
    def is_reference_machine(self) -> bool:
        """Whether this is the kind of GPU that goals are set for, at full size."""
        on_cuda = self.device.type == "cuda" and not self.options.quick
        return on_cuda and REFERENCE_GPU in torch.cuda.get_device_name(self.device)

    def out_of_time(self) -> bool:
        budget = self.options.seconds_budget
        return budget is not None and self.seconds > budget

    # --- options

    def selected(self, case: str) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.options.cases)

    def peers(self, known: Sequence[str], default: Sequence[str]) -> list[str]:
        wanted = default if self.options.against is None else self.options.against
        return [name for name in known if name in wanted]

    def precisions(self, on_cuda: Sequence[str], on_cpu: Sequence[str]) -> list[Precision]:
        names = self.options.precisions
        if names is None:
            names = tuple(on_cuda if self.device.type == "cuda" else on_cpu)
        return [PRECISIONS[name] for name in names]

    # --- the machine's own measures

    def calibrate(self) -> None:
        """Measure the copy bandwidth and the shortest kernel; on a GPU a large product too."""
        self.progress("measuring the copy bandwidth")
        size = QUICK_COPY_BYTES if self.options.quick else COPY_BYTES
        if self.device.type == "cpu":
            size = min(size, COPY_BYTES // 8)
        found: dict[str, Any] = {"copied_bytes": size}
        copy_us = self._copy_us(size)
        self._bytes_per_us = size / copy_us
        found["copy_tbytes_per_s"] = round(self._bytes_per_us / 1e6, 4)
        one = torch.zeros(1, device=self.device)
        found["one_element_us"] = self.timer.measure(lambda: one.add_(1)).as_json()
        if self.device.type == "cuda" and not self.options.quick:
            shape = (MATMUL_SIZE, MATMUL_SIZE)
            a, b = (torch.randn(shape, device=self.device).bfloat16() for _ in range(2))
            product = self.timer.measure(lambda: a @ b)
            found["bf16_matmul_tflops"] = round(2 * MATMUL_SIZE**3 / product.median_us / 1e6, 1)
        self.sections["calibration"] = found

    def _copy_us(self, moved_bytes: int) -> float:
        """The time of a plain copy that reads and writes this many bytes together."""
        if moved_bytes not in self._copies:
            source = torch.randn(max(1, moved_bytes // 8), device=self.device)
            target = torch.empty_like(source)
            self._copies[moved_bytes] = self.timer.measure(lambda: target.copy_(source)).median_us
        return self._copies[moved_bytes]

    # --- rows

    def add(self, row: Row) -> Row:
        """Put a row into the report, with its floor and the time of a copy of as many bytes."""
        self.rows.append(row)
        if row.bytes:
            row.floor_us = sum(row.bytes) / self._bytes_per_us
            row.copy_us = sum(self._copy_us(moved) for moved in row.bytes)
        return row

    def run(
        self,
        forward: Row,
        backward: Row | None,
        candidates: Mapping[str, Callable[[], Candidate]],
        check_out: Callable[[Tensor, float], None],
        check_gradients: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Check and time each candidate; one that fails does not end the run.

        check_out takes a result and the factor by which the limit is widened.
        """
        for name, build in candidates.items():
            rows = [forward] if backward is None else [forward, backward]
            with self.guard(name, *rows) as guard:
                self._run_one(name, build, guard, check_out, check_gradients)
            self.after_row()

    def _run_one(
        self,
        name: str,
        build: Callable[[], Candidate],
        guard: _Guard,
        check_out: Callable[[Tensor, float], None],
        check_gradients: Callable[[Sequence[Tensor]], None],
    ) -> None:
        candidate = build()
        if candidate.rows is not None:
            check_out(candidate.rows(candidate.forward()), 1.0 if guard.is_ours else PEER_SLACK)
        forward, *backward = guard.rows
        forward.set_measurement(name, self.timer.measure(candidate.forward))
        self._compare_with_record(forward, name)
        if not backward:
            return
        guard.rows = backward  # what fails from here on is the backward
        if candidate.grad_out is None:
            raise AbsentError(f"{name} has no backward here")
        call = candidate.prepare_backward()
        if guard.is_ours:
            check_gradients(call())
        backward[0].set_measurement(name, self.timer.measure(call))
        self._compare_with_record(backward[0], name)

    def _compare_with_record(self, row: Row, name: str) -> None:
        recorded, now = row.recorded_us.get(name), row.median_us(name)
        if recorded and now and abs(now / recorded - 1) > RECORDED_PART:
            self.note(
                f"{name} took {now:.4g} us, {now / recorded:.2f} times the {recorded:.4g} us on"
                f" record [{row.case} {row.pass_name} {row.precision}]"
            )

    def guard(self, name: str, *rows: Row) -> _Guard:
        """Whatever fails within is one line of these rows' results."""
        return _Guard(self, name, list(rows), name in (OURS, HINTED))


class LostDeviceError(RuntimeError):
    """The GPU no longer answers: nothing more can be measured in this process."""


class _Guard:
    """Turns what goes wrong with one implementation into one line of its result."""

    def __init__(self, session: Session, name: str, rows: list[Row], is_ours: bool) -> None:
        self.session = session
        self.name = name
        self.rows = rows
        self.is_ours = is_ours

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception):
            return False
        if isinstance(error, AbsentError):
            outcome, text = "absent", str(error)
        elif isinstance(error, WrongResultError):
            outcome, text = "wrong", str(error)
        elif isinstance(error, torch.OutOfMemoryError):
            outcome, text = "error", "out of memory"
        else:
            lines = [line for line in str(error).splitlines() if line.strip()]
            first = lines[0] if lines else "no message"
            outcome, text = "error", f"{type(error).__name__}: {first[:300]}"
        for row in self.rows:
            if self.name not in row.results:
                row.results[self.name] = {outcome: text}
        row = self.rows[0]
        where = f"{row.case} {row.pass_name} {row.precision}"
        self.session.note(text if outcome == "absent" else f"{self.name}: {text} [{where}]")
        if self.is_ours:
            self.session.failed = True
        self._recover()
        return True

    def _recover(self) -> None:
        try:
            self.session.timer.synchronize()
        except RuntimeError as error:
            raise LostDeviceError(f"the GPU was lost after {self.name}: {error}") from error
        if self.session.device.type == "cuda":
            torch.cuda.empty_cache()
