"""Check a wheel: its tag and size, what its libraries need of the machine, and its architectures.

    python .ci/check_wheel.py dist/*.whl

auditwheel (with patchelf) and binutils must be installed; cuobjdump comes from the CUDA toolkit, or
from Triton's wheel. The exit status is 1 if something is wrong.
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
import zipfile
from collections import Counter
from pathlib import Path

MAX_BYTES = 25_000_000
TAG = re.compile(r"-cp310-abi3-(linux|manylinux_\d+_\d+)_\w+\.whl$")
# What comes with torch, whose folder the process has loaded before; everything else that is not
# part of every Linux would have to be in the wheel, and must not be needed at all.
FROM_TORCH = ("libtorch_cpu.so", "libtorch_cuda.so", "libcudart.so.*")
# Names that change from one torch, or one Python, to the next.
UNSTABLE = re.compile(r" (_ZNK?2at\S*|_ZNK?3c10\S*|_?Py[A-Z_]\S*)")
TIED = re.compile(r"libpython\S*|libtorch_python\S*|RPATH|RUNPATH")
# What nvcc makes, without a word, of a device function that a template calls on the host.
EXIT = re.compile(r" exit(?:@|$)", re.MULTILINE)


def output_of(*command: str | Path) -> str:
    """The output of a command; if it fails, the program ends with its message."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def problems_of_file(wheel: Path) -> list[str]:
    """Problems of the wheel's name and size."""
    found = []
    if not TAG.search(wheel.name):
        found.append(f"{wheel.name} is not tagged cp310-abi3 for Linux")
    size_bytes = wheel.stat().st_size
    print(f"{wheel.name}: {size_bytes / 1e6:.1f} MB")
    if size_bytes > MAX_BYTES:
        found.append(f"{wheel.name} has {size_bytes:,} bytes, more than {MAX_BYTES:,}")
    return found


def problems_of_library(library: Path) -> list[str]:
    """Problems of the symbols and libraries that a library needs."""
    undefined = output_of("nm", "-D", "--undefined-only", library)
    unstable = UNSTABLE.findall(undefined)
    tied = TIED.findall(output_of("readelf", "-d", library))
    print(f"{library.name}: {len(undefined.splitlines())} undefined symbols")
    found = [f"{library.name} needs {name}, which is not stable" for name in unstable[:5]]
    if EXIT.search(undefined):
        found.append(f"{library.name} calls exit(): does host code call a device function?")
    return found + [f"{library.name} is tied to one Python or one folder: {name}" for name in tied]


def problems_of_policy(wheel: Path) -> list[str]:
    """auditwheel finds no library that it would have to put into the wheel."""
    options = [word for name in FROM_TORCH for word in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as folder:
        output_of(sys.executable, "-m", "auditwheel", "repair", *options, "-w", folder, wheel)
        (repaired,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(repaired) as after:
            grafted = {
                name for name in set(after.namelist()) - set(before.namelist()) if ".so" in name
            }
        platform = repaired.stem.split("-")[-1]
    print(f"auditwheel: {platform}, beside what torch brings ({', '.join(FROM_TORCH)})")
    found = [f"the wheel would need {name} beside it" for name in sorted(grafted)]
    if not platform.startswith("manylinux_"):
        found.append(f"auditwheel knows no policy that the wheel keeps: {platform}")
    return found


def find_cuobjdump() -> Path:
    """cuobjdump from the CUDA toolkit, the PATH, or Triton's wheel."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    places += [Path(entry) / "triton/backends/nvidia/bin" for entry in sys.path if entry]
    named = shutil.which("cuobjdump")
    for path in (*([Path(named)] if named else []), *(place / "cuobjdump" for place in places)):
        if os.access(path, os.X_OK):
            return path
    raise SystemExit("cuobjdump was not found: install CUDA's package cuda-cuobjdump, or triton")


def expected_code(archs: str) -> set[tuple[str, str]]:
    """For a list like "8.0;10.0+PTX": ("elf", "sm_80"), ("elf", "sm_100"), ("ptx", "sm_100")."""
    found = set()
    for item in archs.split(";"):
        number = item.removesuffix("+PTX").replace(".", "")
        found.add(("elf", f"sm_{number}"))
        if item.endswith("+PTX"):  # which runs on later GPUs only without a feature's letter
            found.add(("ptx", f"sm_{number.rstrip('af')}"))
    return found


def problems_of_archs(library: Path, archs: str) -> list[str]:
    """Each file of kernels is compiled for all architectures that the wheel names, and no other."""
    listed = output_of(find_cuobjdump(), library)
    code = Counter(re.findall(r"^Fatbin (elf|ptx) code:\n=+\narch = (\w+)$", listed, re.MULTILINE))
    text = ", ".join(f"{arch} {kind} {count}" for (kind, arch), count in sorted(code.items()))
    print(f"{library.name}: {text or 'no device code'}")
    expected = expected_code(archs)
    if set(code) != expected:
        return [f"{library.name} holds {sorted(code)}, expected {sorted(expected)}"]
    elf = {count for (kind, _), count in code.items() if kind == "elf"}
    return [] if len(elf) == 1 else [f"{library.name}: some kernels lack an architecture: {text}"]


def check(wheel: Path, archs: str | None) -> list[str]:
    """What is wrong with a wheel; `archs` is what it was asked for, if that is known."""
    problems = problems_of_file(wheel)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        package = Path(folder) / "jagged_cuda"
        libraries = sorted(package.glob("_C_*.so"))
        if not libraries:
            problems.append("the wheel holds no library")
        for library in libraries:
            problems += problems_of_library(library)
        record = json.loads((package / "_prebuilt.json").read_text())
        if archs is not None and record["archs"] != archs:
            problems.append(f"the wheel is for {record['archs'] or 'no GPU'}, asked for {archs}")
        if record["archs"]:
            problems += problems_of_archs(package / "_C_cuda.abi3.so", record["archs"])
    return problems + problems_of_policy(wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--archs", help='what it was built for, as in ARCHS="8.0;9.0a;10.0"')
    options = parser.parse_args()
    # Where pip puts the programs of this environment, patchelf among them.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    problems = check(options.wheel, options.archs)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
