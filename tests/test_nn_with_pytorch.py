"""Modules of jagged_cuda.nn are at home in PyTorch: compilers, copies, ranks, nested tensors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from nn_examples import (
    EACH_MODULE,
    EXAMPLE,
    KEYS,
    LAYOUT,
    OTHER,
    OTHER_KEYS,
    E,
    Example,
    H,
    N,
    Tensors,
    draw,
    make,
    offsets_of,
)
from plain import run_python
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jagged_cuda
from jagged_cuda.nn import (
    DINAttention,
    HSTULayer,
    JaggedFeatureInteraction,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)

# --- compilers, copies, ranks


@EACH_MODULE
def test_compile_and_export(example: Example, device: torch.device) -> None:
    """One graph without breaks, forward and backward, for every T and B."""
    torch._dynamo.reset()
    module = make(example, device)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, t: Tensors, offsets: Tensor, kv_offsets: Tensor) -> Tensor:
            return example.call(self.m, t, offsets, kv_offsets)

    caller = Caller()
    compiled = torch.compile(caller, fullgraph=True, dynamic=True, backend="aot_eager")
    rows, keys, batch = (torch.export.Dim(name, min=2) for name in ("T", "K", "B"))
    dims = {"x": rows, "history": rows, "kv": keys, "values": keys, "targets": batch}
    first = (draw(example, (LAYOUT, KEYS), device), *offsets_of((LAYOUT, KEYS), device))
    shapes = {name: {0: dims[name]} for name in example.shapes}
    program = torch.export.export(
        caller, first, dynamic_shapes=(shapes, {0: batch + 1}, {0: batch + 1})
    )
    exported = program.module()
    for index, layouts in enumerate(((LAYOUT, KEYS), (OTHER, OTHER_KEYS))):
        inputs, offsets = draw(example, layouts, device), offsets_of(layouts, device)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            out = compiled(inputs, *offsets)
            gradients = torch.autograd.grad(out.sum(), list(module.parameters()))
        expected = caller(inputs, *offsets)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(exported(inputs, *offsets), expected)
        wanted = torch.autograd.grad(expected.sum(), list(module.parameters()))
        torch.testing.assert_close(gradients, wanted)


@EXAMPLE
def test_copies(example: Example) -> None:
    """Deep copies, pickles and state_dicts give the same bits; so does a module made on meta."""
    module, inputs = make(example), draw(example, (LAYOUT, KEYS))
    offsets = offsets_of((LAYOUT, KEYS))
    expected = example.call(module, inputs, *offsets)
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    loaded = example.make(device="meta", dtype=torch.float64)
    loaded.to_empty(device="cpu").load_state_dict(torch.load(stored, weights_only=True))
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(example.call(each, inputs, *offsets), expected)


@EACH_MODULE
def test_activation_checkpointing(example: Example) -> None:
    module, inputs = make(example), draw(example, (LAYOUT, KEYS))
    offsets = offsets_of((LAYOUT, KEYS))
    gradients = []
    for run_forward in (
        lambda: example.call(module, inputs, *offsets),
        lambda: checkpoint(example.call, module, inputs, *offsets, use_reentrant=False),
    ):
        gradients.append(torch.autograd.grad(run_forward().sum(), list(module.parameters())))
    assert all(map(torch.equal, *gradients))


DISTRIBUTED = """
import os, sys
os.environ |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import jagged_cuda
from jagged_cuda import nn


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.JaggedTransformerLayer(16, 2, dtype=torch.float64)
        self.cross = nn.JaggedMultiheadAttention(16, 2, num_kv_heads=1, dtype=torch.float64)
        self.target = nn.TargetAttention(16, 2, dtype=torch.float64)
        self.din = nn.DINAttention(16, dtype=torch.float64)
        self.interaction = nn.JaggedFeatureInteraction(16, dtype=torch.float64)
        self.hstu = nn.HSTULayer(16, 2, recompute=True, dtype=torch.float64)

    def forward(self, targets, x, offsets):
        y = self.layer(self.hstu(x, offsets), offsets, causal=True)
        x = y + self.cross(x, offsets, kv=y)
        found = self.target(targets, x, offsets) + self.din(targets, x, offsets)
        return found.sin().sum() + self.interaction(targets, x, offsets).cos().sum()


