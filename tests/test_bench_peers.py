"""Peers that need a GPU, replaced by plain functions: does each get the right operands?"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import checking, cudnn_frontend, implementations, peers, shapes
from benchmarks.operands import Operands
from jagged_cuda.testing.lengths import Layout

LENGTHS = (20, 3, 33)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, kv_begins: Tensor, scale: float, causal: bool
) -> Tensor:
    """q, k, v `[rows, H, D]`, sequence by sequence; computed in float32, as kernels do."""
    dtype, found = q.dtype, []
    q, k, v = (tensor.float() for tensor in (q, k, v))
    for seq in range(len(begins) - 1):
        rows = slice(int(begins[seq]), int(begins[seq + 1]))
        keys = slice(int(kv_begins[seq]), int(kv_begins[seq + 1]))
        logits = scale * torch.einsum("qhd,khd->hqk", q[rows], k[keys])
        if causal:
            logits = logits + torch.full_like(logits, -torch.inf).triu(1)
        found.append(torch.einsum("hqk,khd->qhd", logits.softmax(2), v[keys]))
    return torch.cat(found).to(dtype)


def _gradients(qkv: Sequence[Tensor], grad_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in qkv]
        return torch.autograd.grad(_attention(*leaves, *arguments), leaves, grad_out)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, **options: Any
) -> tuple[Tensor, Tensor]:
    begins, kv_begins, max_queries, max_len, dropout, causal = rest
    assert begins.dtype == kv_begins.dtype == torch.int32 and dropout == 0
    assert (max_queries, max_len) == (int(begins.diff().max()), int(kv_begins.diff().max()))
    assert options["window_size_right"] == (0 if causal else -1)
    return _attention(q, k, v, begins, kv_begins, scale, causal), q.new_zeros(1)


def _flash_backward(grad_out: Tensor, *rest: Any, scale: float, **_: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, begins, kv_begins, _, _, _, causal, _, _ = rest
    return _gradients((q, k, v), grad_out, begins, kv_begins, scale, causal)


def _flash_3(*arguments: Any, causal: bool) -> Tensor:
    q, k, v, begins, kv_begins, max_queries, max_len = arguments
    assert (max_queries, max_len) == (int(begins.diff().max()), int(kv_begins.diff().max()))
    return _attention(q, k, v, begins, kv_begins, q.shape[2] ** -0.5, causal)


class _CudnnTensor:
    """Keeps what is set: set_dim(value) and the like."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def keep(value: Any) -> _CudnnTensor:
            self.given[name.removeprefix("set_")] = value
            return self

        return keep

    def begins_in(self, pack: dict[Any, Tensor]) -> Tensor:
        """The rows where sequences begin, from offsets in elements."""
        dim, stride = self.given["dim"], self.given["stride"]
        assert stride == [dim[1] * dim[2] * dim[3], dim[3], dim[1] * dim[3], 1]
        return pack[self.given["ragged_offset"]].flatten() // stride[2]


class _CudnnGraph:
    """Does in PyTorch what was asked of the graph."""

    def __init__(self, **_: Any) -> None:
        self.built: list[str] = []

    def tensor(self, **geometry: Any) -> _CudnnTensor:
        return _CudnnTensor(**geometry)

    def sdpa(self, **options: Any) -> tuple[_CudnnTensor, ...]:
        self.options, self.results = options, (_CudnnTensor(), _CudnnTensor())
        return self.results

    def sdpa_backward(self, **options: Any) -> tuple[_CudnnTensor, ...]:
        assert options["max_total_seq_len_kv"] == 64  # 56 rows, rounded up
        self.options, self.results = options, tuple(_CudnnTensor() for _ in range(3))
        return self.results

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.built.append(name)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Any, Tensor], workspace: Tensor, handle: object) -> None:
        assert self.built[0] == "validate" and self.built[-1] == "build_plans"
        options = self.options
        q, k, v = (pack[options[name]] for name in ("q", "k", "v"))
        begins, kv_begins = (options[name].begins_in(pack) for name in ("q", "k"))
        assert torch.equal(begins.diff(), pack[options["seq_len_q"]].flatten())
        assert torch.equal(kv_begins.diff(), pack[options["seq_len_kv"]].flatten())
        causal = options["diagonal_band_right_bound"] == 0
        arguments = (begins, kv_begins, options["attn_scale"], causal)
        assert all(tensor.given["output"] for tensor in self.results)
        if "dO" in options:
            assert torch.equal(options["stats"].begins_in(pack), begins)
            found = _gradients((q, k, v), pack[options["dO"]], *arguments)
        else:
            assert torch.equal(self.results[1].begins_in(pack), begins)
            found = (_attention(q, k, v, *arguments), pack[self.results[1]].zero_())
        for tensor, value in zip(self.results, found, strict=True):
            pack[tensor].copy_(value)


def _cudnn() -> Any:
    return types.SimpleNamespace(
        data_type=types.SimpleNamespace(
            BFLOAT16="bf16", HALF="half", FLOAT="float", INT32="i32", INT64="i64"
        ),
        heur_mode=types.SimpleNamespace(A=0, FALLBACK=1),
        pygraph=_CudnnGraph,
        create_handle=object,
        set_stream=lambda handle, stream: None,
    )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "need_cuda", lambda name, device: None)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _flash_backward)
    monkeypatch.setattr(peers, "flash_attention_3", lambda: (_flash_3, True))
    library = _cudnn()
    monkeypatch.setattr(cudnn_frontend, "library", lambda: library)
    monkeypatch.setattr(cudnn_frontend, "_handle", lambda device: None)
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["varlen", "fa3", "cudnn_frontend"])
@pytest.mark.parametrize("kind", ["self", "causal", "target"])
def test_operands_arrive(name: str, kind: str) -> None:
    operands = Operands.draw(
        Layout(LENGTHS),
        1 if kind == "target" else 2,
        8,
        torch.device("cpu"),
        torch.bfloat16,
        causal=kind == "causal",
        queries=5 if kind == "target" else None,
    )
    candidate = implementations.makers(operands, shapes.PRECISIONS["bf16"])[name]()
    out, *gradients = candidate.step()
    check = checking.AttentionCheck(operands)
    assert candidate.rows is not None
    check.require_out(candidate.rows(out))
    dq, dk, dv = gradients
    check.require_gradients((candidate.rows(dq), dk, dv))


def test_cudnn_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_frontend.library.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(peers.AbsentError, match="pip install nvidia-cudnn-frontend"):
        cudnn_frontend.library()
