"""Plant faults that kernels have had, one at a time; each must be caught within a minute.

    python tests/mutations.py                   # the faults of the CPU's kernels
    python tests/mutations.py --device cuda     # those of the GPU's
    python tests/mutations.py --only "lost barrier" --device cuda
    python tests/mutations.py --device cuda --jobs 6    # six copies, each compiled once
    python tests/mutations.py --device cuda --list      # each fault, its file and its check

A fault of tests/faults/ is one text that is replaced by another in a copy of the sources. The copy
is built, and the fuzzer, or the test that the fault names, is run on it. The exit status is 1 if a
fault is not caught, or if the sources as they are fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS
from faults.fault import Fault

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60.0
# What a copy must hold for the fuzzer and the tests to run in it.
FOLDERS = ("csrc", "jagged_cuda", "triton_ref", "tests")


@dataclass(frozen=True)
class Outcome:
    """The result of a fault's check: whether it was caught, by what, after how many seconds."""

    caught: bool
    by: str
    seconds: float


class Workshop:
    """A copy of the project, and a cache, in which only what a fault changes is compiled.

    Args:
        folder: where both lie.
    """

    def __init__(self, folder: Path) -> None:
        self.copy = folder / "copy"
        self.cache = folder / "cache"
        self.cache.mkdir(mode=0o700, parents=True)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.copy),
            "JAGGED_CUDA_CACHE": str(self.cache),
        }

    def prepare(self, fault: Fault | None) -> None:
        """Copy the sources and plant the fault; raises if they do not compile then."""
        shutil.rmtree(self.copy, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.copy / name, ignore=shutil.ignore_patterns("*.so"))
        shutil.copy(ROOT / "pyproject.toml", self.copy)
        if fault is not None:
            fault.plant(self.copy)
        self._python("-c", "import jagged_cuda", check=True)

    def run(self, check: str, device: str) -> Outcome:
        """The check's outcome; a kernel that hangs is not caught, but ends."""
        begin = time.monotonic()
        try:
            return self._outcome(check, device, begin)
        except subprocess.TimeoutExpired as error:
            return Outcome(False, f"no result after {error.timeout:.0f} s", error.timeout)

    def _outcome(self, check: str, device: str, begin: float) -> Outcome:
        file, _, selection = check.partition(" -k ")
        if file.startswith("tests/"):
            done = self._python(
                "-m", "pytest", "-q", "-x", file, *(["-k", selection] * bool(selection))
            )
            found = re.search(r"(?m)^FAILED (\S+)", done.stdout)
            by = found[1] if found else ""
            caught = done.returncode == 1 and found is not None
        else:
            words = f"--device {device} --seed 1 --seconds {SECONDS - 10:.0f} {check}".split()
            done = self._python("-m", "jagged_cuda.fuzz", *words)
            found = re.search(r"\n\n(\w+: .{,120})", done.stdout)
            by = f"the fuzzer: {found[1]}" if found else ""
            caught = done.returncode == 1 and found is not None
        if done.returncode not in (0, 1):
            by = f"status {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
        return Outcome(caught, by, time.monotonic() - begin)

    def _python(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.copy,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and done.returncode:
            raise RuntimeError(f"the copy does not build:\n{done.stderr[-2000:]}")
        return done


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=sorted({fault.name for fault in FAULTS}))
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its copy")
    parser.add_argument("--list", action="store_true", help="print the faults, plant none")
    options = parser.parse_args(given)
    chosen = [
        fault
        for fault in FAULTS
        if fault.device == options.device and options.only in (None, fault.name)
    ]
    if options.list:
        for fault in chosen:
            print(f"{fault.name} (csrc/{fault.path}): {fault.check}")
        return 0
    # One after another in one copy, since each is undone by compiling what the next compiles, too.
    of_file: dict[str, list[Fault | None]] = {"": [None]}
    for fault in chosen:
        of_file.setdefault(fault.path, []).append(fault)
    with tempfile.TemporaryDirectory(prefix="jagged_cuda_mutations") as folder:
        workshops: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(options.jobs):
            workshops.put(Workshop(Path(folder) / str(number)))

        def caught(fault: Fault | None, workshop: Workshop) -> bool:
            try:
                workshop.prepare(fault)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                outcome = Outcome(False, str(error), 0.0)
            else:
                check = "--cases 300" if fault is None else fault.check
                outcome = workshop.run(check, options.device)
            if fault is None:
                print(f"sources as they are: {outcome.by or 'right'}", flush=True)
                return not outcome.by
            verdict = outcome.by if outcome.caught else f"NOT CAUGHT {outcome.by}"
            at = f"{fault.name} (csrc/{fault.path})"
            print(f"{at}: {outcome.seconds:.0f} s, {verdict}", flush=True)
            return outcome.caught

        def count_failed(faults: list[Fault | None]) -> int:
            workshop = workshops.get()
            try:
                return [caught(fault, workshop) for fault in faults].count(False)
            finally:
                workshops.put(workshop)

        with ThreadPoolExecutor(options.jobs) as pool:
            failed = sum(pool.map(count_failed, of_file.values()))
    print(
        f"{len(chosen)} faults, {failed} not caught" if failed else f"{len(chosen)} faults caught"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
