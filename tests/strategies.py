"""Hypothesis strategies over the table of cases."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st

from jagged_cuda.testing.cases import Case
from jagged_cuda.testing.lengths import DISTRIBUTIONS, TILES, Layout, draw_lengths
from jagged_cuda.testing.samples import STORAGES, Spec

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
SEEDS = st.integers(0, 10_000)

# A length is empty, one row, beside a tile's edge, or anything.
LENGTHS = st.one_of(
    st.just(0),
    st.just(1),
    st.sampled_from([tile + step for tile in TILES for step in (-1, 0, 1)]),
    st.integers(0, 140),
)


@st.composite
def layouts(draw: st.DrawFn, num_seqs: int) -> Layout:
    """Lengths listed one by one, or of one of the distributions; with rows outside, or without."""
    if draw(st.booleans()):
        lengths = tuple(draw(st.lists(LENGTHS, min_size=num_seqs, max_size=num_seqs)))
    else:
        rng = random.Random(draw(SEEDS))
        distribution = draw(st.sampled_from(list(DISTRIBUTIONS)))
        lengths = draw_lengths(rng, distribution, num_seqs, draw(st.integers(1, 90)))
    return Layout(lengths, base=draw(st.integers(0, 9)), tail=draw(st.integers(0, 9)))


@st.composite
def specs(draw: st.DrawFn, case: Case, min_seqs: int = 0) -> Spec:
    num_seqs = draw(st.integers(min_seqs, 6))
    # Few sizes are the large ones: what goes wrong there goes wrong for one draw in ten.
    sizes = case.profiles[draw(st.sampled_from(["small", "small", "edge"]))].choices
    choices = {
        name: draw(st.sampled_from(list(sizes.get(name, candidates))))
        for name, candidates in case.choices.items()
    }
    layout = draw(layouts(num_seqs))
    inputs = list(case.inputs)
    return Spec(
        seed=draw(SEEDS),
        layout=layout,
        choices=choices,
        kv_layout=draw(layouts(num_seqs)) if choices.get("cross") else None,
        storage={name: draw(st.sampled_from(list(STORAGES))) for name in inputs},
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
