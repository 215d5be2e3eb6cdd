"""Every operator is in every layer, and docs/adding_an_op.md names everything to add."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from completeness import PARTS, missing_parts, operators, registered
from plain import run_python

from jagged_cuda import _load, ops
from jagged_cuda.testing.cases import CASES, INDEX_OPERATORS

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs/adding_an_op.md").read_text()
TOY = "jagged_reverse"


def test_every_operator_is_complete() -> None:
    assert not missing_parts(ROOT)


def test_the_layers_name_the_same_operators() -> None:
    assert operators(ROOT) == set(ops.__all__) == CASES.keys() | INDEX_OPERATORS
    for path, registers in (
        ("csrc/cpu", r"\bm\.impl\("),
        ("csrc/cuda", r"\bm\.impl\("),
        ("jagged_cuda/ops", r"(?m)^register\("),
    ):
        files = [path for path in (ROOT / path).iterdir() if path.is_file()]
        found = {path.stem for path in files if re.search(registers, path.read_text())}
        assert found == operators(ROOT), path
    assert registered(ROOT) >= operators(ROOT)


def test_kernels_of_sm90a_alone_return_at_once_elsewhere() -> None:
    """Their shared memory, aligned for TMA, tells which they are (prim/sm90a.cuh)."""
    begins = re.compile(r"extern __shared__ __align__\(1024\) char \w+\[\];\n(.*)\n")
    lines = [
        (path.name, line.strip())
        for path in sorted((ROOT / "csrc" / "cuda" / "kernels").rglob("*.cu*"))
        for line in begins.findall(path.read_text())
    ]
    assert len(lines) > 15
    assert [name for name, line in lines if line != "if (!ptx::kIsSm90a) return;"] == []


def test_the_table_of_promises_names_tests() -> None:
    """Each test that docs/testing.md names exists."""
    text = (ROOT / "docs" / "testing.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 40
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_the_guide_names_every_place() -> None:
    for part in PARTS:
        assert f"`{part.place}`" in GUIDE, part.name


@dataclass(frozen=True)
class Step:
    """One block of code of the guide, and where it goes."""

    path: str
    code: str
    anchor: str | None
    before: bool

    def apply(self, root: Path) -> None:
        target = root / self.path
        if self.anchor is None:
            assert not target.exists(), f"{self.path} is there already"
            target.write_text(self.code)
            return
        text = target.read_text()
        # Without a line's end in the anchor, the whole line that begins so.
        found = re.search(rf"(?m)^{re.escape(self.anchor)}.*\n", text)
        assert found, f"the guide's anchor {self.anchor!r} is not in {self.path}"
        at = found.start() if self.before else found.end()
        target.write_text(text[:at] + self.code + text[at:])


BLOCK = re.compile(
    r"^(?:New file `(?P<new>[^`\n]+)`|In `(?P<old>[^`\n]+)`, (?P<side>after|before) "
    r"(?:`` (?P<quoted>[^\n]+) ``|`(?P<anchor>[^\n]+)`)):\n\n"
    r"```\w*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def guide_steps() -> list[Step]:
    found = BLOCK.finditer(GUIDE)
    steps = [
        Step(m["new"] or m["old"], m["code"], m["quoted"] or m["anchor"], m["side"] == "before")
        for m in found
    ]
    assert len(steps) == GUIDE.count("```") // 2, "a block of the guide is in no known form"
    return steps


STEPS = guide_steps()


def copy_project(target: Path) -> Path:
    for name in ("csrc", "jagged_cuda", "triton_ref", "tests", "docs", "README.md"):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "_prebuilt.json")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy(source, target / name)
    return target


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, without the toy operator."""
    return copy_project(tmp_path_factory.mktemp("project"))


def with_toy(project: Path, target: Path, without: Step | None = None) -> Path:
    shutil.copytree(project, target)
    for step in STEPS:
        if step != without:
            step.apply(target)
    return target


def test_following_the_guide_completes_an_operator(project: Path, tmp_path: Path) -> None:
    assert not missing_parts(project)
    assert not missing_parts(with_toy(project, tmp_path / "toy"))


@pytest.mark.parametrize("step", STEPS, ids=[f"{i}-{s.path}" for i, s in enumerate(STEPS)])
def test_a_part_that_is_left_out_is_named(project: Path, tmp_path: Path, step: Step) -> None:
    missing = missing_parts(with_toy(project, tmp_path / "toy", without=step))
    assert missing
    for text in missing:
        assert text.startswith(f"{TOY}: ")
        assert f"({step.path})" in text


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name.replace(" ", "_"))
def test_a_part_that_an_operator_loses_is_named(
    project: Path, tmp_path: Path, part: object
) -> None:
    """The same with the operators that are there: without the file, or without the words."""
    op = "jagged_softmax"
    root = shutil.copytree(project, tmp_path / "less")
    path = root / part.place.replace("<op>", op)
    if "<op>" in part.place:
        path.unlink()
    else:
        kept = path.read_text().splitlines(keepends=True)
        pattern = part.pattern.replace("<op>", op)
        path.write_text("".join(line for line in kept if not re.search(pattern, line)))
    assert f"{op}: {part.name} ({part.place.replace('<op>', op)})" in missing_parts(root)


@pytest.mark.parametrize("place", ["csrc/cpu/<op>.cpp", "csrc/cuda/<op>.cpp"])
def test_a_gradient_kernel_that_is_lost_is_named(project: Path, tmp_path: Path, place: str) -> None:
    root = shutil.copytree(project, tmp_path / "less")
    path = root / place.replace("<op>", "jagged_softmax")
    path.write_text(path.read_text().replace('m.impl("jagged_softmax_backward"', "nothing("))
    (missing,) = missing_parts(root)
    assert missing.startswith("jagged_softmax_backward: ")
    assert f"({path.relative_to(root)})" in missing


def test_the_guides_operator_works(project: Path, tmp_path: Path) -> None:
    """It compiles, and it is right on each device here, forward and backward."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler to compile the guide's operator with")
    root = with_toy(project, tmp_path / "toy")
    # A prebuilt library for CUDA loads without a GPU too.
    has_cuda = _load.cuda_library is not None and torch.cuda.is_available()
    devices = ["cpu"] + ["cuda"] * has_cuda
    # In the cache that the tests use, ninja compiles what the guide adds and changes, no more.
    command = ["-m", "jagged_cuda.testing", TOY, "--seed", *map(str, range(6))]
    command += ["--dtype", "float32", "bfloat16"]
    for device in devices:
        done = run_python(*command, "--device", device, cwd=root, PYTHONPATH=str(root))
        assert f"{TOY}: right for 6 seeds" in done.stdout
