"""hstu_key_ranges: HSTU's masks, judged by what they let each row see.

``python -m jagged_cuda.testing.ops.hstu_key_ranges --settings 100000`` judges random settings.
"""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.lengths import Layout

# No values and no gradient: it has no CASE, and a judge of its own.
NAME = "hstu_key_ranges"
HUGE = 2**40  # beyond any length, and beyond 32 bits


@dataclass(frozen=True)
class Setting:
    """A batch and a mask for it.

    Args:
        layout, kv_layout: queries and keys; None means that keys are the queries' own.
        targets, contextual: keys at each sequence's end and beginning; None means none.
        each: contextual keys are given for each sequence.
        max_attn_len, min_full_attn_len, target_group, causal: as the operator takes them.
        dtype: of the offsets.
    """

    layout: Layout
    kv_layout: Layout | None = None
    targets: tuple[int, ...] | None = None
    contextual: tuple[int, ...] = (0,)
    each: bool = False
    max_attn_len: int = 0
    min_full_attn_len: int = 0
    target_group: int = 1
    causal: bool = True
    dtype: torch.dtype = torch.int64

    @property
    def keys(self) -> Layout:
        return self.kv_layout or self.layout

    def call(self, ops: Any, device: torch.device | str) -> Tensor:
        """`[T, 2, 2]`, as the operator of a module says."""

        def counts(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, self.dtype)

        kv = self.kv_layout
        lens = counts(self.contextual) if self.each else max(self.contextual, default=0)
        return ops.hstu_key_ranges(
            self.layout.offsets(device, self.dtype),
            kv_offsets=None if kv is None else kv.offsets(device, self.dtype),
            num_targets=None if self.targets is None else counts(self.targets),
            contextual_len=lens,
            max_attn_len=self.max_attn_len,
            min_full_attn_len=self.min_full_attn_len,
            target_group=self.target_group,
            causal=self.causal,
            total=self.layout.total,
        )


def draw(seed: int) -> Setting:
    """A random setting: lengths up to 40, everything else up to what fills one, or beyond all."""
    rng = random.Random(f"hstu_key_ranges {seed}")
    num_seqs, longest = rng.randint(0, 5), rng.choice((1, 6, 40))

    def layout() -> Layout:
        lengths = tuple(rng.randint(0, longest) for _ in range(num_seqs))
        return Layout(lengths, base=rng.choice((0, 0, 3)), tail=rng.choice((0, 0, 5)))

    queries = layout()
    keys = layout() if rng.random() < 0.3 else None
    each = rng.random() < 0.4
    same = rng.choice((0, 0, 1, 2, 5)) if each or rng.random() < 0.95 else HUGE
    targets = tuple(rng.choice((0, 1, rng.randint(0, n + 2))) for n in (keys or queries).lengths)
    return Setting(
        layout=queries,
        kv_layout=keys,
        targets=targets if rng.random() < 0.7 else None,
        contextual=tuple(rng.randint(0, 4) if each else same for _ in range(num_seqs)),
        each=each,
        max_attn_len=rng.choice((0, 0, 1, 3, rng.randint(1, 50), HUGE)),
        min_full_attn_len=rng.choice((0, 0, 1, 4, rng.randint(1, 50), HUGE)),
        target_group=rng.choice((1, 1, 2, 3, 7, HUGE)),
        causal=rng.random() < 0.7,
        dtype=rng.choice((torch.int32, torch.int64)),
    )


def definition(setting: Setting, seq: int) -> Tensor:
    """`[Lq, Lk]`: which keys the rows of a sequence see, from the rules for one pair at a time."""
    num_rows, num_keys = setting.layout.lengths[seq], setting.keys.lengths[seq]
    targets = 0 if setting.targets is None else min(setting.targets[seq], num_keys)
    context, before_targets = setting.contextual[seq], num_keys - targets
    # Contextual keys share step 0; the first other one is step 1, or 0 without contextual ones.
    end = before_targets - max(context - 1, 0)
    key = torch.arange(num_keys)
    step = (key - max(context - 1, 0)).clamp(min=0).clamp(max=end)
    row, column = step[:, None], step[None, :]
    ahead = row - column if setting.causal else (row - column).abs()
    sees = ahead > 0
    if setting.max_attn_len > 0:
        reach = torch.full_like(row, setting.max_attn_len)
        if setting.min_full_attn_len > 0:
            reach[row >= end - setting.min_full_attn_len] = 2 * num_keys + 99
        sees &= ahead <= reach
    if context > 0:
        sees |= (row == 0) & (column < end)
    sees |= key[:, None] == key[None, :]
    target = key - before_targets
    group = target.div(setting.target_group, rounding_mode="floor").where(target >= 0, -1)
    sees |= (group[:, None] == group[None, :]) & (group >= 0) & (key[:, None] >= key[None, :])
    # The rows are the last ones of a sequence of keys; what lies before its first sees nothing.
    missing = max(0, num_rows - num_keys)
    return torch.cat([sees.new_zeros(missing, num_keys), sees[max(0, num_keys - num_rows) :]])


def judge(setting: Setting, device: torch.device | str = "cpu", ops: Any = jagged_cuda) -> None:
    """Raise AssertionError unless the ranges of a setting are right."""
    found = setting.call(ops, device).cpu()
    assert found.dtype is torch.int32 and found.shape == (setting.layout.total, 2, 2), found.shape
    offsets = setting.layout.offsets().tolist()
    for seq, (begin, end) in enumerate(itertools.pairwise(offsets)):
        num_keys = setting.keys.lengths[seq]
        ranges = found[begin:end]
        assert (ranges[..., 0] <= ranges[..., 1]).all(), setting
        assert ((ranges >= 0) & (ranges <= num_keys)).all(), setting
        key = torch.arange(num_keys)
        within = (key >= ranges[..., :1]) & (key < ranges[..., 1:])  # [Lq, 2, Lk]
        assert not within.all(1).any(), f"ranges overlap: {setting}"
        wrong = (within.any(1) != definition(setting, seq)).nonzero()
        assert len(wrong) == 0, f"sequence {seq}, row and key {wrong[0].tolist()}: {setting}"
        # The second range is of targets alone, and holds none but targets; the first holds none.
        targets = 0 if setting.targets is None else min(setting.targets[seq], num_keys)
        is_target = key >= num_keys - targets
        in_order = ~(within[:, 0] & is_target) & ~(within[:, 1] & ~is_target)
        first_row = max(0, len(ranges) - targets)
        assert not within[:first_row, 1].any(), f"sequence {seq}, a second range: {setting}"
        assert in_order[first_row:].all(), f"sequence {seq}, ranges of targets: {setting}"
    outside = torch.cat([found[: offsets[0]], found[offsets[-1] :]])
    assert not outside.any(), f"rows outside: {setting}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge random settings of hstu_key_ranges.")
    parser.add_argument("--settings", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.settings):
        judge(draw(seed), options.device)
    print(f"hstu_key_ranges: right for {options.settings:,} settings on {options.device}")


if __name__ == "__main__":
    main()
