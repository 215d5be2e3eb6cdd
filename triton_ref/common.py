"""Shared by the kernels: finding a tile's sequence on the device, and argument checks.

Names: `i_` index, `o_` offsets within an axis, `m_` mask, `p_` pointer, `b_` block in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from jagged_cuda.ops import _contract

INTERPRETED = triton.knobs.runtime.interpret
if isinstance(tl.sum, triton.JITFunction) == INTERPRETED:
    raise ImportError("triton_ref: TRITON_INTERPRET must be set before triton is first imported")
DTYPES = (
    (torch.float32, torch.float16, torch.float64)
    if INTERPRETED
    else (torch.float32, torch.float16, torch.bfloat16)
)

# Tiles of products.
TILE_M = tl.constexpr(64)
TILE_N = tl.constexpr(64)
TILE_K = tl.constexpr(32)

# For the launch of a kernel that takes exp(x * scale - max): contracted to a fused multiply-add,
# the largest logit would no longer be exactly its own maximum.
EXACT_PRODUCTS = {"enable_fp_fusion": False}


@triton.jit
def load_bound(p_offsets, i_bound, num_seqs, total):
    """Element i_bound of [0, offsets[0], ..., offsets[num_seqs], total], kept within [0, total]."""
    m_offset = (i_bound > 0) & (i_bound <= num_seqs + 1)
    bound = tl.load(p_offsets + i_bound - 1, mask=m_offset, other=0).to(tl.int64)
    bound = tl.minimum(tl.maximum(bound, 0), total)
    return tl.where(i_bound > num_seqs + 1, total, bound)


@triton.jit
def load_rows(p_offsets, i_seq, num_seqs, total):
    """First row and end of sequence i_seq; -1 is the rows before all sequences, num_seqs after."""
    begin = load_bound(p_offsets, i_seq + 1, num_seqs, total)
    end = load_bound(p_offsets, i_seq + 2, num_seqs, total)
    return begin, tl.maximum(begin, end)


@triton.jit
def find_tile(p_offsets, i_tile, num_seqs, total, TILE: tl.constexpr):
    """The sequence of a tile in a grid of `num_tiles`, and the tile's first row.

    Virtual tiles of bounds s and s + 1 start at start(s) = bound[s] / TILE + s, which leaves each
    sequence one tile to spare at most; a tile to spare has its first row at or past the end.
    """
    i_bound = 0
    i_end = num_seqs + 2
    while i_end - i_bound > 1:  # start(i_bound) <= i_tile < start(i_end)
        i_middle = (i_bound + i_end) // 2
        if load_bound(p_offsets, i_middle, num_seqs, total) // TILE + i_middle <= i_tile:
            i_bound = i_middle
        else:
            i_end = i_middle
    bound = load_bound(p_offsets, i_bound, num_seqs, total)
    return i_bound - 1, bound + (i_tile - (bound // TILE + i_bound)) * TILE


@triton.jit
def load_matrix(p_matrix_offsets, i_seq, num_seqs, num_elements, capacity):
    """Where the matrix of sequence i_seq begins, and whether there is one that fits."""
    m_seq = (i_seq >= 0) & (i_seq < num_seqs)
    begin = tl.load(p_matrix_offsets + i_seq, mask=m_seq, other=0)
    fits = (begin >= 0) & (begin <= capacity) & (num_elements <= capacity - begin)
    return begin, m_seq & fits


@triton.jit
def load_block(p_x, strides, o_row, o_column, m_row, m_column):
    """The rows and columns of a matrix, zeros where masked: [rows, columns]."""
    o_x = o_row[:, None].to(tl.int64) * strides[0] + o_column[None, :].to(tl.int64) * strides[1]
    return tl.load(p_x + o_x, mask=m_row[:, None] & m_column[None, :], other=0.0)


@triton.jit
def store_block(p_z, b_z, o_row, o_column, m_row, m_column, row_stride):
    """Rows and columns of a matrix whose rows are contiguous, in its type."""
    p_block = p_z + o_row[:, None].to(tl.int64) * row_stride + o_column[None, :]
    b_z = b_z.to(p_z.dtype.element_ty)
    tl.store(p_block, b_z, mask=m_row[:, None] & m_column[None, :])


@triton.jit
def multiply(
    p_m, m_m, stride_xk, p_n, m_n, stride_yk, first_k, end_k, ACCUMULATOR, INPUT_PRECISION
):
    """The sum of x[m, k] y[k, n] over k from first_k to end_k: [TILE_M, TILE_N].

    p_m points to x[m, 0], [TILE_M], and p_n to y[0, n], [TILE_N].
    """
    b_z = tl.zeros([TILE_M, TILE_N], dtype=ACCUMULATOR)
    for first in range(first_k, end_k, TILE_K):
        o_k = (first + tl.arange(0, TILE_K)).to(tl.int64)
        m_k = o_k < end_k
        # [TILE_M, TILE_K]
        p_x = p_m[:, None] + o_k[None, :] * stride_xk
        b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
        # [TILE_K, TILE_N]
        p_y = p_n[None, :] + o_k[:, None] * stride_yk
        b_y = tl.load(p_y, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_z += tl.dot(b_x, b_y, input_precision=INPUT_PRECISION)
    return b_z


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, unless the grid is empty."""
    if 0 not in grid:
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)


