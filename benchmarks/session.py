"""One run of the benchmark: its timer, its options, what it has measured."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.candidate import Candidate
from benchmarks.checking import Check, WrongResultError
from benchmarks.peers import AbsentError
from benchmarks.shapes import PRECISIONS, Precision
from benchmarks.timing import Measurement, Timer

OURS = "jagged_cuda"
HINTED = "jagged_cuda max_len"  # the same, told the longest length
UNFUSED = "jagged_cuda unfused"  # attention as three operators, its scores in memory
ALL_OURS = (OURS, HINTED, UNFUSED)
REFERENCE_GPU = "H100"  # goals and peers' recorded times are of this one
PEER_SLACK = 4.0  # a peer may round more than we may: it only has to be the same function
RECORDED_PART = 0.05  # a peer whose time is further from the recorded one is noted
# The bandwidth is that of the fastest: how fast a copy is depends on where its memory lies too.
COPY_BYTES = (2**28, 2**29, 2**30)
COPY_BYTES_ON_CPU = (2**27,)
QUICK_COPY_BYTES = (2**22,)
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
        has_memory: whether peak memory beyond the inputs is measured too.
        goal_us, goal_mib: time, and peak memory, on the machine of the goals.
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
    has_memory: bool = False
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
        """Our time over the floor and the copy, each peer's time over ours, unfused forms apart."""
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
        for key, suffix in (("median_us", ""), ("peak_mib", " memory")):
            dense, unfused = (self.results.get(name, {}).get(key) for name in ("dense", UNFUSED))
            if dense and unfused:
                found[f"dense / {UNFUSED}{suffix}"] = round(dense / unfused, 3)
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


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Case = TypeVar("_Case", bound=_Named)


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

    def has_attention_goals(self, precision: Precision) -> bool:
        return precision.name == "bf16" and self.is_reference_machine

    def out_of_time(self) -> bool:
        budget = self.options.seconds_budget
        return budget is not None and self.seconds > budget

    # --- options

    def selected(self, case: str) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.options.cases)

    def peers(self, known: Sequence[str], default: Sequence[str]) -> list[str]:
        against = self.options.against
        wanted = default if against is None else known if "all" in against else against
        return [name for name in known if name in wanted]

    def precisions(self, on_cuda: Sequence[str], on_cpu: Sequence[str]) -> list[Precision]:
        names = self.options.precisions
        if names is None:
            names = tuple(on_cuda if self.device.type == "cuda" else on_cpu)
        return [PRECISIONS[name] for name in names]

    def each_case(
        self,
        command: str,
        cases: Sequence[_Case],
        run: Callable[[Session, _Case, Precision], None],
        on_cuda: Sequence[str] = ("bf16",),
        on_cpu: Sequence[str] = ("fp32",),
        cases_on_cpu: Collection[str] | None = None,
    ) -> None:
        """Run the cases that were asked for in each precision, until the time is spent.

        cases_on_cpu: those that a CPU finishes in seconds: there others must be named. None: all.
        """
        for precision in self.precisions(on_cuda, on_cpu):
            with precision.setting():
                for case in cases:
                    if not self._takes(case.name, cases_on_cpu):
                        continue
                    if self.out_of_time():
                        self.note(f"{command}: the time was spent before {case.name}")
                        return
                    self.progress(f"{command}: {case.name} {precision.name}")
                    run(self, case, precision)

    def _takes(self, case: str, cases_on_cpu: Collection[str] | None) -> bool:
        is_unasked = self.options.cases == ("*",) and not self.options.quick
        if self.device.type == "cpu" and is_unasked and cases_on_cpu is not None:
            return case in cases_on_cpu
        return self.selected(case)

    # --- the machine's own measures

    def calibrate(self) -> None:
        """Measure the copy bandwidth and the shortest kernel; on a GPU a large product too."""
        self.progress("measuring the copy bandwidth")
        sizes = COPY_BYTES if self.device.type == "cuda" else COPY_BYTES_ON_CPU
        if self.options.quick:
            sizes = QUICK_COPY_BYTES
        rates = {size: size / self._copy_us(size) for size in sizes}
        self._bytes_per_us = max(rates.values())
        found: dict[str, Any] = {
            "copy_tbytes_per_s": round(self._bytes_per_us / 1e6, 4),
            "copies_tbytes_per_s": {str(size): round(r / 1e6, 4) for size, r in rates.items()},
        }
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
        self, rows: Sequence[Row], candidates: Mapping[str, Callable[[], Candidate]], check: Check
    ) -> None:
        """Check and time each candidate; one that fails does not end the run.

        rows: one for each pass, the forward first where there is one.
        """
        for name, build in candidates.items():
            with self.guard(name, *rows) as guard:
                self._run_one(name, build(), guard, check)
            self.after_row()

    def _run_one(self, name: str, candidate: Candidate, guard: _Guard, check: Check) -> None:
        if candidate.rows is not None:
            slack = 1.0 if guard.is_ours else PEER_SLACK
            check.require_out(candidate.rows(candidate.forward()), slack)
        rows, is_checked = guard.rows, not guard.is_ours
        for index, row in enumerate(rows):
            guard.rows = rows[index:]  # what fails from here on is this pass
            if row.pass_name != "forward" and candidate.grad_out is None:
                raise AbsentError(f"{name} has no backward here")
            call = candidate.prepare(row.pass_name)
            if row.pass_name != "forward" and not is_checked:
                check.require_gradients(call()[-len(candidate.inputs) :])
                is_checked = True
            peak = self.timer.peak_bytes(call) if row.has_memory else None
            row.set_measurement(name, self.timer.measure(call))
            if row.has_memory:
                row.results[name]["peak_mib"] = None if peak is None else round(peak / 2**20, 1)
            self._compare_with_record(row, name)
        if any(row.has_memory for row in rows):
            self.empty_cache()

    def _compare_with_record(self, row: Row, name: str) -> None:
        recorded, now = row.recorded_us.get(name), row.median_us(name)
        if recorded and now and abs(now / recorded - 1) > RECORDED_PART:
            self.note(
                f"{name} took {now:.4g} us, {now / recorded:.2f} times the {recorded:.4g} us on"
                f" record [{row.case} {row.pass_name} {row.precision}]"
            )

    def empty_cache(self) -> None:
        """Give memory that nothing uses back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def guard(self, name: str, *rows: Row) -> _Guard:
        """Whatever fails within is one line of these rows' results."""
        return _Guard(self, name, list(rows), name in ALL_OURS)


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
        self.session.empty_cache()
