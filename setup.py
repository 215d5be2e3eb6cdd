"""Builds the wheel, both libraries through jagged_cuda/_build.py, whose flags the import uses too.

Environment:
    TORCH_CUDA_ARCH_LIST: the architectures; unset, DEFAULT_WHEEL_ARCHS; empty, no CUDA library.
    CUDA_HOME, CXX, MAX_JOBS: the toolkit, the compiler, how many compilers run at once.
    JAGGED_CUDA_CACHE: keeps the objects of this build too, for the next build or import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"


def load_build_module() -> Any:
    """Loads _build.py as a plain file: importing the package would load the libraries."""
    spec = importlib.util.spec_from_file_location("_build", ROOT / "jagged_cuda" / "_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_build"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


_build = load_build_module()


class BuildLibraries(build_ext):
    """Compiles the libraries, except in an editable install, where the first import does."""

    def run(self) -> None:
        if self.editable_mode:
            print("jagged_cuda: the first import compiles the libraries for the GPU that it finds")
            return
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                "error: jagged_cuda is compiled against the torch that you run, and this "
                f"environment has none ({error}): pip install 'torch>=2.10', then "
                "pip install --no-build-isolation jagged_cuda (or . in a checkout)."
            ) from error
        try:
            self._build(torch)
        except _build.BuildError as error:
            raise SystemExit(f"error: {error}") from error

    def _build(self, torch: Any) -> None:
        _build.check_torch(torch.__version__)
        toolchain = _build.find_toolchain(torch.version.cuda)
        compilers = [_build.check_cxx(toolchain)]
        archs = self._archs(toolchain)
        libraries = _build.LIBRARIES[: 2 if archs else 1]
        if archs:
            compilers.append(_build.check_nvcc(toolchain, torch.version.cuda))
            _build.check_archs(toolchain, archs)
        work = (ROOT / self.build_temp / "jagged_cuda").resolve()
        # Objects are kept by the hash of all that they depend on: a second wheel compiles only
        # what changed since the first.
        cache = os.environ.get("JAGGED_CUDA_CACHE")
        objects = Path(cache).resolve() / "objects" if cache else work / "objects"
        work.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)
        for_what = f"the CPU and {_build.format_archs(archs)}" if archs else "the CPU"
        results = _build.build(
            CSRC,
            libraries,
            archs,
            work,
            toolchain=toolchain,
            objects=objects,
            log=work / "build.log",
            progress=_build.ConsoleProgress(
                f"jagged_cuda: compiling for {for_what} with {' and '.join(compilers)}"
            ),
        )
        package = Path(self.build_lib) / "jagged_cuda"
        package.mkdir(parents=True, exist_ok=True)
        for library, result in results.items():
            if isinstance(result, _build.BuildError):
                raise result
            shutil.copyfile(result, package / f"{library}.abi3.so")
        cuda = None
        if archs:
            cuda = "{}.{}".format(*_build.cuda_toolkit_version(toolchain.cuda_home))
        record = _build.prebuilt_record(CSRC, archs, cuda)
        (package / "_prebuilt.json").write_text(json.dumps(record, indent=1) + "\n")
        if self.inplace:
            for name in (*(f"{library}.abi3.so" for library in libraries), "_prebuilt.json"):
                shutil.copyfile(package / name, ROOT / "jagged_cuda" / name)

    def _archs(self, toolchain: Any) -> tuple[Any, ...]:
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
        if listed is None and toolchain.cuda_home is None:
            print(
                "jagged_cuda: no CUDA toolkit was found, so this builds the CPU library alone; "
                "set CUDA_HOME for both"
            )
            return ()
        return _build.parse_archs(_build.DEFAULT_WHEEL_ARCHS if listed is None else listed)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "jagged_cuda"
        return [str(path) for path in (*package.glob("_C_*.so"), package / "_prebuilt.json")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in csrc_files()]


class BuildPython(build_py):
    """Adds csrc/ to the package, so that an installed package can compile for another GPU."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in csrc_files():
            target = Path(self.build_lib) / "jagged_cuda" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(path), str(target))


class Wheel(bdist_wheel):
    """Tags the wheel for every Python from 3.10: the libraries hold no Python symbol."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


def csrc_files() -> list[Path]:
    """Returns the sources that the package carries."""
    return sorted(p for p in CSRC.rglob("*") if p.suffix in _build.SOURCE_SUFFIXES)


setup(
    # Only that there are extensions counts: BuildLibraries knows which files belong to them.
    ext_modules=[
        Extension(f"jagged_cuda.{library}", [], py_limited_api=True) for library in _build.LIBRARIES
    ],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPython, "bdist_wheel": Wheel},
)
