"""Judge random calls of every operator for as long as asked: ``python -m jagged_cuda.fuzz``.

Operators, options, lengths, dims, dtypes, strides, offsets and their base are random, memory around
the operands is NaN, and outputs and gradients are judged against the padded float64 definition by
the one rule of jagged_cuda/testing/comparison.py. A failure is made as small as possible and
printed as a command line that reproduces it; the exit status is then 1. A report at the end says
what was covered and what was never reached.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import multiprocessing
import os
import queue
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jagged_cuda.testing._kernels import kernel_paths
from jagged_cuda.testing.cases import CASES, EVERY
from jagged_cuda.testing.comparison import with_environment
from jagged_cuda.testing.coverage import Coverage, expected, report
from jagged_cuda.testing.draws import (
    BACKENDS,
    DTYPES,
    SIZES,
    Draw,
    Wanted,
    draw,
    dtypes_of,
    judge_draw,
    operators,
    place_of,
)
from jagged_cuda.testing.shrink import shrink

# Shares of the time: the Triton twins are slow in the interpreter and compile on a GPU.
TIME_SHARES = {"cpu": 3.0, "cuda": 3.0, "triton": 1.0}
SHRINK_SECONDS = 30.0
# A draw takes seconds at most, the compilation of a Triton kernel included.
HANG_SECONDS = 180.0


@dataclass(frozen=True)
class Plan:
    """A whole run.

    Args:
        wanted: what to draw from.
        places: backends and their devices.
        seed: of the draws.
        seconds: how long each worker draws.
        cases: how many draws at most, of all workers; None means as many as there is time for.
        workers: processes.
    """

    wanted: Wanted
    places: tuple[tuple[str, str], ...]
    seed: int
    seconds: float
    cases: int | None = None
    workers: int = 1


@dataclass(frozen=True)
class Finding:
    """A draw that fails, and how: an exception's name and its text."""

    draw: Draw
    kind: str
    text: str


class Fuzzer:
    """The draws of one worker, which are every `workers`-th of each backend."""

    def __init__(self, plan: Plan, worker: int = 0) -> None:
        self.plan = plan
        self.coverage = Coverage()
        self.skipped = 0
        self.next_index = {backend: worker for backend, _ in plan.places}
        self.spent = {backend: 0.0 for backend, _ in plan.places}

    def run(self, tell: Callable[[int, int], None], ops: Any = None) -> Finding | None:
        """Draw until the time or the cases are over; return the first draw that fails.

        `tell` is called for each draw before it runs: the place's number and the draw's index.
        `ops` is the module to judge instead of the backends' own.
        """
        deadline = time.monotonic() + self.plan.seconds
        places = self.plan.places
        while (now := time.monotonic()) < deadline:
            place = min(
                range(len(places)),
                key=lambda i: self.spent[places[i][0]] / TIME_SHARES[places[i][0]],
            )
            backend, device = places[place]
            index = self.next_index[backend]
            if self.plan.cases is not None and index >= self.plan.cases:
                return None
            self.next_index[backend] += self.plan.workers
            tell(place, index)
            drawn = draw(self.plan.wanted, self.plan.seed, backend, device, index)
            try:
                paths = judge_draw(drawn.draw, ops)
            except torch.OutOfMemoryError:
                self.skipped += 1
                torch.cuda.empty_cache()
            except Exception as error:
                return Finding(drawn.draw, type(error).__name__, str(error))
            else:
                self.coverage.add(drawn, paths)
            self.spent[backend] += time.monotonic() - now
        return None


def shrunk(finding: Finding, seconds: float, ops: Any = None) -> Finding:
    """The smallest draw found that fails in the same way."""
    last = finding

    def fails(simpler: Draw) -> bool:
        nonlocal last
        try:
            judge_draw(simpler, ops)
        except torch.OutOfMemoryError:
            return False
        except Exception as error:
            if type(error).__name__ == finding.kind:
                last = Finding(simpler, finding.kind, str(error))
                return True
        return False

    shrink(finding.draw, fails, seconds)
    return last


