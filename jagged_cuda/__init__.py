"""Fast jagged-tensor operators for PyTorch: products, softmax, flash attention, no padding.

A jagged tensor is ``values [T, ...]``, the rows of all sequences one after another, and ``offsets
[B + 1]``; sequence b is rows ``offsets[b]:offsets[b + 1]``.
"""

from jagged_cuda import _load
from jagged_cuda._version import __version__

_load.load_libraries()

# Operators register on libraries that are loaded.
from jagged_cuda import lists, nested, nn, offsets, ops, rows, torchrec  # noqa: E402, F401
from jagged_cuda._checks import check_errors, set_checks  # noqa: E402
from jagged_cuda.offsets import *  # noqa: E402, F403
from jagged_cuda.ops import *  # noqa: E402, F403
from jagged_cuda.ops._bias import (  # noqa: E402
    PositionBias,
    TimeBias,
    log_boundaries,
    sqrt_boundaries,
)
from jagged_cuda.rows import *  # noqa: E402, F403

__all__ = [
    "PositionBias",
    "TimeBias",
    "__version__",
    "check_errors",
    "log_boundaries",
    "set_checks",
]
__all__ += ["sqrt_boundaries"]
__all__ += [*offsets.__all__, *ops.__all__, *rows.__all__]