torch.manual_seed(0)
model = Model()
targets, x = torch.randn(6, 3, 16).double(), torch.randn(20, 16).double()
offsets = torch.tensor([0, 4, 4, 9, 15, 16, 20])
halves = [(targets[i : i + 3], x, offsets[i : i + 4]) for i in (0, 3)]  # their offsets: a slice
ranks = []
for rank in (0, 1):
    if (child := os.fork()) == 0:  # before autograd has threads, which a fork would lose
        mean = sum(model(*half) for half in halves) / 2
        expected = torch.autograd.grad(mean, list(model.parameters()))
        store = "file://" + sys.argv[1]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        parallel = DistributedDataParallel(model)
        parallel(*halves[rank]).backward()
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted)
        model.zero_grad(set_to_none=True)
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
        model(*halves[rank]).backward()
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), wanted)
        dist.destroy_process_group()
        os._exit(0)
    ranks.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in ranks]))
"""


def test_data_parallel(tmp_path: Any) -> None:
    """Two ranks with a half of the batch each get the gradients of the whole: DDP, then FSDP."""
    run_python("-c", DISTRIBUTED, str(tmp_path / "store"), OMP_NUM_THREADS="1")


# --- containers


class Model(nn.Module):
    """One of each, for tracers; without annotations, which torch.fx does not store."""

    def __init__(self):
        super().__init__()
        self.layer = JaggedTransformerLayer(E, H)
        self.cross = JaggedMultiheadAttention(E, H)
        self.target = TargetAttention(E, H)
        self.din = DINAttention(E)
        self.interaction = JaggedFeatureInteraction(E)
        self.hstu = HSTULayer(E, H)

    def forward(self, targets, x, offsets):
        y = self.layer(x, offsets, causal=True)
        y = self.hstu(y, offsets)
        y = self.cross(y, offsets, kv=x, kv_offsets=offsets)
        found = self.target(targets, y, offsets) + self.din(targets, y, offsets)
        return found, self.interaction(targets, y, offsets)


def test_one_graph_for_every_kind_of_rows() -> None:
    """torch.fx does not know what will come."""
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    x, offsets = torch.randn(5, E), torch.tensor([0, 2, 5])
    targets = torch.randn(2, N, E)
    expected = model(targets, x, offsets)
    assert all(map(torch.equal, traced(targets, x, offsets), expected))
    nt = jagged_cuda.nested.from_jagged(x, offsets)
    assert all(map(torch.equal, traced(targets, nt, None), expected))
    stored = pickle.loads(pickle.dumps(traced))
    assert all(map(torch.equal, stored(targets, x, offsets), expected))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nested_tensors(compiled: bool, device: torch.device) -> None:
    """In and out; results fit the input, and its gradient is a nested tensor too."""
    torch._dynamo.reset()
    model = Model().to(device)
    layer, target = model.layer, model.target
    if compiled:
        layer, target = (
            torch.compile(m, fullgraph=True, backend="aot_eager") for m in (layer, target)
        )
    x, offsets = torch.randn(9, E, device=device), torch.tensor([0, 2, 2, 9], device=device)
    targets = torch.randn(3, N, E, device=device)
    nt = jagged_cuda.nested.from_jagged(x, offsets, min_len=0, max_len=7).requires_grad_()
    out = layer(nt, causal=True)
    assert out.shape == nt.shape
    torch.testing.assert_close(out.values(), model.layer(x, offsets, causal=True))
    found = target(targets, out + nt)
    torch.testing.assert_close(found, model.target(targets, out.values() + x, offsets))
    (gradient,) = torch.autograd.grad(found.sum(), nt)
    leaf = x.clone().requires_grad_()
    expected = model.target(targets, model.layer(leaf, offsets, causal=True) + leaf, offsets)
    torch.testing.assert_close(gradient.values(), *torch.autograd.grad(expected.sum(), leaf))


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu() -> None:
    """Forward and backward, of every kind of rows."""
    model = Model().cuda()
    x, offsets = torch.randn(5, E, device="cuda"), torch.tensor([0, 2, 5], device="cuda")
    targets = torch.randn(2, N, E, device="cuda")

    def step() -> None:
        for rows in ((x, offsets), (jagged_cuda.nested.from_jagged(x, offsets), None)):
            y = model.hstu(*rows) + model.layer(*rows, causal=True)
            found = model.target(targets, y, rows[1]) + model.din(targets, y, rows[1])
            (found.sum() + model.interaction(targets, y, rows[1]).sum()).backward()

    step()  # cuBLAS makes its workspace
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