def shrunk_in_processes(finding: Finding, seconds: float) -> Finding:
    """The same for draws that kill their process: each is tried in a new one."""

    def fails(simpler: Draw) -> bool:
        command = [sys.executable, "-m", "jagged_cuda.fuzz", "--case", simpler.to_json()]
        try:
            return subprocess.run(command, capture_output=True, timeout=60).returncode != 0
        except subprocess.TimeoutExpired:
            return True

    return Finding(shrink(finding.draw, fails, seconds), finding.kind, finding.text)


# --- processes


def _work(plan: Plan, worker: int, messages: Any, current: Any) -> None:
    """One worker: tells what it runs through `current`, which outlives a crash."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    torch.set_num_threads(1)
    fuzzer = Fuzzer(plan, worker)
    told = time.monotonic()

    def progress() -> None:
        counts = [(*key, n) for key, n in fuzzer.coverage.counts.items()]
        messages.put(("progress", worker, counts, fuzzer.skipped))

    def tell(place: int, index: int) -> None:
        nonlocal told
        current[2 * worker], current[2 * worker + 1] = place, index
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            progress()

    messages.put(("ready", worker))
    finding = fuzzer.run(tell)
    progress()
    if finding is not None:
        messages.put(("found", worker, finding.draw.to_json(), finding.kind, finding.text))
        if not _breaks_the_device(finding):
            finding = shrunk(finding, SHRINK_SECONDS)
            messages.put(("shrunk", worker, finding.draw.to_json(), finding.kind, finding.text))
    messages.put(("done", worker))


def _breaks_the_device(finding: Finding) -> bool:
    """After such an error every call on the device fails in this process."""
    return finding.kind != "MismatchError" and "CUDA error" in finding.text


class Progress:
    """A line that is overwritten on a terminal, and one every ten seconds elsewhere."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.overwrites = stream.isatty()
        self.next = 0.5

    def show(self, seconds: float, cases: int) -> None:
        if seconds < self.next:
            return
        self.next = seconds + (0.5 if self.overwrites else 10.0)
        rate = cases / seconds if seconds > 0 else 0.0
        text = f"fuzz: {seconds:.0f} s, {cases:,} cases, {rate:,.0f} a second"
        print(f"\r{text}   " if self.overwrites else text, end="", file=self.stream)
        if not self.overwrites:
            print(file=self.stream)
        self.stream.flush()

    def end(self) -> None:
        if self.overwrites:
            print("\r" + " " * 70 + "\r", end="", file=self.stream, flush=True)


