"""How the two libraries are compiled: sources, flags, toolchain and commands, in one place.

The import (`_load.py`), the wheel (`setup.py`), CI and `make compdb` all build through `build()`,
so a flag stands here once. Nothing in this file imports jagged_cuda: `setup.py` loads it as a
plain file, and `python jagged_cuda/_build.py` is the command behind `make compdb`.

    _C_cpu   csrc/library.cpp (every schema) and csrc/cpu/
    _C_cuda  csrc/cuda/ (glue, C++ compiler) and csrc/cuda/kernels/ (nvcc, no torch header)

torch.utils.cpp_extension supplies torch's include and library folders. Its `load()` is not used: it
links libtorch_python, names objects by base name alone, hangs after a killed build, refuses CUDA
sources under a CPU build of torch, and takes an H100 for 9.0 where its instructions need 9.0a
(docs/building.md has the details).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import errno
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("_C_cpu", "_C_cuda")
DEFAULT_WHEEL_ARCHS = "8.0;9.0a;10.0+PTX"
MIN_TORCH = (2, 10)
MIN_CAPABILITY = (8, 0)  # mma.sync m16n8k16 and cp.async begin with Ampere

# torch 2.10 is the floor: the binary runs there and on every later release.
DEFINES = ("-DTORCH_TARGET_VERSION=0x020a000000000000ULL",)
COMMON_FLAGS = ("-O3", "-std=c++17", *DEFINES)
# No -march: the CPU kernels choose their instruction set at run time, so that one wheel serves all.
CXX_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")
CUDA_GLUE_FLAGS = (*CXX_FLAGS, "-DUSE_CUDA")
NVCC_FLAGS = (
    *COMMON_FLAGS,
    "-DUSE_CUDA",
    "--expt-relaxed-constexpr",
    "-Xfatbin",
    "-compress-all",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
)
# A compiler that links libstdc++ statically would let our libraries export its symbols, and an
# exception would then cross between two copies of it.
LINK_FLAGS = ("-shared", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL")

MIN_GCC = 11
MIN_CLANG = 14
PART_SUFFIX = ".part.o"  # an object that is being written
SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".inl")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """The libraries cannot be built or loaded; the message says what to do about it."""


# ---------------------------------------------------------------------------------------------
# Sources


def library_sources(csrc: Path, library: str) -> list[Path]:
    """Returns the files that are compiled into a library, sorted."""
    if library == "_C_cpu":
        return [csrc / "library.cpp", *sorted((csrc / "cpu").rglob("*.cpp"))]
    return [
        *sorted((csrc / "cuda").rglob("*.cpp")),
        *sorted((csrc / "cuda" / "kernels").rglob("*.cu")),
    ]


def source_hash(csrc: Path) -> str:
    """Returns a hash of every source and header below `csrc` and of the flags they get."""
    digest = hashlib.sha256()
    for flags in (CXX_FLAGS, CUDA_GLUE_FLAGS, NVCC_FLAGS, LINK_FLAGS):
        digest.update("\0".join(flags).encode() + b"\n")
    for name in sorted(
        os.path.join(folder, name)
        for folder, _, names in os.walk(csrc)
        for name in names
        if name.endswith(SOURCE_SUFFIXES)
    ):
        content = Path(name).read_bytes()
        digest.update(f"{os.path.relpath(name, csrc)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:20]


def _closure(source: Path, csrc: Path) -> list[Path]:
    """Returns `source` and every file of `csrc` (an absolute path) that it includes."""
    seen: dict[Path, None] = {}
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen[path] = None
        for name in _INCLUDE.findall(path.read_bytes()):
            for base in (path.parent, csrc):
                candidate = (base / os.fsdecode(name)).resolve()
                if candidate.is_file() and candidate.is_relative_to(csrc):
                    pending.append(candidate)
                    break
    return sorted(seen)


# ---------------------------------------------------------------------------------------------
# Architectures


@dataclass(frozen=True, order=True)
class Arch:
    """A GPU architecture to compile for: 9.0a is Arch(9, 0, "a"), 10.0+PTX has `ptx` set."""

    major: int
    minor: int
    feature: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.feature}{'+PTX' if self.ptx else ''}"

    def gencode(self) -> list[str]:
        """Returns nvcc's flags for this architecture."""
        number = f"{self.major}{self.minor}"
        name = number + self.feature
        flags = ["-gencode", f"arch=compute_{name},code=sm_{name}"]
        if self.ptx:  # only plain PTX runs on later GPUs, so a feature suffix is dropped here
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
        return flags

    def covers(self, major: int, minor: int) -> bool:
        """Tells whether a GPU of this compute capability can run what is compiled for the arch."""
        if self.ptx and (self.major, self.minor) <= (major, minor):
            return True
        if self.feature == "a":
            return (self.major, self.minor) == (major, minor)
        return self.major == major and self.minor <= minor


