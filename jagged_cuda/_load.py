"""Loads the two libraries: prebuilt where they fit, else compiled once and kept in a cache.

What a warm import does here: hash the sources, ask NVML for the GPUs, load two files. It starts no
process, no compiler and no CUDA context.

    <cache>/<library>-<key>/<library>.so   key: sources, flags, architectures, compilers, torch
    <cache>/objects/                       objects by content, for source checkouts alone
    <cache>/build-*/                       a build under way, or what a killed one left
    <cache>/lock                           held with flock, which the kernel frees on death

The cache is $JAGGED_CUDA_CACHE, else jagged_cuda in $XDG_CACHE_HOME or ~/.cache, else, where that
cannot be written, a private folder of this user in the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from jagged_cuda import _build
from jagged_cuda._build import Arch, BuildError

PACKAGE = Path(__file__).resolve().parent
UNUSED_OBJECT_DAYS = 30


@dataclass(frozen=True)
class Library:
    """A library that this process has loaded."""

    path: Path
    origin: str  # "prebuilt" or "compiled here"
    archs: tuple[Arch, ...]  # of _C_cuda


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, as the driver names it."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: its version, the newest CUDA that it supports, and the GPUs that it sees."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


loaded: dict[str, Library] = {}
# Where they were loaded from.
cpu_library: Path | None = None
cuda_library: Path | None = None
# Why CUDA operators cannot run in this process, as one sentence; None where they can.
cuda_unavailable_reason: str | None = None
_registrations: list[object] = []  # which last as long as these objects


# ---------------------------------------------------------------------------------------------
# The GPUs, without a CUDA context


@functools.cache
def find_driver() -> Driver | None:
    """Asks NVML, which opens no CUDA context, for the driver and the GPUs; None without them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    try:
        return _driver_from_nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError):
        return _driver_from_nvidia_smi()


