"""Peers that need a GPU, replaced by plain functions: does each get the right operands?"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import jagged_cuda
from benchmarks import checking, cudnn_frontend, hstu, implementations, peers, shapes
from benchmarks.operands import Operands
from jagged_cuda.testing.lengths import Layout

LENGTHS = (20, 3, 33)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    kv_begins: Tensor,
    scale: float,
    causal: bool,
    modify: Callable[[int, Tensor], Tensor] = lambda seq, logits: logits,
) -> Tensor:
    """q, k, v `[rows, H, D]`, sequence by sequence; computed in float32, as kernels do."""
    dtype, found = q.dtype, []
    q, k, v = (tensor.float() for tensor in (q, k, v))
    for seq in range(len(begins) - 1):
        rows = slice(int(begins[seq]), int(begins[seq + 1]))
        keys = slice(int(kv_begins[seq]), int(kv_begins[seq + 1]))
        logits = modify(seq, scale * torch.einsum("qhd,khd->hqk", q[rows], k[keys]))
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


class _Value:
    """What a score_mod computes with: a tensor that broadcasts with `[H, L, L]` scores."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def set_data_type(self, value: Any) -> None:
        assert (value == "i32") == (self.tensor.dtype == torch.int32)


class _ScoreModGraph:
    """The operators of a score_mod on the scores of one sequence, done at once.

    operands: the graph's inputs, `[B, ...]` or `[1, ...]` of padded sequences.
    """

    def __init__(self, pack: dict[Any, Tensor], seq: int) -> None:
        self.pack, self.seq = pack, seq

    def of(self, given: Any, scores: Tensor) -> Tensor:
        if isinstance(given, _Value):
            return given.tensor
        tensor = self.pack[given].as_strided(given.given["dim"], given.given["stride"])
        assert tensor.dtype in (torch.int32, torch.float32, torch.bfloat16)
        tensor = tensor[min(self.seq, len(tensor) - 1)]
        rows, keys = (min(*sizes) for sizes in zip(tensor.shape[1:], scores.shape[1:], strict=True))
        return tensor[:, :rows, :keys]

    def modified(self, score_mod: Any, scores: Tensor) -> Tensor:
        self.scores = scores
        return self.of(score_mod(self, _Value(scores)), scores)

    def gen_index(self, input: _Value, axis: int) -> _Value:
        _, rows, keys = input.tensor.shape
        found = torch.arange(rows if axis == 2 else keys, dtype=torch.int32)
        return _Value(found[:, None] if axis == 2 else found[None])

    def _compare(self, compare: str, input: Any, comparison: Any) -> _Value:
        pair = (self.of(each, self.scores) for each in (input, comparison))
        return _Value(getattr(torch, compare)(*pair))

    def cmp_lt(self, input: Any, comparison: Any, compute_data_type: str) -> _Value:
        return self._compare("lt", input, comparison)

    def cmp_ge(self, input: Any, comparison: Any, compute_data_type: str) -> _Value:
        return self._compare("ge", input, comparison)

    def cmp_eq(self, input: Any, comparison: Any, compute_data_type: str) -> _Value:
        return self._compare("eq", input, comparison)

    def add(self, a: Any, b: Any, compute_data_type: str) -> _Value:
        return _Value(self.of(a, self.scores) + self.of(b, self.scores))

    def binary_select(self, input0: Any, input1: Any, mask: _Value) -> _Value:
        chosen = (self.of(each, self.scores) for each in (input0, input1))
        return _Value(torch.where(mask.tensor, *chosen))


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
        self.options, self.results = options, tuple(_CudnnTensor() for _ in range(3))
        return self.results

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.built.append(name)

    def get_workspace_size(self) -> int:
        return 0

    def _attend(self, pack: dict[Any, Tensor], *leaves: Tensor) -> Tensor:
        """leaves: q, k, v."""
        options = self.options
        begins, kv_begins = (options[name].begins_in(pack) for name in ("q", "k"))
        assert torch.equal(begins.diff(), pack[options["seq_len_q"]].flatten())
        assert torch.equal(kv_begins.diff(), pack[options["seq_len_kv"]].flatten())
        causal = options.get("diagonal_band_right_bound") == 0
        score_mod = options.get("score_mod")
        assert options.get("use_padding_mask", False) == (score_mod is None)

        def modify(seq: int, scores: Tensor) -> Tensor:
            return _ScoreModGraph(pack, seq).modified(score_mod, scores) if score_mod else scores

        return _attention(*leaves, begins, kv_begins, options["attn_scale"], causal, modify)

    def execute(self, pack: dict[Any, Tensor], workspace: Tensor, handle: object) -> None:
        assert self.built[0] == "validate" and self.built[-1] == "build_plans"
        options, results = self.options, self.results
        leaves = [pack[options[name]] for name in ("q", "k", "v")]
        assert all(tensor.given["output"] for tensor in results)
        found: Sequence[Tensor]
        stats = options["stats"] if "dO" in options else results[1]
        assert torch.equal(stats.begins_in(pack), options["q"].begins_in(pack))
        if "dO" in options:
            rounded_up = -(-len(leaves[1]) // 64) * 64
            assert options["max_total_seq_len_kv"] == rounded_up
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                out = self._attend(pack, *leaves)
                found = torch.autograd.grad(out, leaves, pack[options["dO"]])
            if "score_mod" in options:
                assert options["score_mod_bprop"](None, found) is found
        else:
            found = (self._attend(pack, *leaves), pack[stats].zero_())
        for tensor, value in zip(results, found, strict=True):
            pack[tensor].copy_(value)


def _cudnn() -> Any:
    return types.SimpleNamespace(
        data_type=types.SimpleNamespace(
            BFLOAT16="bf16",
            HALF="half",
            FLOAT="float",
            INT32="i32",
            INT64="i64",
            BOOLEAN="bool",
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


def _hstu(bias: str = "", near: int = 0, learns: bool = False) -> hstu._Operands:
    case = hstu._Case("case", 4, 64, near, bias, learns)
    return hstu._draw(case, True, torch.device("cpu"), torch.bfloat16)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("bias", ["", "kv_bias"])
@pytest.mark.parametrize("near", [0, 5])
def test_cudnn_has_the_masks_of_hstu(bias: str, near: int) -> None:
    o = _hstu(bias, near)
    candidate = hstu._makers(o)["cudnn_flex"]()
    out, *gradients = candidate.step()
    check = hstu._Check(o, softmax=True)
    check.require_out(out)
    check.require_gradients(gradients)
    for other in (o._replace(ranges=_hstu(near=8).ranges), _hstu("" if bias else "kv_bias", near)):
        with pytest.raises(checking.WrongResultError):
            hstu._Check(other, softmax=True).require_out(out)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("bias", "learns", "reason"),
    [
        ("position_bias", False, "cannot look up"),
        ("time_bias", True, "cannot look up"),
        ("kv_bias", True, "no gradient of kv_bias"),
    ],
)
def test_biases_that_cudnn_has_not_are_refused(bias: str, learns: bool, reason: str) -> None:
    with pytest.raises(peers.AbsentError, match=reason):
        hstu._makers(_hstu(bias, learns=learns))["cudnn_flex"]()


@pytest.mark.usefixtures("stand_ins")
def test_masks_that_cudnn_has_not_are_refused() -> None:
    o = _hstu()
    groups = jagged_cuda.hstu_key_ranges(o.offsets, num_targets=o.targets, target_group=2)
    without_itself = o.ranges - torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)
    for ranges in (groups, without_itself):
        with pytest.raises(peers.AbsentError, match="one range of keys"):
            hstu._makers(o._replace(ranges=ranges))["cudnn_flex"]()


def test_cudnn_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_frontend.library.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(peers.AbsentError, match="pip install nvidia-cudnn-frontend"):
        cudnn_frontend.library()