def parse_archs(text: str) -> tuple[Arch, ...]:
    """Parses TORCH_CUDA_ARCH_LIST ("8.0;9.0a 10.0+PTX"); 9.0 means 9.0a, which wgmma needs."""
    archs = set()
    for item in re.split(r"[;,\s]+", text.strip()):
        if not item:
            continue
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must list architectures like 8.0, 9.0a or 10.0+PTX, "
                f"got {item!r} in {text!r}."
            )
        major, minor, feature = int(match[1]), int(match[2]), match[3]
        if (major, minor) < MIN_CAPABILITY:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must list architectures from 8.0 (Ampere) on, "
                f"got {item!r} in {text!r}."
            )
        archs.add(Arch(major, minor, "a" if (major, minor) == (9, 0) else feature, bool(match[4])))
    return tuple(sorted(archs))


def format_archs(archs: Iterable[Arch]) -> str:
    """Returns the architectures as TORCH_CUDA_ARCH_LIST would hold them."""
    return ";".join(str(arch) for arch in archs)


# ---------------------------------------------------------------------------------------------
# Toolchain: found by looking at files alone, so that a warm import starts no process


@dataclass(frozen=True)
class Toolchain:
    """The compilers of this machine: the C++ command, and the CUDA toolkit's folder."""

    cxx: tuple[str, ...] | None
    cuda_home: Path | None

    @property
    def nvcc(self) -> Path:
        assert self.cuda_home is not None
        return self.cuda_home / "bin" / "nvcc"

    def fingerprint(self, library: str) -> str | None:
        """Returns what identifies the compilers of a library, or None where one is missing."""
        if self.cxx is None or (library == "_C_cuda" and self.cuda_home is None):
            return None
        files = [Path(shutil.which(self.cxx[0]) or self.cxx[0])]
        if library == "_C_cuda":
            files.append(self.nvcc)
        parts = [*self.cxx]
        for path in files:
            real = path.resolve()
            stat = real.stat()
            parts.append(f"{real} {stat.st_size} {stat.st_mtime_ns}")
        return "\n".join(parts)


def find_cxx() -> tuple[str, ...] | None:
    """Returns the C++ compiler's command: $CXX, else c++, g++ or clang++; None if none is there."""
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if command and shutil.which(command[0]):
            return tuple(command)
    return None


