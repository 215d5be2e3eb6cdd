"""How the two libraries are compiled: sources, flags, compilers, and what cpp_extension is told.

torch.utils.cpp_extension and ninja do the work: `load` for the import (`_load.py`) and
`BuildExtension` for wheels (`setup.py`, which loads this file alone, as the package would load the
libraries).

    _C_cpu   csrc/library.cpp (every schema) and csrc/cpu/
    _C_cuda  csrc/cuda/ (glue, C++ compiler) and csrc/cuda/kernels/ (nvcc, no torch header)
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = ("_C_cpu", "_C_cuda")
DEFAULT_WHEEL_ARCHS = "8.0;9.0a;10.0+PTX"
MIN_TORCH = (2, 10)
MIN_CAPABILITY = (8, 0)  # mma.sync m16n8k16 and cp.async begin with Ampere
MIN_GCC = 11
MIN_CLANG = 14

# torch 2.10 is the floor: the binary runs there and on every later release.
COMMON_FLAGS = ("-O3", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL")
# No -march: the CPU kernels choose their instruction set at run time, so that one wheel serves all.
CXX_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")
CUDA_GLUE_FLAGS = (*CXX_FLAGS, "-DUSE_CUDA")
NVCC_FLAGS = (
    *COMMON_FLAGS,
    "-DUSE_CUDA",
    "-Xfatbin",
    "-compress-all",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
)
# A compiler that links libstdc++ statically would let our libraries export its symbols, and an
# exception would then cross between two copies of it. libstdc++ comes first and the rest only as
# needed, so that neither libc10 nor libtorch_python, which `load` names, becomes a dependency.
LINK_FLAGS = ("-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-lstdc++")
LINK_CUDA = ("-Wl,--no-as-needed", "-ltorch_cuda")
SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".inl")


class BuildError(RuntimeError):
    """The libraries cannot be built or loaded; the message says what to do about it."""


# ---------------------------------------------------------------------------------------------
# Sources


def source_files(csrc: Path) -> list[str]:
    """Returns every source and header below `csrc`, as paths relative to it, sorted."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), csrc)
        for folder, _, names in os.walk(csrc)
        for name in names
        if name.endswith(SOURCE_SUFFIXES)
    )


def library_sources(csrc: Path, library: str) -> list[Path]:
    """Returns the files that are compiled into a library: kernels first, then the largest.

    So no core waits at the end for a long one. ninja names objects by base names alone: within a
    library, no two .cpp and no two .cu may share one.
    """
    if library == "_C_cpu":
        files = [csrc / "library.cpp", *(csrc / "cpu").rglob("*.cpp")]
    else:
        files = [*(csrc / "cuda").rglob("*.cpp"), *(csrc / "cuda" / "kernels").rglob("*.cu")]
    return sorted(files, key=lambda path: (path.suffix != ".cu", -path.stat().st_size, path))


def source_hash(csrc: Path) -> str:
    """Returns a hash of every source and header below `csrc` and of the flags they get."""
    digest = hashlib.sha256()
    for flags in (CXX_FLAGS, CUDA_GLUE_FLAGS, NVCC_FLAGS, LINK_FLAGS, LINK_CUDA):
        digest.update("\0".join(flags).encode() + b"\n")
    for name in source_files(csrc):
        content = (csrc / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:20]


def short_hash(*parts: str) -> str:
    """Returns the hash that stands for these texts in the name of a file."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def mirror(csrc: Path, copy: Path) -> None:
    """Makes `copy` hold what `csrc` does, writing only the files whose content differs.

    ninja compiles what is newer than its object: here that is what has changed, whatever date an
    edited or unpacked file bears.
    """
    names = source_files(csrc)
    for gone in set(source_files(copy)).difference(names):
        (copy / gone).unlink()
    for name in names:
        content, target = (csrc / name).read_bytes(), copy / name
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


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
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}"]
        if self.ptx:  # only plain PTX runs on later GPUs, so a feature suffix is dropped here
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
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
    for item in filter(None, re.split(r"[;,\s]+", text)):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None or (int(match[1]), int(match[2])) < MIN_CAPABILITY:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must list architectures from 8.0 (Ampere) on, like 8.0, "
                f"9.0a or 10.0+PTX, got {item!r} in {text!r}."
            )
        major, minor = int(match[1]), int(match[2])
        feature = "a" if (major, minor) == (9, 0) else match[3]
        archs.add(Arch(major, minor, feature, bool(match[4])))
    return tuple(sorted(archs))


def format_archs(archs: Iterable[Arch]) -> str:
    """Returns the architectures as TORCH_CUDA_ARCH_LIST would hold them."""
    return ";".join(map(str, archs))


# ---------------------------------------------------------------------------------------------
# Compilers: found by looking at files alone, so that a warm import starts no process


class Toolchain(NamedTuple):
    """The compilers of this machine: the C++ command, and the CUDA toolkit's folder."""

    cxx: tuple[str, ...] | None
    cuda_home: Path | None

    def fingerprint(self, library: str) -> str | None:
        """Returns what identifies the compilers of a library, or None where one is missing."""
        if self.cxx is None or (library == "_C_cuda" and self.cuda_home is None):
            return None
        files = [Path(shutil.which(self.cxx[0]) or self.cxx[0]).resolve()]
        if library == "_C_cuda" and self.cuda_home is not None:
            files.append((self.cuda_home / "bin" / "nvcc").resolve())
        stats = [(str(path), path.stat()) for path in files]
        return "\n".join([*self.cxx, *(f"{p} {s.st_size} {s.st_mtime_ns}" for p, s in stats)])


