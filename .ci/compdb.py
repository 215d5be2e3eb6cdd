"""Write compile_commands.json, for editors and clang-tidy, with the flags that the build uses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# Loaded as a file: importing the package would load the libraries.
sys.path.insert(0, str(ROOT / "jagged_cuda"))
import _build  # noqa: E402

CSRC = ROOT / "csrc"


def main() -> None:
    cuda_home = _build.find_cuda_home(torch.version.cuda)
    includes = [CSRC, Path(torch.__file__).parent / "include"]
    commands = {
        "_C_cpu.cpp": [*(_build.find_cxx() or ["c++"]), *_build.CXX_FLAGS],
        "_C_cuda.cpp": [*(_build.find_cxx() or ["c++"]), *_build.CUDA_GLUE_FLAGS],
    }
    if cuda_home is not None:
        includes.append(cuda_home / "include")
        nvcc = str(cuda_home / "bin" / "nvcc")
        commands["_C_cuda.cu"] = [nvcc, *_build.NVCC_FLAGS, *_build.gencode("9.0a")]
    entries = []
    for library in _build.LIBRARIES:
        for path in _build.library_sources(CSRC, library):
            command = commands.get(library + path.suffix)
            if command is not None:
                arguments = [*command, *(f"-I{folder}" for folder in includes), "-c", str(path)]
                entries.append({"directory": str(ROOT), "file": str(path), "arguments": arguments})
    (ROOT / "compile_commands.json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"compile_commands.json: {len(entries)} files")


if __name__ == "__main__":
    main()
