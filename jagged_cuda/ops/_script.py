"""What torch.jit.script compiles in place of a function of ours, which has the same name here.

TorchScript reads a function's source, and knows neither keyword-only options nor the way from a
public function to its kernel (_dispatch.py). These forms call the registered operators, which it
knows, with their gradients. They take the same arguments, without the checks of their kinds:
TorchScript checks types itself. Products of float32 do not use TF32, whatever PyTorch allows.

``register``  makes TorchScript take the form; a function without one raises one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._jit_internal import boolean_dispatched


def register(public: Callable[..., Any], has_lse: bool = False) -> None:
    """Let torch.jit.script take the form of a public function.

    Args:
        public: the function.
        has_lse: it has the option return_lse, which decides what it returns. TorchScript's types
            must not depend on a value: it takes the option as a constant and one of two forms.
    """
    name = public.__name__

    def form() -> Callable[..., Any]:
        found = globals().get(name)
        if found is None:
            raise RuntimeError(
                f"{name}: torch.jit.script is not supported; use torch.export or torch.compile"
            )
        return found

    public.__prepare_scriptable__ = form  # type: ignore[attr-defined]
    with_lse, without_lse = globals().get(f"{name}_with_lse"), globals().get(name)
    if has_lse and with_lse and without_lse:
        forms: Any = {
            "if_true": with_lse,
            "if_false": without_lse,
            "index": list(without_lse.__annotations__).index("return_lse"),
            "default": False,
            "arg_name": "return_lse",
        }
        boolean_dispatched[public] = forms


# --- offsets


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    sums = lengths.cumsum(0, dtype=torch.int64)
    return torch.nn.functional.pad(sums.to(lengths.dtype), (1, 0))


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    return torch.diff(offsets)


def matrix_offsets(offsets: Tensor, y_offsets: Tensor | None = None) -> Tensor:
    rows = offsets.to(torch.int64).diff().clamp(min=0)
    columns = rows if y_offsets is None else y_offsets.to(torch.int64).diff().clamp(min=0)
    return torch.nn.functional.pad((rows * columns).cumsum(0), (1, 0))


# --- products


def jagged_dense_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    number = 0
    if activation is not None:
        # In the order of csrc/contract/activation.h; another name is not in the list, an error.
        number = ["none", "relu", "gelu", "silu", "sigmoid", "tanh"].index(activation)
    return torch.ops.jagged_cuda.jagged_dense_bmm(x, y, offsets, False, bias, number)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.jagged_cuda.jagged_jagged_bmm(x, y, offsets)


def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    total_out: int | None = None,
) -> Tensor:
    begins = _matrix_offsets(offsets, y_offsets, matrix_offsets)
    total = int(begins[-1]) if total_out is None else total_out
    return torch.ops.jagged_cuda.jagged_jagged_bmm_jagged_out(
        x, y, offsets, y_offsets, begins, total
    )


def array_jagged_bmm_jagged_out(
    a: Tensor,
    y: Tensor,
    offsets: Tensor,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    transpose: bool = False,
    total: int | None = None,
) -> Tensor:
    begins = _matrix_offsets(offsets, y_offsets, matrix_offsets)
    rows = y.size(0)
    if total is not None:
        rows = total
    elif y_offsets is not None:
        rows = int(y_offsets[-1]) if transpose else int(offsets[-1])
    return torch.ops.jagged_cuda.array_jagged_bmm_jagged_out(
        a, y, offsets, y_offsets, begins, rows, transpose
    )


def _matrix_offsets(offsets: Tensor, y_offsets: Tensor | None, given: Tensor | None) -> Tensor:
    return matrix_offsets(offsets, y_offsets) if given is None else given


# --- softmax


def jagged_softmax(x: Tensor, offsets: Tensor, scale: int | float = 1.0) -> Tensor:
    return torch.ops.jagged_cuda.jagged_softmax(x, offsets, float(scale))


def jagged2_softmax(
    a: Tensor,
    offsets: Tensor,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    dim: int = -1,
    scale: int | float = 1.0,
) -> Tensor:
    begins = _matrix_offsets(offsets, y_offsets, matrix_offsets)
    return torch.ops.jagged_cuda.jagged2_softmax(a, offsets, y_offsets, begins, dim, float(scale))


# --- attention


def jagged_flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: int | float | None = None,
    max_len: int | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    left, right = window_size
    if causal:
        if right > 0:
            raise RuntimeError(
                "jagged_flash_attention: window_size must be (left, 0) or (left, -1) with"
                f" causal=True, got {window_size}"
            )
        right = 0
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    out, lse = torch.ops.jagged_cuda.jagged_flash_attention(
        q, k, v, offsets, kv_offsets, left, right, _scale(q, scale), max_len
    )
    if one_head:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return out, lse


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: int | float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
) -> Tensor:
    return jagged_flash_attention_with_lse(
        q, k, v, offsets, kv_offsets, causal, window_size, scale, max_len
    )[0]


def jagged_target_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    scale: int | float | None = None,
    max_len: int | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    one_head = q.dim() == 3 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
    out, lse = torch.ops.jagged_cuda.jagged_target_attention(
        q, k, v, offsets, _scale(q, scale), max_len
    )
    if one_head:
        out, lse = out.squeeze(2), lse.squeeze(2)
    return out, lse


def jagged_target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    scale: int | float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
) -> Tensor:
    return jagged_target_attention_with_lse(q, k, v, offsets, scale, max_len)[0]


def _scale(q: Tensor, given: int | float | None) -> float:
    return q.size(-1) ** -0.5 if given is None else float(given)


# --- rows


def jagged_to_padded(
    x: Tensor, offsets: Tensor, max_len: int, fill: bool | int | float = 0.0
) -> Tensor:
    # TorchScript's float() takes a bool, or a number, but not what may be either.
    number = float(fill) if isinstance(fill, bool) else float(fill)  # noqa: RUF034
    return torch.ops.jagged_cuda.jagged_to_padded(x, offsets, max_len, number)


def padded_to_jagged(x: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    return torch.ops.jagged_cuda.padded_to_jagged(x, offsets, _total(offsets, total))


def jagged_broadcast(x: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    return torch.ops.jagged_cuda.jagged_broadcast(x, offsets, _total(offsets, total))


def jagged_sum(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.jagged_cuda.jagged_sum(x, offsets)


def jagged_mean(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.jagged_cuda.jagged_mean(x, offsets)


def _total(offsets: Tensor, given: int | None) -> int:
    return int(offsets[-1]) if given is None else given


# --- modules (jagged_cuda.nn): rows are tensors here


def take_apart(
    module: str,
    name: str,
    x: Tensor,
    offsets: Tensor | None,
    width: int,
    default: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    found = default if offsets is None else offsets
    if found is None:
        raise RuntimeError(f"{module}: offsets must be given with {name}, got None")
    return x, found


def check_targets(module: str, targets: Tensor, width: int) -> Tensor:
    return targets


def put_together(x: Tensor, values: Tensor) -> Tensor:
    return values
