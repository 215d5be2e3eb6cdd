"""The wheel and the source distribution, what the libraries need of others, and what git tracks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import filelock
import pytest
import torch
from plain import run_python

import jagged_cuda
from jagged_cuda import _build, _load

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="packaging is tested only in a checkout"
)


def _output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _tracked() -> list[Path]:
    listed = _output_of("git", "ls-files", "-co", "--exclude-standard", "-z")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, or would have: a build leaves its traces there."""
    copy = tmp_path_factory.mktemp("checkout") / "jagged_cuda"
    for path in _tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return copy


def _build_package(checkout: Path, what: str) -> Path:
    # Where `make wheel` compiles: what it has compiled is not compiled again.
    objects = ROOT / "build" / f"temp.linux-{os.uname().machine}-{sys.implementation.cache_tag}"
    objects.mkdir(parents=True, exist_ok=True)
    (checkout / "setup.cfg").write_text(f"[build_ext]\nbuild_temp = {objects}\n")
    script = f'import setuptools.build_meta as backend; print(backend.build_{what}("dist"))'
    with filelock.FileLock(objects / "lock"):  # .ci/run builds the CUDA library
        done = run_python("-c", script, cwd=checkout, TORCH_CUDA_ARCH_LIST="")
    return checkout / "dist" / done.stdout.strip().split("\n")[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return _build_package(checkout, "wheel")


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    return _build_package(checkout, "sdist")


def _names(checkout: Path, *folders: str) -> set[str]:
    return {
        path.relative_to(checkout).as_posix()
        for folder in folders
        for path in (checkout / folder).rglob("*")
        if path.suffix in (".py", *_build.SOURCE_SUFFIXES)
    }


def test_the_wheel_serves_every_python_from_3_10(wheel: Path) -> None:
    name = f"jagged_cuda-{jagged_cuda.__version__}-cp310-abi3-linux_{os.uname().machine}.whl"
    assert wheel.name == name


def test_what_is_in_the_wheel(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = json.loads(archive.read("jagged_cuda/_prebuilt.json"))
        library = archive.read("jagged_cuda/_C_cpu.abi3.so")
        metadata = archive.read(f"{_info_folder(names)}/METADATA").decode()
    assert {f"jagged_cuda/{name}" for name in _names(checkout, "csrc")} <= names
    assert {"jagged_cuda/_C_cpu.abi3.so", "jagged_cuda/py.typed", "jagged_cuda/info.py"} <= names
    assert _names(checkout, "jagged_cuda") == {name for name in names if name.endswith(".py")}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"jagged_cuda", _info_folder(names)}
    assert record["source_hash"] == _build.source_hash(checkout / "csrc")
    assert f"Version: {jagged_cuda.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = re.findall(r"^Requires-Dist: (\S+)$", metadata, re.MULTILINE)
    assert required == ["torch>=2.10", "ninja"]  # the others are extras, marked as such
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert str(checkout).encode() not in library
    assert str(Path(torch.__file__).parent).encode() not in library


def _info_folder(names: set[str]) -> str:
    return next(name.split("/")[0] for name in names if ".dist-info/" in name)


def test_an_installed_wheel_loads_its_libraries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = """
        from jagged_cuda import _load
        library = _load.loaded['_C_cpu']
        print(library.origin, library.path, _load.find_csrc())
    """
    place = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = run_python("-c", script, cwd=tmp_path, **place)
    package = tmp_path / "jagged_cuda"
    assert done.stdout.split() == [
        "prebuilt",
        str(package / "_C_cpu.abi3.so"),
        str(package / "csrc"),
    ]


def test_what_is_in_the_source_distribution(sdist: Path, checkout: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _names(checkout, "csrc", "jagged_cuda", "triton_ref") <= names
    wanted = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "jagged_cuda/_build.py"}
    assert wanted <= names
    assert {"tests/test_packaging.py", "triton_ref/__init__.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_without_torch_the_build_says_what_to_install(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    script = 'import setuptools.build_meta as backend; backend.build_wheel("dist")'
    done = run_python("-c", script, cwd=checkout, status=1, PYTHONPATH=str(tmp_path))
    assert done.stderr.strip().split("\n")[-1] == (
        "error: jagged_cuda is compiled against the torch that you run, and this environment has "
        "none (no torch here): pip install 'torch>=2.10', then pip install --no-build-isolation "
        "jagged_cuda (or . in a checkout)."
    )


@pytest.mark.parametrize("library", _build.LIBRARIES)
def test_the_libraries_need_nothing_that_changes_with_torch_or_python(library: str) -> None:
    loaded = _load.loaded.get(library)
    if loaded is None:
        pytest.skip(f"{library} is not loaded: {_load.cuda_unavailable_reason}")
    tools = [shutil.which("nm"), shutil.which("readelf")]
    if None in tools:
        pytest.skip("binutils is not installed")
    undefined = _output_of("nm", "-D", "--undefined-only", str(loaded.path))
    assert "aoti_torch_" in undefined or "torch_" in undefined
    assert re.findall(r" (?:_ZNK?2at|_ZNK?3c10|_?Py[A-Z_])\S*", undefined) == []
    needed = _output_of("readelf", "-d", str(loaded.path))
    assert not re.search(r"libpython|libtorch_python|RPATH|RUNPATH", needed), needed


@pytest.mark.parametrize("archs", ["8.0;9.0a;10.0", ""])
def test_make_wheel_takes_the_architectures(archs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    command = ("make", "-n", "wheel", "VENV=", f"PYTHON={sys.executable}", f"ARCHS={archs}")
    printed = _output_of(*command)
    assert ("TORCH_CUDA_ARCH_LIST='8.0;9.0a;10.0' " in printed) == bool(archs)
    assert ("TORCH_CUDA_ARCH_LIST" in printed) == bool(archs)


# --- what CI checks of a wheel


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wheel_passes_what_ci_checks(
    wheel: Path, check_wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check_wheel.problems_of_file(wheel) == []
    other = tmp_path / wheel.name.replace("cp310-abi3", "cp311-cp311")
    shutil.copy(wheel, other)
    monkeypatch.setattr(check_wheel, "MAX_BYTES", 1000)
    assert len(check_wheel.problems_of_file(other)) == 2


@pytest.mark.parametrize("body", ["return 1;", "std::exit(1);"])
def test_a_library_that_would_end_the_process(
    body: str, check_wheel: ModuleType, tmp_path: Path
) -> None:
    source, library = tmp_path / "host.cpp", tmp_path / "host.so"
    source.write_text(f'#include <cstdlib>\nextern "C" int launch() {{ {body} }}\n')
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", library], check=True)
    problems = check_wheel.problems_of_library(library)
    assert [("exit()" in problem) for problem in problems] == [True] * ("exit" in body)


# --- docs/building.md


def sentences() -> list[str]:
    """Every sentence that building and loading can raise or warn of, with … for what differs."""
    found = []
    for path in ("jagged_cuda/_build.py", "jagged_cuda/_load.py", "setup.py"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                values = node.args if node.func.id in ("BuildError", "SystemExit") else []
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("why_"):
                returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                values = [v.elts[0] if isinstance(v, ast.Tuple) else v for v in returned if v]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values = [node.value] if node.targets[0].id in ("why", "problem") else []
                values += [
                    v for n in values if isinstance(n, ast.IfExp) for v in (n.body, n.orelse)
                ]
            found += [text for text in map(_literal, values) if len(text.strip("… ")) > 10]
    return found


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return ""


def test_every_message_is_explained_and_no_other() -> None:
    text = (ROOT / "docs" / "building.md").read_text().partition("## When it does not work")[2]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", text, re.MULTILINE)[2:]
    patterns = {row: ".*".join(map(re.escape, row.split("…"))) for row in rows}
    raised = sentences()
    assert len(raised) > 20

    def matches(pattern: str, sentence: str) -> bool:
        return re.search(pattern, sentence, re.DOTALL) is not None

    unexplained = [s for s in raised if not any(matches(p, s) for p in patterns.values())]
    assert unexplained == []
    assert [row for row, p in patterns.items() if not any(matches(p, s) for s in raised)] == []


def test_nothing_in_the_repository_names_one_machine() -> None:
    """Absolute paths of homes and workplaces, and hosts of package registries."""
    private = re.compile(
        r"/(?:wor[k]|hom[e]|roo[t]|User[s]|far[m]|opt/venv[s])/|/[.]librar[y]\b"
        r"|pypi[.]or[g]|pythonhoste[d]"
    )
    found = []
    for path in _tracked():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".png", ".gz", ".csv"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
            if private.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


def test_the_sources_of_both_libraries_are_found() -> None:
    """`load` names objects by base names, which must therefore be unique within a library."""
    for library in _build.LIBRARIES:
        sources = _build.library_sources(CSRC, library)
        assert len(sources) > 10 and all(path.is_file() for path in sources)
        assert [n for n, times in Counter(p.name for p in sources).items() if times > 1] == []


def test_each_source_is_compiled_once_and_the_long_ones_alone() -> None:
    for library in _build.LIBRARIES:
        sources = _build.library_sources(CSRC, library)
        groups = _build.joined(sources)
        assert sorted(path for group in groups for path in group) == sorted(sources)
        assert len(groups) < len(sources)
        for group in groups:
            assert len({path.suffix for path in group}) == 1
            kernels = [path.name for path in group if path.suffix == ".cu"]
            assert len(group) == 1 or not any(n.startswith(_build.ALONE) for n in kernels)
    names = [path.stem for path in _build.library_sources(CSRC, "_C_cuda") if path.suffix == ".cu"]
    assert {name for group in _build.JOINED_KERNELS for name in group} <= set(names)


def test_the_longest_to_compile_are_first() -> None:
    names = [path.name for path in _build.library_sources(CSRC, "_C_cuda")]
    turns = [
        next(i for i, name in enumerate(names) if name.startswith(long)) for long in _build.LONGEST
    ]
    assert turns == sorted(turns) and turns[0] == 0
    kernels = sum(name.endswith(".cu") for name in names)
    assert all(name.endswith(".cu") for name in names[:kernels])


def test_kernels_include_no_header_of_torch() -> None:
    """nvcc would find one, and would take 6 s a file instead of 2."""
    kernels = [p for p in (CSRC / "cuda" / "kernels").rglob("*") if p.is_file()]
    assert len(kernels) > 50
    include = re.compile(r'#\s*include\s*[<"](torch|ATen|c10)/')
    assert [p.name for p in kernels if include.search(p.read_text())] == []