def cuda_home_candidates() -> list[Path]:
    """Returns the folders where a CUDA toolkit may be, in order of preference."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:  # may be a wrapper script far from the toolkit: find_cuda_home looks for its header
        folders += [os.path.dirname(os.path.dirname(p)) for p in (nvcc, os.path.realpath(nvcc))]
    folders += [os.path.join(entry, "nvidia", "cu13") for entry in sys.path if entry]
    return [Path(folder) for folder in dict.fromkeys(f for f in folders if f)]


def cuda_toolkit_version(cuda_home: Path) -> tuple[int, int] | None:
    """Returns (major, minor) of a CUDA toolkit, read from its header."""
    try:
        with open(cuda_home / "include" / "cuda_runtime_api.h", "rb") as header:
            match = re.search(rb"#define\s+CUDART_VERSION\s+(\d+)", header.read(65536))
    except OSError:
        return None
    return divmod(int(match[1]) // 10, 100) if match else None


def find_cuda_home(cuda: str | None) -> Path | None:
    """Returns the CUDA toolkit to use, preferring one of the same major version as `cuda`.

    torch's own search takes the folder above whichever nvcc is on PATH, which is wrong where
    that is a wrapper script; a folder counts here only if it has both the compiler and the headers.
    """
    major = int(cuda.split(".")[0]) if cuda else None
    fit = []
    for folder in cuda_home_candidates():
        if (folder / "bin" / "nvcc").is_file():
            version = cuda_toolkit_version(folder)
            if version is not None:
                if major is None or version[0] == major:
                    return folder
                fit.append(folder)
    return fit[0] if fit else None


def find_toolchain(cuda: str | None) -> Toolchain:
    """Finds the compilers; `cuda` is torch.version.cuda."""
    return Toolchain(find_cxx(), find_cuda_home(cuda))


def _first_line(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (result.stdout or result.stderr).strip().split("\n")[0]


def check_cxx(toolchain: Toolchain) -> str:
    """Raises BuildError unless the C++ compiler will do; returns its name and version."""
    if toolchain.cxx is None:
        named = os.environ.get("CXX")
        found = f"CXX={named} was not found" if named else "no c++, g++ or clang++ is on PATH"
        raise BuildError(
            f"jagged_cuda needs a C++ compiler and {found}: install g++ {MIN_GCC} or newer "
            f"(Debian, Ubuntu: apt-get install g++), or set CXX to one."
        )
    words = " ".join(toolchain.cxx)
    banner = _first_line([*toolchain.cxx, "--version"])
    number = _first_line([*toolchain.cxx, "-dumpfullversion", "-dumpversion"])
    match = re.match(r"\d+", number)
    if match is None:
        raise BuildError(
            f"jagged_cuda needs a C++ compiler and {words} does not run: install g++ {MIN_GCC} or "
            f"newer, or set CXX to one."
        )
    is_clang = "clang" in banner.lower()
    name, least = ("clang++", MIN_CLANG) if is_clang else ("g++", MIN_GCC)
    if int(match[0]) < least:
        raise BuildError(
            f"jagged_cuda needs {name} {least} or newer and {words} is {number}: install a newer "
            f"one, or set CXX to one."
        )
    return f"{name} {number}"


def check_nvcc(toolchain: Toolchain, cuda: str | None) -> str:
    """Raises BuildError unless nvcc is there and fits torch; returns its name and version."""
    if toolchain.cuda_home is None:
        major = cuda.split(".")[0] if cuda else "13"
        raise BuildError(
            f"nvcc was not found in CUDA_HOME, /usr/local/cuda, PATH or an installed wheel: "
            f"install the CUDA {major} toolkit and set CUDA_HOME to its folder."
        )
    version = cuda_toolkit_version(toolchain.cuda_home) or (0, 0)
    if cuda and version[0] != int(cuda.split(".")[0]):
        raise BuildError(
            f"torch is built for CUDA {cuda} and the toolkit in {toolchain.cuda_home} is CUDA "
            f"{version[0]}.{version[1]}: install a CUDA {cuda.split('.')[0]} toolkit and set "
            f"CUDA_HOME to its folder."
        )
    return f"nvcc {version[0]}.{version[1]}"


def check_archs(toolchain: Toolchain, archs: Iterable[Arch]) -> None:
    """Raises BuildError if nvcc does not know an architecture."""
    known = subprocess.run(
        [str(toolchain.nvcc), "--list-gpu-code"], capture_output=True, text=True, check=False
    ).stdout.split()
    for arch in archs:
        if known and f"sm_{arch.major}{arch.minor}" not in known:
            raise BuildError(
                f"{toolchain.nvcc} cannot compile for a GPU of compute capability {arch.major}."
                f"{arch.minor}: install a newer CUDA toolkit and set CUDA_HOME to its folder."
            )


def check_torch(version: str) -> None:
    """Raises BuildError if torch is older than the stable ABI that the libraries use."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < MIN_TORCH:
        raise BuildError(
            f"jagged_cuda needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer and this is torch "
            f"{version}: pip install --upgrade torch."
        )


