"""cuDNN's ragged attention under a mask of key ranges, as a score_mod of its graph.

A score_mod may be what cuDNN finds a kernel for. For Hopper, cuDNN 9.19 has selections by comparing
a key's index with its row's, or with a number of the row. It has none for logical operators, nor in
the backward for a third number of a row. So a mask is one range of keys for each row, and the row
itself; HSTU's are, with targets in groups of one. Nothing looks a number up in a table, so biases
by position and time cannot be had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cudnn_frontend import RaggedAttention
from benchmarks.peers import AbsentError, Sizes
from jagged_cuda.testing import padding
from jagged_cuda.testing.lengths import Layout

MASKED = -1e30


def _range_of_rows(ranges: Tensor, row: Tensor) -> Tensor:
    """The one range of each row, `[T, 2]`, where what it sees is that and itself."""
    first, second = ranges.unbind(1)
    itself = torch.stack((row, row + 1), 1)
    in_first = (first[:, 0] <= row) & (row < first[:, 1])
    expressible = torch.where(second[:, 0] == second[:, 1], in_first, (second == itself).all(1))
    if not bool(expressible.all()):
        raise AbsentError("cudnn_flex has one range of keys for each row, and the row itself")
    return first


class RangedAttention(RaggedAttention):
    """The graphs of one batch of self-attention under key ranges, with a bias of keys or none.

    Args:
        ranges: `[T, 2, 2]`
        kv_bias: `[T]`, without a gradient: cuDNN's for a bias of keys leaves its memory.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        layout: Layout,
        scale: float,
        ranges: Tensor,
        kv_bias: Tensor | None = None,
    ) -> None:
        begins = layout.offsets(q.device).long()
        sizes: Sizes = (begins, begins, layout.max_len, layout.max_len)
        super().__init__(q, k, sizes, scale, causal=False)
        self.options = {"attn_scale": scale}  # the mask leaves padding out, too
        row = torch.arange(q.shape[0], device=q.device) - begins[layout.seq_of_row(q.device)]
        of_rows = padding.pad(_range_of_rows(ranges, row), layout)[:, None]  # [B, 1, M, 2]
        first, end = (of_rows[..., side, None].int().contiguous() for side in (0, 1))
        self.operands |= {"range_end": end, "masked": q.new_full((1,) * 4, MASKED).float()}
        if bool(first.any()):
            self.operands["range_begin"] = first
        if kv_bias is not None:
            self.operands["kv_bias"] = padding.pad(kv_bias, layout)[:, None, None].contiguous()

    def _modified(self, graph: Any, scores: Any, tensors: dict[str, Any]) -> Any:
        types = self.cudnn.data_type
        row, key = (graph.gen_index(input=scores, axis=axis) for axis in (2, 3))
        for index in (row, key):
            index.set_data_type(types.INT32)

        def where(compare: str, bound: Any, seen: Any, unseen: Any) -> Any:
            condition = getattr(graph, f"cmp_{compare}")(
                input=key, comparison=bound, compute_data_type=types.BOOLEAN
            )
            condition.set_data_type(types.BOOLEAN)
            return graph.binary_select(input0=seen, input1=unseen, mask=condition)

        if "kv_bias" in tensors:
            bias = tensors["kv_bias"]
            scores = graph.add(a=scores, b=bias, compute_data_type=types.FLOAT)
        masked = tensors["masked"]
        found = where("lt", tensors["range_end"], scores, masked)
        if "range_begin" in tensors:
            found = where("ge", tensors["range_begin"], found, masked)
        return where("eq", row, scores, found)

    def _options(self, tensors: dict[str, Any], backward: bool) -> dict[str, Any]:
        found = self.options | {"score_mod": lambda of, scores: self._modified(of, scores, tensors)}
        if not backward:
            return found
        if "kv_bias" in tensors:
            # Once more for each row, with a stride of 0: as [B, 1, 1, M] gradients come out wrong.
            longest = self.sizes["k"][1]
            bias = tensors["kv_bias"].set_dim([self.num_seqs, 1, longest, longest])
            bias.set_stride([longest, longest, 0, 1])
        # What is masked has no weight, so its gradient is zero without a mask.
        return found | {"score_mod_bprop": lambda of, gradient: gradient}
