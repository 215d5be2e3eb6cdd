"""Plant faults that kernels have had, one at a time; each must be caught within a minute.

    python tests/mutations.py                   # the faults of the CPU's kernels
    python tests/mutations.py --device cuda     # those of the GPU's
    python tests/mutations.py --only "lost barrier" --device cuda
    python tests/mutations.py --device cuda --jobs 6    # six faults at a time
    python tests/mutations.py --device cuda --list      # each fault, its file and its check

A fault of tests/faults/ is one text that is replaced by another in a copy of the sources. What it
changes is compiled and linked with the objects of a first copy, which has none. Then the fuzzer, or
the test that the fault names, is run on it. The exit status is 1 if a fault is not caught, or if
the sources as they are fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS
from faults.fault import Fault

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "jagged_cuda"))
import _build  # noqa: E402  as a file: importing the package would compile and load its libraries

del sys.path[0]
SECONDS = 60.0
# What a copy must hold for the fuzzer and the tests to run in it.
FOLDERS = ("csrc", "jagged_cuda", "triton_ref", "tests")
CORES = os.cpu_count() or 1
COMPILERS = threading.BoundedSemaphore(CORES)  # of all faults together


@dataclass(frozen=True)
class Outcome:
    """The result of a fault's check: whether it was caught, by what, after how many seconds."""

    caught: bool
    by: str
    seconds: float


class Compiled:
    """A library as ninja has compiled it, and how: what of it a fault changes is compiled again.

    Args:
        work: ninja's folder, with objects, and the sources in csrc/ and joined/.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self.library = re.sub(r"work-(_C_[a-z]+)-.*", r"\1", work.name)
        steps = json.loads(self._ninja("compdb"))
        self.commands: dict[str, str] = {step["output"]: step["command"] for step in steps}
        self.files: dict[str, set[str]] = {}
        for paragraph in self._ninja("deps").split("\n\n"):
            name, *files = paragraph.strip().split("\n")
            paths = {str(work / file.strip()) for file in files}  # ccache's are relative
            self.files[name.partition(":")[0]] = paths

    def compile(self, sources: Path, path: str, folder: Path) -> Path:
        """The library with `sources`, of which the file `path` is another; `folder` is empty."""
        (folder / "csrc").symlink_to(sources)
        shutil.copytree(self.work / "joined", folder / "joined")
        source = str(self.work / "csrc" / path)
        objects = {name for name in self.commands if name.endswith(".o")}
        changed = {name for name in objects if source in self.files[name]}
        for name in objects - changed:
            (folder / name).symlink_to(self.work / name)
        with ThreadPoolExecutor(CORES) as pool:
            list(pool.map(lambda name: self._run(name, folder), changed))
        self._run(f"{self.library}.so", folder)
        return folder / f"{self.library}.so"

    def _run(self, output: str, folder: Path) -> None:
        command = self.commands[output].replace(str(self.work), str(folder))
        with COMPILERS:
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the copy does not build:\n{done.stderr[-2000:]}")

    def _ninja(self, tool: str) -> str:
        command = [shutil.which("ninja", path=_build.path_with_ninja()) or "ninja", "-t", tool]
        return subprocess.run(command, cwd=self.work, stdout=subprocess.PIPE, text=True).stdout


class Workshop:
    """A copy of the project, in a folder of its own.

    Args:
        folder: where it, and what is compiled for it, lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copy = folder / "copy"
        self.cache = folder / "cache"
        self.cache.mkdir(mode=0o700, parents=True)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.copy),
            "JAGGED_CUDA_CACHE": str(self.cache),
        }

    def compile(self) -> tuple[list[Compiled], str]:
        """Compiles the sources as they are, as an import does; also returns _prebuilt.json."""
        self._copy_sources()
        words = "torch.version.cuda, ';'.join(_load.loaded['_C_cuda'].archs)"
        program = (
            "import json, torch; from jagged_cuda import _load; has = '_C_cuda' in _load.loaded; "
            f"print(json.dumps([{words}] if has else [None, '']))"
        )
        cuda, archs = json.loads(self._python("-c", program, check=True).stdout)
        libraries = [Compiled(work) for work in sorted(self.cache.glob("work-_C_*"))]
        return libraries, json.dumps({"cuda": cuda, "archs": archs})

    def prepare(self, fault: Fault, libraries: Sequence[Compiled], record: str) -> None:
        """Plants the fault in a new copy; raises RuntimeError if that does not compile."""
        self._copy_sources()
        fault.plant(self.copy)
        for library in libraries:
            folder = self.folder / library.library
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = library.compile(self.copy / "csrc", fault.path, folder)
            shutil.copy(made, self.copy / "jagged_cuda" / f"{library.library}.abi3.so")
        hashed = {"source_hash": _build.source_hash(self.copy / "csrc")}
        path = self.copy / "jagged_cuda" / "_prebuilt.json"
        path.write_text(json.dumps(json.loads(record) | hashed))

    def _copy_sources(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "_prebuilt.json")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.copy)

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
    with tempfile.TemporaryDirectory(prefix="jagged_cuda_mutations") as folder:
        first = Workshop(Path(folder) / "first")
        libraries, record = first.compile()
        by = first.run("--cases 300", options.device).by
        print(f"sources as they are: {by or 'right'}", flush=True)
        workshops: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(options.jobs):
            workshops.put(Workshop(Path(folder) / str(number)))

        def is_caught(fault: Fault) -> bool:
            workshop = workshops.get()
            try:
                workshop.prepare(fault, libraries, record)
                outcome = workshop.run(fault.check, options.device)
            except RuntimeError as error:
                outcome = Outcome(False, str(error), 0.0)
            finally:
                workshops.put(workshop)
            verdict = outcome.by if outcome.caught else f"NOT CAUGHT {outcome.by}"
            at = f"{fault.name} (csrc/{fault.path})"
            print(f"{at}: {outcome.seconds:.0f} s, {verdict}", flush=True)
            return outcome.caught

        with ThreadPoolExecutor(options.jobs) as pool:
            failed = [*pool.map(is_caught, chosen)].count(False) + bool(by)
    print(
        f"{len(chosen)} faults, {failed} not caught" if failed else f"{len(chosen)} faults caught"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
