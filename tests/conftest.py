"""Devices, hypothesis profiles, and what becomes of GPU tests without a GPU."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

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

HAS_GPU = torch.cuda.is_available()
NO_GPU = "tests marked `cuda` are deselected: they need an NVIDIA GPU, and this machine has none"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU; deselected without one")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_report_header() -> str:
    return f"GPU: {torch.cuda.get_device_name() if HAS_GPU else NO_GPU}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    absent = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if request.param == "cuda"
        else (torch.device("cpu"))
    )


@pytest.fixture
def tf32():
    """float32 products may round their operands to TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
