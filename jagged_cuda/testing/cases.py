"""The one table of cases: what tests, opcheck, fuzzing and benchmarks know about each operator.

Each file of ``ops/`` is the room of one operator, and is found automatically. Its ``CASE`` is the
operator with the arguments that all backends take; ``VARIANTS``, by name, are options that
``CASE`` leaves at their defaults, each judged and fuzzed like an operator of its own. An operator
that returns indices, without values or a gradient, has a ``NAME`` and a ``judge`` in its room
instead, and tests of its own.
"""

from __future__ import annotations

import importlib
import pkgutil

from jagged_cuda.testing import ops
from jagged_cuda.testing.case import DTYPES, Case, Kind, Profile, Tensors

__all__ = [
    "CASES",
    "DTYPES",
    "EVERY",
    "INDEX_OPERATORS",
    "VARIANTS",
    "Case",
    "Kind",
    "Profile",
    "Tensors",
    "key_of",
]

_ROOMS = {
    room.name: importlib.import_module(f"{ops.__name__}.{room.name}")
    for room in pkgutil.iter_modules(ops.__path__)
}

CASES: dict[str, Case] = {n: room.CASE for n, room in _ROOMS.items() if hasattr(room, "CASE")}
INDEX_OPERATORS = _ROOMS.keys() - CASES.keys()
VARIANTS: dict[str, Case] = {
    name: case for room in _ROOMS.values() for name, case in getattr(room, "VARIANTS", {}).items()
}
EVERY: dict[str, Case] = CASES | VARIANTS


def key_of(case: Case) -> str:
    """The name by which EVERY has a case; a variant's own name is its function's."""
    return next(key for key, each in EVERY.items() if each is case)