class Workers:
    """The processes of a run, and their reports."""

    def __init__(self, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self.plan = plan
        self.messages = context.Queue()
        self.current = context.Array("q", 2 * plan.workers, lock=False)
        self.processes = [
            context.Process(target=_work, args=(plan, n, self.messages, self.current), daemon=True)
            for n in range(plan.workers)
        ]
        self.counts: dict[int, Counter[tuple[str, str]]] = {}
        self.skipped: dict[int, int] = {}
        self.heard = [time.monotonic()] * plan.workers
        self.running = set(range(plan.workers))
        self.begin: float | None = None
        self.end: float | None = None
        self.finding: Finding | None = None

    def seconds(self) -> float:
        return 0.0 if self.begin is None else (self.end or time.monotonic()) - self.begin

    def cases(self) -> int:
        counts = (each.items() for each in self.counts.values())
        return sum(n for items in counts for (section, _), n in items if section == "dtypes")

    def run(self, progress: Progress) -> None:
        """Return when all are done, or the one that found something."""
        for process in self.processes:
            process.start()
        try:
            while self.running:
                try:
                    self._hear(*self.messages.get(timeout=0.2))
                except queue.Empty:
                    self._look_for_dead()
                if self.finding is None and self.begin is not None:
                    progress.show(self.seconds(), self.cases())
        except KeyboardInterrupt:
            pass
        finally:
            for process in self.processes:
                process.kill()
                process.join()

    def _hear(self, kind: str, worker: int, *rest: Any) -> None:
        self.heard[worker] = time.monotonic()
        if kind == "ready":
            self.begin = self.begin or time.monotonic()
        elif kind == "progress":
            self.counts[worker] = Counter({(section, item): n for section, item, n in rest[0]})
            self.skipped[worker] = rest[1]
        elif kind == "done":
            self.running.discard(worker)
        elif worker in self.running:  # "found", then "shrunk"
            self.end = self.end or time.monotonic()
            self.finding = Finding(Draw.from_json(rest[0]), *rest[1:])
            self.running = {worker}

    def _look_for_dead(self) -> None:
        for worker in sorted(self.running):
            code = self.processes[worker].exitcode
            if code == 0:
                self.running.discard(worker)
            elif code is not None:
                how = f"signal {-code}" if code < 0 else f"exit status {code}"
                self._blame(worker, f"the process ended with {how}")
            elif self.begin and time.monotonic() - self.heard[worker] > HANG_SECONDS:
                self._blame(worker, f"no result after {HANG_SECONDS:.0f} s")

    def _blame(self, worker: int, text: str) -> None:
        """Record the draw that the worker had begun: it killed the process, or hangs."""
        self.running.clear()
        self.end = self.end or time.monotonic()
        if self.finding is None:
            backend, device = self.plan.places[self.current[2 * worker]]
            index = self.current[2 * worker + 1]
            drawn = draw(self.plan.wanted, self.plan.seed, backend, device, index)
            self.finding = Finding(drawn.draw, "crash", text)


def fuzz(plan: Plan) -> int:
    """Run a plan in its processes, print what is found and the report; return the exit status."""
    workers = Workers(plan)
    progress = Progress(sys.stderr)
    workers.run(progress)
    progress.end()
    seconds, finding = workers.seconds(), workers.finding
    if finding is not None and (finding.kind == "crash" or _breaks_the_device(finding)):
        print(f"fuzz: {finding.kind} in {finding.draw.op}; making it smaller in new processes")
        finding = shrunk_in_processes(finding, 4 * SHRINK_SECONDS)
    coverage = Coverage()
    for counts in workers.counts.values():
        coverage.counts.update(counts)
    skipped = sum(workers.skipped.values())
    _print_report(plan, coverage, workers.cases(), seconds, skipped, finding)
    return 0 if finding is None else 1


def _print_report(
    plan: Plan,
    coverage: Coverage,
    cases: int,
    seconds: float,
    skipped: int,
    finding: Finding | None,
) -> None:
    rate = cases / seconds if seconds > 0 else 0.0
    result = "nothing found" if finding is None else f"found: {finding.kind}"
    print(
        f"fuzz: {cases:,} cases in {seconds:.0f} s ({rate:,.0f} a second) on {plan.workers}"
        f" process{'es' if plan.workers > 1 else ''}, seed {plan.seed}: {result}"
    )
    if skipped:
        print(f"  {skipped:,} more did not fit into the GPU's memory")
    print(report(coverage, expected(plan.wanted, plan.places)))
    if finding is not None:
        text = finding.text.split("\n  reproduce:")[0]
        print(f"\n{finding.kind}: {text}\n  reproduce: {with_environment(finding.draw.command())}")
    sys.stdout.flush()


# --- the command line


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths of a file: an interaction log (CSV with user_id), or numbers, plain or gzipped."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    rows = csv.reader(text.splitlines())
    header = [name.strip() for name in next(rows, [])]
    if "user_id" in header:
        column = header.index("user_id")
        return tuple(Counter(row[column] for row in rows if len(row) > column).values())
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words or not all(word.isdigit() for word in words):
        raise ValueError("expected a CSV file with a column user_id, or lengths")
    return tuple(int(word) for word in words)


def _judge_one(text: str) -> int:
    try:
        given = Draw.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"fuzz: --case must be what a finding printed: {error}") from None
    prepare([given.backend], given.device)
    try:
        paths = judge_draw(given)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"{given.op}: right; kernels {', '.join(paths) or 'of Triton'}")
    return 0


