"""Which parts of an operator are there, in each layer (docs/adding_an_op.md lists them)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """What an operator has in one place; ``<op>`` is its name."""

    name: str
    place: str
    pattern: str
    also: Callable[[str, str], bool] | None = None

    def missing(self, root: Path, op: str) -> bool:
        path = root / self.place.replace("<op>", op)
        if not path.is_file():
            return True
        text = path.read_text()
        found = re.search(self.pattern.replace("<op>", re.escape(op)), text)
        return not found or (self.also is not None and not self.also(text, op))


def _registration(text: str, op: str) -> str:
    """The arguments of register("<op>", ...)."""
    found = re.search(rf'register\(\s*"{op}",(.*?)\n\)', text, re.DOTALL)
    return found[1] if found else ""


def _has_gradient_or_says_so(text: str, op: str) -> bool:
    return "backward=" in _registration(text, op) or "No gradient" in text


# A kernel checks its arguments before it does anything else.
_CHECK = r'op = "<op>";\n  static const Contract contract\(op\);[^;]*\bcontract\.check\('

PARTS = (
    Part("schema and line", "csrc/contract/operators.h", r'\{"<op>\('),
    Part("CPU kernel", "csrc/cpu/<op>.cpp", r'm\.impl\("<op>",'),
    Part("check on the CPU", "csrc/cpu/<op>.cpp", _CHECK),
    Part("CUDA kernel", "csrc/cuda/kernels/<op>.cu", r"\blaunch_<op>\w*\("),
    Part("CUDA kernel's interface", "csrc/cuda/kernels/<op>.h", r"\blaunch_<op>\w*\("),
    Part("CUDA glue", "csrc/cuda/<op>.cpp", r'm\.impl\("<op>",'),
    Part("check on CUDA", "csrc/cuda/<op>.cpp", _CHECK),
    Part("public function", "jagged_cuda/ops/<op>.py", r"(?m)^def <op>\("),
    Part("override", "jagged_cuda/ops/<op>.py", r"(?m)^@overridable\ndef <op>\("),
    Part("registration", "jagged_cuda/ops/<op>.py", r'register\(\s*"<op>"[,)]'),
    Part("gradient", "jagged_cuda/ops/<op>.py", "", _has_gradient_or_says_so),
    Part(
        "autocast policy",
        "jagged_cuda/ops/<op>.py",
        "",
        lambda text, op: "autocast=" in _registration(text, op),
    ),
    Part("import", "jagged_cuda/ops/__init__.py", r"from jagged_cuda\.ops\.<op> import <op>\n"),
    Part("export", "jagged_cuda/ops/__init__.py", r'(?m)^    "<op>",$'),
    Part("room", "jagged_cuda/testing/ops/<op>.py", r'(?m)^(    name=|NAME = )"<op>",?$'),
    Part("kernel paths", "tests/test_cuda_paths.py", r'"<op>",'),
    Part("Triton twin", "triton_ref/<op>.py", r"(?m)^def <op>\("),
    Part("Triton twin's import", "triton_ref/__init__.py", r"from \.<op> import <op>\n"),
    Part("Triton twin's export", "triton_ref/__init__.py", r'(?m)^    "<op>",$'),
    Part("documentation", "README.md", r"(?m)^\| `<op>\("),
)

# Each of these alone makes an operator known, so that whatever else is left out is missed.
SOURCES = (
    ("csrc/contract/operators.h", r'\{"(\w+)\('),
    ("jagged_cuda/ops/__init__.py", r"from jagged_cuda\.ops\.(\w+) import"),
)
ROOMS = "jagged_cuda/testing/ops"

# What else an operator may register: its gradient, and the plan of its moves.
SUFFIXES = ("_backward", "_plan")


def _stem(name: str) -> str:
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def registered(root: Path) -> set[str]:
    """The registered operators, gradients and plans included."""
    return set(re.findall(SOURCES[0][1], (root / SOURCES[0][0]).read_text()))


def operators(root: Path) -> set[str]:
    """The operators that some layer knows, by the stem of their files."""
    found = {
        op for path, pattern in SOURCES for op in re.findall(pattern, (root / path).read_text())
    }
    found |= {path.stem for path in (root / ROOMS).glob("[!_]*.py")}
    return {_stem(op) for op in found}


def missing_parts(root: Path) -> list[str]:
    """Each part that an operator lacks, as ``operator: part (place)``."""
    missing = [
        f"{op}: {part.name} ({part.place.replace('<op>', op)})"
        for op in sorted(operators(root))
        for part in PARTS
        if part.missing(root, op)
    ]
    for name in sorted(registered(root)):
        op = _stem(name)
        if name == op:
            continue
        for part in PARTS:
            # A gradient kernel, or a plan, lives in its operator's files, without a gradient.
            if part.name in ("CPU kernel", "CUDA glue", "registration") and Part(
                part.name, part.place.replace("<op>", op), part.pattern
            ).missing(root, name):
                missing.append(f"{name}: {part.name} ({part.place.replace('<op>', op)})")
    return missing
