"""Hypothesis strategies over the table of cases."""

from __future__ import annotations

from hypothesis import strategies as st

from jagged_cuda.testing.cases import DTYPES as ALL_DTYPES
from jagged_cuda.testing.cases import Case
from jagged_cuda.testing.lengths import DISTRIBUTIONS, TILES, Layout, draw_lengths
from jagged_cuda.testing.samples import Spec

DTYPES = st.sampled_from(list(ALL_DTYPES.values()))
SEEDS = st.integers(0, 10_000)

# A length is empty, one row, beside a tile's edge, or anything.
LENGTHS = st.one_of(
    st.sampled_from([0, 1, *(tile + step for tile in TILES for step in (-1, 0, 1))]),
    st.integers(0, 140),
)


@st.composite
def specs(draw: st.DrawFn, case: Case, min_seqs: int = 0) -> Spec:
    """Specs that the one generator makes from numbers that hypothesis draws."""
    rng = draw(st.randoms(use_true_random=False))
    num_seqs = draw(st.integers(min_seqs, 6))

    def layout() -> Layout:
        """Lengths one by one, or of one of the distributions; with rows outside, or without."""
        lengths = tuple(draw(LENGTHS) for _ in range(num_seqs))
        if draw(st.booleans()):
            distribution = draw(st.sampled_from(list(DISTRIBUTIONS)))
            lengths = draw_lengths(rng, distribution, num_seqs, draw(st.integers(1, 90)))
        return Layout(lengths, base=draw(st.integers(0, 9)), tail=draw(st.integers(0, 9)))

    # A third of the draws has the sizes of profile edge: a fault there shows in many of them.
    profile = draw(st.sampled_from(["small", "small", "edge"]))
    return case.draw(rng, profile, draw(SEEDS), layout)
