"""Loads the two libraries: prebuilt where they fit, else compiled once and kept in a cache.

A warm import hashes the sources, asks NVML for the GPUs and loads two files: it starts no process
and no CUDA context.

    <cache>/<library>-<key>.so     key: sources, flags, architectures, torch, compilers
    <cache>/work-<library>-<key>/  ninja's folder, for these architectures, torch and compilers
    <cache>/lock                   of filelock: the kernel frees it on death

The cache is $JAGGED_CUDA_CACHE, else jagged_cuda in $XDG_CACHE_HOME or ~/.cache, else, where that
cannot be written, a private folder of this user in the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from jagged_cuda import _build
from jagged_cuda._build import Build, BuildError

PACKAGE = Path(__file__).resolve().parent


class Library(NamedTuple):
    """A library that this process has loaded."""

    path: Path
    origin: str  # "prebuilt" or "compiled here"
    archs: tuple[str, ...]  # of _C_cuda


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
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            if not failed and not nvml.nvmlDeviceGetCudaComputeCapability(device, *capability):
                nvml.nvmlDeviceGetName(device, text, len(text))
                gpus.append(Gpu(text.value.decode(), (major.value, minor.value)))
        return Driver(version, cuda, tuple(gpus))
    finally:
        nvml.nvmlShutdown()


def archs_of_gpus(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Returns what to compile for the GPUs found; 9.0 means 9.0a, which wgmma needs."""
    capable = {gpu.capability for gpu in gpus if gpu.capability >= _build.MIN_CAPABILITY}
    found = ";".join(f"{major}.{minor}" for major, minor in capable)
    return _build.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or found)


def why_no_cuda(driver: Driver | None) -> str | None:
    """Returns why CUDA cannot run here, or None if it can."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install a CUDA build of torch."
    if driver is None or not driver.gpus:
        return "no NVIDIA GPU is visible to this process."
    if driver.cuda[0] < int(cuda.split(".")[0]):
        return (
            f"the NVIDIA driver {driver.version} supports CUDA {driver.cuda[0]}.{driver.cuda[1]} "
            f"and torch is built for CUDA {cuda}: update the driver, or install torch for its CUDA."
        )
    if not archs_of_gpus(driver.gpus):
        return f"jagged_cuda needs Ampere (8.0) or newer and this is {driver.gpus[0]}: use the CPU."
    return None


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
    """Tells whether only this user can write to the folder, if it is a folder in /tmp."""
    if folder.parent != Path(tempfile.gettempdir()) or not folder.is_dir():
        return True
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write


@contextlib.contextmanager
def _locked_cache() -> Iterator[Path]:
    """Locks the first cache folder that can be written to, waiting for a process that compiles."""
    import filelock  # which torch requires

    for folder in cache_folders():
        lock = filelock.FileLock(folder / "lock")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _usable(folder):
                try:
                    lock.acquire(timeout=3)
                except filelock.Timeout:
                    _build.say("waiting for another process, which compiles the libraries")
                    lock.acquire()
                break
    else:
        raise BuildError(
            f"jagged_cuda cannot write to {' or '.join(map(str, cache_folders()))}, or others can: "
            f"set JAGGED_CUDA_CACHE to a folder of your own."
        )
    try:
        yield folder
    finally:
        lock.release()


def _find(key: str) -> Path | None:
    """Returns a compiled library if a cache holds it."""
    for folder in filter(_usable, cache_folders()):
        for path in sorted(folder.glob(f"{key}.so")):
            return path
    return None


def _load(name: str, path: Path, origin: str, archs: tuple[str, ...]) -> None:
    """Loads a library; does nothing if it was loaded already, under the name of its build."""
    global cpu_library, cuda_library
    torch.ops.load_library(str(path))
    loaded[name] = Library(path, origin, archs)
    cpu_library, cuda_library = (loaded[n].path if n in loaded else None for n in _build.LIBRARIES)


def _compile(builds: list[Build], sources: str, why: str) -> dict[str, BuildError | OSError]:
    """Compiles, at once, the libraries that no cache holds; returns those that failed, and why."""
    problems: dict[str, BuildError | OSError] = {}
    missing, compilers = [], ""
    for build in builds:
        if _find(build.key(sources)) is None:
            try:
                compilers = build.check()  # the last one's, of CUDA, name those of the CPU, too
                missing.append(build)
            except BuildError as error:
                problems[build.library] = error
    if not missing:
        return problems
    try:
        with _locked_cache() as folder:
            # But for those that another process has compiled meanwhile.
            missing = [build for build in missing if _find(build.key(sources)) is None]
            if missing:
                whats = [
                    f"this GPU ({';'.join(b.archs)})" if b.archs else "the CPU" for b in missing
                ]
                title = f"{why}compiling for {' and '.join(whats)} with {compilers}, once"
                results = _build.load_all(missing, folder, f"{title}; kept in {folder}")
                for build, result in zip(missing, results, strict=True):
                    if isinstance(result, Path):
                        os.replace(result, folder / f"{build.key(sources)}.so")
                    else:
                        problems[build.library] = result
    except (BuildError, OSError) as error:  # of the cache
        problems |= {build.library: error for build in missing}
    return problems


def _load_compiled(builds: list[Build], sources: str, why: str) -> dict[str, BuildError]:
    """Loads libraries of the cache, compiled if need be; returns those that failed, and why."""
    problems = _compile(builds, sources, why)
    for build in builds:
        path = _find(build.key(sources))
        if path is not None and build.library not in problems:
            try:
                _load(build.library, path, "compiled here", build.archs)
            except OSError as error:
                problems[build.library] = error
    return {name: _as_build_error(name, problem) for name, problem in problems.items()}


def _as_build_error(library: str, problem: BuildError | OSError) -> BuildError:
    if isinstance(problem, BuildError):
        return problem
    error = BuildError(
        f"{library} cannot be written or loaded ({problem}): remove it, or set "
        f"JAGGED_CUDA_CACHE to a folder with room, from which programs may run."
    )
    error.__cause__ = problem
    return error


def find_csrc() -> Path:
    """Returns the sources: csrc/ of a checkout, or of an installed package."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").is_file():
            return folder
    raise BuildError(f"jagged_cuda has no csrc folder in {PACKAGE}: install the package again.")


