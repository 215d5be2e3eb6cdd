"""Fast jagged-tensor operators for PyTorch: products, softmax, flash attention, no padding.

A jagged tensor is ``values [T, ...]``, the rows of all sequences one after another, and ``offsets
[B + 1]``; sequence b is rows ``offsets[b]:offsets[b + 1]``.
"""

import os

from jagged_cuda import _load
from jagged_cuda._version import __version__

_load.load_libraries()

# Operators register on libraries that are loaded.
from jagged_cuda import offsets, ops  # noqa: E402
from jagged_cuda.offsets import *  # noqa: E402, F403
from jagged_cuda.ops import *  # noqa: E402, F403

__all__ = ["__version__", "set_checks", *offsets.__all__, *ops.__all__]


def set_checks(enabled: bool) -> None:
    """Validate offsets in every operator, and raise RuntimeError with the first bad index.

    Off by default, since on CUDA each check waits for the GPU. Sets ``JAGGED_CUDA_CHECK`` for
    this process.
    """
    os.environ["JAGGED_CUDA_CHECK"] = "1" if enabled else "0"
