"""What runs here: ``python -m jagged_cuda.info`` prints versions, libraries, GPUs and kernel paths.

Paste its output into a bug report.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

import jagged_cuda
from jagged_cuda import _build, _load
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TYPICAL = (64, (64, 64), (64,), (8,))


def versions() -> list[tuple[str, str]]:
    """Returns what is installed, as (name, text)."""
    driver = _load.find_driver()
    toolkit = _build.find_cuda_home(torch.version.cuda)
    rows = [
        ("jagged_cuda", f"{jagged_cuda.__version__} in {_load.PACKAGE}"),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, CUDA runtime {torch.version.cuda or 'none'}"),
        ("CUDA toolkit", _toolkit_text(toolkit)),
        ("C++ compiler", " ".join(_build.find_cxx() or ("none",))),
        (
            "CPU",
            f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
            f"torch uses {torch.backends.cpu.get_cpu_capability()}",
        ),
        (
            "driver",
            "none"
            if driver is None
            else "{}, up to CUDA {}.{}".format(driver.version, *driver.cuda),
        ),
    ]
    for index, gpu in enumerate(driver.gpus if driver else ()):
        rows.append((f"GPU {index}", str(gpu)))
    for name in _build.LIBRARIES:
        library = _load.loaded.get(name)
        text = "not loaded"
        if library is not None:
            archs = f"{';'.join(library.archs)}, " if library.archs else ""
            text = f"{archs}{library.origin}: {library.path}"
        rows.append((name, text))
    if _load.cuda_unavailable_reason:
        rows.append(("CUDA operators", _load.cuda_unavailable_reason))
    return rows


def _toolkit_text(toolkit: Any) -> str:
    if toolkit is None:
        return "none"
    return f"{_build.cuda_toolkit_version(toolkit)} in {toolkit}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def kernel_paths(device: str, dtypes: Sequence[torch.dtype]) -> list[tuple[str, str, str]]:
    """Runs each operator on two short sequences; returns (operator, dtype, "forward; backward")."""
    return [
        (case.name, str(dtype).removeprefix("torch."), _paths(case, device, dtype))
        for case in CASES.values()
        for dtype in dtypes
    ]


def _paths(case: Case, device: str, dtype: torch.dtype) -> str:
    """Returns the kernels that a case's forward and backward take, or why it does not run."""
    choices = {
        name: next((c for c in TYPICAL if c in candidates), candidates[0])
        for name, candidates in case.choices.items()
    }
    try:
        sample = case.sample(Spec(0, Layout((40, 70)), choices), dtype, device)
        leaves = [sample.tensors[name].requires_grad_() for name in case.inputs]
        out = case.call(jagged_cuda, sample)["out"]
        forward = last_kernel(device)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return f"{forward}; {last_kernel(device)}"
    except RuntimeError as error:
        return str(error).strip().split("\n")[0].split(". ")[0]


def main() -> None:
    """Prints the report."""
    for name, text in versions():
        print(f"{name:<15} {text}")
    devices = [("cpu", CPU_DTYPES)]
    if "_C_cuda" in _load.loaded and torch.cuda.is_available():
        devices.append(("cuda", CUDA_DTYPES))
    for device, dtypes in devices:
        print(f"\nkernel paths on {device} (forward; the last of backward)")
        for operator, dtype, path in kernel_paths(device, dtypes):
            print(f"  {operator:<28} {dtype:<9} {path}")


if __name__ == "__main__":
    main()
