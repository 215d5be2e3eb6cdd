"""What the tests of test_cuda_*.py share: names of kernel paths, layouts, marks, memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

import pytest
import torch

from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.lengths import Layout

CUDA = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

HALF_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# Softmaxes of matrices over their rows by clusters, and over their columns by staged shares.
CLUSTERS, STAGED = (".words", ".staged_words") if HOPPER else ("", ".words")
# Large matrices over their rows.
STRIPS = ".strips" if HOPPER else None
DENSE, JAGGED = "cuda.jagged_dense_bmm", "cuda.jagged_jagged_bmm"
MATRICES, WEIGHTED = "cuda.jagged_jagged_bmm_jagged_out", "cuda.array_jagged_bmm_jagged_out"


def best_path(product: str, path: str) -> str:
    """The path of a product that has kernels on wgmma."""
    stays = not HOPPER or path.endswith(".f32" if product == MATRICES else (".tf32", ".f32"))
    return f"{product}.{path if stays else path.replace('mma_sync', 'wgmma')}"


PATH = pytest.mark.parametrize("path", ["best", "mma_sync"], indirect=True)
# Of a product on tensor cores, as its kernels are named.
PRECISION = pytest.mark.parametrize("precision", [*HALF_DTYPES, "tf32", "f32"])


def in_precision(precision: str, request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of a product in this precision, which it allows."""
    if precision == "tf32":
        request.getfixturevalue("tf32")
    return HALF_DTYPES.get(precision, torch.float32)


LAYOUT = Layout((70, 0, 33, 1, 128, 15), base=5, tail=9)
KEYS = Layout((3, 20, 0, 64, 1, 100), base=2, tail=4)

# With each case its options for keys, or columns, of other lengths.
CASE_AND_CROSS = pytest.mark.parametrize(
    ("case", "cross"),
    [
        pytest.param(case, cross, id=f"{name}{'-cross' if cross else ''}")
        for name, case in EVERY.items()
        for cross in case.choices.get("cross", (False,))
    ],
)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requested_bytes(when: str = "current") -> int:
    """What tensors asked for: the free blocks that they got may be up to 1 MB larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def memory_at_rest() -> int:
    """What is requested, once backward passes of other tests have freed their memory.

    Their threads let go of it a moment after the pass returns. The peak counts from here.
    """
    gc.collect()
    before, now = -1, requested_bytes()
    while before != now:
        time.sleep(0.02)
        before, now = now, requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    return now
