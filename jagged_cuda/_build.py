"""How the two libraries are compiled: sources, flags, compilers, and the use of cpp_extension.

torch.utils.cpp_extension and ninja do the work: `load` for the import (`_load.py`) and
`BuildExtension` for wheels (`setup.py`).

    _C_cpu   csrc/library.cpp (every schema) and csrc/cpu/
    _C_cuda  csrc/cuda/ (glue, C++ compiler) and csrc/cuda/kernels/ (nvcc, no torch header)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = ("_C_cpu", "_C_cuda")
DEFAULT_WHEEL_ARCHS = "8.0;9.0a;10.0+PTX"
MIN_TORCH = (2, 10)
MIN_CAPABILITY = (8, 0)  # mma.sync m16n8k16 and cp.async begin with Ampere
MIN_GCC, MIN_CLANG = 11, 14

# torch 2.10 is the floor: the binary runs there and on every later release.
COMMON_FLAGS = ("-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL")
HOST_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")
# No -march: the CPU kernels choose their instruction set at run time, so that one wheel serves all.
CXX_FLAGS = ("-O3", *HOST_FLAGS)
CUDA_GLUE_FLAGS = ("-O2", *HOST_FLAGS, "-DUSE_CUDA")
# cpp_extension hides the conversions of 16-bit numbers, which the kernels use.
HIDDEN = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
SHOWN = [f"-U__CUDA_NO_{name}__" for name in HIDDEN]
# -O1 is the host's part of a .cu, which only launches: -O3 takes up to half a second more a file.
# Kernels are optimized in full, whatever it says.
NVCC_FLAGS = ("-O1", *COMMON_FLAGS, *SHOWN, "-Xcompiler=-fvisibility=hidden")
# A compiler that links libstdc++ statically would let our libraries export its symbols, and an
# exception would then cross between two copies of it. libstdc++ comes first and the rest only as
# needed, so that neither libc10 nor libtorch_python, which `load` names, becomes a dependency.
LINK_FLAGS = ("-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-lstdc++")
LINK_CUDA = ("-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed")
# What the names of the files begin with that take longest to compile, longest first, with what they
# are joined with: 32 to 10 s of one core. Started late, one of them would keep all others waiting.
LONGEST = (
    *("few", "jagged2_softmax", "tiny", "ranged_", "tf32_", "long_", "backward_"),
    *("jagged_broadcast", "forward_", "target_", "fma", "jagged_dense_bmm"),
)
# Those among them that are joined with nothing.
ALONE = ("jagged2_softmax", "ranged_", "long_", "backward_", "forward_", "target_")
# Reading headers, of torch or of CUDA, takes most of the time of a short file: several are compiled
# as one that includes them. Of C++, so many of a folder, but for those of instruction sets; of
# kernels the groups here, 1 to 25 s of one core each. No file with dynamic shared memory is beside
# one with kernels that have none: its alignment would round up their static shared memory.
JOINED_CPP = 16
JOINED_KERNELS = (
    ("array_jagged_bmm_jagged_out", "jagged_mean"),
    (
        *("bias_sums", "check_offsets", "hopper", "hstu_key_ranges", "launch"),
        *("jagged_topk", "matrix_offsets"),
    ),
    ("few", "short", "wide"),
    (
        *("jagged_broadcast", "jagged_concat", "jagged_dense_add", "jagged_dense_mul"),
        *("jagged_index_select", "jagged_select", "jagged_slice", "jagged_sum", "jagged_take"),
        *("jagged_to_padded", "padded_heads", "padded_to_jagged"),
    ),
    ("jagged_flash_attention", "jagged_jagged_bmm"),
    ("jagged_hstu_attention", "jagged_jagged_bmm_jagged_out"),
    ("jagged_positions", "jagged_target_attention"),
    ("jagged_sessionize", "layer_norm_mul_dropout"),
    ("tf32_backward", "tf32_forward", "tf32_long"),
    ("tiny", "tiny_wide"),
)
BUILDING = "building"  # a file that lies in a folder while a library is compiled there
SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".inl")


class BuildError(RuntimeError):
    """The libraries cannot be built or loaded; the message says what to do about it."""


def source_files(csrc: Path) -> list[str]:
    """Returns every source and header below `csrc`, as paths relative to it, sorted."""
    root = os.path.join(csrc, "")
    return sorted(
        os.path.join(folder, name).removeprefix(root)
        for folder, _, names in os.walk(csrc)
        for name in names
        if name.endswith(SOURCE_SUFFIXES)
    )


def library_sources(csrc: Path, library: str) -> list[Path]:
    """Returns the files compiled into a library: LONGEST first, then kernels, then the shortest.

    (These instantiate headers, and take longer.) `load` names objects only by base names: no two
    .cpp of a library, and no two .cu, may share one.
    """
    if library == "_C_cpu":
        files = [csrc / "library.cpp", *(csrc / "cpu").rglob("*.cpp")]
    else:
        files = [*(csrc / "cuda").rglob("*.cpp"), *(csrc / "cuda" / "kernels").rglob("*.cu")]

    def turn(path: Path) -> tuple[bool, int, int, Path]:
        is_kernel = path.suffix == ".cu"
        long = [i for i, name in enumerate(LONGEST) if is_kernel and path.name.startswith(name)]
        return not is_kernel, min(long, default=len(LONGEST)), path.stat().st_size, path

    return sorted(files, key=turn)


def joined(sources: Sequence[Path]) -> list[list[Path]]:
    """Returns what is compiled together of these sources, in their order."""
    names = {name: group for group in JOINED_KERNELS for name in group}
    groups: dict[object, list[Path]] = {}
    for path in sources:
        key: object = path
        if path.suffix == ".cu":
            key = names.get(path.stem, path)
        elif not path.name.startswith("isa_"):
            key = path.parent
        groups.setdefault(key, []).append(path)
    together = []
    for paths in groups.values():
        number = -(-len(paths) // JOINED_CPP)
        together += [sorted(paths)[i::number] for i in range(number)]
    return together


def join(group: Sequence[Path], csrc: Path, folder: Path) -> Path:
    """Returns the file to compile for those of a group: the only one, or one that includes them.

    Their names must differ, in unnamed namespaces too.
    """
    if len(group) == 1:
        return group[0]
    names = [path.relative_to(csrc).as_posix() for path in group]
    path = folder / f"{group[0].parent.name}_{group[0].stem}{group[0].suffix}"
    text = "".join(f'#include "{name}"\n' for name in names)
    if not path.is_file() or path.read_text() != text:  # ninja goes by time
        folder.mkdir(exist_ok=True)
        path.write_text(text)
    return path


def source_hash(csrc: Path) -> str:
    """Returns a hash of every source and header below `csrc` and of the flags they get."""
    flags = (CXX_FLAGS, CUDA_GLUE_FLAGS, NVCC_FLAGS, LINK_FLAGS, LINK_CUDA)
    digest = hashlib.sha256(repr(flags).encode())
    for name in source_files(csrc):
        content = (csrc / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:20]


def short_hash(*parts: str) -> str:
    """Returns a short hash of these texts, for the name of a file."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def mirror(csrc: Path, copy: Path) -> None:
    """Makes `copy` hold what `csrc` does, by content, where ninja would go by time."""
    names = source_files(csrc)
    for gone in set(source_files(copy)).difference(names):
        (copy / gone).unlink()
    for name in names:
        content, target = (csrc / name).read_bytes(), copy / name
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


