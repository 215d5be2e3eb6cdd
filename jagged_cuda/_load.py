"""Loads the two libraries: prebuilt where they fit, else compiled once and kept in a cache.

What a warm import does here: hash the sources, ask NVML for the GPUs, load two files. It starts no
process, no compiler and no CUDA context.

    <cache>/<library>-<key>.so    key: sources, flags, architectures, torch, compilers
    <cache>/work-<library>-<key>  ninja's folder, for these architectures, torch and compilers
    <cache>/lock                  of filelock: the kernel frees it on death

The cache is $JAGGED_CUDA_CACHE, else jagged_cuda in $XDG_CACHE_HOME or ~/.cache, else, where that
cannot be written, a private folder of this user in the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from jagged_cuda import _build
from jagged_cuda._build import Arch, BuildError

PACKAGE = Path(__file__).resolve().parent
UNUSED_WORK_DAYS = 30


class Library(NamedTuple):
    """A library that this process has loaded."""

    path: Path
    origin: str  # "prebuilt" or "compiled here"
    archs: tuple[Arch, ...]  # of _C_cuda


class Gpu(NamedTuple):
    """A GPU of this machine, as the driver names it."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


class Driver(NamedTuple):
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
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
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
            capability = (ctypes.byref(major), ctypes.byref(minor))
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            if nvml.nvmlDeviceGetCudaComputeCapability(device, *capability):
                continue
            text.value = b""
            nvml.nvmlDeviceGetName(device, text, len(text))
            gpus.append(Gpu(text.value.decode(), (major.value, minor.value)))
        return Driver(version, cuda, tuple(gpus))
    finally:
        nvml.nvmlShutdown()


def archs_of_gpus(gpus: tuple[Gpu, ...]) -> tuple[Arch, ...]:
    """Returns what to compile for the GPUs found; 9.0 means 9.0a, which wgmma needs."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if listed:
        return _build.parse_archs(listed)
    capable = {gpu.capability for gpu in gpus if gpu.capability >= _build.MIN_CAPABILITY}
    return tuple(sorted(Arch(*c, "a" if c == (9, 0) else "") for c in capable))


def why_no_cuda(driver: Driver | None) -> str | None:
    """Returns why CUDA cannot run here, or None if it can."""
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"this is torch {torch.__version__}, a build without CUDA: install a CUDA build of "
            f"torch to use jagged_cuda on a GPU."
        )
    if driver is None or not driver.gpus:
        return "no NVIDIA GPU is visible to this process."
    if driver.cuda[0] < int(cuda.split(".")[0]):
        return (
            f"the NVIDIA driver {driver.version} supports CUDA {driver.cuda[0]}.{driver.cuda[1]} "
            f"and torch is built for CUDA {cuda}: update the driver, or install a build of torch "
            f"for CUDA {driver.cuda[0]}."
        )
    if not archs_of_gpus(driver.gpus):
        return f"jagged_cuda needs Ampere (8.0) or newer and this is {driver.gpus[0]}: use the CPU."
    return None


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
    return [*folders, Path(tempfile.gettempdir()) / f"jagged_cuda-{os.getuid()}"]


def _usable(folder: Path) -> bool:
    """Tells whether nobody else could have put a library into this folder, if /tmp holds it."""
    if folder.parent != Path(tempfile.gettempdir()):
        return True
    try:
        status = folder.lstat()
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write


@contextlib.contextmanager
def _locked_cache() -> Iterator[Path]:
    """Locks the first cache folder that can be written to, waiting for a process that compiles."""
    import filelock  # which torch requires

    failures = []
    for folder in cache_folders():
        lock = filelock.FileLock(folder / "lock")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _usable(folder):
                raise PermissionError(errno.EACCES, "others can write to this folder")
            try:
                lock.acquire(timeout=3)
            except filelock.Timeout:
                _build.say("jagged_cuda: waiting for another process, which compiles the libraries")
                lock.acquire()
        except OSError as error:
            failures.append(f"{folder} ({error.strerror})")
            continue
        try:
            yield folder
        finally:
            lock.release()
        return
    raise BuildError(
        f"jagged_cuda has nowhere to keep what it compiles, since it cannot write to "
        f"{' or '.join(failures)}: set JAGGED_CUDA_CACHE to a folder that you can write to."
    )


class Compiled(NamedTuple):
    """A library that the cache holds, or that is to be compiled into it."""

    name: str
    archs: tuple[Arch, ...]
    csrc: Path
    sources: str  # their hash
    toolchain: _build.Toolchain

    def key(self, *more: str) -> str:
        compilers = self.toolchain.fingerprint(self.name)
        parts = [_build.format_archs(self.archs), str(torch.__version__), *more]
        last = "*" if compilers is None else _build.short_hash(compilers)
        return f"{self.name}-{_build.short_hash(*parts)}-{last}"

    def find(self) -> Path | None:
        """Returns the library if a cache holds it; without its compiler it serves, too."""
        for folder in filter(_usable, cache_folders()):
            for path in sorted(folder.glob(f"{self.key(self.sources)}.so")):
                return path
        return None

    def load(self, why: str) -> Path:
        """Loads the library, compiling it first if no cache holds it; returns its path."""
        path = self.find()
        if path is None:
            names = (self.name, self.archs, self.toolchain, torch.version.cuda)
            compilers = _build.check_compilers(*names)
            began = time.time()
            with _locked_cache() as folder:
                path = self.find()
                if path is None:
                    return self._compile(folder, began, f"{why}compiling", f"with {compilers}")
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise BuildError(
                f"{path} does not load ({error}): remove it and import again, or set "
                f"JAGGED_CUDA_CACHE to a folder on a disk that programs may run from."
            ) from error
        return path

    def _compile(self, folder: Path, began: float, compiling: str, compilers: str) -> Path:
        path = folder / f"{self.key(self.sources)}.so"
        failure = path.with_suffix(".failed")
        if failure.exists() and failure.stat().st_mtime > began:
            raise BuildError(failure.read_text())  # of the process that was waited for
        what = f"this GPU ({_build.format_archs(self.archs)})" if self.archs else "the CPU"
        title = f"jagged_cuda: {compiling} for {what} {compilers}, once; kept in {folder}"
        work = folder / f"work-{self.key()}"
        try:
            _sweep(folder)
            built = _build.load(self.name, self.csrc, work, self.archs, self.toolchain, title)
            os.replace(built, path)  # it is loaded: opened under this name, it is the same library
        except OSError as error:
            raise BuildError(
                f"jagged_cuda cannot compile in {work} ({error}): free some space there, or set "
                f"JAGGED_CUDA_CACHE to another folder, on a disk that programs may run from."
            ) from error
        except BuildError as error:
            failure.write_text(str(error))
            raise
        return path


def _sweep(folder: Path) -> None:
    """Removes what is left of killed builds, and of those that nobody has used for a month."""
    oldest = time.time() - UNUSED_WORK_DAYS * 86400
    for path in (*folder.glob("abandoned-*"), *folder.glob("work-*")):
        if path.name.startswith("abandoned-") or path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Prebuilt libraries


def find_csrc() -> Path | None:
    """Returns the sources: csrc/ of a checkout, or of an installed package."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").is_file():
            return folder
    return None