def _driver_from_nvml(nvml: ctypes.CDLL) -> Driver | None:
    if nvml.nvmlInit_v2():
        return None
    try:
        text = ctypes.create_string_buffer(96)
        number, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        nvml.nvmlSystemGetDriverVersion(text, len(text))
        version = text.value.decode()
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(major))
        cuda = divmod(major.value // 10, 100)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
        gpus = []
        for index in range(number.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            if nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            ):
                continue
            text.value = b""
            nvml.nvmlDeviceGetName(device, text, len(text))
            gpus.append(Gpu(text.value.decode(), (major.value, minor.value)))
        return Driver(version, cuda, tuple(gpus))
    finally:
        nvml.nvmlShutdown()


def _driver_from_nvidia_smi() -> Driver | None:
    """The way round where NVML cannot be loaded, yet the driver's tool is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [row.split(", ", 2) for row in result.stdout.splitlines() if row.count(", ") >= 2]
    if result.returncode or not rows:
        return None
    gpus = []
    for _, capability, name in rows:
        major, _, minor = capability.partition(".")
        if major.isdigit() and minor.isdigit():
            gpus.append(Gpu(name, (int(major), int(minor))))
    return Driver(rows[0][0], (0, 0), tuple(gpus))


def archs_of_gpus(gpus: tuple[Gpu, ...]) -> tuple[Arch, ...]:
    """Returns what to compile for the GPUs found; 9.0 means 9.0a, which wgmma needs."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if listed:
        return _build.parse_archs(listed)
    capable = {gpu.capability for gpu in gpus if gpu.capability >= _build.MIN_CAPABILITY}
    return tuple(sorted(Arch(*c, "a" if c == (9, 0) else "") for c in capable))


# ---------------------------------------------------------------------------------------------
# The cache


def cache_folders() -> list[Path]:
    """Returns the folders that may serve as the cache, in order of preference."""
    named = os.environ.get("JAGGED_CUDA_CACHE")
    if named:
        return [Path(named).expanduser().absolute()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        folders.append(Path(base) / "jagged_cuda")
    folders.append(Path(tempfile.gettempdir()) / f"jagged_cuda-{os.getuid()}")
    return folders


def _is_ours(folder: Path) -> bool:
    """Tells whether nobody else could have put a library into this folder."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return folder.is_symlink() and _is_ours(folder.resolve())
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _usable(folder: Path) -> bool:
    """Tells whether a cache folder may be read: the shared temporary folder needs a check."""
    return folder.parent != Path(tempfile.gettempdir()) or _is_ours(folder)


class _Lock:
    """The cache's lock, and the folder it guards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _usable(folder):
            raise PermissionError(errno.EACCES, "others can write to this folder", str(folder))
        self.folder = folder
        self.waited = 0.0
        # A file that cannot be written to (a full or read-only disk) shows here, before any work.
        self.file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> _Lock:
        try:
            began = time.time()
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._wait()
                self.waited = time.time() - began
            os.truncate(self.file, 0)
            os.pwrite(self.file, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(self.file)
            raise
        return self

    def _wait(self) -> None:
        """Waits until the process that compiles is done, or dead."""
        said = False
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
            if not said and time.monotonic() - began > 3:
                said = True
                holder = os.pread(self.file, 20, 0).decode(errors="replace") or "another process"
                _say(f"jagged_cuda: waiting for process {holder}, which compiles the libraries")

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _lock_cache() -> _Lock:
    """Opens the first cache folder that can be written; raises BuildError if there is none."""
    failures = []
    for folder in cache_folders():
        try:
            return _Lock(folder)
        except OSError as error:
            failures.append(f"{folder} ({error.strerror})")
    raise BuildError(
        f"jagged_cuda has nowhere to keep what it compiles, since it cannot write to "
        f"{' or '.join(failures)}: set JAGGED_CUDA_CACHE to a folder that you can write to."
    )


@dataclass(frozen=True)
class _Wanted:
    """A library to be had from the cache, or to be compiled into it."""

    name: str
    archs: tuple[Arch, ...]
    core: str  # hash of sources, flags, architectures and torch
    compilers: str | None  # hash of the compilers; None where one is missing

    @property
    def entry(self) -> str:
        return f"{self.name}-{self.core}-{self.compilers}"

    def find(self) -> Path | None:
        """Returns the compiled library if a cache holds it."""
        for folder in filter(_usable, cache_folders()):
            if self.compilers is not None:
                entries = [folder / self.entry]
            else:  # the compiler is gone, what it made of these sources still serves
                entries = sorted(folder.glob(f"{self.name}-{self.core}-*"))
            for entry in entries:
                if (entry / f"{self.name}.so").is_file():
                    return entry / f"{self.name}.so"
        return None


def _want(name: str, archs: tuple[Arch, ...], sources: str, toolchain: _build.Toolchain) -> _Wanted:
    fingerprint = toolchain.fingerprint(name)
    core = "\n".join([name, sources, _build.format_archs(archs), str(torch.__version__)])
    return _Wanted(
        name,
        archs,
        hashlib.sha256(core.encode()).hexdigest()[:16],
        None if fingerprint is None else hashlib.sha256(fingerprint.encode()).hexdigest()[:8],
    )


def _compile(
    wanted: list[_Wanted], csrc: Path, toolchain: _build.Toolchain, why: str
) -> dict[str, Path | BuildError]:
    """Compiles libraries into the cache, or waits for the process that does."""
    results: dict[str, Path | BuildError] = {}
    compilers: dict[str, None] = {}
    buildable = []
    for library in wanted:
        try:
            if library.name == "_C_cuda":
                compilers[_build.check_nvcc(toolchain, torch.version.cuda)] = None
                _build.check_archs(toolchain, library.archs)
            compilers[_build.check_cxx(toolchain)] = None
            buildable.append(library)
        except BuildError as error:
            results[library.name] = error
    if not buildable:
        return results
    with _lock_cache() as lock:
        missing = []
        for library in buildable:
            found = library.find()
            failure = lock.folder / f"{library.entry}.failed"
            if found is not None:
                results[library.name] = found
            elif _failed_while_waiting(failure, lock.waited):
                results[library.name] = BuildError(failure.read_text())
            else:
                failure.unlink(missing_ok=True)
                missing.append(library)
        if missing:
            _sweep(lock.folder)
            for_what = [
                f"this GPU ({_build.format_archs(lib.archs)})" if lib.archs else "the CPU"
                for lib in missing
            ]
            progress = _build.ConsoleProgress(
                f"jagged_cuda: {why}compiling for {' and '.join(for_what)} with "
                f"{' and '.join(compilers)}",
                f", once; kept in {lock.folder}",
            )
            results |= _compile_locked(missing, lock.folder, csrc, toolchain, progress)
    return results


def _failed_while_waiting(failure: Path, waited: float) -> bool:
    """Tells whether the process that was waited for has just failed at the same build."""
    try:
        return waited > 0 and failure.stat().st_mtime >= time.time() - waited - 1
    except OSError:
        return False


def _compile_locked(
    missing: list[_Wanted],
    folder: Path,
    csrc: Path,
    toolchain: _build.Toolchain,
    progress: _build.Progress,
) -> dict[str, Path | BuildError]:
    results: dict[str, Path | BuildError] = {}
    archs = tuple(arch for library in missing for arch in library.archs)
    objects = None
    if csrc.parent != PACKAGE:  # a checkout, whose sources change: keep what did not
        objects = folder / "objects"
    work = None
    try:
        if objects is not None:
            objects.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
        built = _build.build(
            csrc,
            [library.name for library in missing],
            archs,
            work,
            toolchain=toolchain,
            objects=objects,
            log=folder / "build.log",
            progress=progress,
        )
        for library in missing:
            result = built[library.name]
            if isinstance(result, Path):
                result = _publish(result, folder / library.entry, library)
            results[library.name] = result
    except OSError as error:
        sentence = BuildError(
            f"jagged_cuda cannot write to {folder} ({error.strerror}): free some space there, or "
            f"set JAGGED_CUDA_CACHE to another folder."
        )
        results |= {lib.name: sentence for lib in missing if lib.name not in results}
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    for library in missing:
        if isinstance(results[library.name], BuildError):
            with contextlib.suppress(OSError):
                (folder / f"{library.entry}.failed").write_text(str(results[library.name]))
    return results


def _publish(result: Path, entry: Path, library: _Wanted) -> Path:
    """Moves a finished library to its place in one step, so that nobody sees half of it."""
    staged = result.parent / f"{library.name}-publish"
    staged.mkdir()
    os.replace(result, staged / result.name)
    shutil.rmtree(entry, ignore_errors=True)
    os.replace(staged, entry)
    return entry / result.name


def _sweep(folder: Path) -> None:
    """Removes what killed builds left, and objects that no build has used for a month."""
    for leftover in folder.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    now = time.time()
    for path in (folder / "objects").glob("*.o"):
        days = 1 if path.name.endswith(_build.PART_SUFFIX) else UNUSED_OBJECT_DAYS
        try:
            if path.stat().st_mtime < now - days * 86400:
                path.unlink()
        except OSError:
            continue


# ---------------------------------------------------------------------------------------------
# Prebuilt libraries


def find_csrc() -> Path | None:
    """Returns the sources: csrc/ of a checkout, or of an installed package."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").is_file():
            return folder
    return None


@dataclass(frozen=True)
class _Prebuilt:
    """The libraries that lie in the package's folder, and what their record says of them."""

    paths: dict[str, Path]
    archs: tuple[Arch, ...]
    cuda: str | None
    source_hash: str | None


def find_prebuilt(package: Path) -> _Prebuilt | None:
    """Returns the prebuilt libraries beside the package, if there are any."""
    paths: dict[str, Path] = {}
    for name in _build.LIBRARIES:
        for suffix in (".abi3.so", ".so"):
            if (package / (name + suffix)).is_file():
                paths.setdefault(name, package / (name + suffix))
    try:
        record = json.loads((package / "_prebuilt.json").read_text())
        archs = _build.parse_archs(record["archs"])
    except (OSError, ValueError, KeyError, BuildError):
        return None
    if not paths:
        return None
    return _Prebuilt(paths, archs, record.get("cuda"), record.get("source_hash"))


def why_unfit(prebuilt: _Prebuilt, gpus: tuple[Gpu, ...]) -> str | None:
    """Returns why the prebuilt CUDA library cannot run here, or None if it can."""
    if "_C_cuda" not in prebuilt.paths:
        return "the installed package holds no CUDA library"
    built = (prebuilt.cuda or "").split(".")[0]
    running = (torch.version.cuda or "").split(".")[0]
    if built != running:
        return f"the installed CUDA library is for CUDA {built} and torch is for CUDA {running}"
    for gpu in gpus:
        if gpu.capability < _build.MIN_CAPABILITY:
            continue
        if not any(arch.covers(*gpu.capability) for arch in prebuilt.archs):
            return (
                f"the installed CUDA library ({_build.format_archs(prebuilt.archs)}) does not "
                f"cover {gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})"
            )
    return None


# ---------------------------------------------------------------------------------------------
# Loading


def why_no_cuda(driver: Driver | None) -> tuple[str | None, bool]:
    """Returns why CUDA cannot run here, or None, and whether the user should be warned of it."""
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"this is torch {torch.__version__}, a build without CUDA: install a CUDA build of "
            f"torch to use jagged_cuda on a GPU.",
            False,
        )
    if driver is None or not driver.gpus:
        return "no NVIDIA GPU is visible to this process.", False
    if driver.cuda[0] and driver.cuda[0] < int(cuda.split(".")[0]):
        return (
            f"the NVIDIA driver {driver.version} supports CUDA {driver.cuda[0]}.{driver.cuda[1]} "
            f"and torch is built for CUDA {cuda}: update the driver, or install a build of torch "
            f"for CUDA {driver.cuda[0]}.",
            True,
        )
    if not archs_of_gpus(driver.gpus):
        gpu = driver.gpus[0]
        return (
            f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]} and "
            f"jagged_cuda needs 8.0 (Ampere) or newer: use the CPU here.",
            True,
        )
    return None, False


