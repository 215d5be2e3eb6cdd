"""cuDNN's ragged attention, forward and backward, through the package nvidia-cudnn-frontend.

A cuDNN graph is built for one batch: its sizes are part of it, its lengths are tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import AbsentError, Sizes

TOTAL_MULTIPLE = 64  # what cuDNN wants the bounds of its workspace rounded up to


@functools.cache
def library() -> Any:
    """The module; torch is imported by then, so that both use one cuDNN."""
    if importlib.util.find_spec("cudnn") is None:
        raise AbsentError("cudnn_frontend is not installed (pip install nvidia-cudnn-frontend)")
    return importlib.import_module("cudnn")


@functools.cache
def _handle(device: torch.device) -> Any:
    return library().create_handle()


class RaggedAttention:
    """The two graphs of one batch. q `[Tq, H, D]`, k and v `[T, H, D]`, in bf16 or fp16."""

    def __init__(self, q: Tensor, k: Tensor, sizes: Sizes, scale: float, causal: bool) -> None:
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise AbsentError("cudnn_frontend has bfloat16 and float16 alone")
        self.cudnn = library()
        query_begins, begins, max_queries, max_len = sizes
        self.sizes = {"q": (q.shape[0], max_queries), "k": (k.shape[0], max_len)}
        self.num_seqs = begins.shape[0] - 1
        self.heads, self.dim = q.shape[1:]
        self.dtype, self.device = q.dtype, q.device
        self.options = {
            "attn_scale": scale,
            "use_padding_mask": True,
            "diagonal_band_right_bound": 0 if causal else None,
        }
        # The lengths, and where sequences begin in elements: of rows, and of softmax statistics.
        row_elems = self.heads * self.dim
        self.operands = {
            "seq_len_q": query_begins.diff().int(),
            "seq_len_kv": begins.diff().int(),
            "q_begins": query_begins * row_elems,
            "k_begins": begins * row_elems,
            "stats_begins": query_begins * self.heads,
        }
        self.operands = {name: t.reshape(-1, 1, 1, 1) for name, t in self.operands.items()}

    # --- graphs

    def _geometry(self, side: str) -> dict[str, list[int]]:
        """Dimensions `[B, H, M, D]` and strides; or of the statistics `[B, H, M, 1]`."""
        longest = self.sizes["q" if side == "stats" else side][1]
        dim = 1 if side == "stats" else self.dim
        row = self.heads * dim
        return {
            "dim": [self.num_seqs, self.heads, longest, dim],
            "stride": [longest * row, dim, row, 1],
        }

    def _like(self, graph: Any, name: str, operand: Tensor) -> Any:
        types = self.cudnn.data_type
        data_type = {
            torch.int32: types.INT32,
            torch.int64: types.INT64,
            torch.float32: types.FLOAT,
            torch.bfloat16: types.BFLOAT16,
            torch.float16: types.HALF,
        }[operand.dtype]
        dim, stride = list(operand.shape), list(operand.stride())
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def _options(self, tensors: dict[str, Any], backward: bool) -> dict[str, Any]:
        """What a graph is asked for beside q, k, v and lengths; a subclass may ask for more."""
        return self.options

    def _new_graph(self, sides: dict[str, str]) -> tuple[Any, dict[str, Any]]:
        """A graph, and its inputs by name: lengths, offsets, and those of `sides`."""
        types = self.cudnn.data_type
        graph = self.cudnn.pygraph(
            io_data_type=types.BFLOAT16 if self.dtype == torch.bfloat16 else types.HALF,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            **({"handle": _handle(self.device)} if self.device.type == "cuda" else {}),
        )
        tensors = {
            name: self._like(graph, name, operand) for name, operand in self.operands.items()
        }
        for name, side in sides.items():
            options = {"data_type": types.FLOAT} if side == "stats" else {}
            tensor = graph.tensor(name=name, **self._geometry(side), **options)
            tensors[name] = tensor.set_ragged_offset(tensors[f"{side}_begins"])
        return graph, tensors

    def _build(
        self, graph: Any, tensors: dict[str, Any], outputs: dict[str, tuple[str, Any]]
    ) -> tuple[Any, dict[str, Any]]:
        for name, (side, tensor) in outputs.items():
            geometry = self._geometry(side)
            tensor.set_output(True).set_dim(geometry["dim"]).set_stride(geometry["stride"])
            tensors[name] = tensor.set_ragged_offset(tensors[f"{side}_begins"])
            if side == "stats":
                tensor.set_data_type(self.cudnn.data_type.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, tensors

    @functools.cached_property
    def _forward(self) -> tuple[Any, dict[str, Any]]:
        names = ("q", "k", "v", "seq_len_q", "seq_len_kv")
        graph, tensors = self._new_graph({"q": "q", "k": "k", "v": "k"})
        inputs = {name: tensors[name] for name in names}
        out, stats = graph.sdpa(**inputs, generate_stats=True, **self._options(tensors, False))
        return self._build(graph, tensors, {"out": ("q", out), "stats": ("stats", stats)})

    @functools.cached_property
    def _backward(self) -> tuple[Any, dict[str, Any]]:
        sides = {"q": "q", "k": "k", "v": "k", "o": "q", "dO": "q", "stats": "stats"}
        graph, tensors = self._new_graph(sides)
        inputs = {name: tensors[name] for name in (*sides, "seq_len_q", "seq_len_kv")}
        totals = {
            f"max_total_seq_len_{name}": -(-self.sizes[side][0] // TOTAL_MULTIPLE) * TOTAL_MULTIPLE
            for name, side in (("q", "q"), ("kv", "k"))
        }
        options = self._options(tensors, True)
        dq, dk, dv = graph.sdpa_backward(**inputs, **totals, **options)
        return self._build(graph, tensors, {"dq": ("q", dq), "dk": ("k", dk), "dv": ("k", dv)})

    # --- calls

    def _execute(self, built: tuple[Any, dict[str, Any]], **operands: Tensor) -> None:
        graph, tensors = built
        handle = _handle(self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.cudnn.set_stream(handle=handle, stream=stream)
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        pack = {tensors[name]: operand for name, operand in (self.operands | operands).items()}
        graph.execute(pack, workspace, handle=handle)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        stats = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)  # [Tq, H]
        self._execute(self._forward, q=q, k=k, v=v, out=out, stats=stats)
        return out, stats

    def backward(self, *operands: Tensor) -> Sequence[Tensor]:
        """operands: q, k, v, out, grad_out, stats."""
        inputs = dict(zip(("q", "k", "v", "o", "dO", "stats"), operands, strict=True))
        gradients = {f"d{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")}
        self._execute(self._backward, **inputs, **gradients)
        return tuple(gradients.values())


class Attention(torch.autograd.Function):
    """q, k, v `[rows, H, D]`, and the RaggedAttention of their batch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ragged: RaggedAttention) -> Tensor:
        out, stats = ragged.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.ragged = ragged
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats = ctx.saved_tensors
        return (*ctx.ragged.backward(q, k, v, out, grad_out, stats), None)
