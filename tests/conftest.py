"""Devices, hypothesis profiles, and the deselection of GPU tests without a GPU."""

from __future__ import annotations

import fcntl
import gc
import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from toy_package import Toy

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when Triton is first imported, which parts of torch do before tests/test_triton_ref.py,
    # which needs its CPU interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile(
    "base", deadline=None, print_blob=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("base"), max_examples=12, derandomize=True
)
hypothesis.settings.register_profile(
    "full", hypothesis.settings.get_profile("base"), max_examples=300
)
hypothesis.settings.load_profile("quick")

GIB = 2**30


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: what cores and memory allow, a few cores left to the GPU tests' own work.

    A worker takes up to 2 GiB, and up to 3 of a GPU's.
    """
    cores = len(os.sched_getaffinity(0))
    limits = [cores if cores < 8 else cores - 2]
    limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * GIB))
    if HAS_GPU:
        limits.append(torch.cuda.get_device_properties(0).total_memory // (3 * GIB))
    return max(1, min(limits))


NO_GPU = "none; tests marked `cuda`, which need one, are deselected"
ONE_GPU = "; tests marked `multi_gpu`, which need two, are deselected"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU; deselected without one")
    config.addinivalue_line("markers", "multi_gpu: needs two of them; deselected without")
    config.addinivalue_line("markers", "torchrec: needs TorchRec; deselected without")
    config.addinivalue_line("markers", "fbgemm: needs FBGEMM; deselected without")
    config.addinivalue_line("markers", "fbgemm_cuda: needs FBGEMM's CUDA kernels too")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_report_header() -> str:
    if not HAS_GPU:
        return f"GPU: {NO_GPU}"
    return f"GPU: {torch.cuda.get_device_name()}{ONE_GPU if torch.cuda.device_count() < 2 else ''}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {"cuda"} if not HAS_GPU else set()
    if torch.cuda.device_count() < 2:
        absent.add("multi_gpu")
    for mark, package in {"torchrec": "torchrec", "fbgemm": "fbgemm_gpu"}.items():
        if importlib.util.find_spec(package) is None:
            absent.add(mark)
    if "fbgemm" in absent or not fbgemm_has_cuda():
        absent.add("fbgemm_cuda")
    lacking = [item for item in items if absent & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=lacking)
    kept = set(items).difference(lacking)
    items[:] = [item for item in items if item in kept]


def fbgemm_has_cuda() -> bool:
    """Whether FBGEMM is its build for CUDA, which has another name among distributions."""
    try:
        importlib.metadata.version("fbgemm-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn."""
    if request.param == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that the device takes by itself, "best", or those of all GPUs, "mma_sync"."""
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "" if request.param == "best" else request.param)
    return request.param


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A package that compiles soon, for the tests of building."""
    from toy_package import Toy  # which imports jagged_cuda

    return Toy(tmp_path / "toy")


@pytest.fixture
def tf32():
    """float32 products may round their operands to TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """PyTorch's cache in one process must not take the GPU's memory from tests in others."""
    yield
    if torch.cuda.memory_reserved() > GIB:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def room_on_gpu() -> Iterator[None]:
    """Only one test that needs tens of GiB runs at a time, whatever the number of processes."""
    needed = 48 * GIB
    if torch.cuda.mem_get_info()[1] < needed:
        pytest.skip("needs a GPU of 48 GiB")
    path = Path(tempfile.gettempdir()) / f"jagged_cuda_room_on_gpu_{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Other tests free their memory when they end.
        deadline = time.monotonic() + 120
        while torch.cuda.mem_get_info()[0] < needed and time.monotonic() < deadline:
            time.sleep(0.2)
        yield
        gc.collect()
        torch.cuda.empty_cache()
