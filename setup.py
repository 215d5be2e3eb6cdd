"""Builds the wheel: both libraries by torch.utils.cpp_extension, with the flags of _build.py.

Environment:
    TORCH_CUDA_ARCH_LIST: the architectures; unset, DEFAULT_WHEEL_ARCHS; empty, no CUDA library.
    CUDA_HOME, CXX, MAX_JOBS: the toolkit, the compiler, how many compilers run at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

spec = importlib.util.spec_from_file_location("_build", ROOT / "jagged_cuda" / "_build.py")
assert spec is not None and spec.loader is not None
_build: Any = importlib.util.module_from_spec(spec)
sys.modules["_build"] = _build  # where its dataclasses look themselves up
spec.loader.exec_module(_build)
os.environ["PATH"] = _build.path_with_ninja()

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension
except ImportError as error:
    torch, missing, BuildExtension = None, error, build_ext


class BuildLibraries(BuildExtension):
    """Compiles the libraries, except in an editable install, where the first import does."""

    def run(self) -> None:
        if self.editable_mode:
            print("jagged_cuda: the first import compiles the libraries for the GPU that it finds")
            return
        if torch is None:
            raise SystemExit(
                "error: jagged_cuda is compiled against the torch that you run, and this "
                f"environment has none ({missing}): pip install 'torch>=2.10', then "
                "pip install --no-build-isolation jagged_cuda (or . in a checkout)."
            )
        try:
            self.build()
        except _build.BuildError as error:
            raise SystemExit(f"error: {error}") from error
        except RuntimeError as error:  # of BuildExtension, once ninja has said why
            raise SystemExit(f"error: {error}: the compiler's message is above.") from error

    def build(self) -> None:
        _build.check_torch(torch.__version__)
        toolchain = _build.find_toolchain(torch.version.cuda)
        archs = self.archs(toolchain)
        names = _build.LIBRARIES if archs else _build.LIBRARIES[:1]
        for name in names:
            known = _build.check_compilers(name, archs, toolchain, torch.version.cuda)
            print(f"jagged_cuda: compiling {name} for {_build.format_archs(archs)} with {known}")
        base = Path(self.build_temp).resolve()
        base.mkdir(parents=True, exist_ok=True)
        with _build.cpp_extension(toolchain, base) as cpp_extension:
            self.distribution.ext_modules = [
                self.extension(cpp_extension, name, base, archs, toolchain) for name in names
            ]
            self.finalize_options()
            super().run()
        cuda = None
        if archs:
            cuda = "{}.{}".format(*_build.cuda_toolkit_version(toolchain.cuda_home))
        record = {
            "source_hash": _build.source_hash(CSRC),
            "archs": _build.format_archs(archs),
            "cuda": cuda,
        }
        path = Path(self.build_lib) / "jagged_cuda" / "_prebuilt.json"
        path.write_text(json.dumps(record, indent=1) + "\n")

    def archs(self, toolchain: Any) -> tuple[Any, ...]:
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
        if listed is None and toolchain.cuda_home is None:
            print("jagged_cuda: no CUDA toolkit was found, so this builds the CPU library alone")
            return ()
        return _build.parse_archs(_build.DEFAULT_WHEEL_ARCHS if listed is None else listed)

    def extension(
        self, cpp_extension: Any, name: str, base: Path, archs: Any, toolchain: Any
    ) -> Extension:
        """Returns what is compiled in a work folder that changes with what ninja does not see."""
        compilers = toolchain.fingerprint(name)
        key = _build.short_hash(_build.format_archs(archs), torch.__version__, compilers)
        work = base / f"{name}-{key}"
        work.mkdir(exist_ok=True)
        recipe = _build.prepare(name, CSRC, work, archs, toolchain)
        kind = cpp_extension.CppExtension if name == "_C_cpu" else cpp_extension.CUDAExtension
        extension = kind(
            f"jagged_cuda.{name}",
            recipe.sources,
            include_dirs=[recipe.include],
            extra_compile_args={"cxx": recipe.cxx, "nvcc": recipe.nvcc},
            extra_link_args=recipe.link,
            py_limited_api=True,
        )
        extension.libraries = ["torch_cpu"] if name == "_C_cpu" else ["torch_cpu", "cudart"]
        extension.work = work
        return extension

    def build_extension(self, extension: Any) -> None:
        """Compiles in the work folder, without what this Python itself was compiled with."""
        cxx = os.environ["CXX"]
        for name in ("compiler", "compiler_cxx", "compiler_so", "compiler_so_cxx"):
            self.compiler.set_executable(name, [cxx])
        for name in ("linker_so", "linker_so_cxx"):
            self.compiler.set_executable(name, [cxx, "-shared"])
        self.build_temp = str(extension.work)
        super().build_extension(extension)

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them


class BuildPython(build_py):
    """Adds csrc/ to the package, so that an installed package can compile for another GPU."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _build.mirror(CSRC, Path(self.build_lib) / "jagged_cuda" / "csrc")


setup(
    # Only that there are extensions counts here: BuildLibraries fills them in.
    ext_modules=[Extension(f"jagged_cuda.{name}", []) for name in _build.LIBRARIES],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPython},
    # For every Python from 3.10: the libraries hold no Python symbol.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
