"""Builds the wheel: both libraries by torch.utils.cpp_extension, with the flags of _build.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

# Loaded as a file: importing the package would load the libraries.
sys.path.insert(0, str(ROOT / "jagged_cuda"))
import _build  # noqa: E402

del sys.path[0]
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
        cuda_home = _build.find_cuda_home(torch.version.cuda)
        default = _build.DEFAULT_WHEEL_ARCHS if cuda_home else ""
        archs = _build.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", default))
        if not archs:
            print("jagged_cuda: no architectures or no CUDA toolkit, so the CPU library alone")
        base = Path(self.build_temp).resolve()
        for name in _build.LIBRARIES if archs else _build.LIBRARIES[:1]:
            build = _build.Build(name, CSRC, archs if name == "_C_cuda" else (), torch)
            listed = ";".join(build.archs) or "the CPU"
            print(f"jagged_cuda: compiling for {listed} with {build.check()}", flush=True)
            self.build_temp = str(base / build.key())
            os.makedirs(self.build_temp, exist_ok=True)
            with build.cpp_extension(Path(self.build_temp)) as cpp_extension:
                self.distribution.ext_modules = [self.extension(cpp_extension, build)]
                self.compiler = self.swig_opts = None  # finalized again, with the extension
                self.finalize_options()
                super().run()
        record = {"source_hash": _build.source_hash(CSRC), "archs": ";".join(archs), "cuda": None}
        if archs:
            record["cuda"] = _build.cuda_toolkit_version(cuda_home)
        path = Path(self.build_lib) / "jagged_cuda" / "_prebuilt.json"
        path.write_text(json.dumps(record, indent=1) + "\n")

    def extension(self, cpp_extension, build: _build.Build) -> Extension:
        work = Path(self.build_temp)
        is_cuda = build.library == "_C_cuda"
        kind = cpp_extension.CUDAExtension if is_cuda else cpp_extension.CppExtension
        sources, cxx, nvcc, link = build.recipe(work, small=True)
        extension = kind(f"jagged_cuda.{build.library}", sources, py_limited_api=True)
        extension.include_dirs.insert(0, str(work / "csrc"))
        extension.library_dirs.insert(0, str(work / "link"))
        extension.libraries = ["cudart", "torch_cpu"] if is_cuda else ["torch_cpu"]
        extension.extra_compile_args = {"cxx": cxx, "nvcc": nvcc}
        extension.extra_link_args = link
        return extension

    def build_extensions(self) -> None:
        """Compiles without the flags that this Python itself was compiled with."""
        cxx = os.environ["CXX"]
        for name in ("compiler", "compiler_cxx", "compiler_so", "compiler_so_cxx"):
            self.compiler.set_executable(name, [cxx])
        for name in ("linker_so", "linker_so_cxx"):
            self.compiler.set_executable(name, [cxx, "-shared"])
        super().build_extensions()

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