# An architecture is written as in TORCH_CUDA_ARCH_LIST: "9.0a", "10.0+PTX".
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def parse_archs(text: str) -> tuple[str, ...]:
    """Parses TORCH_CUDA_ARCH_LIST ("8.0;9.0a 10.0+PTX"); 9.0 means 9.0a, which wgmma needs."""
    archs = {}
    for item in filter(None, re.split(r"[;,\s]+", text)):
        match = _ARCH.fullmatch(item)
        capability = (int(match[1]), int(match[2])) if match else (0, 0)
        if capability < MIN_CAPABILITY:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must list architectures from 8.0 (Ampere) on, like 8.0, "
                f"9.0a or 10.0+PTX, got {item!r} in {text!r}."
            )
        archs[re.sub(r"^9\.0f?(?!a)", "9.0a", item)] = capability
    return tuple(sorted(archs, key=lambda arch: (archs[arch], arch)))


def gencode(arch: str) -> list[str]:
    """Returns nvcc's flags for an architecture."""
    number, _, ptx = arch.replace(".", "").partition("+")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    if ptx:  # only plain PTX runs on later GPUs, so a feature's letter is dropped here
        number = number.rstrip("af")
        flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def covers(arch: str, capability: tuple[int, int]) -> bool:
    """Tells whether a GPU of this compute capability can run what is compiled for `arch`."""
    major, minor, feature, ptx = _ARCH.fullmatch(arch).groups()  # type: ignore[union-attr]
    own = (int(major), int(minor))
    if feature == "a":
        return own == capability or (bool(ptx) and own < capability)
    return own <= capability and (bool(ptx) or own[0] == capability[0])


