"""torch.compile, torch.export, AOTInductor and autocast."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import CASES, Case, Tensors
from jagged_cuda.testing.judge import check
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
CHOICES: dict[str, Any] = {"D": 8, "N": 11, "trailing": (6,), "dims": (8, 16), "heads": (6, 3)}
CHOICES |= {"causal": True, "window_size": (-1, -1), "scale": 0.5, "cross": False}
CHOICES |= {"max_len": False, "transpose": True, "capacity": 600}
CHOICES |= {"padded_len": 13, "total": 51, "dim": -2}
CHOICES |= {"queries": 9}
# Neither T nor B agrees, and no two sizes are equal, which dynamic shapes would take for one.
FIRST, SECOND = Layout((5, 0, 9, 3), base=1, tail=2), Layout((4, 21, 2, 0, 6, 1, 7), tail=3)

# On a CPU inductor starts the C++ compiler, slowly: once is enough there.
COMPILED = [
    pytest.param(
        case,
        backend,
        device,
        id=f"{case.name}-{backend}-{device}",
        marks=[pytest.mark.cuda] if device == "cuda" else [],
    )
    for case in CASES.values()
    for backend in ("aot_eager", "inductor")
    for device in ("cpu", "cuda")
    if (backend, device) != ("inductor", "cpu") or case.name == "jagged_flash_attention"
]


def draw(
    case: Case, layout: Layout, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Sample:
    spec = case.spec("small", 0)
    spec = dataclasses.replace(
        spec,
        layout=layout,
        kv_layout=None,
        choices=dict(spec.choices) | CHOICES,
        storage={},
        poisoned=False,
    )
    return case.sample(spec, dtype, device)


def function_of(case: Case) -> Callable[[Tensors, Tensor], Tensors]:
    """The operator between two pointwise operations, which a compiler may want to fuse."""
    spec = draw(case, FIRST, "cpu").spec

    def function(tensors: Tensors, offsets: Tensor) -> Tensors:
        scaled = {name: 2.0 * (0.5 * t) for name, t in tensors.items()}
        found = case.function(jagged_cuda, spec, scaled, offsets, None)
        return {name: (0.5 * t) * 2.0 for name, t in found.items()}

    return function


def leaves_of(sample: Sample) -> Tensors:
    return {name: t.detach().requires_grad_() for name, t in sample.tensors.items()}


def run_backward(function: Callable[..., Tensors], sample: Sample) -> tuple[Tensors, Tensors]:
    """Outputs and gradients, and the cotangents they came from."""
    leaves = leaves_of(sample)
    found = function(leaves, sample.offsets)
    cotangents = {name: torch.ones_like(t) for name, t in found.items()}
    gradients = torch.autograd.grad(
        list(found.values()), list(leaves.values()), list(cotangents.values())
    )
    results = {name: t.detach() for name, t in found.items()}
    results |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return results, cotangents


@pytest.mark.parametrize(("case", "backend", "device"), COMPILED)
def test_compile(case: Case, backend: str, device: str) -> None:
    """No graph break, forward and backward, and no compilation again for another T and B."""
    if backend == "inductor" and device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor compiles for the CPU with g++, which is not installed")
    torch._dynamo.reset()
    compiled = torch.compile(function_of(case), fullgraph=True, dynamic=True, backend=backend)
    for index, layout in enumerate((FIRST, SECOND)):
        sample = draw(case, layout, device)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found, cotangents = run_backward(compiled, sample)
        check(case, sample, found, cotangents)


@CASE
def test_compile_obeys_the_precision_setting(case: Case) -> None:
    """The setting is read while tracing: it is a constant of the graph, not a graph break."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    sample = draw(case, FIRST, torch.device("cpu"))
    before = torch.backends.cuda.matmul.fp32_precision
    seen = []
    try:
        for precision in ("ieee", "tf32"):
            torch._dynamo.reset()
            torch.backends.cuda.matmul.fp32_precision = precision
            torch.compile(function_of(case), fullgraph=True, backend=keep)(
                sample.tensors, sample.offsets
            )
            (node,) = [n for n in graphs[-1].graph.nodes if case.name in str(n.target)]
            seen.append(node.args[-1] if case.product else True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ([False, True] if case.product else [True, True])


class Module(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function = function_of(case)

    def forward(self, tensors: Tensors, offsets: Tensor) -> Tensors:
        return self.function(tensors, offsets)


def exported(case: Case, device: torch.device) -> torch.export.ExportedProgram:
    sample = draw(case, FIRST, device)
    rows, batch = torch.export.Dim("T", min=2), torch.export.Dim("B", min=2)
    dims = {"q": rows, "kv": rows, "seq": batch, "matrix": torch.export.Dim("E", min=2)}
    shapes = {name: {0: dims[case.rows[name]]} for name in sample.tensors}
    return torch.export.export(
        Module(case),
        (sample.tensors, sample.offsets),
        dynamic_shapes={"tensors": shapes, "offsets": {0: batch + 1}},
    )


@CASE
def test_export(case: Case, device: torch.device) -> None:
    program = exported(case, device)
    sample = draw(case, SECOND, device)
    check(case, sample, program.module()(sample.tensors, sample.offsets), None)


def compiler_with_shared_library(folder: Path) -> str:
    """A C++ compiler that links the process's libstdc++.

    AOTInductor's libraries share strings and streams with torch; one with a libstdc++ of its own
    inside, as some compilers make, crashes when it is loaded.
    """
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text("#include <iostream>\nvoid probe() { std::cout << 1; }\n")
    for compiler in (os.environ.get("CXX", "g++"), "g++", "c++"):
        command = [*compiler.split(), "-shared", "-fPIC", str(source), "-o", str(library)]
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run(command).returncode == 0 and b"libstdc++.so.6" in library.read_bytes():
            return compiler
    raise RuntimeError("no C++ compiler here links the shared libstdc++")


@CASE
@pytest.mark.cuda
def test_aot_inductor_package(case: Case, tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with torch._inductor.config.patch("cpp.cxx", (None, compiler_with_shared_library(tmp_path))):
        path = torch._inductor.aoti_compile_and_package(
            exported(case, device), package_path=str(tmp_path / "model.pt2")
        )
    sample = draw(case, SECOND, device)
    loaded = torch._inductor.aoti_load_package(path)
    check(case, sample, loaded(sample.tensors, sample.offsets), None)


@CASE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(case: Case, dtype: torch.dtype, compiled: bool, device: torch.device) -> None:
    """Products and attention run in the autocast dtype, softmax in float32, copies and sums in that
    of their input; gradients are like inputs."""
    torch._dynamo.reset()
    sample = draw(case, FIRST, device)
    function = function_of(case)
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves = leaves_of(sample)
    if case.autocast != "lower_precision":
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
    with torch.autocast(device.type, dtype=dtype):
        found = function(leaves, sample.offsets)
    expected = torch.float32 if case.autocast == "float32" else dtype
    assert found["out"].dtype == expected
    if "lse" in found:
        assert found["lse"].dtype == torch.float32
    gradients = torch.autograd.grad(found["out"].sum(), list(leaves.values()))
    assert [g.dtype for g in gradients] == [t.dtype for t in leaves.values()]
    # The same bits as with operands cast by hand.
    cast = {name: t.detach().to(expected) for name, t in leaves.items()}
    by_hand = function_of(case)(cast, sample.offsets)
    torch.testing.assert_close(found["out"].detach(), by_hand["out"], rtol=0, atol=0)


@CASE
def test_autocast_leaves_float64_alone(case: Case, device: torch.device) -> None:
    sample = draw(case, FIRST, device, torch.float64)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert function_of(case)(sample.tensors, sample.offsets)["out"].dtype == torch.float64


@CASE
def test_no_gradient_is_computed_for_what_needs_none(case: Case, device: torch.device) -> None:
    sample = draw(case, FIRST, device)
    for name in case.differentiable:
        leaves = {n: t.detach().requires_grad_(n == name) for n, t in sample.tensors.items()}
        function_of(case)(leaves, sample.offsets)["out"].sum().backward()
        assert {n for n, t in leaves.items() if t.grad is not None} == {name}
