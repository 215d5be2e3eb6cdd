"""TorchRec's JaggedTensor and KeyedJaggedTensor as (values, offsets), and back, without copies.

TorchRec is imported only by `from_jagged`, which has to make one of its tensors; everything else
goes by the methods of the tensor that it is given.

Example::

    history = embeddings(features)["history"]            # JaggedTensor
    x, offsets = jagged_cuda.torchrec.to_jagged(history)
    out = jagged_cuda.jagged_flash_attention(x, x, x, offsets)
    history = jagged_cuda.torchrec.with_values(history, out)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from jagged_cuda.ops._contract import fail_argument, shape_text

__all__ = ["features_to_jagged", "from_jagged", "to_jagged", "with_values"]


def to_jagged(jt: Any) -> tuple[Tensor, Tensor]:
    """Take a JaggedTensor apart.

    Args:
        jt: a JaggedTensor, as an EmbeddingCollection returns for each feature.

    Returns:
        ``(values, offsets)``, the tensors that jt itself holds: values `[T, ...]`, offsets
        `[B + 1]`. Offsets are computed, and kept by jt, if it has only lengths.

    Raises:
        RuntimeError: jt is something else.

    Notes:
        Nothing is copied and nothing synchronises. Weights stay with jt: ``jt.weights_or_none()``.
    """
    if not is_jagged_tensor(jt):
        fail_argument("torchrec.to_jagged", "jt", "a JaggedTensor", describe(jt))
    return jt.values(), jt.offsets()


def features_to_jagged(
    kjt: Any, keys: Sequence[str] | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Take a KeyedJaggedTensor apart by features, without waiting for the GPU.

    ``kjt[key]`` and ``kjt.to_dict()`` read the features' lengths on the host. Here each feature is
    its slice of all offsets, beside the values of all features: the offsets do not begin at 0,
    which every operator takes; rows of other features are outside every sequence.

    Args:
        kjt: a KeyedJaggedTensor. Its features may have strides (numbers of sequences) of their own.
        keys: which features, by default all.

    Returns:
        For each key ``(values, offsets)``: values `[T, ...]` the same tensor for all, offsets
        `[B + 1]` a view.

    Raises:
        RuntimeError: kjt is something else, or has no feature of that name.

    Notes:
        Nothing is copied. Results of operators have rows for all of values, zeros outside the
        feature: their work is that of the feature's rows, their memory that of all. Linear layers
        treat all rows, so for a small feature among large ones ``kjt[key]`` may cost less.
    """
    if not is_keyed_jagged_tensor(kjt):
        fail_argument("torchrec.features_to_jagged", "kjt", "a KeyedJaggedTensor", describe(kjt))
    names, strides = list(kjt.keys()), list(kjt.stride_per_key())
    values, offsets = kjt.values(), kjt.offsets()
    begins = dict(zip(names, accumulate(strides, initial=0), strict=False))
    stride_of = dict(zip(names, strides, strict=True))
    found = {}
    for key in names if keys is None else keys:
        if key not in begins:
            fail_argument("torchrec.features_to_jagged", "keys", f"among {names}", repr(key))
        found[key] = values, offsets[begins[key] : begins[key] + stride_of[key] + 1]
    return found


def from_jagged(values: Tensor, offsets: Tensor, *, weights: Tensor | None = None) -> Any:
    """Make a JaggedTensor of rows and offsets.

    Args:
        values: `[T, ...]`.
        offsets: `[B + 1]` int32 or int64. They have to begin at 0 for the methods of JaggedTensor
            that go by lengths alone, and for other modules of TorchRec; `to_jagged` gives them back
            as they are.
        weights: `[T]`, or None.

    Returns:
        A JaggedTensor that holds these tensors.

    Raises:
        ImportError: TorchRec is not installed.
    """
    from torchrec import JaggedTensor

    return JaggedTensor(values=values, weights=weights, offsets=offsets)


def with_values(jt: Any, values: Tensor) -> Any:
    """Make a JaggedTensor or KeyedJaggedTensor of other rows, where jt's lie.

    Args:
        jt: a JaggedTensor, or a KeyedJaggedTensor.
        values: `[T, ...]`, one row for each of jt's.

    Returns:
        One of jt's kind around values, with the lengths, offsets and weights, and the keys and
        strides, that jt holds.

    Raises:
        RuntimeError: jt is something else; the number of rows is another.

    Notes:
        Nothing is copied and nothing synchronises.
    """
    keyed = is_keyed_jagged_tensor(jt)
    if not keyed and not is_jagged_tensor(jt):
        expected = "a JaggedTensor or a KeyedJaggedTensor"
        fail_argument("torchrec.with_values", "jt", expected, describe(jt))
    if not isinstance(values, Tensor) or values.is_nested:
        fail_argument("torchrec.with_values", "values", "a tensor", describe(values))
    if values.shape[0] != jt.values().shape[0]:
        expected = shape_text([jt.values().shape[0], "..."])
        fail_argument("torchrec.with_values", "values", expected, shape_text(values.shape))
    parts = {
        "values": values,
        "weights": jt.weights_or_none(),
        "lengths": jt.lengths_or_none(),
        "offsets": jt.offsets_or_none(),
    }
    if not keyed:
        return type(jt)(**parts)
    if jt.variable_stride_per_key():
        parts["stride_per_key_per_rank"] = jt.stride_per_key_per_rank()
        parts["inverse_indices"] = jt.inverse_indices_or_none()
    else:
        parts["stride"] = jt.stride()
    return type(jt)(keys=jt.keys(), **parts)


def is_jagged_tensor(x: Any) -> bool:
    """Whether x has the methods of a JaggedTensor, and is no KeyedJaggedTensor."""
    return _has_methods(x, "values", "offsets", "weights_or_none") and not hasattr(x, "keys")


def is_keyed_jagged_tensor(x: Any) -> bool:
    """Whether x has the methods of a KeyedJaggedTensor."""
    return _has_methods(x, "values", "offsets", "keys", "stride_per_key")


def describe(x: object) -> str:
    """For messages: what x is, and how to get what is asked for."""
    if is_keyed_jagged_tensor(x):
        return "a KeyedJaggedTensor: take one feature of it, with features_to_jagged(...)[key]"
    if isinstance(x, Tensor):
        return "a nested tensor" if x.is_nested else "a tensor"
    return "None" if x is None else f"a {type(x).__name__}"


def _has_methods(x: object, *names: str) -> bool:
    return not isinstance(x, Tensor) and all(callable(getattr(x, name, None)) for name in names)
