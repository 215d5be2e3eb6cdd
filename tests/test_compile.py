"""torch.compile, torch.export, AOTInductor and autocast."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import CASE, general, spec_of
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import EVERY, Case, Tensors
from jagged_cuda.testing.judge import check
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

CHOICES: dict[str, Any] = {"D": 8, "N": 11, "trailing": (6,), "dims": (8, 16), "heads": (6, 3)}
CHOICES |= {"causal": True, "window_size": (-1, -1), "scale": 0.5, "cross": False}
CHOICES |= {"max_len": False, "transpose": True, "capacity": 600}
CHOICES |= {"padded_len": 13, "total": 51, "dim": -2}
CHOICES |= {"queries": 9, "p": 0.3}
# Neither T nor B agrees, and no two sizes are equal, which dynamic shapes would take for one.
FIRST, SECOND = Layout((5, 0, 9, 3), base=1, tail=2), Layout((4, 21, 2, 0, 6, 1, 7), tail=3)
# Where keys have lengths of their own, T is an argument of some operators, and stays.
FIRST_CROSS = dataclasses.replace(FIRST, tail=SECOND.total - 18)
KEYS = {FIRST_CROSS: Layout((2, 4, 1, 0), base=2, tail=8), SECOND: Layout((1, 5, 3, 2, 0, 4, 6), 1)}

# On a CPU inductor starts the C++ compiler, slowly: once is enough there.
COMPILED = [
    pytest.param(
        case,
        backend,
        device,
        cross,
        id=f"{name}-{backend}-{device}{'-cross' if cross else ''}",
        marks=[pytest.mark.cuda] if device == "cuda" else [],
    )
    for name, case in EVERY.items()
    for backend in ("aot_eager", "inductor")
    for device in ("cpu", "cuda")
    for cross in case.choices.get("cross", (False,))
    if (backend, device) != ("inductor", "cpu") or (name == "jagged_flash_attention" and not cross)
]


def draw(
    case: Case,
    layout: Layout,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    cross: bool = False,
) -> Sample:
    keys = KEYS[layout] if cross else None
    spec = spec_of(layout, poisoned=False, kv_layout=keys, **CHOICES | general(case))
    return case.sample(spec, dtype, device)


def function_of(case: Case, cross: bool = False) -> Callable[..., Tensors]:
    """The operator between two pointwise operations, which a compiler may want to fuse."""
    spec = draw(case, FIRST_CROSS if cross else FIRST, "cpu", cross=cross).spec

    def function(tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None = None) -> Tensors:
        scaled = {name: 2.0 * (0.5 * t) for name, t in tensors.items()}
        found = case.function(jagged_cuda, spec, scaled, offsets, kv_offsets)
        return {name: (0.5 * t) * 2.0 for name, t in found.items()}

    return function


def leaves_of(sample: Sample) -> Tensors:
    return {name: t.detach().requires_grad_() for name, t in sample.tensors.items()}


def run_backward(function: Callable[..., Tensors], sample: Sample) -> tuple[Tensors, Tensors]:
    """Outputs and gradients, and the cotangents they came from."""
    leaves = leaves_of(sample)
    found = function(leaves, sample.offsets, sample.kv_offsets)
    cotangents = {name: torch.ones_like(t) for name, t in found.items()}
    gradients = torch.autograd.grad(
        list(found.values()), list(leaves.values()), list(cotangents.values())
    )
    results = {name: t.detach() for name, t in found.items()}
    results |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return results, cotangents


@pytest.mark.parametrize(("case", "backend", "device", "cross"), COMPILED)
def test_compile(case: Case, backend: str, device: str, cross: bool) -> None:
    """No graph break, forward and backward, and no compilation again for another T and B."""
    if backend == "inductor" and device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor compiles for the CPU with g++, which is not installed")
    torch._dynamo.reset()
    function = function_of(case, cross)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for index, layout in enumerate((FIRST_CROSS if cross else FIRST, SECOND)):
        sample = draw(case, layout, device, cross=cross)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found, cotangents = run_backward(compiled, sample)
        check(case, sample, found, cotangents)


@pytest.mark.parametrize("biased", [False, True])
def test_compile_with_sizes_that_only_the_run_knows(biased: bool, device: torch.device) -> None:
    """As TorchRec's features have them, and queries made of those."""

    def function(counts: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
        rows, queries = counts.tolist()
        x = k.new_ones(rows, 1, 8)
        q = jagged_cuda.jagged_sum(x, offsets)[:, None].expand(-1, queries, -1, -1)
        kv_bias = k[:, 0, 0] if biased else None
        return jagged_cuda.jagged_target_attention(q, k, k, offsets, kv_bias=kv_bias)

    torch._dynamo.reset()
    offsets = torch.tensor([0, 2, 5], device=device)
    k = torch.randn(5, 1, 8, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for queries in (3, 4):
            counts = torch.tensor([5, queries])
            expected = function(counts, k, offsets)
            torch.testing.assert_close(compiled(counts, k, offsets), expected)


@CASE
def test_compile_obeys_the_precision_setting(case: Case) -> None:
    """The setting is read while tracing: it is a constant of the graph, not a graph break."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    sample = draw(case, FIRST, torch.device("cpu"))
    # Of an operator that takes another one's kernels, those are named last.
    (*_, kernel) = [n for n in case.registered(sample) if not n.endswith(("_backward", "_plan"))]
    before = torch.backends.cuda.matmul.fp32_precision
    seen = []
    try:
        for precision in ("ieee", "tf32"):
            torch._dynamo.reset()
            torch.backends.cuda.matmul.fp32_precision = precision
            torch.compile(function_of(case), fullgraph=True, backend=keep)(
                sample.tensors, sample.offsets
            )
            (node,) = [n for n in graphs[-1].graph.nodes if kernel in str(n.target)]
            names = [argument.name for argument in node.target._schema.arguments]
            seen.append(node.args[names.index("allow_tf32")] if case.product else True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ([False, True] if case.product else [True, True])


# Models of several operators, since what takes the time is to compile one: (name, cross).
GROUPS = {
    "self": [(name, False) for name in EVERY],
    "cross": [
        (name, True) for name, case in EVERY.items() if True in case.choices.get("cross", ())
    ],
}
EXPORTED = [
    pytest.param(*member, id=f"{member[0]}-{group}")
    for group, members in GROUPS.items()
    for member in members
]


class Module(torch.nn.Module):
    """Some operators, each with arguments of its own, by its name."""

    def __init__(self, members: Sequence[tuple[str, bool]]) -> None:
        super().__init__()
        self.functions = {name: function_of(EVERY[name], cross) for name, cross in members}

    def forward(self, arguments: dict[str, Any]) -> dict[str, Tensors]:
        return {name: function(*arguments[name]) for name, function in self.functions.items()}


def samples_of(
    members: Sequence[tuple[str, bool]], device: torch.device, *, first: bool
) -> dict[str, Sample]:
    def layout(cross: bool) -> Layout:
        return (FIRST_CROSS if cross else FIRST) if first else SECOND

    return {name: draw(EVERY[name], layout(cross), device, cross=cross) for name, cross in members}


def arguments_of(samples: dict[str, Sample]) -> dict[str, Any]:
    return {name: (s.tensors, s.offsets, s.kv_offsets) for name, s in samples.items()}


def exported(
    members: Sequence[tuple[str, bool]], device: torch.device
) -> torch.export.ExportedProgram:
    samples = samples_of(members, device, first=True)
    shapes = {}
    for name, cross in members:
        case = EVERY[name]
        rows, batch, keys, elems = (
            torch.export.Dim(f"{letter}_{name}", min=2) for letter in ("T", "B", "K", "E")
        )
        dims = {
            "q": rows,
            "kv": keys if cross else rows,
            "seq": batch,
            "matrix": elems,
            "table": None,
            "features": None,
        }
        of_tensors = {each: {0: dims[case.rows[each]]} for each in samples[name].tensors}
        shapes[name] = (of_tensors, {0: batch + 1}, {0: batch + 1} if cross else None)
    arguments = (arguments_of(samples),)
    return torch.export.export(Module(members), arguments, dynamic_shapes={"arguments": shapes})


def check_all(
    run: Callable[[dict[str, Any]], dict[str, Tensors]],
    members: Sequence[tuple[str, bool]],
    device: torch.device,
) -> None:
    """With another T and B than the program was made with."""
    samples = samples_of(members, device, first=False)
    found = run(arguments_of(samples))
    for name, sample in samples.items():
        check(EVERY[name], sample, found[name], None)


@pytest.mark.parametrize(("name", "cross"), EXPORTED)
def test_export(name: str, cross: bool, device: torch.device) -> None:
    members = [(name, cross)]
    check_all(exported(members, device).module(), members, device)


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


@pytest.mark.parametrize("members", GROUPS.values(), ids=GROUPS)
def test_aot_inductor_package(
    members: Sequence[tuple[str, bool]], device: torch.device, tmp_path: Path
) -> None:
    if shutil.which("g++") is None and "CXX" not in os.environ:
        pytest.skip("AOTInductor compiles with g++, which is not installed")
    with torch._inductor.config.patch("cpp.cxx", (None, compiler_with_shared_library(tmp_path))):
        path = torch._inductor.aoti_compile_and_package(
            exported(members, device), package_path=str(tmp_path / "model.pt2")
        )
    check_all(torch._inductor.aoti_load_package(path), members, device)


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
    # The same bits as with operands cast by hand. Biases are of the dtype of sums, and what has a
    # row for each feature stays as it is.
    kept = {name for name, rows in case.rows.items() if rows in ("features", "table")} | {"kv_bias"}
    cast = {
        name: t.detach() if name in kept else t.detach().to(expected) for name, t in leaves.items()
    }
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
    for name in case.inputs:
        leaves = {n: t.detach().requires_grad_(n == name) for n, t in sample.tensors.items()}
        function_of(case)(leaves, sample.offsets)["out"].sum().backward()
        assert {n for n, t in leaves.items() if t.grad is not None} == {name}
