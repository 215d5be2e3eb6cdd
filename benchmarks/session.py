"""One run of the benchmark: its timer, its options, what it has measured."""

from __future__ import annotations

import contextlib
import fnmatch
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.candidate import Candidate
from benchmarks.checking import Check, WrongResultError
from benchmarks.peers import AbsentError
from benchmarks.shapes import PRECISIONS, Precision
from benchmarks.timing import Measurement, Timer

OURS = "jagged_cuda"
HINTED = "jagged_cuda max_len"  # the same with the longest length given
UNFUSED = "jagged_cuda unfused"  # attention as three operators, its scores in memory
REFERENCE_GPU = "H100"  # goals and peers' recorded times are of this one
PEER_SLACK = 4.0  # a peer may round more than we may: it only has to be the same function
RECORDED_PART = 0.05  # a peer whose time is further from the recorded one is noted
# The bandwidth is that of the fastest: how fast a copy is depends on where its memory lies too.
COPY_BYTES = (2**28, 2**29, 2**30)
COPY_BYTES_ON_CPU = (2**27,)
QUICK_COPY_BYTES = (2**22,)
COPY_MULTIPLE = 4096  # a copy of any other size runs at four fifths of the speed
MATMUL_SIZE = 8192
MATMULS = {"bf16": ("bf16", "fp16"), "tf32": ("tf32",)}  # whose rate each product tells

# The bar of an operator that is bound by memory: BAR_FACTOR times its floor, and for each kernel
# that it must launch LAUNCH_US, or SHORT_LAUNCH_US where the floor is under SHORT_FLOOR_US.
FLOOR_BYTES_PER_US = 3.03e6  # of a copy on the reference GPU; elsewhere the run's own copy counts
FLOOR_MATMUL_PART = 0.75  # of the run's large product: no operator's products run faster
BAR_FACTOR = 1.15
LAUNCH_US, SHORT_LAUNCH_US, SHORT_FLOOR_US = 4.0, 8.0, 10.0


def is_ours(name: str) -> bool:
    """Whether an implementation is ours, in whatever variant."""
    return name.split()[0] == OURS


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    quick: bool = False
    against: tuple[str, ...] | None = None  # None: each command's own choice
    cases: tuple[str, ...] = ("*",)
    precisions: tuple[str, ...] | None = None
    seconds_budget: float | None = None
    rounds: int = 1  # how often all implementations of a case are timed in turn


@dataclass(frozen=True)
class Command:
    """A command: its cases, how it runs, and the peers that it knows."""

    cases: tuple[str, ...]
    run: Callable[[Session], None]
    peers: tuple[str, ...] = ()
    default_peers: tuple[str, ...] = ()


class Goal(NamedTuple):
    """A limit for our time: `value` microseconds, or `value` times what `of` names."""

    value: float
    of: str  # "us", "floor" or "best peer"