def find_cxx() -> tuple[str, ...] | None:
    """Returns the C++ compiler's command: $CXX, else c++, g++ or clang++; starts no process."""
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


def cuda_toolkit_version(cuda_home: Path) -> str | None:
    """Returns the version of a CUDA toolkit, such as "13.0", read from its header."""
    try:
        with open(cuda_home / "include" / "cuda_runtime_api.h", "rb") as header:
            match = re.search(rb"#define\s+CUDART_VERSION\s+(\d+)", header.read(65536))
    except OSError:
        return None
    return "{}.{}".format(*divmod(int(match[1]) // 10, 100)) if match else None


def toolkit_flags(toolkit: str | None, *, cores: int, small: bool) -> tuple[str, ...]:
    """Returns nvcc's flags for compressed binaries and threads, of which CUDA 12 knows less.

    `small` ones, of a wheel, are a fifth smaller, and take 3 % of all core-seconds. More than 20
    cores would wait for the longest file: there ptxas compiles its kernels in four threads, to the
    same machine code, and in 5 to 25 % more core-seconds. (nvcc's own --split-compile shares out
    the optimizer's work, too, and with it machine code changes.)
    """
    if toolkit is None or int(toolkit.split(".")[0]) < 13:
        return ("-Xfatbin=-compress-all",)
    compress = "--compress-mode=size" if small else "-Xfatbin=-compress-all"
    return (compress, "-Xptxas=-split-compile=4") if cores > 20 else (compress,)


def find_cuda_home(cuda: str | None) -> Path | None:
    """Returns the CUDA toolkit to use, preferring one of the same major version as `cuda`.

    torch's own search takes the folder above any nvcc on PATH, which may be a wrapper script; here
    a folder counts only if it has both the compiler and the headers.
    """
    found = [f for f in cuda_home_candidates() if (f / "bin" / "nvcc").is_file()]
    versions = [(cuda_toolkit_version(folder), folder) for folder in found]
    usable = [(version, folder) for version, folder in versions if version]
    fit = [item for item in usable if cuda and item[0].split(".")[0] == cuda.split(".")[0]]
    return (fit or usable)[0][1] if usable else None


def check_cxx(cxx: tuple[str, ...] | None) -> str:
    """Raises BuildError unless the C++ compiler is usable; returns its name and version."""
    named = os.environ.get("CXX")
    problem = f"CXX={named} was not found" if named else "no c++, g++ or clang++ is on PATH"
    if cxx is not None:
        done = subprocess.run([*cxx, "--version"], capture_output=True, text=True)
        banner = done.stdout.partition("\n")[0]
        versions = re.findall(r"\b(\d+)\.\d+\.\d+", banner)
        if versions and int(versions[-1]) >= (MIN_CLANG if "clang" in banner else MIN_GCC):
            return banner
        problem = f"{' '.join(cxx)} {f'is {banner}' if versions else 'does not run'}"
    raise BuildError(
        f"jagged_cuda needs g++ {MIN_GCC} or clang++ {MIN_CLANG}, or newer, and {problem}: install "
        f"one (Debian, Ubuntu: apt-get install g++), or set CXX to one."
    )


def check_nvcc(home: Path | None, cuda: str | None) -> str:
    """Raises BuildError unless nvcc is there and fits torch; returns its name and version."""
    major = (cuda or "13").split(".")[0]
    problem = "nvcc was not found in CUDA_HOME, /usr/local/cuda, PATH or an installed wheel"
    if home is not None:
        version = cuda_toolkit_version(home) or "unknown"
        if cuda is None or version.split(".")[0] == major:
            return f"nvcc {version}"
        problem = f"torch is built for CUDA {cuda} and the toolkit in {home} is CUDA {version}"
    raise BuildError(f"{problem}: install CUDA {major} and set CUDA_HOME to its folder.")


def path_with_ninja() -> str:
    """Returns PATH with the programs of this Python first: ninja's wheel put its program there."""
    scripts = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    return os.pathsep.join([*dict.fromkeys(scripts), os.environ.get("PATH", os.defpath)])


@dataclass(frozen=True)
class Build:
    """One library of `csrc`, for these architectures, this torch and the compilers found here."""

    library: str
    csrc: Path
    archs: tuple[str, ...]
    torch: Any  # the module
    cxx: tuple[str, ...] | None = field(default_factory=find_cxx)

    @functools.cached_property
    def cuda_home(self) -> Path | None:
        return find_cuda_home(self.torch.version.cuda) if self.library == "_C_cuda" else None

    def key(self, sources: str = "") -> str:
        """Returns a name for what is compiled, with `*` in it where a compiler is missing."""
        name = short_hash(*self.archs, str(self.torch.__version__), sources)
        if self.cxx is None or (self.library == "_C_cuda" and self.cuda_home is None):
            return f"{self.library}-{name}-*"
        files = [Path(shutil.which(self.cxx[0]) or self.cxx[0]).resolve()]
        if self.cuda_home is not None:
            files.append((self.cuda_home / "bin" / "nvcc").resolve())
        stats = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return f"{self.library}-{name}-{short_hash(*self.cxx, *stats)}"

    def check(self) -> str:
        """Raises BuildError unless the programs that compile it are usable; returns their names."""
        if shutil.which("ninja", path=path_with_ninja()) is None:
            raise BuildError("jagged_cuda compiles with ninja, which is missing: pip install it.")
        cxx = check_cxx(self.cxx)
        nvcc = check_nvcc(self.cuda_home, self.torch.version.cuda) if self.archs else None
        return f"{nvcc} and {cxx}" if nvcc else cxx

    @contextlib.contextmanager
    def cpp_extension(self, work: Path, *, at_once: int = 1) -> Iterator[Any]:
        """Gives torch.utils.cpp_extension, with the environment that this build needs.

        `at_once`: how many libraries are compiled in it at a time.
        """
        assert self.cxx is not None
        cxx = self.cxx[0]
        if len(self.cxx) > 1:  # it takes CXX for one word
            cxx = str(work / "c++")
            Path(cxx).write_text(f'#!/bin/sh\nexec {shlex.join(self.cxx)} "$@"\n')
            Path(cxx).chmod(0o755)
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        jobs = max(1, min(len(os.sched_getaffinity(0)), memory_bytes // at_once // 1_500_000_000))
        before = dict(os.environ)
        os.environ |= {
            "PATH": path_with_ninja(),
            "CXX": cxx,
            "MAX_JOBS": os.environ.get("MAX_JOBS") or str(jobs),
            "TMPDIR": str(work),
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # check_cxx has; nvcc refuses by itself
            # As it is imported, cpp_extension calls torch.cuda.is_available(). Answered through
            # NVML, that leaves the driver uninitialised: a process forked later can use CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        os.environ.pop("CC", None)  # would become nvcc's C++ compiler
        os.environ.pop("TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES", None)
        # Without a GPU it warns of its own guess of CUDA_HOME.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        try:
            from torch.utils import cpp_extension

            if self.cuda_home is not None:
                cpp_extension.CUDA_HOME = str(self.cuda_home)
            yield cpp_extension
        except ImportError as error:
            raise BuildError(
                f"compiling jagged_cuda needs setuptools ({error}): pip install 'setuptools<82'."
            ) from error
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    def recipe(
        self, work: Path, *, small: bool = False
    ) -> tuple[list[str], list[str], list[str], list[str]]:
        """Mirrors csrc into `work`; returns its sources there, and the C++, nvcc and link flags.

        `small`: rather a small binary than one that is there soon.
        """
        sources, torch_folder = work / "csrc", Path(self.torch.__file__).parent
        mirror(self.csrc, sources)
        cxx = [*(CXX_FLAGS if self.library == "_C_cpu" else CUDA_GLUE_FLAGS)]
        nvcc = [*NVCC_FLAGS, "-ccbin", os.environ["CXX"]]
        if self.cuda_home is not None:
            toolkit, cores = cuda_toolkit_version(self.cuda_home), len(os.sched_getaffinity(0))
            nvcc += toolkit_flags(toolkit, cores=cores, small=small)
        nvcc += [flag for arch in self.archs for flag in gencode(arch)]
        # Messages of a check hold the file's name: keep this machine's folders out of them.
        for folder, name in ((sources, "csrc"), (torch_folder / "include", "torch")):
            cxx.append(f"-ffile-prefix-map={folder}={name}")
            nvcc.append(f"-Xcompiler={cxx[-1]}")
        if self.torch.version.cuda is None:  # cpp_extension then asks nvcc for no dependencies
            nvcc.append(f"-DJAGGED_SOURCES={source_hash(self.csrc)}")
        link = [*LINK_FLAGS]
        if self.library == "_C_cuda":
            folder = self._link_folder(work / "link", torch_folder / "lib")
            link += [f"-L{folder}", f"-L{torch_folder / 'lib'}", *LINK_CUDA]
        groups = joined(library_sources(sources, self.library))
        files = [str(join(group, sources, work / "joined")) for group in groups]
        return files, cxx, nvcc, link

    def _link_folder(self, folder: Path, torch_libraries: Path) -> Path:
        """Makes a folder with libcudart.so, which CUDA's wheels do not call so.

        Under a CPU build of torch it has an empty libtorch_cuda.so, so that the result asks for it.
        """
        assert self.cuda_home is not None
        places = [self.cuda_home / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
        found = [path for place in places for path in place.glob("libcudart.so*")]
        if not found:
            raise BuildError(
                f"the CUDA toolkit in {self.cuda_home} has no libcudart.so: install all of it, or "
                f"the nvidia-cuda-runtime wheel, or set CUDA_HOME to another one."
            )
        folder.mkdir(exist_ok=True)
        (folder / "libcudart.so").unlink(missing_ok=True)
        (folder / "libcudart.so").symlink_to(found[0])
        if not (torch_libraries / "libtorch_cuda.so").exists():
            stub = ["-shared", "-Wl,-soname,libtorch_cuda.so", "-x", "c++", "/dev/null", "-o"]
            subprocess.run([os.environ["CXX"], *stub, folder / "libtorch_cuda.so"], check=True)
        return folder

    def load(self, cpp_extension: Any, work: Path) -> Path:
        """Compiles in `work`, where ninja keeps what has not changed, and loads the library.

        Raises BuildError if compiling fails, and OSError if `work` cannot be written, or the
        library not be loaded.
        """
        sources, cxx, nvcc, link = self.recipe(work)
        # A build that has failed in this process would count as done.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(self.library, None)
        building = work / BUILDING
        building.touch()
        try:
            path = cpp_extension.load(
                name=self.library,
                sources=sources,
                extra_cflags=[*map(shlex.quote, cxx)],
                extra_cuda_cflags=[*map(shlex.quote, nvcc)],
                extra_ldflags=[*map(shlex.quote, link)],
                extra_include_paths=[str(work / "csrc")],
                build_directory=str(work),
                is_python_module=False,
            )
        except RuntimeError as error:
            building.unlink()
            raise _explain(str(error), work) from None
        building.unlink()
        return Path(path)


def load_all(
    builds: Sequence[Build], folder: Path, title: str
) -> list[Path | BuildError | OSError]:
    """Compiles and loads libraries, all at once, each in its own folder below `folder`.

    The caller holds a lock on the folder. Returns, for each library, its path, or a BuildError if
    it could not be compiled, or an OSError if it could not be written or loaded.
    """
    for path in folder.glob("work-*"):  # unused for a month
        if path.stat().st_mtime < time.time() - 30 * 86400:
            shutil.rmtree(path, ignore_errors=True)
    works = [folder / f"work-{build.key()}" for build in builds]
    for work in works:
        if (work / BUILDING).exists():
            # A killed build left it: its compilers may still run, and write into this folder.
            abandoned = work.rename(work.with_name(f"{work.name}-abandoned-{time.time_ns()}"))
            shutil.rmtree(abandoned, ignore_errors=True)
        work.mkdir(exist_ok=True)

    def load(build: Build, work: Path) -> Path | BuildError | OSError:
        try:
            return build.load(cpp_extension, work)
        except (BuildError, OSError) as error:
            return error

    files = sum(len(joined(library_sources(b.csrc, b.library))) for b in builds)
    # That of the last one serves all: what CUDA needs beside the rest changes nothing for the CPU.
    with (
        builds[-1].cpp_extension(works[-1], at_once=len(builds)) as cpp_extension,
        progress(title, works, files),
        concurrent.futures.ThreadPoolExecutor(len(builds)) as pool,
    ):
        return [*pool.map(load, builds, works)]


@contextlib.contextmanager
def progress(title: str, works: Sequence[Path], files: int) -> Iterator[None]:
    """Says on stderr what is compiled, how many objects `works` have, and how long it took."""
    began, stopped = time.time(), threading.Event()

    def watch() -> None:
        while not stopped.wait(10):
            with contextlib.suppress(FileNotFoundError):  # of an object that is being rewritten
                objects = [path for work in works for path in work.glob("*.o")]
                done = sum(path.stat().st_mtime >= began for path in objects)
                say(f"{min(done, files)}/{files} files")

    say(title)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        say(f"done in {time.time() - began:.0f} s")
    finally:
        stopped.set()


def say(text: str) -> None:
    print(f"jagged_cuda: {text}", file=sys.stderr, flush=True)


def _source_at_fault(compiled: str, output: str, work: Path) -> str:
    """Returns the file of csrc that failed: of those joined, the last that the compiler named."""
    said = re.split(r"\berror\b", output, maxsplit=1)[0]
    named = re.findall(rf"{re.escape(str(work / 'csrc'))}/(\S+?\.(?:cpp|cu))\b", said)
    is_joined = Path(compiled).parent == work / "joined"
    return named[-1] if is_joined and named else os.path.relpath(compiled, work / "csrc")


def _explain(output: str, work: Path) -> BuildError:
    """Turns ninja's output into one sentence, with the end of what the compiler said."""
    failed = re.search(r"^FAILED: .*\n.* -c (\S+) -o ", output, re.MULTILINE)
    what = (
        f"csrc/{_source_at_fault(failed[1], output[failed.end() :], work)}"
        if failed
        else "the library"
    )
    if "No space left on device" in output:
        raise OSError("No space left on device")
    log = work / "build.log"
    log.write_text(output)
    lines = output.strip().split("\n")
    errors = [line for line in lines[1:] if re.search(r"\b(error|fatal)\b", line)]
    tail = "\n  ".join(errors[:5] or lines[-5:])
    return BuildError(f"compiling {what} failed; the whole output is in {log}; it says:\n  {tail}")
