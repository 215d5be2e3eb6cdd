"""A toy package to build, which takes a tenth of a second a file.

Copies of _build.py and _load.py beside a csrc/ of its own, a compiler that writes down each call,
and a stand-in for torch with torch's own cpp_extension: the import of all of torch would take most
of the time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from jagged_cuda import _build, _load

PACKAGE = Path(_load.__file__).parent
TIMEOUT = 300

VISIBLE = 'extern "C" __attribute__((visibility("default")))'
SOURCES = {
    "library.cpp": f'#include "answer.h"\n{VISIBLE} int toy_answer() {{ return kAnswer; }}\n',
    "answer.h": "constexpr int kAnswer = 42;\n",
    "cpu/toy.cpp": f"{VISIBLE} int toy_other() {{ return 7; }}\n",
    "cuda/toy.cpp": '#include <cuda_runtime_api.h>\nextern "C" int toy_devices() {\n'
    "  int count = 0;\n  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;\n}\n",
    "cuda/kernels/toy.cu": "__global__ void fill(float* x) { x[threadIdx.x] = 1.0f; }\n"
    "void launch_fill(float* x) { fill<<<1, 32>>>(x); }\n",
}

# Compiles as g++ does, and writes down its arguments; told to, it sleeps or fails instead.
COMPILER = """\
#!/bin/sh
echo "$*" >> "{folder}/calls"
case "$*" in
  *" -c "*)
    if [ -e "{folder}/sleep" ]; then touch "{folder}/sleeping"; sleep 60; fi
    if [ -e "{folder}/fail" ]; then cat "{folder}/fail" >&2; exit 1; fi ;;
esac
exec {compiler} "$@"
"""

# What _build.py, _load.py and cpp_extension use of torch.
TORCH = {
    "__init__.py": """
import ctypes
from types import SimpleNamespace
from torch import version
__version__ = version.__version__
no = lambda: False
cuda = SimpleNamespace(_is_compiled=no, is_available=no)
xpu = SimpleNamespace(_is_compiled=no)
ops = SimpleNamespace(load_library=ctypes.CDLL)
library = SimpleNamespace(Library=lambda *arguments: None)
_C = SimpleNamespace(_dispatch_get_all_op_names=lambda: [])
""",
    "version.py": "__version__ = '2.11.0'\ncuda = hip = None\n",
    "utils/__init__.py": "",
}
OF_TORCH = ("_appdirs.py", "torch_version.py", "_vendor")
OF_UTILS = ("cpp_extension.py", "_cpp_extension_versioner.py", "file_baton.py")

IMPORT = """
    import ctypes, json, sys, torch
    from jagged_cuda import _load
    {before}
    _load.load_libraries()
    library = ctypes.CDLL(str(_load.loaded["_C_cpu"].path))
    print(json.dumps({{
        "answer": library.toy_answer(),
        "loaded": {{k: [str(v.path), v.origin] for k, v in _load.loaded.items()}},
        "reason": _load.cuda_unavailable_reason,
    }}))
"""

# The GPU that a test says there is.
WITH_GPU = (
    "_load.find_driver = lambda: _load.Driver('580.1', (13, 0), "
    "(_load.Gpu('NVIDIA H100', (9, 0)),)); torch.version.cuda = '13.0'"
)
WITHOUT_GPU = "_load.find_driver = lambda: None"


class Toy:
    """A package of one answer, with its own cache, compiler and environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "jagged_cuda"
        self.csrc = root / "csrc"
        self.cache = root / "cache"
        self.torch = root / "stand-in" / "torch"
        self.package.mkdir(parents=True)
        for name in ("_build.py", "_load.py"):
            shutil.copy(PACKAGE / name, self.package)
        (self.package / "__init__.py").write_text("")
        for folder, files in ((self.csrc, SOURCES), (self.torch, TORCH)):
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        for name in (*OF_TORCH, *(f"utils/{name}" for name in OF_UTILS)):
            (self.torch / name).symlink_to(Path(torch.__file__).parent / name)
        real = " ".join(_build.find_cxx() or ("c++",))
        (self.torch / "lib").mkdir()
        for name in ("c10", "torch", "torch_cpu", "torch_python"):
            self.link("/dev/null", self.torch / "lib" / f"lib{name}.so")
        compiler = root / "c++"
        compiler.write_text(COMPILER.format(folder=root, compiler=real))
        compiler.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_CUDA", "JAGGED"))}
        self.env = {
            **kept,
            "CXX": str(compiler),
            "JAGGED_CUDA_CACHE": str(self.cache),
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'stand-in'}",
        }

    def link(self, source: Path | str, library: Path) -> None:
        flags = ["-shared", "-fPIC", "-x", "c++", str(source), "-o", str(library)]
        subprocess.run([*(_build.find_cxx() or ("c++",)), *flags], check=True)

    def start(self, before: str = WITHOUT_GPU, script: str = IMPORT) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script.format(before=before))],
            cwd=self.root,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def load(self, before: str = WITHOUT_GPU) -> tuple[dict, str]:
        """Imports the toy in a new process; returns what it printed and its stderr."""
        process = self.start(before)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
        return json.loads(out), err

    def fails(self, before: str = WITHOUT_GPU) -> str:
        """Imports the toy in a new process that must fail; returns the BuildError's message."""
        process = self.start(before)
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode != 0
        assert "BuildError: " in err, err
        return err.split("BuildError: ", 1)[1].strip()

    def compiled(self) -> list[str]:
        """Returns the files that the compiler has compiled so far."""
        calls = self.root / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [
            word
            for line in lines
            if " -c " in line
            for word in line.split()
            if "csrc/" in word and word.endswith((".cpp", ".cu"))
        ]

    def calls(self) -> int:
        calls = self.root / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    def prebuild(self, archs: str, cuda: str) -> None:
        """Puts libraries beside the package, as a wheel does."""
        for name in _build.LIBRARIES:  # the toy's CUDA library needs no CUDA
            self.link(self.csrc / "library.cpp", self.package / f"{name}.abi3.so")
        record = {"source_hash": _build.source_hash(self.csrc), "archs": archs, "cuda": cuda}
        (self.package / "_prebuilt.json").write_text(json.dumps(record))