@dataclass
class Row:
    """One line of the report: a case, a pass, a precision, and the time of each implementation.

    Args:
        bytes: of each kernel that must be launched: its inputs read once, its outputs written once.
        flops: useful floating-point operations; None where bytes alone matter.
        has_memory: whether peak memory beyond the inputs is measured too.
        bar_scale: a factor of the bar, for products that are computed in several parts.
        launches: kernels that must be launched for each of `bytes`.
        launch_us: of each kernel within the bar; None is the usual time.
        goal, goal_mib: time, and peak memory, on the machine of the goals.
        recorded_us: what peers took on that machine.
        floor_us: no kernel can be faster: the larger of bytes and operations over their rates.
        bar_us: what a kernel that is bound by memory must reach; None for another.
        copy_us: a plain copy that moves as many bytes, timed in the same run.
        sm_mhz: the lowest SM clock after a measurement of the row.
        below_max_clock: whether that is less than the GPU's maximum.
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
    bar_scale: float = 1.0
    launches: int = 1
    launch_us: float | None = None
    goal: Goal | None = None
    goal_mib: float | None = None
    recorded_us: dict[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    bar_us: float | None = None
    copy_us: float | None = None
    sm_mhz: int | None = None
    below_max_clock: bool = False
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def median_us(self, name: str) -> float | None:
        return self.results.get(name, {}).get("median_us")

    def set_floor(self, bytes_per_us: float, flops_per_us: float | None) -> None:
        """Set the floor, and the bar where bytes determine it."""
        by_bytes = sum(self.bytes) / bytes_per_us
        by_flops = (self.flops or 0.0) / flops_per_us if flops_per_us else 0.0
        self.floor_us = max(by_bytes, by_flops)
        if by_bytes >= by_flops:
            is_short = self.floor_us < SHORT_FLOOR_US
            launch_us = self.launch_us or (SHORT_LAUNCH_US if is_short else LAUNCH_US)
            launches = len(self.bytes) * self.launches
            bar_us = BAR_FACTOR * self.floor_us + launches * launch_us
            self.bar_us = self.bar_scale * bar_us

    def set_measurement(
        self, name: str, measurement: Measurement, max_sm_mhz: int | None = None
    ) -> None:
        """Of several measurements all medians are kept; the median of the row is their median."""
        entry = self.results.setdefault(name, {})
        medians = entry.get("medians_us", [entry["median_us"]] if "median_us" in entry else [])
        entry.update(measurement.as_json())
        if medians:
            entry["medians_us"] = [*medians, entry["median_us"]]
            entry["median_us"] = round(statistics.median(entry["medians_us"]), 3)
        if measurement.sm_mhz is not None:
            self.sm_mhz = min(self.sm_mhz or measurement.sm_mhz, measurement.sm_mhz)
            self.below_max_clock = self.sm_mhz < (max_sm_mhz or 0)

    def goal_us(self) -> float | None:
        """The goal in microseconds, where what it refers to was measured."""
        if self.goal is None:
            return None
        peers = [
            entry["median_us"]
            for name, entry in self.results.items()
            if not is_ours(name) and "median_us" in entry
        ]
        base = {
            "us": 1.0,
            "floor": self.floor_us,
            "best peer": min(peers, default=None),
        }[self.goal.of]
        return None if base is None else self.goal.value * base

    def as_json(self) -> dict[str, Any]:
        names = ("command", "case", "pass_name", "precision", "shape", "seed", "flops", "bytes")
        names += ("goal", "goal_mib", "floor_us", "bar_us", "copy_us", "sm_mhz", "below_max_clock")
        found = {name.removesuffix("_name"): getattr(self, name) for name in names}
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = round(value, 3)
        return found | {"results": self.results}


class Session:
    """State and methods that all commands share."""

    def __init__(self, timer: Timer, options: Options) -> None:
        self.timer = timer
        self.device = timer.device
        self.options = options
        self.rows: list[Row] = []
        self.sections: dict[str, Any] = {}  # everything that is no row: calibration, build
        self.notes: list[str] = []  # absences, failures, oddities: each once
        self.failed = False  # an operator of ours did, or was wrong
        self.after_row: Callable[[], None] = lambda: None
        self._began = time.monotonic()
        self._copies: dict[int, float] = {}
        self._bytes_per_us = 0.0
        self._flops_per_us: dict[str, float] = {}  # by precision, those of products in floors

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

    def has_goal(self, goal: Goal, precision: Precision) -> bool:
        """Goals of attention are for bf16; those in microseconds for one kind of GPU."""
        if precision.name != "bf16" or self.device.type != "cuda" or self.options.quick:
            return False
        return goal.of != "us" or self.is_reference_machine

    def all_notes(self) -> list[str]:
        """The notes, and what is to be said of the run as a whole."""
        slow = [row.sm_mhz for row in self.rows if row.below_max_clock and row.sm_mhz]
        if not slow:
            return self.notes
        most = self.timer.max_sm_mhz
        text = f"the SM clock was below its maximum of {most} MHz in {len(slow)} of"
        return [*self.notes, f"{text} {len(self.rows)} rows, {min(slow)} MHz at the lowest"]

    def out_of_time(self) -> bool:
        budget = self.options.seconds_budget
        return budget is not None and self.seconds > budget

    # --- options

    def selected(self, case: str) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.options.cases)

    def peers(self, command: Command) -> list[str]:
        known, against = command.peers, self.options.against
        wanted = command.default_peers if against is None else against
        return [name for name in known if name in wanted or "all" in wanted]

    def precisions(self, on_cuda: Sequence[str], on_cpu: Sequence[str]) -> list[Precision]:
        names = self.options.precisions
        if names is None:
            names = tuple(on_cuda if self.device.type == "cuda" else on_cpu)
        return [PRECISIONS[name] for name in names]

    def each_case(
        self,
        command: str,
        cases: Sequence[Any],
        run: Callable[[Session, Any, Precision], None],
        on_cuda: Sequence[str] = ("bf16",),
        on_cpu: Sequence[str] = ("fp32",),
        cases_on_cpu: Collection[str] | None = None,
    ) -> None:
        """Run the cases that were asked for in each precision, until the time is spent.

        cases: each has a name.
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
        copied = self._bytes_per_us = max(rates.values())
        found: dict[str, Any] = {
            "copy_tbytes_per_s": round(copied / 1e6, 4),
            "copies_tbytes_per_s": {str(size): round(r / 1e6, 4) for size, r in rates.items()},
        }
        self.sections["calibration"] = found
        if self.device.type != "cuda":
            return
        # A kernel that returns at once: what every time here includes.
        found["empty_kernel_us"] = self.timer.measure(lambda: torch.cuda._sleep(0)).as_json()
        if self.options.quick:
            return
        if self.is_reference_machine:
            self._bytes_per_us = FLOOR_BYTES_PER_US
        for name, like in MATMULS.items():
            rate = self._matmul_flops_per_us(PRECISIONS[name])
            found[f"{name}_matmul_tflops"] = round(rate / 1e6, 1)
            self._flops_per_us |= dict.fromkeys(like, FLOOR_MATMUL_PART * rate)

    def _matmul_flops_per_us(self, precision: Precision) -> float:
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        a, b = (torch.randn(shape, device=self.device).to(precision.dtype) for _ in range(2))
        with precision.setting():
            return 2 * MATMUL_SIZE**3 / self.timer.measure(lambda: a @ b).median_us

    def _copy_us(self, moved_bytes: int) -> float:
        """The time of a plain copy that reads and writes this many bytes together, or a few more.

        Its size is rounded up: the copy is as fast as one can be.
        """
        size = -(-moved_bytes // (2 * COPY_MULTIPLE)) * COPY_MULTIPLE
        if size not in self._copies:
            source = torch.randn(size // 4, device=self.device)
            target = torch.empty_like(source)
            self._copies[size] = self.timer.measure(lambda: target.copy_(source)).median_us
        return self._copies[size]

    # --- rows

    def floor_us(self, row: Row) -> float:
        """The floor of a row that is not in the report."""
        row.set_floor(self._bytes_per_us, self._flops_per_us.get(row.precision))
        return row.floor_us or 0.0

    def add(self, row: Row) -> Row:
        """Put a row into the report, with its floor and the time of a copy of as many bytes."""
        self.rows.append(row)
        if row.bytes:
            row.set_floor(self._bytes_per_us, self._flops_per_us.get(row.precision))
            if self.device.type != "cuda":
                row.bar_us = None  # its time of a launch is a GPU's
            row.copy_us = sum(self._copy_us(moved) for moved in row.bytes)
        return row

    def run(
        self, rows: Sequence[Row], candidates: Mapping[str, Callable[[], Candidate]], check: Check
    ) -> None:
        """Check and time each candidate; one that fails does not end the run.

        rows: one for each pass, the forward first where there is one. With several rounds the
        candidates are timed in turn, A B A B. Once the time is spent, peers are left out.
        """
        for number in range(self.options.rounds):
            for name, build in candidates.items():
                if number > 0 and rows[0].median_us(name) is None:
                    continue
                with self.guard(name, *rows) as guard:
                    if self.out_of_time() and not guard.is_ours:
                        raise AbsentError("the time was spent before some peers")
                    self._run_one(build(), guard, check if number == 0 else None)
                self.after_row()

    def _run_one(self, candidate: Candidate, guard: _Guarded, check: Check | None) -> None:
        """check: None if the results are known to be right."""
        name, rows = guard.name, guard.rows
        if candidate.rows is not None and check is not None:
            slack = 1.0 if guard.is_ours else PEER_SLACK
            check.require_out(candidate.rows(candidate.forward()), slack)
        needs_check = guard.is_ours or candidate.has_our_gradients
        for index, row in enumerate(rows):
            guard.rows = rows[index:]  # what fails from here on is this pass
            if row.pass_name != "forward" and candidate.grad_out is None:
                raise AbsentError(f"{name} has no backward here")
            call = candidate.prepare(row.pass_name)
            if row.pass_name != "forward" and needs_check and check is not None:
                check.require_gradients(call()[-len(candidate.inputs) :])
                needs_check = False
            peak = self.timer.peak_bytes(call) if row.has_memory else None
            row.set_measurement(name, self.timer.measure(call), self.timer.max_sm_mhz)
            if row.has_memory:
                row.results[name]["peak_mib"] = None if peak is None else round(peak / 2**20, 3)
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

    @contextlib.contextmanager
    def guard(self, name: str, *rows: Row) -> Iterator[_Guarded]:
        """Turn whatever goes wrong within into one line of these rows' results.

        Raises:
            LostDeviceError: the device no longer answers.
        """
        guarded = _Guarded(name, list(rows), is_ours(name))
        try:
            yield guarded
        except Exception as error:
            self._record_failure(guarded, error)
            try:
                self.timer.synchronize()
            except RuntimeError as lost:
                raise LostDeviceError(f"the GPU was lost after {name}: {lost}") from lost
            self.empty_cache()

    def _record_failure(self, guarded: _Guarded, error: Exception) -> None:
        outcome, text = "error", str(error)
        if isinstance(error, AbsentError):
            outcome = "absent"
        elif isinstance(error, WrongResultError):
            outcome = "wrong"
        elif isinstance(error, torch.OutOfMemoryError):
            text = "out of memory"
        else:
            first = next((line for line in text.splitlines() if line.strip()), "no message")
            text = f"{type(error).__name__}: {first[:300]}"
        for row in guarded.rows:
            row.results.setdefault(guarded.name, {outcome: text})
        row = guarded.rows[0]
        where = f"{row.case} {row.pass_name} {row.precision}"
        self.note(text if outcome == "absent" else f"{guarded.name}: {text} [{where}]")
        self.failed = self.failed or guarded.is_ours


class LostDeviceError(RuntimeError):
    """The GPU no longer answers: nothing more can be measured in this process."""


@dataclass
class _Guarded:
    """What is being measured, and the rows that it has not yet filled."""

    name: str
    rows: list[Row]
    is_ours: bool