def load_libraries(package: Path = PACKAGE, csrc: Path | None = None) -> None:
    """Loads `_C_cpu`, and `_C_cuda` where there is a GPU, compiling what is not there yet.

    A problem with CUDA never breaks the import: the CPU library serves, a RuntimeWarning says what
    to do, and so does every CUDA operator that is called (`cuda_unavailable_reason`).

    Args:
        package: the folder that may hold prebuilt libraries.
        csrc: the folder of sources; by default that of the checkout or of the package.

    Raises:
        BuildError: the CPU library can be neither loaded nor compiled.
    """
    global cuda_unavailable_reason
    if "_C_cpu" in loaded:
        return
    if not sys.platform.startswith("linux"):
        raise BuildError(f"jagged_cuda runs on Linux, and this is {sys.platform}.")
    _build.check_torch(torch.__version__)
    csrc = csrc or find_csrc()
    sources = _build.source_hash(csrc) if csrc is not None else None
    driver = find_driver()
    gpus = driver.gpus if driver else ()
    cuda_unavailable_reason, warn = why_no_cuda(driver)

    prebuilt = find_prebuilt(package)
    why = ""
    if prebuilt is not None and sources is not None and prebuilt.source_hash != sources:
        why = "the sources have changed since the libraries beside the package were built, so "
        prebuilt = None
    if prebuilt is not None and "_C_cpu" in prebuilt.paths:
        _load("_C_cpu", prebuilt.paths["_C_cpu"], "prebuilt", ())
    # Without a GPU too, a CUDA library that is there is loaded: its operators are then registered.
    with_cuda = torch.version.cuda and (cuda_unavailable_reason is None or not gpus)
    if prebuilt is not None and with_cuda:
        unfit = why_unfit(prebuilt, gpus)
        if unfit is None:
            _load("_C_cuda", prebuilt.paths["_C_cuda"], "prebuilt", prebuilt.archs)
        else:
            why = f"{unfit}, so "

    needed: list[tuple[str, tuple[Arch, ...]]] = []
    if "_C_cpu" not in loaded:
        needed.append(("_C_cpu", ()))
    if "_C_cuda" not in loaded and cuda_unavailable_reason is None:
        needed.append(("_C_cuda", archs_of_gpus(gpus)))
    if needed:
        if csrc is None or sources is None:
            raise BuildError(
                f"{why}jagged_cuda has to be compiled and {package} has no csrc folder: install "
                f"the package again."
            )
        problem = _load_or_compile(needed, csrc, sources, why)
        if problem is not None:
            cuda_unavailable_reason, warn = str(problem), True

    if cuda_unavailable_reason is not None:
        cuda_unavailable_reason = f"jagged_cuda cannot use CUDA: {cuda_unavailable_reason}"
        if warn:
            warnings.warn(
                f"{cuda_unavailable_reason} Its CPU operators work.", RuntimeWarning, stacklevel=3
            )
            _explain_cuda_calls(cuda_unavailable_reason)


