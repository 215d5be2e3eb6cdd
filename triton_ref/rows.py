"""Truncation and splitting, by the twin that plans ranges and moves them."""

from .jagged_slice import slice_rows


def jagged_first(xs, offsets, n, *, total=None):
    """z_b = x_b[:n] for xs [T, ...], and the offsets; n is an int or [B]."""
    return slice_rows(xs, offsets, 0, n, total)


def jagged_last(xs, offsets, n, *, total=None):
    """z_b = x_b[L - min(n, L):] for xs [T, ...], and the offsets; n is an int or [B]."""
    return slice_rows(xs, offsets, 0, n, total, from_end=True)


def jagged_split(x, offsets, *, n=None, left_offsets=None, totals=None):
    """left_b = x_b[:n] and right_b = x_b[n:] for x [T, ...], each with its offsets."""
    n = left_offsets.diff() if n is None else n
    left, right = (None, None) if totals is None else totals
    return slice_rows(x, offsets, 0, n, left), slice_rows(x, offsets, n, None, right)
