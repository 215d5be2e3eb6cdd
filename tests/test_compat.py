"""jagged_cuda.compat: the functions of other libraries, compared with these libraries."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import sentence
from torch import Tensor

from jagged_cuda import compat, jagged_flash_attention

B, D, N = 5, 8, 6
LENGTHS = (3, 0, 7, 1, 4)
OFFSETS = torch.tensor(LENGTHS).cumsum(0)
OFFSETS = torch.cat((torch.zeros(1, dtype=torch.int64), OFFSETS))
T = sum(LENGTHS)
ROWS = torch.cat([torch.arange(n) for n in LENGTHS])  # within their sequences

# --- FBGEMM

Call = Callable[[Any, dict[str, Tensor], Tensor, int], Any]
SHAPES = {"x": (T, D), "y": (T, N), "dense": (B, D, N), "padded": (B, 4, D), "vector": (T,)}

# The arguments that each takes by position, with FBGEMM's names for them.
FUNCTIONS: dict[str, tuple[tuple[str, ...], Call]] = {
    "jagged_to_padded_dense": (
        ("x",),
        lambda f, t, o, max_len: f(values=t["x"], offsets=[o], max_lengths=[max_len]),
    ),
    "jagged_to_padded_dense, of numbers": (
        ("vector",),
        lambda f, t, o, max_len: f(t["vector"], [o], [max_len], -1.5),
    ),
    "dense_to_jagged": (
        ("padded",),
        lambda f, t, o, max_len: f(dense=t["padded"][:, :max_len], x_offsets=[o]),
    ),
    "dense_to_jagged, with total_L": (
        ("padded",),
        lambda f, t, o, max_len: f(t["padded"][:, :max_len], [o], total_L=T + 2),
    ),
    "jagged_dense_elementwise_add_jagged_output": (
        ("x", "padded"),
        lambda f, t, o, max_len: f(x_values=t["x"], x_offsets=[o], y=t["padded"][:, :max_len]),
    ),
    "jagged_dense_bmm": (
        ("x", "dense"),
        lambda f, t, o, max_len: f(x_values=t["x"], x_offsets=o, y=t["dense"], max_L=max_len),
    ),
    "jagged_jagged_bmm": (
        ("x", "y"),
        lambda f, t, o, max_len: f(x_values=t["x"], y_values=t["y"], x_offsets=o, max_L=max_len),
    ),
    "jagged_softmax": (
        ("x",),
        lambda f, t, o, max_len: f(values=t["x"], x_offsets=o, max_L=max_len),
    ),
}


# FBGEMM has kernels for each; its build for the CPU alone lacks the others.
ON_EACH = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.fbgemm_cuda])]
)


def operands(names: tuple[str, ...], device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(SHAPES[name], generator=generator).to(device).requires_grad_()
        for name in names
    }


def values_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.fbgemm
@ON_EACH
@pytest.mark.parametrize("max_len", [1, 3, 4, 7, 12])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_agrees_with_fbgemm(name: str, dtype: torch.dtype, max_len: int, device: str) -> None:
    """Values and gradients, cut or not."""
    import fbgemm_gpu  # noqa: F401, it registers the operators

    names, call = FUNCTIONS[name]
    offsets = OFFSETS.to(device, dtype)
    # FBGEMM's softmax leaves the rows that it cuts, and their gradient, as they were in memory.
    kept = slice(None) if name != "jagged_softmax" else ROWS.lt(max_len).to(device)
    outcomes = []
    for library in (compat, torch.ops.fbgemm):
        tensors = operands(names, device)
        result = call(getattr(library, name.partition(",")[0]), tensors, offsets, max_len)
        values = values_of(result)
        weight = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        loss = (values * weight.to(device))[kept].sum()
        outcomes.append((result, values, *torch.autograd.grad(loss, list(tensors.values()))))
    (found, *ours), (expected, *theirs) = outcomes
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our[kept], their[kept])
    assert type(found) is type(expected)
    if isinstance(found, tuple):
        assert type(found[1]) is type(expected[1])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.fbgemm
@ON_EACH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_sums_of_lengths_agree_with_fbgemm(dtype: torch.dtype, device: str) -> None:
    import fbgemm_gpu  # noqa: F401

    for lengths in ([2, 0, 3], [], [[1, 2, 0], [0, 4, 5]]):
        given = torch.tensor(lengths, dtype=dtype, device=device)
        found = compat.asynchronous_complete_cumsum(given)
        expected = torch.ops.fbgemm.asynchronous_complete_cumsum(given)
        assert torch.equal(found, expected) and found.dtype is expected.dtype


@pytest.mark.fbgemm
def test_a_sum_of_two_dtypes_agrees_with_fbgemm() -> None:
    import fbgemm_gpu  # noqa: F401

    tensors = operands(("x", "padded"))
    arguments = tensors["x"].half(), [OFFSETS], tensors["padded"]
    found, expected = (
        library.jagged_dense_elementwise_add_jagged_output(*arguments)[0]
        for library in (compat, torch.ops.fbgemm)
    )
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.fbgemm
def test_arguments_have_fbgemms_names_and_order() -> None:
    import fbgemm_gpu  # noqa: F401

    for name in set(compat.__all__) - {"flash_attn_varlen_func"}:
        schema = getattr(torch.ops.fbgemm, name).default._schema
        parameters = inspect.signature(getattr(compat, name)).parameters
        assert list(parameters) == [argument.name for argument in schema.arguments], name
        for argument in schema.arguments:
            if argument.has_default_value():
                assert parameters[argument.name].default == argument.default_value, name


@pytest.mark.parametrize("name", ["jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax"])
def test_what_is_cut_is_not_read(name: str) -> None:
    names, call = FUNCTIONS[name]
    function, tensors = getattr(compat, name), operands(names)
    expected = values_of(call(function, tensors, OFFSETS, 3))
    assert expected.shape[0] != T or not expected[ROWS >= 3].any()
    hostile = {
        key: values.detach().clone().masked_fill(ROWS[:, None] >= 3, float("nan"))
        if values.shape[0] == T
        else values
        for key, values in tensors.items()
    }
    assert torch.equal(values_of(call(function, hostile, OFFSETS, 3)), expected)
    # Nothing is as large as max_L.
    assert values_of(call(function, tensors, OFFSETS, 2**40)).isfinite().all()


LIST = "a list of one tensor"
ONE = "there is one jagged dimension"
MISUSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "two dimensions": (
        lambda x, o: compat.jagged_to_padded_dense(x, [o, o], [2]),
        f"jagged_to_padded_dense: offsets must be {LIST}: {ONE}, got 2",
    ),
    "two lengths": (
        lambda x, o: compat.jagged_to_padded_dense(x, [o], [2, 3]),
        f"jagged_to_padded_dense: max_lengths must be a list of one length: {ONE}, got 2",
    ),
    "two dimensions back": (
        lambda x, o: compat.dense_to_jagged(x[None], [o, o]),
        f"dense_to_jagged: x_offsets must be {LIST}: {ONE}, got 2",
    ),
    "two dimensions added": (
        lambda x, o: compat.jagged_dense_elementwise_add_jagged_output(x, [o, o], x[None]),
        f"jagged_dense_elementwise_add_jagged_output: x_offsets must be {LIST}: {ONE}, got 2",
    ),
    "no list": (
        lambda x, o: compat.dense_to_jagged(x[None], o),
        f"dense_to_jagged: x_offsets must be {LIST}, got a Tensor",
    ),
    "a list": (
        lambda x, o: compat.jagged_softmax(x, [o], 3),
        "jagged_softmax: x_offsets must be a tensor, got a list: pass torch.tensor(...) of it",
    ),
    "a length on the device": (
        lambda x, o: compat.jagged_dense_bmm(x, o, x.new_ones(B, D, N), torch.tensor(3)),
        "jagged_dense_bmm: max_L must be an int, got a tensor: the host would wait for the tensor's"
        " device; pass int(...) of it",
    ),
    "a negative length": (
        lambda x, o: compat.jagged_jagged_bmm(x, x, o, -1),
        "jagged_jagged_bmm: max_L must be 0 or more, got -1",
    ),
    "lengths of floats": (
        lambda x, o: compat.asynchronous_complete_cumsum(x),
        "asynchronous_complete_cumsum: t_in must be int32 or int64, got float32",
    ),
    "lengths in three dimensions": (
        lambda x, o: compat.asynchronous_complete_cumsum(o[None, None]),
        "asynchronous_complete_cumsum: t_in must be [B] or [N, B], got [1, 1, 6]",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_gets_a_sentence(name: str) -> None:
    call, message = MISUSES[name]
    assert sentence(call, torch.ones(T, D), OFFSETS) == message


# --- flash-attn


def attention_of_each(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, kv_offsets: Tensor, scale: float | None
) -> Tensor:
    """Causal, bottom-right, by PyTorch, one sequence at a time."""
    parts = []
    for b in range(len(offsets) - 1):
        rows, keys = slice(*offsets[b : b + 2].tolist()), slice(*kv_offsets[b : b + 2].tolist())
        each = [x[part].transpose(0, 1) for x, part in ((q, rows), (k, keys), (v, keys))]
        size = each[0].shape[1], each[1].shape[1]
        mask = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0])
        out = torch.nn.functional.scaled_dot_product_attention(
            *each, attn_mask=mask, scale=scale, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def test_flash_attn_is_attention() -> None:
    offsets, kv_offsets = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 9]).int()
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    found = compat.flash_attn_varlen_func(
        *(q, k, v, offsets, kv_offsets, 3, 5), softmax_scale=0.4, causal=True, deterministic=True
    )
    expected = attention_of_each(q, k, v, offsets, kv_offsets, 0.4)
    torch.testing.assert_close(found, expected)


def test_flash_attn_takes_a_window_and_gives_its_sums() -> None:
    """As Transformers calls it: the same window on both sides, and causal."""
    x = torch.randn(T, 2, 8)
    begins = OFFSETS.int()
    out, lse, probs = compat.flash_attn_varlen_func(
        *(x, x, x, begins, begins, 7, 7), causal=True, window_size=(2, 2), return_attn_probs=True
    )
    expected = jagged_flash_attention(x, x, x, OFFSETS, window_size=(2, 0), return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1].t()) and probs is None


LACKING = {
    "dropout_p": (0.1, "0: there is no dropout, got 0.1"),
    "softcap": (30.0, "0: scores are not capped, got 30.0"),
    "alibi_slopes": (torch.ones(2), "None: there is no ALiBi, got a tensor"),
    "block_table": (torch.ones(2, 1).int(), "None: keys are not paged, got a tensor"),
}


@pytest.mark.parametrize("option", LACKING)
def test_what_flash_attn_has_and_we_lack_gets_a_sentence(option: str) -> None:
    value, message = LACKING[option]
    x = torch.ones(T, 2, 8)
    arguments = (x, x, x, OFFSETS, OFFSETS, 7, 7)
    text = sentence(compat.flash_attn_varlen_func, *arguments, **{option: value})
    assert text == f"flash_attn_varlen_func: {option} must be {message}"


# --- both


def test_they_are_traced_and_compiled() -> None:
    class Model(torch.nn.Module):
        def forward(self, x, lengths, weights, padded):
            offsets = compat.asynchronous_complete_cumsum(lengths)
            out = compat.jagged_dense_bmm(x, offsets, weights, 3)[0]
            out = compat.jagged_softmax(out, offsets, 3)[0]
            out = compat.jagged_dense_elementwise_add_jagged_output(out, [offsets], padded)[0]
            heads = out[:, None]
            out = compat.flash_attn_varlen_func(heads, heads, heads, offsets, offsets, 7, 7)
            return compat.jagged_to_padded_dense(out, [offsets], [3])

    model = Model()
    inputs = (
        *(torch.randn(T, D), torch.tensor(LENGTHS)),
        *(torch.randn(B, D, N), torch.randn(B, 4, N)),
    )
    expected = model(*inputs)
    assert torch.equal(torch.fx.symbolic_trace(model)(*inputs), expected)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), expected)


def test_examples() -> None:
    found = doctest.testmod(compat, extraglobs={"torch": torch})
    assert found.attempted > len(compat.__all__) and not found.failed
