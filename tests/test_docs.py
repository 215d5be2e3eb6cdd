"""Every snippet of README.md and docs/ runs, and so does every example in a docstring.

A page's Python blocks are executed in order, in one namespace, on the CPU. A block may say behind
the language what it needs, as in "python cuda" or "python torchrec". Commands in other blocks are
not run, but what they name must exist. (docs/adding_an_op.md is executed by test_registration.py;
`make docs` executes the tutorial as a notebook too.)
"""

from __future__ import annotations

import doctest
import functools
import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import generate

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "howto").glob("*.md"))
NEEDS = ("cuda", "torchrec")


class Block(NamedTuple):
    """A fenced block: its language, what it needs, its first line, its text."""

    language: str
    needs: str
    line: int
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    fences = re.finditer(r"^```(\S*) *(.*)\n([\s\S]*?)^```$", text, re.MULTILINE)
    for fence in fences:
        language, needs, body = fence.groups()
        if language == "{code-cell}":
            language, needs = "python", ""
        yield Block(language, needs, text.count("\n", 0, fence.start(3)), body)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


def pages_to_run() -> Iterator[object]:
    """Each page, once for its plain blocks and once more with those that need something."""
    for page in PAGES:
        if page.name == "adding_an_op.md":
            continue
        blocks = python_blocks(page)
        for need in ("", *NEEDS):
            if any(block.needs == need for block in blocks):
                marks = [getattr(pytest.mark, need)] if need else []
                name = page.relative_to(ROOT).as_posix()
                yield pytest.param(page, need, marks=marks, id=f"{name}{need and '-'}{need}")


@pytest.mark.parametrize(("page", "need"), list(pages_to_run()))
def test_snippets_run(
    page: Path, need: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled snippets stop before Inductor's C++, which takes long; test_compile.py has it."""
    eager = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", eager)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**variables, "MASTER_PORT": str(free.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    torch._dynamo.reset()
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in python_blocks(page):
        if block.needs in ("", need):
            code = "\n" * block.line + block.text
            exec(compile(code, str(page), "exec"), namespace)


def test_every_block_says_what_it_needs() -> None:
    for page in PAGES:
        for block in python_blocks(page):
            assert block.needs in ("", *NEEDS), f"{page}:{block.line}: {block.needs}"


# --- commands

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands() -> Iterator[tuple[str, str]]:
    """The lines of shell blocks, with their page; what a generated part reports is a record."""
    for page in PAGES:
        text = re.sub(r"<!-- (summary|speed):[\s\S]*?<!-- end of \1 -->", "", page.read_text())
        for body in re.findall(r"^```(?:sh|bash)?\n([\s\S]*?)^```$", text, re.MULTILINE):
            for line in body.splitlines():
                yield page.relative_to(ROOT).as_posix(), line.partition("  #")[0]


def file_of_module(name: str) -> Path:
    """What `python -m` runs."""
    found = importlib.util.find_spec(name)
    if found and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    return Path(found.origin if found and found.origin else name)


def test_commands_name_what_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    seen = 0
    for page, line in commands():
        where = f"{page}: {line}"
        for target in re.findall(r"^make ([a-z]+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), where
            seen += 1
        found = re.search(r"(?:python|torchrun \S+ \S+) (?:-m )?([\w./]+)(.*)", line)
        if not found or found[1] in ("setup.py", "python", "pytest", "train.py"):
            continue
        path = ROOT / found[1] if found[1].endswith(".py") else file_of_module(found[1])
        assert path.is_file(), where
        sources = path.read_text() + "".join(p.read_text() for p in path.parent.glob("*.py"))
        for option in OPTION.findall(found[2]):
            assert f'"{option}"' in sources, f"{where}: {option}"
        seen += 1
    assert seen > 20


# --- docstrings


def documented() -> Iterator[object]:
    for module in generate.public_modules():
        for name in ("", *generate.public_objects(module)):
            yield pytest.param(module, name, id=f"{module.__name__}{name and '.'}{name}")


# Options of the process: an example of theirs would change it.
WITHOUT_EXAMPLE = {"", "check_errors", "set_checks"}


@pytest.mark.parametrize(("module", "name"), list(documented()))
def test_examples_of_docstrings_run(module: ModuleType, name: str) -> None:
    """Of a module (name is "") and of each public name; a small module may have one for all."""
    value = getattr(module, name) if name else module
    names = {**vars(module), "torch": torch, "jagged_cuda": sys.modules["jagged_cuda"]}
    assert value.__doc__, f"{value} has no docstring"
    if name:
        tests = doctest.DocTestFinder().find(value, name, module=module, globs=names)
        shown = any(test.examples for test in tests) or "\nExample:" in (module.__doc__ or "")
        assert shown or name in WITHOUT_EXAMPLE, f"{name} has no example"
    else:
        tests = [doctest.DocTestParser().get_doctest(value.__doc__, names, str(value), None, 0)]
    torch.manual_seed(0)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(verbose=False, optionflags=options)
    for test in tests:
        report: list[str] = []
        runner.run(test, out=report.append)
        assert not report, "".join(report)


# --- the site


def test_every_page_is_in_the_table_of_contents() -> None:
    """Sphinx warns of pages that are not, but only `make docs` runs it."""
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^(.*<)?{name}>?$", index, re.MULTILINE), name