class Prebuilt(NamedTuple):
    """The libraries that lie in the package's folder, and what their record says of them."""

    paths: dict[str, Path]
    archs: tuple[Arch, ...]
    cuda: str
    source_hash: str


def find_prebuilt(package: Path) -> Prebuilt | None:
    """Returns the prebuilt libraries beside the package, if there are any."""
    paths = {name: package / f"{name}.abi3.so" for name in _build.LIBRARIES}
    try:
        record = json.loads((package / "_prebuilt.json").read_text())
        archs = _build.parse_archs(record["archs"])
    except (OSError, ValueError, KeyError, BuildError):
        return None
    present = {name: path for name, path in paths.items() if path.is_file()}
    return Prebuilt(present, archs, record["cuda"] or "", record["source_hash"])


def why_unfit(prebuilt: Prebuilt, gpus: tuple[Gpu, ...]) -> str | None:
    """Returns why the prebuilt CUDA library cannot run here, or None if it can."""
    if "_C_cuda" not in prebuilt.paths:
        return "the installed package holds no CUDA library"
    built, running = (v.split(".")[0] for v in (prebuilt.cuda, torch.version.cuda or ""))
    if built != running:
        return f"the installed CUDA library is for CUDA {built} and torch is for CUDA {running}"
    archs = prebuilt.archs
    for gpu in gpus:
        covered = any(arch.covers(*gpu.capability) for arch in archs)
        if gpu.capability >= _build.MIN_CAPABILITY and not covered:
            return f"the installed CUDA library ({_build.format_archs(archs)}) does not cover {gpu}"
    return None


# ---------------------------------------------------------------------------------------------
# Loading


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
    reason = why_no_cuda(driver)

    prebuilt = find_prebuilt(package)
    why = ""
    if prebuilt is not None and sources not in (None, prebuilt.source_hash):
        why = "the sources have changed since the libraries beside the package were built, so "
        prebuilt = None
    if prebuilt is not None and "_C_cpu" in prebuilt.paths:
        torch.ops.load_library(str(prebuilt.paths["_C_cpu"]))
        _remember("_C_cpu", Library(prebuilt.paths["_C_cpu"], "prebuilt", ()))
    # Without a GPU too, a CUDA library that is there is loaded: its operators are then registered.
    if prebuilt is not None and torch.version.cuda and (reason is None or not gpus):
        unfit = why_unfit(prebuilt, gpus)
        why = f"{unfit}, so " if unfit else ""
        if not unfit:
            torch.ops.load_library(str(prebuilt.paths["_C_cuda"]))
            _remember("_C_cuda", Library(prebuilt.paths["_C_cuda"], "prebuilt", prebuilt.archs))

    for name in _build.LIBRARIES:
        if name in loaded or (name == "_C_cuda" and reason is not None):
            continue
        if csrc is None or sources is None:
            raise BuildError(
                f"{why}jagged_cuda has to be compiled and {package} has no csrc folder: install "
                f"the package again."
            )
        archs = archs_of_gpus(gpus) if name == "_C_cuda" else ()
        toolchain = _build.find_toolchain(torch.version.cuda)
        try:
            path = Compiled(name, archs, csrc, sources, toolchain).load(why)
            _remember(name, Library(path, "compiled here", archs))
        except BuildError as error:
            if name == "_C_cpu":
                raise
            reason = str(error)

    if reason is not None:
        cuda_unavailable_reason = f"jagged_cuda cannot use CUDA: {reason}"
        if gpus and torch.version.cuda:
            text = f"{cuda_unavailable_reason} Its CPU operators work."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            _explain_cuda_calls(cuda_unavailable_reason)


def _remember(name: str, library: Library) -> None:
    global cpu_library, cuda_library
    loaded[name] = library
    cpu_library, cuda_library = (loaded[n].path if n in loaded else None for n in _build.LIBRARIES)


def _explain_cuda_calls(reason: str, namespace: str = "jagged_cuda") -> None:
    """Makes every operator called with CUDA tensors raise the reason, in place of torch's list."""

    def explain(*_: object) -> None:
        raise RuntimeError(reason)

    library = torch.library.Library(namespace, "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            library.impl(name.removeprefix(f"{namespace}::"), explain, "CUDA")
    _registrations.append(library)
