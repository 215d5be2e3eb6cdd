"""How a call is timed.

On a GPU: CUDA events around the replay of a CUDA graph that holds the call, so that the host's own
time stays out of it. Before each repetition a buffer larger than the L2 cache is read, so that the
cache is cold, and clean: a buffer that was written would leave lines that the timed kernels must
first write back. The read also keeps the GPU busy while the host queues what follows. On the CPU:
the clock around the call, with warm caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU
FLUSH_US = 120.0  # about what reading them takes
BUDGET_S = 0.08  # of one measurement
MIN_REPETITIONS, MAX_REPETITIONS = 5, 50
RELEASE_S = 0.1  # after memory was given back: for a while kernels are up to a tenth slower
HOST_CALLS_IN_A_ROW = 64  # then the GPU catches up: a full queue would make the host wait
NVML_CLOCK_SM = 1


@dataclass(frozen=True)
class Measurement:
    """Times of one call in microseconds."""

    median_us: float
    min_us: float
    q25_us: float
    q75_us: float
    repetitions: int
    method: str  # "graph", "eager" (a call that cannot be captured) or "clock"
    sm_mhz: int | None = None  # the GPU's clock right after the last repetition

    @classmethod
    def of(cls, times_us: list[float], method: str, sm_mhz: int | None = None) -> Measurement:
        quartiles = statistics.quantiles(times_us, n=4) if len(times_us) > 1 else times_us * 3
        median = statistics.median(times_us)
        return cls(median, min(times_us), quartiles[0], quartiles[2], len(times_us), method, sm_mhz)

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


class SmClock:
    """Reads the SM clock of a GPU from NVML; None where NVML does not know it."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        if device.type != "cuda":
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        is_found = nvml.nvmlInit_v2() == 0
        if is_found and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == 0:
            self._nvml = nvml

    def now_mhz(self) -> int | None:
        return self._ask("nvmlDeviceGetClockInfo")

    def max_mhz(self) -> int | None:
        return self._ask("nvmlDeviceGetMaxClockInfo")

    def _ask(self, function: str) -> int | None:
        mhz = ctypes.c_uint()
        if self._nvml is None:
            return None
        failed = getattr(self._nvml, function)(self._handle, NVML_CLOCK_SM, ctypes.byref(mhz))
        return None if failed else mhz.value


class Timer:
    """Times calls on one device.

    Args:
        repetitions: of each measurement; by default as many as a short time allows.
    """

    max_sm_mhz: int | None = None

    def __init__(self, device: torch.device, repetitions: int | None) -> None:
        self.device = device
        self.repetitions = repetitions

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Everything that is to be timed must be made in this context."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for the device."""

    def measure(self, call: Callable[[], object]) -> Measurement:
        """The time that the device needs for the call."""
        raise NotImplementedError

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most memory that the call holds at any one time; None where that is unknown."""
        return None

    def measure_host(self, call: Callable[[], object], calls: int) -> Measurement:
        """The time after which the call returns to its caller."""
        (measurement,) = self.measure_host_in_turn([call], calls)
        return measurement

    def measure_host_in_turn(
        self, candidates: Sequence[Callable[[], object]], calls: int
    ) -> list[Measurement]:
        """The same of several, call by call in turn: a clock that changes changes it for all."""
        times: list[list[float]] = [[] for _ in candidates]
        with self.context():
            for index in range(calls + HOST_CALLS_IN_A_ROW):
                if index % max(1, HOST_CALLS_IN_A_ROW // len(candidates)) == 0:
                    self.synchronize()
                pairs = list(zip(candidates, times, strict=True))
                for call, found in pairs if index % 2 else pairs[::-1]:
                    begin = time.perf_counter_ns()
                    result = call()
                    found.append((time.perf_counter_ns() - begin) / 1e3)
                    del result  # freed outside the measurement
            self.synchronize()
        return [Measurement.of(found[HOST_CALLS_IN_A_ROW:], "clock") for found in times]

    def _repetitions(self, each_s: float) -> int:
        if self.repetitions is not None:
            return self.repetitions
        return max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(BUDGET_S / max(each_s, 1e-9))))


class CudaTimer(Timer):
    """Times calls on a GPU.

    Everything runs on one stream of its own: autograd runs a backward on the stream of its forward,
    and only what runs on the stream that captures can be captured.
    """

    def __init__(self, device: torch.device, repetitions: int | None = None) -> None:
        super().__init__(device, repetitions)
        self.stream = torch.cuda.Stream(device)
        self.clock = SmClock(device)
        self.max_sm_mhz = self.clock.max_mhz()
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
            self._release_cache()
            graph = self._capture(call)
            run = call if graph is None else graph.replay
            trial_us = min(self._times(run, 3))
            times = self._times(run, self._repetitions((trial_us + FLUSH_US) / 1e6))
            sm_mhz = self.clock.now_mhz()
        return Measurement.of(times, "eager" if graph is None else "graph", sm_mhz)

    def _release_cache(self) -> None:
        """Give back what is cached, as a capture does, and wait until that has no effect."""
        reserved = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved(self.device) < reserved:
            time.sleep(RELEASE_S)

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


class CpuTimer(Timer):
    """Times calls on the CPU."""

    def __init__(self, repetitions: int | None = None) -> None:
        super().__init__(torch.device("cpu"), repetitions)

    def measure(self, call: Callable[[], object]) -> Measurement:
        call()
        repetitions = self._repetitions(self._time(call))
        return Measurement.of([self._time(call) * 1e6 for _ in range(repetitions)], "clock")

    def _time(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - begin
        del result
        return elapsed


def memory_bytes(device: torch.device) -> int:
    """The memory of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
