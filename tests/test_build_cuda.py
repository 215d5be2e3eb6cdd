"""Building for CUDA: toolkits, architectures, prebuilt libraries, and why there is no CUDA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_package import PACKAGE, SOURCES, WITH_GPU, Toy

from jagged_cuda import _build, _load
from jagged_cuda._build import Build, BuildError

# ---------------------------------------------------------------------------------------------
# CUDA: a problem there leaves the CPU library serving, with one sentence


def _toolkit(folder: Path, version: int) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "bin" / "nvcc").write_text("#!/bin/sh\necho sm_80\n")
    (folder / "bin" / "nvcc").chmod(0o755)
    (folder / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return folder


def test_a_gpu_without_nvcc_warns_once_and_the_cpu_serves(toy: Toy) -> None:
    no_toolkit = f"{WITH_GPU}; _load._build.cuda_home_candidates = lambda: []"
    result, err = toy.load(no_toolkit)
    reason = (
        "jagged_cuda cannot use CUDA: nvcc was not found in CUDA_HOME, /usr/local/cuda, PATH or an "
        "installed wheel: install CUDA 13 and set CUDA_HOME to its folder."
    )
    assert result["answer"] == 42
    assert result["reason"] == reason
    assert list(result["loaded"]) == ["_C_cpu"]
    assert err.count("RuntimeWarning") == 1
    assert f"RuntimeWarning: {reason} Its CPU operators work." in err


def test_cuda_operators_raise_the_reason() -> None:
    library = torch.library.Library("jagged_cuda_toy", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    _load._explain_cuda_calls("buy a GPU.", "jagged_cuda_toy")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"^buy a GPU\.$"):
        torch.ops.jagged_cuda_toy.twice.default.redispatch(keys, torch.ones(1))


def test_a_toolkit_of_another_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _toolkit(tmp_path / "cuda-12.8", 12080)
    with pytest.raises(BuildError) as error:
        _build.check_nvcc(old, "13.0")
    assert str(error.value) == (
        f"torch is built for CUDA 13.0 and the toolkit in {old} is CUDA 12.8: install CUDA 13 "
        f"and set CUDA_HOME to its folder."
    )
    monkeypatch.setattr(_build, "cuda_home_candidates", lambda: [old])
    with pytest.raises(BuildError, match=r"has no libcudart\.so: install all of it"):
        Build("_C_cuda", tmp_path, (), torch)._link_folder(tmp_path / "link", tmp_path)

    new = _toolkit(tmp_path / "cuda-13.0", 13000)
    hollow = tmp_path / "wrapper"  # an nvcc that is a script far from its toolkit
    (hollow / "bin").mkdir(parents=True)
    shutil.copy(old / "bin" / "nvcc", hollow / "bin" / "nvcc")
    monkeypatch.setattr(_build, "cuda_home_candidates", lambda: [hollow, old, new])
    assert _build.find_cuda_home("13.0") == new
    assert _build.find_cuda_home("12.6") == old
    assert _build.find_cuda_home("11.8") == old
    monkeypatch.setattr(_build, "cuda_home_candidates", lambda: [hollow])
    assert _build.find_cuda_home("13.0") is None


def test_cuda_home_is_looked_for_where_it_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/first")
    monkeypatch.setenv("CUDA_PATH", "/second")
    assert _build.cuda_home_candidates()[:3] == [
        Path("/first"),
        Path("/second"),
        Path("/usr/local/cuda"),
    ]


def test_why_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    h100, t4 = _load.Gpu("NVIDIA H100", (9, 0)), _load.Gpu("Tesla T4", (7, 5))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA: install a CUDA build" in (_load.why_no_cuda(None) or "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _load.why_no_cuda(None) == "no NVIDIA GPU is visible to this process."
    assert _load.why_no_cuda(_load.Driver("580.1", (13, 0), (h100,))) is None
    assert _load.why_no_cuda(_load.Driver("550.54", (12, 4), (h100,))) == (
        "the NVIDIA driver 550.54 supports CUDA 12.4 and torch is built for CUDA 13.0: update the "
        "driver, or install torch for its CUDA."
    )
    assert _load.why_no_cuda(_load.Driver("580.1", (13, 0), (t4,))) == (
        "jagged_cuda needs Ampere (8.0) or newer and this is Tesla T4 (compute capability 7.5): "
        "use the CPU."
    )
    assert _load.why_no_cuda(_load.Driver("580.1", (13, 0), (t4, h100))) is None


def test_no_gpu_is_visible_where_the_environment_hides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        _load.find_driver.cache_clear()
        assert _load.find_driver() is None
    _load.find_driver.cache_clear()


needs_nvcc = pytest.mark.skipif(
    _build.find_cuda_home(torch.version.cuda) is None, reason="no CUDA toolkit on this machine"
)


@needs_nvcc
def test_both_libraries_compile_at_once(toy: Toy) -> None:
    """And each is kept, and loaded, though the other cannot be compiled."""
    home = _build.find_cuda_home("13.0")
    assert home is not None
    for name in ("c10_cuda", "torch_cuda"):
        toy.link("/dev/null", toy.torch / "lib" / f"lib{name}.so")
    folders = (toy.torch / "lib", home / "lib64", home / "lib")
    toy.env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
    major = (_build.cuda_toolkit_version(home) or "13").split(".")[0]
    with_gpu = WITH_GPU.replace("torch.version.cuda = '13.0'", f"torch.version.cuda = '{major}.0'")
    (toy.csrc / "cuda" / "toy.cpp").write_text("this does not compile\n")
    result, err = toy.load(with_gpu)
    lines = [line for line in err.splitlines() if line.startswith("jagged_cuda: ")]
    assert lines[0].startswith("jagged_cuda: compiling for the CPU and this GPU (9.0a) with nvcc ")
    assert list(result["loaded"]) == ["_C_cpu"]
    assert "compiling csrc/cuda/toy.cpp failed" in result["reason"]
    (toy.csrc / "cuda" / "toy.cpp").write_text(SOURCES["cuda/toy.cpp"])
    result, err = toy.load(with_gpu)
    assert result["reason"] is None
    assert {name: origin for name, (_, origin) in result["loaded"].items()} == dict.fromkeys(
        _build.LIBRARIES, "compiled here"
    )
    assert toy.load(with_gpu)[1] == ""


@needs_nvcc
def test_the_cuda_library_compiles_for_several_architectures(toy: Toy) -> None:
    """As in a wheel, under a CPU build of torch too."""
    shutil.copy(PACKAGE.parent / "setup.py", toy.root)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", "built"]
    toy.env |= {"TORCH_CUDA_ARCH_LIST": "8.0;9.0;10.0+PTX", "PYTHONPATH": ""}

    def build() -> Path:
        done = subprocess.run(command, cwd=toy.root, env=toy.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return toy.root / "built" / "jagged_cuda" / "_C_cuda.abi3.so"

    needed = subprocess.run(
        ["readelf", "-d", str(build())], capture_output=True, text=True, check=True
    ).stdout
    assert "[libcudart.so." in needed
    assert "[libtorch_cuda.so]" in needed
    assert "python" not in needed and "c10" not in needed
    assert "RPATH" not in needed and "RUNPATH" not in needed
    assert str(toy.root).encode() not in build().read_bytes()
    record = json.loads((toy.root / "built" / "jagged_cuda" / "_prebuilt.json").read_text())
    assert record["archs"] == "8.0;9.0a;10.0+PTX"

    compiled = len(toy.compiled())
    build()
    assert len(toy.compiled()) == compiled  # ninja keeps what has not changed
    (toy.csrc / "cuda" / "kernels" / "toy.cu").write_text("this does not compile\n")
    os.utime(toy.csrc / "cuda" / "kernels" / "toy.cu", (0, 0))
    failed = subprocess.run(command, cwd=toy.root, env=toy.env, capture_output=True, text=True)
    last = failed.stderr.strip().split("\n")[-1]
    assert last.startswith("error: Error compiling objects for extension: the compiler's message")


# ---------------------------------------------------------------------------------------------
# Architectures and prebuilt libraries


def test_architecture_lists() -> None:
    assert _build.parse_archs("8.0 9.0;10.0+PTX,8.6") == ("8.0", "8.6", "9.0a", "10.0+PTX")
    assert _build.parse_archs("9.0+PTX") == ("9.0a+PTX",)
    assert _build.gencode("9.0a+PTX") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    for wrong in ("hopper", "9", "7.5", "8.0;sm_90"):
        with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST must list architectures"):
            _build.parse_archs(wrong)


@pytest.mark.parametrize(
    "arch, covered, not_covered",
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(9, 0), (7, 5)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("9.0a", [(9, 0)], [(8, 0), (10, 0)]),
        ("9.0a+PTX", [(9, 0), (10, 0)], [(8, 0)]),
        ("10.0", [(10, 0), (10, 3)], [(12, 0), (9, 0)]),
        ("10.0+PTX", [(10, 0), (10, 3), (12, 0)], [(9, 0)]),
    ],
)
def test_which_gpus_an_architecture_covers(
    arch: str, covered: list[tuple[int, int]], not_covered: list[tuple[int, int]]
) -> None:
    assert all(_build.covers(arch, capability) for capability in covered)
    assert not any(_build.covers(arch, capability) for capability in not_covered)


def test_the_architectures_of_the_gpus_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    gpus = tuple(_load.Gpu("GPU", c) for c in ((9, 0), (8, 6), (9, 0), (7, 5), (12, 0)))
    assert _load.archs_of_gpus(gpus) == ("8.6", "9.0a", "12.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    assert _load.archs_of_gpus(gpus) == ("8.0", "9.0a")


def test_prebuilt_libraries_that_fit_are_used(toy: Toy) -> None:
    toy.prebuild("8.0;9.0a", "13.0")
    result, err = toy.load(WITH_GPU)
    assert {name: origin for name, (_, origin) in result["loaded"].items()} == {
        "_C_cpu": "prebuilt",
        "_C_cuda": "prebuilt",
    }
    assert result["reason"] is None
    assert err == ""
    assert toy.calls() == 0


def test_prebuilt_libraries_of_other_sources_are_not_used(toy: Toy) -> None:
    toy.prebuild("8.0;9.0a", "13.0")
    (toy.csrc / "answer.h").write_text("constexpr int kAnswer = 44;\n")
    result, err = toy.load()
    assert result["answer"] == 44
    assert result["loaded"]["_C_cpu"][1] == "compiled here"
    assert (
        "the sources have changed since the libraries beside the package were built, so compiling"
        in err
    )


def test_prebuilt_libraries_for_another_gpu_or_cuda_are_not_used(toy: Toy) -> None:
    toy.prebuild("8.0", "13.0")
    prebuilt = _load.find_prebuilt(toy.package)
    assert prebuilt is not None
    h100, a10 = _load.Gpu("NVIDIA H100", (9, 0)), _load.Gpu("NVIDIA A10", (8, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        assert _load.why_unfit(prebuilt, (a10,)) is None
        assert _load.why_unfit(prebuilt, (a10, h100)) == (
            "the installed CUDA library (8.0) does not cover NVIDIA H100 (compute capability 9.0)"
        )
        patch.setattr(torch.version, "cuda", "12.8")
        assert _load.why_unfit(prebuilt, (a10,)) == (
            "the installed CUDA library is for CUDA 13 and torch is for CUDA 12"
        )
    result, _ = toy.load(f"{WITH_GPU}; _load._build.cuda_home_candidates = lambda: []")
    assert result["loaded"]["_C_cpu"][1] == "prebuilt"
    assert "nvcc was not found" in result["reason"]
    (toy.package / "_prebuilt.json").write_text("{")
    assert _load.find_prebuilt(toy.package) is None


def test_binaries_are_made_small_or_soon() -> None:
    fast = "-Xfatbin=-compress-all"
    assert _build.toolkit_flags("13.0", cores=2, small=True) == ("--compress-mode=size",)
    assert _build.toolkit_flags("13.0", cores=2, small=False) == (fast,)
    assert _build.toolkit_flags("13.0", cores=16, small=False) == (fast,)
    assert _build.toolkit_flags("13.0", cores=32, small=False) == (fast, "-Xptxas=-split-compile=4")
    for toolkit in ("12.8", None):
        assert _build.toolkit_flags(toolkit, cores=32, small=True) == (fast,)
