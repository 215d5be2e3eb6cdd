"""How a call is timed.

On a GPU: CUDA events around the replay of a CUDA graph that holds the call, so that the host's own
time stays out of it. Before each repetition a buffer larger than the L2 cache is read, so that the
cache is cold, and clean: a buffer that were written would leave lines that the timed kernels must
first write back. The read also keeps the GPU busy while the host queues what follows. On the CPU:
the clock around the call, with warm caches.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU
FLUSH_US = 120.0  # about what reading them takes
BUDGET_S = 0.08  # of one measurement
MIN_REPETITIONS, MAX_REPETITIONS = 5, 50
HOST_CALLS_IN_A_ROW = 64  # then the GPU catches up: a full queue would make the host wait


@dataclass(frozen=True)
class Measurement:
    """Times of one call in microseconds."""

    median_us: float
    min_us: float
    q25_us: float
    q75_us: float
    repetitions: int
    method: str  # "graph", "eager" (a call that cannot be captured) or "clock"

    @classmethod
    def of(cls, times_us: list[float], method: str) -> Measurement:
        quartiles = statistics.quantiles(times_us, n=4) if len(times_us) > 1 else times_us * 3
        median = statistics.median(times_us)
        return cls(median, min(times_us), quartiles[0], quartiles[2], len(times_us), method)

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["spread"] = (self.q75_us - self.q25_us) / self.median_us if self.median_us else 0.0
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


class Timer(Protocol):
    """Times calls on one device."""

    device: torch.device

    def measure(self, call: Callable[[], object]) -> Measurement:
        """The time that the device needs for the call."""

    def measure_host(self, call: Callable[[], object], calls: int) -> Measurement:
        """The time after which the call returns to its caller."""

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most memory that the call holds at any one time; None where that is unknown."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def context(self) -> contextlib.AbstractContextManager[object]:
        """What everything that is to be timed must be made in."""


def _repetitions(wanted: int | None, each_s: float) -> int:
    if wanted is not None:
        return wanted
    return max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(BUDGET_S / max(each_s, 1e-9))))


def _host_times(
    call: Callable[[], object], calls: int, synchronize: Callable[[], None]
) -> list[float]:
    times = []
    for index in range(calls + HOST_CALLS_IN_A_ROW):
        if index % HOST_CALLS_IN_A_ROW == 0:
            synchronize()
        begin = time.perf_counter_ns()
        result = call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        del result  # freed outside the measurement
    synchronize()
    return times[HOST_CALLS_IN_A_ROW:]


class CudaTimer:
    """Times calls on a GPU.

    Everything runs on one stream of its own: autograd runs a backward on the stream of its forward,
    and only what runs on the stream that captures can be captured.
    """

    def __init__(self, device: torch.device, repetitions: int | None = None) -> None:
        self.device = device
        self.repetitions = repetitions
        self.stream = torch.cuda.Stream(device)
        with self.context():
            self._flush = torch.rand(FLUSH_BYTES // 4, device=device)
            self._sum = torch.empty((), device=device)
        self.synchronize()

    def context(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def measure(self, call: Callable[[], object]) -> Measurement:
        with self.context():
            for _ in range(2):  # compiles, tunes and loads whatever the call needs
                call()
            self.synchronize()
            graph = self._capture(call)
            run = call if graph is None else graph.replay
            trial_us = min(self._times(run, 3))
            repetitions = _repetitions(self.repetitions, (trial_us + FLUSH_US) / 1e6)
            times = self._times(run, repetitions)
        return Measurement.of(times, "eager" if graph is None else "graph")

    def _capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                call()
        except RuntimeError as error:
            self.synchronize()  # raises where the GPU itself is what failed
            if isinstance(error, torch.OutOfMemoryError):  # what a graph holds, it holds beside
                del graph
                torch.cuda.empty_cache()
            return None
        return graph

    def _times(self, run: Callable[[], object], repetitions: int) -> list[float]:
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)
        ]
        for begin, end in events:
            torch.sum(self._flush, 0, out=self._sum)
            begin.record(self.stream)
            run()
            end.record(self.stream)
        self.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def measure_host(self, call: Callable[[], object], calls: int) -> Measurement:
        with self.context():
            return Measurement.of(_host_times(call, calls, self.synchronize), "clock")

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        with self.context():
            call()
            self.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = call()
            self.synchronize()
            peak = torch.cuda.max_memory_allocated(self.device) - before
            del result
        return peak


class CpuTimer:
    """Times calls on the CPU."""

    def __init__(
        self, repetitions: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device = torch.device("cpu")
        self.repetitions = repetitions
        self._clock = clock

    def context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def measure(self, call: Callable[[], object]) -> Measurement:
        call()
        trial_s = self._time(call)
        repetitions = _repetitions(self.repetitions, trial_s)
        times = [self._time(call) * 1e6 for _ in range(repetitions)]
        return Measurement.of(times, "clock")

    def _time(self, call: Callable[[], object]) -> float:
        begin = self._clock()
        result = call()
        elapsed = self._clock() - begin
        del result
        return elapsed

    def measure_host(self, call: Callable[[], object], calls: int) -> Measurement:
        return Measurement.of(_host_times(call, calls, self.synchronize), "clock")

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        return None


def memory_bytes(device: torch.device) -> int:
    """The memory of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if sys.platform == "linux":
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemTotal:"):
                    return int(line.split()[1]) * 1024
    return 8 * 2**30