@dataclass(frozen=True)
class TorchPaths:
    """Where torch's headers and libraries are, and what it is built for."""

    version: str
    cuda: str | None
    includes: tuple[str, ...]
    libraries: tuple[str, ...]


def torch_paths(toolchain: Toolchain) -> TorchPaths:
    """Asks torch.utils.cpp_extension for torch's folders."""
    import torch

    # As it is imported, cpp_extension calls torch.cuda.is_available(). Answered through NVML, that
    # leaves the driver uninitialised, so that a process forked later can still use CUDA. Where
    # there is no GPU it warns of its own guess of CUDA_HOME, which is not used here.
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    previous = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise BuildError(
            f"compiling jagged_cuda needs torch.utils.cpp_extension, which fails to import "
            f"({error}): pip install 'setuptools<82'."
        ) from error
    finally:
        logger.setLevel(level)
        if previous is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = previous
    if toolchain.cuda_home is not None and torch.version.cuda:
        cpp_extension.CUDA_HOME = str(toolchain.cuda_home)
    return TorchPaths(
        str(torch.__version__),
        torch.version.cuda,
        tuple(cpp_extension.include_paths()),
        tuple(cpp_extension.library_paths()),
    )


# ---------------------------------------------------------------------------------------------
# Commands


@dataclass(frozen=True)
class Unit:
    """One file to compile."""

    library: str
    source: Path
    command: tuple[str, ...]  # without the output: `-o object` is appended
    key: str  # hash of all that the object depends on


def _units(
    csrc: Path, library: str, archs: Sequence[Arch], toolchain: Toolchain, torch: TorchPaths
) -> list[Unit]:
    assert toolchain.cxx is not None
    fingerprint = toolchain.fingerprint(library)
    isystem = [word for path in torch.includes for word in ("-isystem", path)]
    jobs = min(len(archs), os.cpu_count() or 1)
    gencode = [flag for arch in archs for flag in arch.gencode()]
    units = []
    for source in library_sources(csrc, library):
        if source.suffix == ".cu":  # no torch folder: kernels are free of torch's headers
            command = [str(toolchain.nvcc), *NVCC_FLAGS, *gencode]
            command += ["--threads", str(jobs)] if jobs > 1 else []
            command += ["-ccbin", shutil.which(toolchain.cxx[0]) or toolchain.cxx[0]]
        elif library == "_C_cuda":
            assert toolchain.cuda_home is not None
            command = [*toolchain.cxx, *CUDA_GLUE_FLAGS, *isystem]
            command += ["-isystem", str(toolchain.cuda_home / "include")]
        else:
            command = [*toolchain.cxx, *CXX_FLAGS, *isystem]
        digest = hashlib.sha256()
        digest.update("\0".join([*command, torch.version, fingerprint or ""]).encode())
        for path in _closure(source, csrc.resolve()):
            digest.update(b"\0" + path.relative_to(csrc.resolve()).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
        # Messages of a check hold the file's name: keep this machine's folders out of them.
        for folder, name in ((str(csrc), "csrc"), *((path, "torch") for path in torch.includes)):
            prefix = f"-ffile-prefix-map={folder}={name}"
            command += ["-Xcompiler", prefix] if source.suffix == ".cu" else [prefix]
        command += ["-I", str(csrc), "-c", str(source)]
        units.append(Unit(library, source, tuple(command), digest.hexdigest()[:32]))
    return units


def _find_cudart(cuda_home: Path, major: int) -> Path:
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for name in ("libcudart.so", f"libcudart.so.{major}"):
            if (cuda_home / folder / name).exists():
                return cuda_home / folder / name
    raise BuildError(
        f"the CUDA toolkit in {cuda_home} has no libcudart.so: install the whole toolkit (package "
        f"cuda-cudart-dev, or the nvidia-cuda-runtime wheel), or set CUDA_HOME to another one."
    )


def _link_command(
    library: str, objects: Sequence[Path], toolchain: Toolchain, torch: TorchPaths, work: Path
) -> list[str]:
    assert toolchain.cxx is not None
    command = [*toolchain.cxx, *LINK_FLAGS, *map(str, objects)]
    command += [f"-L{folder}" for folder in torch.libraries]
    if library == "_C_cuda":
        assert toolchain.cuda_home is not None
        if torch.cuda is None:
            # A CPU build of torch has no libtorch_cuda: an empty library of that name stands in,
            # so that the result asks for the real one where it is loaded.
            stub = work / "stub"
            stub.mkdir(exist_ok=True)
            (stub / "empty.cpp").write_text("")
            name = "libtorch_cuda.so"
            flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(stub / name)]
            _run([*toolchain.cxx, *flags, str(stub / "empty.cpp")])
            command.append(f"-L{stub}")
        version = cuda_toolkit_version(toolchain.cuda_home) or (13, 0)
        command += ["-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed"]
        command.append(str(_find_cudart(toolchain.cuda_home, version[0])))
    return [*command, "-ltorch_cpu"]


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise _CommandFailed(command, result.stdout)


