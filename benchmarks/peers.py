"""Other implementations, found by import: nothing here is a dependency."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DESCRIPTIONS = {
    "padded": "the operator in PyTorch on data that is already padded",
    "dense": "attention unfused in PyTorch on padded data: product, mask, softmax, product",
    "sdpa": "scaled_dot_product_attention on padded data; on a GPU FlashAttention, which takes no"
    " mask, so that padding takes part",
    "varlen": "FlashAttention-2 in torch, behind torch.nn.attention.varlen",
    "cudnn_frontend": "cuDNN's ragged attention, through the package nvidia-cudnn-frontend",
    "fa3": "FlashAttention-3: flash_attn_interface, or the wheel fa3-fwd (forward only)",
    "flex": "FlexAttention, compiled, with a block mask made beforehand; forward only but in hstu",
    "flex_mask": "the same with the making of its block mask",
    "cudnn_flex": "cuDNN's ragged attention (softmax), the same mask and kv_bias as a score_mod",
    "padded_hstu": "HSTU's attention in PyTorch on padded data",
    "indexing": "plain PyTorch: boolean masks, cat, repeat_interleave, indexing",
    "pytorch": "plain PyTorch on packed rows: layer_norm, product, dropout",
    "compiled": "torch.compile of the same",
    "sll": "FBGEMM's Triton kernels (fbgemm_gpu.sll, fbgemm_gpu.triton.jagged)",
}


class AbsentError(RuntimeError):
    """A peer that this machine, or this case, does not have; the message is the reason."""


def need_cuda(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise AbsentError(f"{name} needs a GPU")


# --- FBGEMM's Triton kernels


@functools.cache
def _fbgemm_folder(within: str) -> Path | None:
    spec = importlib.util.find_spec("fbgemm_gpu")
    for location in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(location) / within
        if folder.is_dir():
            return folder
    return None


def sll(module: str, within: str = "sll/triton") -> Any:
    """A file of fbgemm_gpu/sll/triton, or of another folder there, as a module of its own.

    fbgemm_gpu itself, whose library wants one particular release of torch, is not imported.
    """
    folder = _fbgemm_folder(within)
    if folder is None:
        raise AbsentError("fbgemm_gpu is not installed (pip install --no-deps fbgemm-gpu-cpu)")
    name = "_jagged_cuda_bench_" + within.replace("/", "_")
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module(f"{name}.{module}")


# --- attention on jagged data


Sizes = tuple[Tensor, Tensor, int, int]  # offsets of queries and of keys, the longest of each


class VarlenAttention(torch.autograd.Function):
    """FlashAttention-2 behind torch.nn.attention.varlen. q, k, v `[rows, H, D]`, offsets int32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, scale: float, causal: bool
    ) -> Tensor:
        window = {"window_size_left": -1, "window_size_right": 0 if causal else -1}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *sizes, 0.0, causal, return_debug_mask=False, scale=scale, **window
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"scale": scale, **window}
        if any(ctx.needs_input_grad):  # dropout's state, unused: made outside the backward
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            ctx.arguments = (*sizes, 0.0, causal, state, torch.empty(0, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.aten._flash_attention_backward(
            grad_out, *ctx.saved_tensors, *ctx.arguments, **ctx.options
        )
        return (*gradients, None, None, None)


def flash_attention_3() -> tuple[Any, bool]:
    """Its varlen function, and whether it has a backward."""
    for module, has_backward in (("flash_attn_interface", True), ("fa3_fwd_interface", False)):
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module).flash_attn_varlen_func, has_backward
    raise AbsentError("neither flash_attn_interface nor fa3_fwd_interface is installed")


# --- versions


def versions() -> dict[str, str]:
    """The installed peers that are packages of their own."""
    names = ("fbgemm-gpu-cpu", "fbgemm-gpu", "fa3-fwd", "flash-attn-3", "nvidia-cudnn-frontend")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