def prepare(backends: Sequence[str], device: str) -> None:
    """Check that the backends can run here; exit with a sentence if one can't."""
    if "cuda" in backends and not torch.cuda.is_available():
        raise SystemExit("fuzz: the backend cuda needs an NVIDIA GPU, and PyTorch sees none")
    if "cuda" in backends and not kernel_paths("cuda"):
        raise SystemExit("fuzz: the CUDA library is not loaded; see python -m jagged_cuda.info")
    if "triton" not in backends:
        return
    if torch.device(device).type == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise SystemExit("fuzz: set TRITON_INTERPRET=1 to run the Triton twins on a CPU")
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        twins = operators("triton")
    except ImportError as error:
        where = "triton and triton_ref, which is run from a checkout of the sources"
        raise SystemExit(f"fuzz: the backend triton needs {where}: {error}") from None
    lacking = [name for name in CASES if not hasattr(twins, name)]
    if lacking:
        raise SystemExit(f"fuzz: triton_ref has no {', '.join(lacking)}")


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jagged_cuda.fuzz", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--op", help="names, separated by commas; by default all")
    parser.add_argument("--device", help="cpu, cuda or cuda:<n>; by default a GPU if there is one")
    parser.add_argument("--backends", help=f"of {', '.join(BACKENDS)}; by default the device's own")
    parser.add_argument("--dtype", help=f"of {', '.join(DTYPES)}; by default all")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument("--cases", type=int, help="stop after so many draws of each backend")
    parser.add_argument("--size", help="small, edge, many, giant, large or kinds; by default all")
    parser.add_argument("--jobs", type=int, help="processes; by default one per core, one on a GPU")
    parser.add_argument(
        "--shape-from",
        metavar="FILE",
        type=Path,
        help="take lengths from an interaction log (CSV: user_id, item_id, timestamp; .gz too), or"
        " from a file of lengths",
    )
    parser.add_argument("--case", metavar="JSON", help="judge one draw, as a finding prints it")
    return parser.parse_args(given)


def _plan(options: argparse.Namespace) -> Plan:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = torch.device(device).type == "cpu"
    backends = (options.backends or ("cpu" if on_cpu else "cuda")).split(",")
    ops = options.op.split(",") if options.op else list(EVERY)
    dtypes = options.dtype.split(",") if options.dtype else list(DTYPES)
    for name, chosen, known in (
        ("--op", ops, tuple(EVERY)),
        ("--backends", backends, BACKENDS),
        ("--dtype", dtypes, tuple(DTYPES)),
    ):
        unknown = [each for each in chosen if each not in known]
        if unknown:
            raise SystemExit(f"fuzz: {name} must be of {', '.join(known)}, got {unknown[0]}")
    if on_cpu and "cuda" in backends:
        raise SystemExit("fuzz: the backend cuda needs --device cuda")
    places = tuple((b, "cpu" if b == "cpu" else device) for b in dict.fromkeys(backends))
    for place in places:
        sizes = SIZES[place_of(*place)]
        if options.size is not None and options.size not in sizes:
            raise SystemExit(f"fuzz: --size must be of {', '.join(sizes)} for {place[0]}")
        if not set(dtypes) & set(dtypes_of(*place)):
            served = ", ".join(dtypes_of(*place))
            raise SystemExit(f"fuzz: --dtype must be of {served} for {place[0]} on {place[1]}")
    prepare(backends, device)
    lengths = None
    if options.shape_from is not None:
        try:
            lengths = read_lengths(options.shape_from)
        except (OSError, EOFError, ValueError) as error:
            raise SystemExit(f"fuzz: --shape-from {options.shape_from}: {error}") from None
    seed = random.randrange(10**6) if options.seed is None else options.seed
    jobs = options.jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    wanted = Wanted(tuple(ops), tuple(dtypes), options.size, lengths)
    return Plan(wanted, places, seed, options.seconds, options.cases, jobs)


def main(given: Sequence[str] | None = None) -> int:
    options = _arguments(given)
    if options.case is not None:
        return _judge_one(options.case)
    return fuzz(_plan(options))


if __name__ == "__main__":
    sys.exit(main())