def find_toolchain(cuda: str | None) -> Toolchain:
    """Finds the compilers; `cuda` is torch.version.cuda."""
    return Toolchain(find_cxx(), find_cuda_home(cuda))


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
    major = cuda.split(".")[0] if cuda else None
    found: list[tuple[bool, int, Path]] = []
    for folder in cuda_home_candidates():
        version = cuda_toolkit_version(folder) if (folder / "bin" / "nvcc").is_file() else None
        if version is not None:
            found.append((str(version[0]) != (major or str(version[0])), len(found), folder))
    return min(found)[2] if found else None


def _first_line(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (result.stdout or result.stderr).strip().split("\n")[0]


def check_compilers(
    library: str, archs: Sequence[Arch], toolchain: Toolchain, cuda: str | None
) -> str:
    """Raises BuildError unless a library's compilers are there and fit; returns their names."""
    if shutil.which("ninja", path=path_with_ninja()) is None:
        raise BuildError("jagged_cuda is compiled by ninja, which is missing: pip install ninja.")
    cxx = check_cxx(toolchain.cxx)
    return cxx if library == "_C_cpu" else f"{check_nvcc(toolchain, archs, cuda)} and {cxx}"


def check_cxx(cxx: tuple[str, ...] | None) -> str:
    """Raises BuildError unless the C++ compiler will do; returns its name and version."""
    named = os.environ.get("CXX")
    problem = f"CXX={named} was not found" if named else "no c++, g++ or clang++ is on PATH"
    if cxx is not None:
        is_clang = "clang" in _first_line([*cxx, "--version"]).lower()
        name, least = ("clang++", MIN_CLANG) if is_clang else ("g++", MIN_GCC)
        number = _first_line([*cxx, "-dumpfullversion", "-dumpversion"])
        match = re.match(r"\d+", number)
        if match and int(match[0]) >= least:
            return f"{name} {number}"
        problem = f"{' '.join(cxx)} {f'is {name} {number}' if match else 'does not run'}"
    raise BuildError(
        f"jagged_cuda needs g++ {MIN_GCC} or clang++ {MIN_CLANG}, or newer, and {problem}: install "
        f"one (Debian, Ubuntu: apt-get install g++), or set CXX to one."
    )


def check_nvcc(toolchain: Toolchain, archs: Sequence[Arch], cuda: str | None) -> str:
    """Raises BuildError unless nvcc fits torch and knows the GPUs; returns its name and version."""
    home, major = toolchain.cuda_home, (cuda or "13").split(".")[0]
    problem = "nvcc was not found in CUDA_HOME, /usr/local/cuda, PATH or an installed wheel"
    if home is not None:
        version = "{}.{}".format(*cuda_toolkit_version(home) or (0, 0))
        listing = [str(home / "bin" / "nvcc"), "--list-gpu-code"]
        known = subprocess.run(listing, capture_output=True, text=True).stdout.split()
        new = [a for a in archs if known and f"sm_{a.major}{a.minor}" not in known]
        if cuda and version.split(".")[0] != major:
            problem = f"torch is built for CUDA {cuda} and the toolkit in {home} is CUDA {version}"
        elif new:
            problem = f"{home}/bin/nvcc (CUDA {version}) cannot compile for a GPU of {new[0]}"
        else:
            return f"nvcc {version}"
    raise BuildError(
        f"{problem}: install a newer CUDA {major} toolkit and set CUDA_HOME to its folder."
    )


def check_torch(version: str) -> None:
    """Raises BuildError if torch is older than the stable ABI that the libraries use."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < MIN_TORCH:
        raise BuildError(
            f"jagged_cuda needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer and this is torch "
            f"{version}: pip install --upgrade torch."
        )


# ---------------------------------------------------------------------------------------------
# What torch.utils.cpp_extension is told


def path_with_ninja() -> str:
    """Returns PATH with the programs of this Python first: ninja's wheel put its program there."""
    scripts = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    return os.pathsep.join([*dict.fromkeys(scripts), os.environ.get("PATH", os.defpath)])


def num_jobs() -> int:
    """Returns how many compilers run at once: $MAX_JOBS, else one a core as far as memory goes."""
    named = os.environ.get("MAX_JOBS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), available // 1_500_000_000))


@contextlib.contextmanager
def cpp_extension(toolchain: Toolchain, work: Path) -> Iterator[Any]:
    """Gives torch.utils.cpp_extension, in an environment in which it builds what it is told to."""
    before = os.environ.copy()
    os.environ |= {
        "PATH": path_with_ninja(),
        "CXX": compiler_word(toolchain, work),
        "MAX_JOBS": str(num_jobs()),
        "TMPDIR": str(work),
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # check_cxx has; nvcc says itself what it takes
        # As it is imported, cpp_extension calls torch.cuda.is_available(). Answered through NVML,
        # that leaves the driver uninitialised, so that a process forked later can still use CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    for name in ("CC", "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"):
        os.environ.pop(name, None)  # CC would become nvcc's C++ compiler
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)  # without a GPU it warns of its own guess of CUDA_HOME
    try:
        from torch.utils import cpp_extension

        if toolchain.cuda_home is not None:
            cpp_extension.CUDA_HOME = str(toolchain.cuda_home)
        yield cpp_extension
    except ImportError as error:
        raise BuildError(
            f"compiling jagged_cuda needs torch.utils.cpp_extension, which fails to import "
            f"({error}): pip install 'setuptools<82'."
        ) from error
    finally:
        logger.setLevel(level)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def compiler_word(toolchain: Toolchain, work: Path) -> str:
    """Returns the C++ compiler's command as one word: a script in `work` if it has several."""
    assert toolchain.cxx is not None
    if len(toolchain.cxx) == 1:
        return shutil.which(toolchain.cxx[0]) or toolchain.cxx[0]
    script = work / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(toolchain.cxx)} "$@"\n')
    script.chmod(0o755)
    return str(script)


class Recipe(NamedTuple):
    """How one library is compiled in its work folder, into which its sources are mirrored."""

    sources: list[str]
    include: str
    cxx: list[str]
    nvcc: list[str]
    link: list[str]


def prepare(
    library: str, csrc: Path, work: Path, archs: Sequence[Arch], toolchain: Toolchain
) -> Recipe:
    """Mirrors the sources into `work`, and returns how a library is compiled there."""
    import torch

    sources = work / "csrc"
    torch_folder = Path(torch.__file__).parent
    mirror(csrc, sources)
    cxx = [*(CXX_FLAGS if library == "_C_cpu" else CUDA_GLUE_FLAGS)]
    nvcc = [*NVCC_FLAGS, *(flag for arch in archs for flag in arch.gencode())]
    link = [*LINK_FLAGS]
    # Messages of a check hold the file's name: keep this machine's folders out of them.
    for folder, name in ((sources, "csrc"), (torch_folder / "include", "torch")):
        cxx.append(f"-ffile-prefix-map={folder}={name}")
        nvcc += ["-Xcompiler", cxx[-1]]
    if library == "_C_cuda":
        nvcc += ["-ccbin", compiler_word(toolchain, work)]
        if torch.version.cuda is None:  # BuildExtension then leaves nvcc's dependencies out
            headers = [name for name in source_files(csrc) if not name.endswith((".cpp", ".cu"))]
            texts = [(csrc / name).read_text() for name in headers]
            nvcc.append(f"-DJAGGED_HEADERS={short_hash(*headers, *texts)}")
        folder = _link_folder(work / "link", torch_folder / "lib", toolchain)
        link += [f"-L{folder}", f"-L{torch_folder / 'lib'}", *LINK_CUDA]
    files = [str(path) for path in library_sources(sources, library)]
    return Recipe(files, str(sources), cxx, nvcc, link)


def _link_folder(folder: Path, torch_libraries: Path, toolchain: Toolchain) -> Path:
    """Makes a folder with libcudart.so, which CUDA's wheels do not call so, and libtorch_cuda.so.

    A CPU build of torch has no libtorch_cuda: an empty library of that name stands in, so that the
    result asks for the real one where it is loaded.
    """
    assert toolchain.cxx is not None and toolchain.cuda_home is not None
    found = [
        path
        for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
        for path in (toolchain.cuda_home / name).glob("libcudart.so*")
    ]
    if not found:
        raise BuildError(
            f"the CUDA toolkit in {toolchain.cuda_home} has no libcudart.so: install the whole "
            f"toolkit (package cuda-cudart-dev, or the nvidia-cuda-runtime wheel), or set "
            f"CUDA_HOME to another one."
        )
    folder.mkdir(exist_ok=True)
    (folder / "libcudart.so").unlink(missing_ok=True)
    (folder / "libcudart.so").symlink_to(found[0])
    if not (torch_libraries / "libtorch_cuda.so").exists():
        stub = ["-shared", "-Wl,-soname,libtorch_cuda.so", "-x", "c++", "/dev/null"]
        subprocess.run([*toolchain.cxx, *stub, "-o", folder / "libtorch_cuda.so"], check=True)
    return folder


def load(
    library: str,
    csrc: Path,
    work: Path,
    archs: Sequence[Arch],
    toolchain: Toolchain,
    title: str,
) -> Path:
    """Compiles a library in `work`, where ninja keeps what has not changed, and loads it.

    The caller holds a lock on the folder. Raises BuildError if compiling fails, with the whole
    output in `work`/build.log, and OSError if a file cannot be written or the library not loaded.
    """
    building = work / "building"
    if building.exists():
        # Of a build that was killed: its compilers may still run, and write into this folder.
        abandoned = work.with_name(f"abandoned-{os.getpid()}-{time.time_ns()}")
        work.rename(abandoned)
        shutil.rmtree(abandoned, ignore_errors=True)
    work.mkdir(exist_ok=True)
    recipe = prepare(library, csrc, work, archs, toolchain)
    building.touch()
    with cpp_extension(toolchain, work) as extension, Progress(title, work, len(recipe.sources)):
        # A build that has failed in this process would count as done.
        extension.JIT_EXTENSION_VERSIONER.entries.pop(library, None)
        try:
            path = extension.load(
                name=library,
                sources=recipe.sources,
                extra_cflags=[*map(shlex.quote, recipe.cxx)],
                extra_cuda_cflags=[*map(shlex.quote, recipe.nvcc)],
                extra_ldflags=[*map(shlex.quote, recipe.link)],
                extra_include_paths=[recipe.include],
                build_directory=str(work),
                is_python_module=False,
            )
        except RuntimeError as error:
            building.unlink()
            raise _explain(str(error), work) from None
    building.unlink()
    return Path(path)


class Progress:
    """Says on stderr what is compiled, how many objects `work` has, and how long it took."""

    def __init__(self, title: str, work: Path, files: int) -> None:
        self.title, self.work, self.files = title, work, files
        self.began = time.time()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        say(self.title)
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()
        if error[0] is None:
            say(f"jagged_cuda: done in {time.time() - self.began:.0f} s")

    def _watch(self) -> None:
        quarters = 0
        while not self.stopped.wait(0.5):
            done = 0
            for path in self.work.glob("*.o"):
                with contextlib.suppress(FileNotFoundError):  # it is being written anew
                    done += path.stat().st_mtime >= self.began
            if quarters < 4 * done // self.files < 4:
                quarters = 4 * done // self.files
                say(f"jagged_cuda: {done}/{self.files} files")


def say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _explain(output: str, work: Path) -> BuildError:
    """Turns ninja's output into one sentence, with the end of what the compiler said."""
    failed = re.search(r"^FAILED: (?:\[code=\d+\] )?(\S+)", output, re.MULTILINE)
    source = re.search(r" -c (\S+) -o ", output[failed.end() :]) if failed else None
    what = f"linking {failed[1]}" if failed else "compiling jagged_cuda"
    if source and failed and failed[1].endswith(".o"):
        what = f"compiling csrc/{os.path.relpath(source[1], work / 'csrc')}"
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return BuildError(
            f"{what} failed because the disk that holds {work.parent} is full: free some space, or "
            f"set JAGGED_CUDA_CACHE to a folder on another disk."
        )
    if "unsupported GNU version" in output or "unsupported clang version" in output:
        return BuildError(
            f"{what} failed because nvcc does not support this C++ compiler: set CXX to an older "
            f"one that your CUDA toolkit supports, for example CXX=g++-13."
        )
    log = work / "build.log"
    log.write_text(output)
    lines = [line for line in output.strip().split("\n") if not line.startswith("ninja: ")]
    errors = [line for line in lines if re.search(r"\b(error|Error|fatal)\b", line)][1:4]
    tail = "\n  ".join([*errors, *(line for line in lines[-5:] if line not in errors)])
    return BuildError(f"{what} failed; the whole output is in {log}; it ended with:\n  {tail}")