def _load_or_compile(
    needed: list[tuple[str, tuple[Arch, ...]]], csrc: Path, sources: str, why: str
) -> BuildError | None:
    """Loads libraries from the cache, compiling what is missing; returns what CUDA's lacks."""
    toolchain = _build.find_toolchain(torch.version.cuda)
    wanted = [_want(name, archs, sources, toolchain) for name, archs in needed]
    results: dict[str, Path | BuildError] = {}
    for library in wanted:
        found = library.find()
        if found is not None:
            results[library.name] = found
    missing = [library for library in wanted if library.name not in results]
    if missing:
        try:
            results |= _compile(missing, csrc, toolchain, why)
        except BuildError as error:
            results |= {library.name: error for library in missing}
    for library in wanted:
        result = results[library.name]
        if isinstance(result, Path):
            try:
                _load(library.name, result, "compiled here", library.archs)
                continue
            except OSError as error:
                result = BuildError(
                    f"{result} does not load ({error}): remove its folder and import again, or set "
                    f"JAGGED_CUDA_CACHE to a folder on a disk that programs may run from."
                )
        if library.name == "_C_cpu":
            raise result
        return result
    return None


def _load(name: str, path: Path, origin: str, archs: tuple[Arch, ...]) -> None:
    global cpu_library, cuda_library
    torch.ops.load_library(str(path))
    if name == "_C_cpu":
        cpu_library = path
    else:
        cuda_library = path
    loaded[name] = Library(path, origin, archs)


def _explain_cuda_calls(reason: str, namespace: str = "jagged_cuda") -> None:
    """Makes every operator called with CUDA tensors raise the reason, in place of torch's list."""

    def explain(*_: object) -> None:
        raise RuntimeError(reason)

    library = torch.library.Library(namespace, "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            library.impl(name.removeprefix(f"{namespace}::"), explain, "CUDA")
    _registrations.append(library)