class Prebuilt(NamedTuple):
    """The libraries that lie in the package's folder, and their record."""

    paths: dict[str, Path]
    archs: tuple[str, ...]
    cuda: str
    source_hash: str


def find_prebuilt(package: Path) -> Prebuilt | None:
    """Returns the prebuilt libraries beside the package, if there are any."""
    paths = {path.name.partition(".")[0]: path for path in package.glob("_C_*.abi3.so")}
    try:
        record = json.loads((package / "_prebuilt.json").read_text())
        archs = _build.parse_archs(record["archs"])
        return Prebuilt(paths, archs, record["cuda"] or "", record["source_hash"])
    except (OSError, ValueError, KeyError, BuildError):
        return None


def why_unfit(prebuilt: Prebuilt, gpus: tuple[Gpu, ...]) -> str | None:
    """Returns why the prebuilt CUDA library cannot run here, or None if it can."""
    if "_C_cuda" not in prebuilt.paths:
        return "the installed package holds no CUDA library"
    built, running = (v.split(".")[0] for v in (prebuilt.cuda, torch.version.cuda or ""))
    if built != running:
        return f"the installed CUDA library is for CUDA {built} and torch is for CUDA {running}"
    archs = prebuilt.archs
    for gpu in gpus:
        covered = any(_build.covers(arch, gpu.capability) for arch in archs)
        if gpu.capability >= _build.MIN_CAPABILITY and not covered:
            return f"the installed CUDA library ({';'.join(archs)}) does not cover {gpu}"
    return None


def load_libraries(package: Path = PACKAGE) -> None:
    """Loads `_C_cpu`, and `_C_cuda` where there is a GPU, compiling what is not there yet.

    A problem with CUDA never breaks the import: the CPU library serves, a RuntimeWarning says what
    to do, and so does every CUDA operator that is called (`cuda_unavailable_reason`). Raises
    BuildError if the CPU library can be neither loaded nor compiled.
    """
    global cuda_unavailable_reason
    if "_C_cpu" in loaded:
        return
    if not sys.platform.startswith("linux"):
        raise BuildError(f"jagged_cuda runs on Linux, and this is {sys.platform}.")
    if tuple(map(int, torch.__version__.split(".")[:2])) < _build.MIN_TORCH:
        raise BuildError(
            f"jagged_cuda needs torch {'.'.join(map(str, _build.MIN_TORCH))} or newer and this is "
            f"torch {torch.__version__}: pip install --upgrade torch."
        )
    csrc = find_csrc()
    sources = _build.source_hash(csrc)
    driver = find_driver()
    gpus = driver.gpus if driver else ()
    reason = why_no_cuda(driver)

    prebuilt = find_prebuilt(package)
    why = ""
    if prebuilt is not None and prebuilt.source_hash != sources:
        why = "the sources have changed since the libraries beside the package were built, so "
        prebuilt = None
    if prebuilt is not None and "_C_cpu" in prebuilt.paths:
        _load("_C_cpu", prebuilt.paths["_C_cpu"], "prebuilt", ())
    # Without a GPU too, a CUDA library that is there is loaded: its operators are then registered.
    if prebuilt is not None and torch.version.cuda and (reason is None or not gpus):
        unfit = why_unfit(prebuilt, gpus)
        why = f"{unfit}, so " if unfit else ""
        if not unfit:
            _load("_C_cuda", prebuilt.paths["_C_cuda"], "prebuilt", prebuilt.archs)

    archs = {"_C_cpu": ()} if reason else {"_C_cpu": (), "_C_cuda": archs_of_gpus(gpus)}
    builds = [Build(name, csrc, archs[name], torch) for name in archs if name not in loaded]
    problems = _load_compiled(builds, sources, why)
    if "_C_cpu" in problems:
        raise problems["_C_cpu"]
    if "_C_cuda" in problems:
        reason = str(problems["_C_cuda"])

    if reason is not None:
        cuda_unavailable_reason = f"jagged_cuda cannot use CUDA: {reason}"
        if gpus and torch.version.cuda:
            text = f"{cuda_unavailable_reason} Its CPU operators work."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            _explain_cuda_calls(cuda_unavailable_reason)


def _explain_cuda_calls(reason: str, namespace: str = "jagged_cuda") -> None:
    """Makes every operator called with CUDA tensors raise the reason, in place of torch's list."""

    def explain(*_: object) -> None:
        raise RuntimeError(reason)

    library = torch.library.Library(namespace, "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            library.impl(name.removeprefix(f"{namespace}::"), explain, "CUDA")
    _registrations.append(library)