class _CommandFailed(Exception):
    def __init__(self, command: Sequence[str], output: str) -> None:
        super().__init__(output)
        self.command = command
        self.output = output


def num_jobs() -> int:
    """Returns how many compilers run at once: $MAX_JOBS, else one a core as far as memory goes."""
    named = os.environ.get("MAX_JOBS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    cores = len(os.sched_getaffinity(0))
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, available // 1_500_000_000))


def estimate_seconds(units: Sequence[Unit], archs: Sequence[Arch]) -> int:
    """Returns about how long compiling takes here, rounded to 5 s; a guess for the first line."""
    work = sum(9 * max(1, len(archs)) if u.source.suffix == ".cu" else 7 for u in units)
    return max(5, 5 * round(work / max(1, min(num_jobs(), len(units))) / 5))


# ---------------------------------------------------------------------------------------------
# Building


class Progress:
    """Receives what `build` does; the base class keeps silent."""

    def start(self, files: int, seconds: int) -> None: ...

    def step(self, done: int, files: int, name: str, seconds: float) -> None: ...

    def finish(self) -> None: ...


def build(
    csrc: Path,
    libraries: Sequence[str],
    archs: Sequence[Arch],
    work: Path,
    *,
    toolchain: Toolchain,
    objects: Path | None = None,
    log: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Path | BuildError]:
    """Compiles and links libraries in the folder `work`.

    Args:
        csrc: the folder of sources.
        libraries: names from LIBRARIES.
        archs: the architectures of `_C_cuda`.
        work: an existing folder for objects and results.
        toolchain: from find_toolchain, already checked.
        objects: a folder that keeps objects by the hash of all they depend on, so that a later
            build compiles only what changed; None keeps none.
        log: where the output of a command that fails is written.
        progress: is told what happens.

    Returns:
        For each library the path of its .so, or why it could not be built: a failure of one leaves
        the other usable.

    Raises:
        BuildError: no library can be built at all (torch.utils.cpp_extension does not import).
    """
    progress = progress or Progress()
    torch = torch_paths(toolchain)
    csrc = csrc.resolve()
    units = [unit for lib in libraries for unit in _units(csrc, lib, archs, toolchain, torch)]
    placed: dict[Unit, Path] = {}
    for unit in units:
        if objects is not None and (objects / f"{unit.key}.o").is_file():
            placed[unit] = objects / f"{unit.key}.o"
            os.utime(placed[unit])
    # The longest first, so that no core waits at the end: kernels, then by size.
    todo = sorted(
        (unit for unit in units if unit not in placed),
        key=lambda unit: (unit.source.suffix != ".cu", -unit.source.stat().st_size),
    )
    results: dict[str, Path | BuildError] = {}
    if todo:
        progress.start(len(todo), estimate_seconds(todo, archs))
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()
    guard = threading.Lock()

    def compile_unit(unit: Unit) -> tuple[Path, float]:
        target = (objects or work) / f"{unit.key}.o"
        part = target.with_suffix(f".{os.getpid()}{PART_SUFFIX}")
        began = time.monotonic()
        with guard:
            if stopped.is_set() or unit.library in results:
                raise concurrent.futures.CancelledError
            process = subprocess.Popen(
                [*unit.command, "-o", str(part)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=work,
                env={**os.environ, "TMPDIR": str(work)},
            )
            running.add(process)
        output = process.communicate()[0]
        with guard:
            running.discard(process)
        if process.returncode:
            part.unlink(missing_ok=True)
            raise _CommandFailed([*unit.command, "-o", str(part)], output)
        os.replace(part, target)
        return target, time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(num_jobs()) as pool:
        futures = {pool.submit(compile_unit, unit): unit for unit in todo}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                unit = futures[future]
                name = unit.source.relative_to(csrc).as_posix()
                try:
                    placed[unit], seconds = future.result()
                except concurrent.futures.CancelledError:
                    continue
                except (_CommandFailed, OSError) as error:
                    with guard:
                        results.setdefault(
                            unit.library, _explain(f"compiling csrc/{name}", error, work, log)
                        )
                    continue
                progress.step(done, len(todo), name, seconds)
        except BaseException:  # an interrupt: stop the compilers, then leave
            with guard:
                stopped.set()
                for process in running:
                    process.kill()
            raise
    for library in libraries:
        if library in results:
            continue
        target = work / f"{library}.so"
        try:
            linked = [placed[unit] for unit in units if unit.library == library]
            _run([*_link_command(library, linked, toolchain, torch, work), "-o", str(target)])
            results[library] = target
        except BuildError as error:
            results[library] = error
        except (_CommandFailed, OSError) as error:
            results[library] = _explain(f"linking {library}.so", error, work, log)
    progress.finish()
    return results


def _explain(what: str, error: Exception, work: Path, log: Path | None) -> BuildError:
    """Turns the failure of a command into one sentence, with the end of its output."""
    output = error.output if isinstance(error, _CommandFailed) else str(error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left on device" in output or "Disk quota exceeded" in output:
        return BuildError(
            f"{what} failed because the disk that holds {work.parent} is full: free some space, or "
            f"set JAGGED_CUDA_CACHE to a folder on another disk."
        )
    if "unsupported GNU version" in output or "unsupported clang version" in output:
        return BuildError(
            f"{what} failed because nvcc does not support this C++ compiler: set CXX to an older "
            f"one that your CUDA toolkit supports, for example CXX=g++-13."
        )
    where = ""
    if log is not None:
        command = shlex.join(error.command) if isinstance(error, _CommandFailed) else what
        try:
            log.write_text(f"{command}\n\n{output}\n")
            where = f"; the whole output is in {log}"
        except OSError:
            where = ""
    lines = [line for line in output.strip().split("\n") if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|Error|fatal)\b", line)]
    tail = "\n  ".join([*errors[:3], *[line for line in lines[-5:] if line not in errors[:3]]])
    return BuildError(f"{what} failed{where}; it ended with:\n  {tail}")


# ---------------------------------------------------------------------------------------------
# Wheels, compile_commands.json and the command line


def prebuilt_record(csrc: Path, archs: Sequence[Arch], cuda: str | None) -> dict[str, object]:
    """Returns what is stored beside prebuilt libraries, so that `_load` can tell if they fit."""
    return {
        "source_hash": source_hash(csrc),
        "archs": format_archs(archs),
        "cuda": cuda,
    }


def compile_commands(
    csrc: Path, archs: Sequence[Arch], toolchain: Toolchain
) -> list[dict[str, object]]:
    """Returns the entries of compile_commands.json, for editors and clang-tidy."""
    torch = torch_paths(toolchain)
    libraries = LIBRARIES if toolchain.cuda_home else LIBRARIES[:1]
    return [
        {"directory": str(csrc.parent), "file": str(unit.source), "arguments": list(unit.command)}
        for library in libraries
        for unit in _units(csrc.resolve(), library, archs, toolchain, torch)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes compile_commands.json or compiles the libraries into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--csrc", type=Path, default=Path(__file__).resolve().parents[1] / "csrc")
    parser.add_argument("--archs", default=os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0a")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="default: both")
    parser.add_argument("--compdb", type=Path, help="write compile_commands.json here")
    parser.add_argument("--out", type=Path, help="compile the libraries into this folder")
    parser.add_argument("--objects", type=Path, help="keep objects here between builds")
    parser.add_argument("--verbose", action="store_true", help="name each file with its time")
    options = parser.parse_args(arguments)
    import torch

    archs = parse_archs(options.archs)
    toolchain = find_toolchain(torch.version.cuda)
    try:
        check_torch(torch.__version__)
        check_cxx(toolchain)
        if options.compdb:
            entries = compile_commands(options.csrc, archs, toolchain)
            options.compdb.write_text(json.dumps(entries, indent=1) + "\n")
            print(f"{options.compdb}: {len(entries)} files")
        if options.out:
            libraries = options.library or list(LIBRARIES)
            if "_C_cuda" in libraries:
                check_nvcc(toolchain, torch.version.cuda)
                check_archs(toolchain, archs)
            for folder in (options.out, options.objects):
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="jagged_cuda-") as work:
                results = build(
                    options.csrc,
                    libraries,
                    archs,
                    Path(work),
                    toolchain=toolchain,
                    objects=options.objects and options.objects.resolve(),
                    log=options.out / "build.log",
                    progress=ConsoleProgress(
                        f"jagged_cuda: compiling for {format_archs(archs)}",
                        verbose=options.verbose,
                    ),
                )
                for library, result in results.items():
                    if isinstance(result, BuildError):
                        raise result
                    shutil.move(result, options.out / f"{library}.so")
                    print(options.out / f"{library}.so")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class ConsoleProgress(Progress):
    """Says on stderr what is compiled, about how long it takes, how far it is and how long it took.

    On a terminal the count is rewritten in place; elsewhere it is printed at every quarter. If
    verbose, each file is named with its time.
    """

    def __init__(self, title: str, note: str = "", *, verbose: bool = False) -> None:
        self.title = title
        self.note = note
        self.verbose = verbose
        self.began: float | None = None
        self.quarters = 0
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def start(self, files: int, seconds: int) -> None:
        self.began = time.monotonic()
        self._write(f"{self.title}: {files} files, about {seconds} s{self.note}\n")

    def step(self, done: int, files: int, name: str, seconds: float) -> None:
        if self.verbose:
            self._write(f"{seconds:6.1f} s  {name}\n")
            return
        quarters = 4 * done // files
        if self.on_terminal:
            self._write(f"\rjagged_cuda: {done}/{files} files")
        elif quarters > self.quarters and done < files:
            self._write(f"jagged_cuda: {done}/{files} files\n")
        self.quarters = quarters

    def finish(self) -> None:
        if self.began is not None:
            start = "\r" if self.on_terminal else ""
            self._write(f"{start}jagged_cuda: done in {time.monotonic() - self.began:.0f} s\n")

    @staticmethod
    def _write(text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


if __name__ == "__main__":
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main())
