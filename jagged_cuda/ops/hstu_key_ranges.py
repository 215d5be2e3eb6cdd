"""hstu_key_ranges: HSTU's masks as two ranges of keys per row."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def hstu_key_ranges(
    offsets: Tensor,
    *,
    kv_offsets: Tensor | None = None,
    num_targets: Tensor | None = None,
    contextual_len: int | Tensor = 0,
    max_attn_len: int = 0,
    min_full_attn_len: int = 0,
    target_group: int = 1,
    causal: bool = True,
    total: int | None = None,
) -> Tensor:
    """Say which keys each row sees under a mask of HSTU, as two ranges.

    A sequence of Lk keys is contextual keys, then its history, then targets. All contextual keys
    count as step 0, each key of the history as one more step, and all targets as the step after
    those. Row i is at position ``p = i + Lk - Lq``, as a key there would be. It sees

    - itself, and the keys of earlier steps (with ``causal=False`` of all other steps), as long as
      they are at most max_attn_len steps away, or it is within min_full_attn_len steps of the
      targets;
    - as a contextual row, everything before the targets;
    - as a target, the earlier targets of its group.

    Args:
        offsets: `[B + 1]` int32 or int64; the queries of sequence b are rows
            ``offsets[b]:offsets[b + 1]``.
        kv_offsets: `[B + 1]` of offsets' dtype, for keys; None means offsets. Fewer queries than
            keys are the last ones: new rows against a long history.
        num_targets: `[B]` int32 or int64, keys at the end of each sequence; None means none.
        contextual_len: keys at the beginning of each sequence, an int or `[B]` int32 or int64.
        max_attn_len: steps that a row looks back (and without causality ahead); 0 is unlimited.
        min_full_attn_len: steps before the targets whose rows look back without limit.
        target_group: targets in a group.
        causal: see nothing later, but for contextual rows.
        total: rows of the result, those of q. None reads the last of offsets, which waits for the
            GPU.

    Returns:
        `[total, 2, 2]` int32: of each row two ranges (begin, end) of keys, ``begin <= j < end``,
        counted from the first key of its sequence. They do not overlap, and an empty one has
        begin = end. For a target the second one is its group up to itself, for other rows it is
        empty. Rows outside every sequence get empty ones.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Made for ``key_ranges`` of the attention operators, which are then called without causal.
        Empty sequences are allowed, as are contextual keys or targets that fill a sequence: where
        nothing lies between them, rows see themselves and their group alone. Numbers of targets
        beyond a sequence's length count as its length. No gradient. With total nothing
        synchronises.

    Source: "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations" (Zhai et al., 2024), and the masks of its public code.

    Example:
        >>> hstu_key_ranges(torch.tensor([0, 3]), num_targets=torch.tensor([1]))
        tensor([[[0, 1],
                 [0, 0]],
        <BLANKLINE>
                [[0, 2],
                 [0, 0]],
        <BLANKLINE>
                [[0, 2],
                 [2, 3]]], dtype=torch.int32)
    """
    op = "hstu_key_ranges"
    if total is None:
        _contract.check_offsets(op, offsets)
        total = _matrices.read_size(op, "total", offsets)
    lens = contextual_len if isinstance(contextual_len, Tensor) else None
    return call(
        torch.ops.jagged_cuda.hstu_key_ranges.default,
        offsets,
        kv_offsets,
        num_targets,
        lens,
        0 if isinstance(contextual_len, Tensor) else contextual_len,
        max_attn_len,
        min_full_attn_len,
        target_group,
        causal,
        total,
    )


register(
    "hstu_key_ranges",
    autocast="unchanged",
)