def num_tiles(total: int, num_seqs: int, tile: int) -> int:
    """How many tiles cover every row of a jagged tensor, whatever its lengths."""
    return total // tile + num_seqs + 2


def tile_of(columns: int, widest: int = 32) -> tuple[int, int]:
    """Rows and columns of a tile of 1024 elements: few columns make it tall."""
    tile_columns = min(widest, triton.next_power_of_2(max(1, columns)))
    return 1024 // tile_columns, tile_columns


def accumulator_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def accumulator(x: torch.Tensor) -> tl.dtype:
    """The same as a type of Triton's."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def input_precision() -> str:
    """How fp32 products are taken: PyTorch's own setting."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def check_place(op: str, **arguments: Any) -> None:
    """Check arguments by the operator's contract, and that they are where Triton runs."""
    _contract.check(op, **arguments)
    name, x = next(iter(arguments.items()))
    if (x.device.type == "cpu") != INTERPRETED:
        place = "on the CPU (TRITON_INTERPRET=1)" if INTERPRETED else "on a CUDA device"
        _contract.fail_argument(op, name, place, x.device)


def check(op: str, **arguments: Any) -> None:
    """The same, and that the dtype is served here."""
    check_place(op, **arguments)
    name, x = next(iter(arguments.items()))
    if x.dtype not in DTYPES:
        names = ", ".join(map(_contract.dtype_name, DTYPES))
        _contract.fail_argument(op, name, f"one of {names}", _contract.dtype_name(x.dtype))


def counts_of(count: int | torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """A number of rows: of each sequence or None, and else of all."""
    return (count, 0) if isinstance(count, torch.Tensor) else (None, count or 0)


def make_matrices(
    op: str,
    offsets: torch.Tensor,
    y_offsets: torch.Tensor | None,
    matrix_offsets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The offsets of the matrices' rows, of their columns, and of the matrices, contiguous.

    Matrices begin at the running sum of Lx*Ly unless matrix_offsets say where.
    """
    _contract.check_offsets(op, offsets, y_offsets)
    y_offsets = offsets if y_offsets is None else y_offsets
    if matrix_offsets is None:
        lengths = [bounds.long().diff().clamp(min=0) for bounds in (offsets, y_offsets)]
        begins = (lengths[0] * lengths[1]).cumsum(0)
        matrix_offsets = torch.cat([begins.new_zeros(1), begins])
    return offsets.contiguous(), y_offsets.contiguous(), matrix_offsets.contiguous()
