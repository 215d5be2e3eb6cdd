"""The one table of cases: what tests, opcheck, fuzzing and benchmarks know of each operator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing import reference
from jagged_cuda.testing.lengths import DISTRIBUTIONS, draw_layout
from jagged_cuda.testing.samples import STORAGES, Sample, Spec, draw_sample

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Profile:
    """How large samples are: candidates for B, for the longest sequence, and for the choices."""

    num_seqs: Sequence[int]
    max_len: Sequence[int]
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Case:
    """An operator and how to judge it. Tensors, outputs and gradients go by name.

    Args:
        name: of the public function; the stem of its files in every layer.
        registered: the arguments of each registered operator behind it, forward first.
        choices: candidates for each size and option.
        shapes: of the floating arguments of a spec.
        rows: whose rows each argument and output has: "q", "kv", "seq" (one for each sequence) or
            "matrix" (one for each element of a sequence's matrix `[L, Lk]`; the choice "capacity"
            says how many there are), or "total" (those of "q" in as many as that choice says).
        function: calls the function of a module (jagged_cuda, triton_ref) on tensors, offsets and
            kv_offsets.
        reference: the padded definition, on arguments of any dtype.
        rounded: padded PyTorch in the same precision, in each way in which it can be written:
            arguments in the dtype of sums, what is stored in the other one.
        terms: of each output and, given cotangents, of each gradient.
        differentiable: the arguments that have a gradient.
        product: it multiplies operands, which TF32 may round.
        autocast: the policy under autocast.
        profiles: "small", "edge", "large".
        huge: choices for which 4.2 million rows have more than 2^31 elements, or None.
        huge_dense: choices for which 32,775 sequences have more than 2^31 elements in what has one
            row a sequence, or None.
        jumps: how far each gradient may be off because sums that are off by an accuracy times their
            terms come to lie on the other side of a kink, or are stored as a neighbouring value; or
            None.
    """

    name: str
    choices: Mapping[str, Sequence[Any]]
    shapes: Callable[[Spec], dict[str, tuple[int, ...]]]
    rows: Mapping[str, str]
    function: Callable[[Any, Spec, Tensors, Tensor, Tensor | None], Tensors]
    registered: Callable[[Sample], dict[str, tuple[Any, ...]]]
    reference: Callable[[Spec, Tensors], Tensors]
    rounded: tuple[Callable[[Spec, Tensors, torch.dtype], Tensors], ...]
    terms: Callable[[Spec, Tensors, Tensors | None], Tensors]
    differentiable: tuple[str, ...]
    product: bool
    autocast: Literal["lower_precision", "float32", "unchanged"]
    profiles: Mapping[str, Profile]
    huge: Mapping[str, Any] | None
    huge_dense: Mapping[str, Any] | None = None
    jumps: Callable[[Spec, Tensors, Tensors, torch.dtype, float], Tensors] | None = None

    def __repr__(self) -> str:
        return f"Case({self.name!r})"

    def spec(self, profile: str, seed: int) -> Spec:
        """Draw a spec from a seed."""
        rng = random.Random(f"{self.name} {profile} {seed}")
        sizes = self.profiles[profile]
        num_seqs, max_len = rng.choice(sizes.num_seqs), rng.choice(sizes.max_len)
        choices = {
            name: rng.choice(sizes.choices.get(name, candidates))
            for name, candidates in self.choices.items()
        }
        distributions = tuple(DISTRIBUTIONS)
        layout = draw_layout(rng, rng.choice(distributions), num_seqs, max_len)
        kv_layout = None
        if choices.get("cross"):
            kv_layout = draw_layout(rng, rng.choice(distributions), num_seqs, max_len)
        inputs = [name for name in self.rows if name not in self.outputs]
        storage = {name: rng.choice(tuple(STORAGES)) for name in inputs if rng.random() < 0.4}
        offsets_dtype = rng.choice((torch.int32, torch.int64))
        return Spec(seed, layout, choices, kv_layout, storage, offsets_dtype)

    def sample(self, spec: Spec, dtype: torch.dtype, device: torch.device | str) -> Sample:
        """Draw the arguments of a spec."""
        return draw_sample(spec, self.shapes(spec), self.rows, dtype, device)

    def call(self, ops: Any, sample: Sample) -> Tensors:
        """Call the function of a module on a sample."""
        return self.function(ops, sample.spec, sample.tensors, sample.offsets, sample.kv_offsets)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.rows if name in ("out", "lse"))


def _bilinear_terms(
    definition: Callable[..., Tensor],
) -> Callable[[Spec, Tensors, Tensors | None], Tensors]:
    """Of a product: itself, and its gradients, on absolute values."""

    def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
        leaves = {name: t.abs().requires_grad_() for name, t in tensors.items()}
        out = definition(leaves["x"], leaves["y"], spec.layout)
        found = {"out": out.detach()}
        if cotangents is not None:
            gradients = torch.autograd.grad(out, list(leaves.values()), cotangents["out"].abs())
            found |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
        return found

    return terms


_PRODUCT_PROFILES = {
    "small": Profile((1, 2, 4), (1, 9, 24), {"D": (1, 3, 8, 16), "N": (1, 5, 8)}),
    "edge": Profile((1, 3, 6), (33, 65, 130)),
    "large": Profile((64, 500), (200, 700), {"D": (64, 256, 257), "N": (8, 40, 128, 384)}),
}
_FEATURES = (1, 2, 3, 8, 15, 16, 31, 32, 33, 40, 64, 65, 128, 129, 200)

# --- jagged_dense_bmm


JAGGED_DENSE_BMM = Case(
    name="jagged_dense_bmm",
    choices={"D": _FEATURES, "N": _FEATURES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.layout.num_seqs, spec.choices["D"], spec.choices["N"]),
    },
    rows={"x": "q", "y": "seq", "out": "q"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_dense_bmm(t["x"], t["y"], offsets)},
    registered=lambda s: {"jagged_dense_bmm": (s.tensors["x"], s.tensors["y"], s.offsets)},
    reference=lambda spec, t: {"out": reference.jagged_dense_bmm(t["x"], t["y"], spec.layout)},
    rounded=(lambda spec, t, _: {"out": reference.jagged_dense_bmm(t["x"], t["y"], spec.layout)},),
    terms=_bilinear_terms(reference.jagged_dense_bmm),
    differentiable=("x", "y"),
    product=True,
    autocast="lower_precision",
    profiles=_PRODUCT_PROFILES,
    huge={"D": 512, "N": 8},
    huge_dense={"D": 256, "N": 257},
)

# --- jagged_jagged_bmm


JAGGED_JAGGED_BMM = Case(
    name="jagged_jagged_bmm",
    choices={"D": _FEATURES, "N": _FEATURES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.layout.total, spec.choices["N"]),
    },
    rows={"x": "q", "y": "q", "out": "seq"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_jagged_bmm(t["x"], t["y"], offsets)},
    registered=lambda s: {"jagged_jagged_bmm": (s.tensors["x"], s.tensors["y"], s.offsets)},
    reference=lambda spec, t: {"out": reference.jagged_jagged_bmm(t["x"], t["y"], spec.layout)},
    rounded=(lambda spec, t, _: {"out": reference.jagged_jagged_bmm(t["x"], t["y"], spec.layout)},),
    terms=_bilinear_terms(reference.jagged_jagged_bmm),
    differentiable=("x", "y"),
    product=True,
    autocast="lower_precision",
    profiles=_PRODUCT_PROFILES,
    huge={"D": 512, "N": 8},
    huge_dense={"D": 256, "N": 257},
)

# --- the products with one matrix a sequence

_CAPACITIES = ("exact", "exact", "spare", "short")
_MATRIX_PROFILES = _PRODUCT_PROFILES | {
    "large": Profile((16, 100), (200, 500), {"D": (64, 256, 257), "N": (8, 40, 128, 384)})
}


def _terms_of(
    definition: Callable[[Spec, Tensors], Tensors],
) -> Callable[[Spec, Tensors, Tensors | None], Tensors]:
    """Of a product: itself, and its gradients, on absolute values."""

    def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
        leaves = {name: t.abs().requires_grad_() for name, t in tensors.items()}
        out = definition(spec, leaves)["out"]
        found = {"out": out.detach()}
        if cotangents is not None:
            gradients = torch.autograd.grad(out, list(leaves.values()), cotangents["out"].abs())
            found |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
        return found

    return terms


def _matrix_offsets(sample: Sample) -> Tensor:
    return jagged_cuda.matrix_offsets(sample.offsets, sample.kv_offsets)


# --- jagged_jagged_bmm_jagged_out


def _matrices_reference(spec: Spec, tensors: Tensors) -> Tensors:
    operands = (tensors["x"], tensors["y"], spec.layout, spec.kv)
    return {"out": reference.jagged_jagged_bmm_jagged_out(*operands, spec.capacity)}


def _call_matrices(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    out = ops.jagged_jagged_bmm_jagged_out(
        tensors["x"], tensors["y"], offsets, y_offsets=kv_offsets, total_out=spec.capacity
    )
    return {"out": out}


JAGGED_JAGGED_BMM_JAGGED_OUT = Case(
    name="jagged_jagged_bmm_jagged_out",
    choices={"D": _FEATURES, "cross": (False, True), "capacity": _CAPACITIES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.kv.total, spec.choices["D"]),
    },
    rows={"x": "q", "y": "kv", "out": "matrix"},
    function=_call_matrices,
    registered=lambda s: {
        "jagged_jagged_bmm_jagged_out": (
            *(s.tensors["x"], s.tensors["y"], s.offsets, s.kv_offsets),
            *(_matrix_offsets(s), s.spec.capacity),
        )
    },
    reference=_matrices_reference,
    rounded=(lambda spec, t, _: _matrices_reference(spec, t),),
    terms=_terms_of(_matrices_reference),
    differentiable=("x", "y"),
    product=True,
    autocast="lower_precision",
    profiles=_MATRIX_PROFILES,
    huge={"D": 512},
)

# --- array_jagged_bmm_jagged_out


def _weighted_reference(spec: Spec, tensors: Tensors) -> Tensors:
    operands = (tensors["a"], tensors["y"], spec.layout, spec.kv)
    return {"out": reference.array_jagged_bmm_jagged_out(*operands, spec.choices["transpose"])}


def _weighted_offsets(
    spec: Spec, offsets: Tensor, kv_offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The result has the rows of q: with transpose these are the matrices' columns."""
    if spec.choices["transpose"] and kv_offsets is not None:
        return kv_offsets, offsets
    return offsets, kv_offsets


def _call_weighted(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    rows, columns = _weighted_offsets(spec, offsets, kv_offsets)
    out = ops.array_jagged_bmm_jagged_out(
        tensors["a"],
        tensors["y"],
        rows,
        y_offsets=columns,
        transpose=spec.choices["transpose"],
        total=None if kv_offsets is None else spec.layout.total,
    )
    return {"out": out}


def _registered_weighted(sample: Sample) -> dict[str, tuple[Any, ...]]:
    spec = sample.spec
    offsets = _weighted_offsets(spec, sample.offsets, sample.kv_offsets)
    arguments = (sample.tensors["a"], sample.tensors["y"], *offsets, _matrix_offsets(sample))
    name = "array_jagged_bmm_jagged_out"
    return {name: (*arguments, spec.layout.total, spec.choices["transpose"])}


ARRAY_JAGGED_BMM_JAGGED_OUT = Case(
    name="array_jagged_bmm_jagged_out",
    choices={
        "N": _FEATURES,
        "cross": (False, True),
        "capacity": _CAPACITIES,
        "transpose": (False, True),
    },
    shapes=lambda spec: {"a": (spec.capacity,), "y": (spec.kv.total, spec.choices["N"])},
    rows={"a": "matrix", "y": "kv", "out": "q"},
    function=_call_weighted,
    registered=_registered_weighted,
    reference=_weighted_reference,
    rounded=(lambda spec, t, _: _weighted_reference(spec, t),),
    terms=_terms_of(_weighted_reference),
    differentiable=("a", "y"),
    product=True,
    autocast="lower_precision",
    profiles=_MATRIX_PROFILES,
    huge={"N": 512},
)

# --- jagged_softmax


def _softmax_scale(spec: Spec) -> float:
    return spec.choices["scale"]


def _softmax_rounded(toward: int) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def rounded(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        options = (_softmax_scale(spec), storage, toward)
        return {"out": reference.jagged_softmax_rounded(tensors["x"], spec.layout, *options)}

    return rounded


def _softmax_terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    grad_out = None if cotangents is None else cotangents["out"]
    out, grad_x = reference.jagged_softmax_terms(
        tensors["x"], grad_out, spec.layout, _softmax_scale(spec)
    )
    return {"out": out} if grad_x is None else {"out": out, "grad_x": grad_x}


def _registered_softmax(sample: Sample) -> dict[str, tuple[Any, ...]]:
    x, scale = sample.tensors["x"], _softmax_scale(sample.spec)
    out = jagged_cuda.jagged_softmax(x.detach(), sample.offsets, scale=scale)
    return {
        "jagged_softmax": (x, sample.offsets, scale),
        "jagged_softmax_backward": (torch.randn_like(out), out, sample.offsets, scale),
    }


JAGGED_SOFTMAX = Case(
    name="jagged_softmax",
    # 6 times an outlier is a logit of some hundreds; x[T] alone, and no column at all, are allowed.
    choices={
        "trailing": ((), (1,), (3,), (8,), (16,), (65,), (2, 3), (1, 1, 7), (0,), (300,)),
        "scale": (1.0, 1.0, 0.125, 6.0, -1.5, 0.0),
    },
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "q"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_softmax(t["x"], offsets, scale=_softmax_scale(spec))
    },
    registered=_registered_softmax,
    reference=lambda spec, t: {
        "out": reference.jagged_softmax(t["x"], spec.layout, _softmax_scale(spec))
    },
    rounded=(_softmax_rounded(0), _softmax_rounded(1), _softmax_rounded(-1)),
    terms=_softmax_terms,
    differentiable=("x",),
    product=False,
    autocast="float32",
    profiles={
        "small": Profile((1, 2, 4), (1, 9, 24)),
        "edge": Profile((1, 3, 6), (33, 65, 300)),
        "large": Profile((64, 500), (200, 3000), {"trailing": ((8,), (4, 64), (257,))}),
    },
    huge={"trailing": (512,)},
)


# --- jagged2_softmax


def _jagged2_options(spec: Spec) -> tuple[Any, ...]:
    return spec.layout, spec.kv, spec.choices["dim"], _softmax_scale(spec)


def _jagged2_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return {"out": reference.jagged2_softmax(tensors["a"], *_jagged2_options(spec))}


def _jagged2_rounded(toward: int) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def rounded(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        rows, columns, dim, scale = _jagged2_options(spec)
        options = (dim, scale, storage, toward)
        out = reference.jagged2_softmax_rounded(tensors["a"], rows, columns, *options)
        return {"out": out}

    return rounded


def _jagged2_terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    grad_out = None if cotangents is None else cotangents["out"]
    options = _jagged2_options(spec)
    out, grad_a = reference.jagged2_softmax_terms(tensors["a"], grad_out, *options)
    return {"out": out} if grad_a is None else {"out": out, "grad_a": grad_a}


def _call_jagged2(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    options = {"dim": spec.choices["dim"], "scale": _softmax_scale(spec)}
    return {"out": ops.jagged2_softmax(tensors["a"], offsets, y_offsets=kv_offsets, **options)}


def _registered_jagged2(sample: Sample) -> dict[str, tuple[Any, ...]]:
    a = sample.tensors["a"]
    options = (sample.spec.choices["dim"], _softmax_scale(sample.spec))
    arguments = (sample.offsets, sample.kv_offsets, _matrix_offsets(sample), *options)
    out = torch.ops.jagged_cuda.jagged2_softmax(a.detach(), *arguments)
    return {
        "jagged2_softmax": (a, *arguments),
        "jagged2_softmax_backward": (torch.randn_like(out), out, *arguments),
    }


JAGGED2_SOFTMAX = Case(
    name="jagged2_softmax",
    choices={
        "dim": (-1, -2),
        "scale": (1.0, 1.0, 0.125, 6.0, -1.5, 0.0),
        "cross": (False, True),
        "capacity": _CAPACITIES,
    },
    shapes=lambda spec: {"a": (spec.capacity,)},
    rows={"a": "matrix", "out": "matrix"},
    function=_call_jagged2,
    registered=_registered_jagged2,
    reference=_jagged2_reference,
    rounded=(_jagged2_rounded(0), _jagged2_rounded(1), _jagged2_rounded(-1)),
    terms=_jagged2_terms,
    differentiable=("a",),
    product=False,
    autocast="float32",
    profiles={
        "small": Profile((1, 2, 4), (1, 9, 24)),
        "edge": Profile((1, 3, 6), (33, 65, 300)),
        "large": Profile((16, 100), (200, 700)),
    },
    huge=None,
)

# --- conversions and reductions

_TRAILING = ((), (1,), (3,), (8,), (16,), (65,), (2, 3), (1, 1, 7), (0,), (300,))
_ROW_PROFILES = {
    "small": Profile((1, 2, 4), (1, 9, 24)),
    "edge": Profile((1, 3, 6), (33, 65, 300)),
    "large": Profile((64, 500), (200, 3000), {"trailing": ((8,), (4, 64), (257,))}),
}


def _padded_len(spec: Spec) -> int:
    """By the choice "padded_len": a number, or what the longest sequence needs, more or less."""
    chosen = spec.choices["padded_len"]
    if isinstance(chosen, int):
        return chosen
    longest = spec.layout.max_len
    return {"longest": longest, "spare": longest + 3, "short": longest * 2 // 3}[chosen]


# --- jagged_to_padded


def _to_padded_reference(spec: Spec, tensors: Tensors) -> Tensors:
    fill = spec.choices["fill"]
    return {
        "out": reference.jagged_to_padded(tensors["x"], spec.layout, _padded_len(spec), fill),
    }


JAGGED_TO_PADDED = Case(
    name="jagged_to_padded",
    choices={
        "trailing": _TRAILING,
        "padded_len": ("longest", "spare", "short", 0),
        "fill": (0.0, -1.5, 3.0),
    },
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "seq"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_to_padded(t["x"], offsets, _padded_len(spec), fill=spec.choices["fill"])
    },
    registered=lambda s: {
        "jagged_to_padded": (s.tensors["x"], s.offsets, _padded_len(s.spec), s.spec.choices["fill"])
    },
    reference=_to_padded_reference,
    rounded=(lambda spec, t, _: _to_padded_reference(spec, t),),
    terms=_terms_of(_to_padded_reference),
    differentiable=("x",),
    product=False,
    autocast="unchanged",
    profiles=_ROW_PROFILES,
    huge={"trailing": (512,), "padded_len": 128},
)

# --- padded_to_jagged


def _to_jagged_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return {"out": reference.padded_to_jagged(tensors["x"], spec.rows_layout("total"))}


PADDED_TO_JAGGED = Case(
    name="padded_to_jagged",
    choices={
        "trailing": _TRAILING,
        "padded_len": ("longest", "spare", "short", 0),
        "total": (None,),
    },
    shapes=lambda spec: {"x": (spec.layout.num_seqs, _padded_len(spec), *spec.choices["trailing"])},
    rows={"x": "seq", "out": "total"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.padded_to_jagged(t["x"], offsets, total=spec.rows_layout("total").total)
    },
    registered=lambda s: {
        "padded_to_jagged": (s.tensors["x"], s.offsets, s.spec.rows_layout("total").total)
    },
    reference=_to_jagged_reference,
    rounded=(lambda spec, t, _: _to_jagged_reference(spec, t),),
    terms=_terms_of(_to_jagged_reference),
    differentiable=("x",),
    product=False,
    autocast="unchanged",
    profiles=_ROW_PROFILES,
    huge={"trailing": (512,), "padded_len": 128},
)

# --- jagged_sum


def _sum_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return {"out": reference.jagged_sum(tensors["x"], spec.layout)}


JAGGED_SUM = Case(
    name="jagged_sum",
    choices={"trailing": _TRAILING},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "seq"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_sum(t["x"], offsets)},
    registered=lambda s: {"jagged_sum": (s.tensors["x"], s.offsets)},
    reference=_sum_reference,
    rounded=(lambda spec, t, _: _sum_reference(spec, t),),
    terms=_terms_of(_sum_reference),
    differentiable=("x",),
    product=False,
    autocast="unchanged",
    profiles=_ROW_PROFILES,
    huge={"trailing": (512,)},
    huge_dense={"trailing": (65_600,)},
)

# --- jagged_mean


def _mean_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return {"out": reference.jagged_mean(tensors["x"], spec.layout)}


JAGGED_MEAN = Case(
    name="jagged_mean",
    choices={"trailing": _TRAILING},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "seq"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_mean(t["x"], offsets)},
    registered=lambda s: {"jagged_mean": (s.tensors["x"], s.offsets)},
    reference=_mean_reference,
    rounded=(lambda spec, t, _: _mean_reference(spec, t),),
    terms=_terms_of(_mean_reference),
    differentiable=("x",),
    product=False,
    autocast="unchanged",
    profiles=_ROW_PROFILES,
    huge={"trailing": (512,)},
    huge_dense={"trailing": (65_600,)},
)

# --- jagged_broadcast


def _broadcast_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return {"out": reference.jagged_broadcast(tensors["x"], spec.rows_layout("total"))}


JAGGED_BROADCAST = Case(
    name="jagged_broadcast",
    choices={"trailing": _TRAILING, "total": (None,)},
    shapes=lambda spec: {"x": (spec.layout.num_seqs, *spec.choices["trailing"])},
    rows={"x": "seq", "out": "total"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_broadcast(t["x"], offsets, total=spec.rows_layout("total").total)
    },
    registered=lambda s: {
        "jagged_broadcast": (s.tensors["x"], s.offsets, s.spec.rows_layout("total").total)
    },
    reference=_broadcast_reference,
    rounded=(lambda spec, t, _: _broadcast_reference(spec, t),),
    terms=_terms_of(_broadcast_reference),
    differentiable=("x",),
    product=False,
    autocast="unchanged",
    profiles=_ROW_PROFILES,
    huge={"trailing": (512,)},
    huge_dense={"trailing": (65_600,)},
)

# --- jagged_flash_attention


def _window(spec: Spec) -> tuple[int, int]:
    left, right = spec.choices["window_size"]
    return (left, 0) if spec.choices["causal"] else (left, right)


def _attention_scale(spec: Spec) -> float:
    """The scale in numbers: None is 1 / sqrt(D), "large" gives logits of some +-200."""
    scale, dim = spec.choices["scale"], spec.choices["dims"][0]
    if scale == "large":
        return 10 * dim**-0.5
    return dim**-0.5 if scale is None else scale


def _attention_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    dim_qk, dim_v = spec.choices["dims"]
    heads, kv_heads = spec.choices["heads"] or (1, 1)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (spec.layout.total, heads, dim_qk),
        "k": (spec.kv.total, kv_heads, dim_qk),
        "v": (spec.kv.total, kv_heads, dim_v),
    }
    if spec.choices["heads"] is None:
        shapes = {name: (shape[0], shape[2]) for name, shape in shapes.items()}
    return shapes


def _call_attention(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    choices = spec.choices
    out, lse = ops.jagged_flash_attention(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        offsets,
        kv_offsets=kv_offsets,
        causal=choices["causal"],
        window_size=choices["window_size"],
        scale=None if choices["scale"] is None else _attention_scale(spec),
        max_len=max(spec.layout.max_len, spec.kv.max_len) if choices["max_len"] else None,
        return_lse=True,
    )
    return {"out": out, "lse": lse}


def _registered_attention(sample: Sample) -> dict[str, tuple[Any, ...]]:
    with_heads = sample.spec.choices["heads"] is not None
    qkv = tuple(sample.tensors[n] if with_heads else sample.tensors[n].unsqueeze(1) for n in "qkv")
    offsets = (sample.offsets, sample.kv_offsets)
    options = (*_window(sample.spec), _attention_scale(sample.spec), None, False)
    detached = tuple(t.detach() for t in qkv)
    op = torch.ops.jagged_cuda.jagged_flash_attention
    out, lse = op(*detached, *offsets, *options)
    gradients = (torch.randn_like(out), torch.randn_like(lse))
    return {
        "jagged_flash_attention": (*qkv, *offsets, *options),
        "jagged_flash_attention_backward": (*gradients, *detached, out, lse, *offsets, *options),
    }


def _on_heads(
    definition: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., tuple[Tensor, ...]]:
    """Take and return tensors without a dimension of heads where the spec has none."""

    def wrapped(spec: Spec, tensors: Sequence[Tensor | None], *rest: Any) -> tuple[Tensor, ...]:
        one_head = spec.choices["heads"] is None
        with_heads = (t.unsqueeze(1) if one_head and t is not None else t for t in tensors)
        layouts = (spec.layout, spec.kv, _window(spec), _attention_scale(spec))
        found = definition(*with_heads, *layouts, *rest)
        return tuple(t.squeeze(1) for t in found) if one_head else found

    return wrapped


def _attention_reference(spec: Spec, tensors: Tensors) -> Tensors:
    qkv = (tensors["q"], tensors["k"], tensors["v"])
    out, lse = _on_heads(reference.jagged_flash_attention)(spec, qkv)
    return {"out": out, "lse": lse}


def _attention_rounded(
    divide_last: bool,
) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def rounded(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        qkv = (tensors["q"], tensors["k"], tensors["v"])
        definition = _on_heads(reference.jagged_flash_attention_rounded)
        out, lse = definition(spec, qkv, storage, divide_last)
        return {"out": out, "lse": lse}

    return rounded


def _attention_terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    gradients = cotangents or {}
    arguments = (*(tensors[n] for n in "qkv"), gradients.get("out"), gradients.get("lse"))
    found = _on_heads(reference.jagged_flash_attention_terms)(spec, arguments)
    return dict(zip(("out", "lse", "grad_q", "grad_k", "grad_v"), found, strict=False))


JAGGED_FLASH_ATTENTION = Case(
    name="jagged_flash_attention",
    choices={
        # None is the [T, D] form; else (H, G).
        "heads": (None, (1, 1), (2, 2), (4, 2), (3, 1)),
        "dims": (
            (1, 1),
            (3, 5),
            (8, 8),
            (8, 200),
            (16, 32),
            (24, 16),
            (32, 32),
            (40, 64),
            (64, 64),
            (64, 16),
            (65, 63),
            (72, 72),
            (96, 96),
            (128, 128),
            (128, 64),
            (192, 128),
            (250, 7),
            (256, 256),
        ),
        "causal": (False, True),
        "window_size": ((-1, -1), (-1, -1), (0, 0), (3, 0), (0, 5), (7, -1), (-1, 2), (40, 40)),
        "scale": (None, None, 0.3, "large", -0.2, 0.0),
        "cross": (False, True),
        "max_len": (False, True),
    },
    shapes=_attention_shapes,
    rows={"q": "q", "k": "kv", "v": "kv", "out": "q", "lse": "q"},
    function=_call_attention,
    registered=_registered_attention,
    reference=_attention_reference,
    rounded=(_attention_rounded(divide_last=False), _attention_rounded(divide_last=True)),
    terms=_attention_terms,
    differentiable=("q", "k", "v"),
    product=True,
    autocast="lower_precision",
    profiles={
        "small": Profile((1, 2, 4), (1, 9, 24), {"dims": ((1, 1), (3, 5), (8, 8), (16, 32))}),
        "edge": Profile((1, 3, 5), (33, 65, 130)),
        "large": Profile(
            (16,),
            (300, 700),
            {
                "heads": ((2, 2), (4, 1)),
                "dims": ((32, 32), (64, 64), (128, 128), (256, 256)),
                "window_size": ((-1, -1), (-1, -1), (100, 100), (256, 0)),
            },
        ),
    },
    huge={"dims": (64, 64), "heads": (8, 8)},
)

# --- jagged_target_attention


def _target_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    dim_qk, dim_v = spec.choices["dims"]
    seqs, queries, rows = spec.layout.num_seqs, spec.choices["queries"], spec.layout.total
    if spec.choices["heads"] is None:
        return {"q": (seqs, queries, dim_qk), "k": (rows, dim_qk), "v": (rows, dim_v)}
    heads, kv_heads = spec.choices["heads"]
    return {
        "q": (seqs, queries, heads, dim_qk),
        "k": (rows, kv_heads, dim_qk),
        "v": (rows, kv_heads, dim_v),
    }


def _call_target(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, _: Tensor | None
) -> Tensors:
    choices = spec.choices
    out, lse = ops.jagged_target_attention(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        offsets,
        scale=None if choices["scale"] is None else _attention_scale(spec),
        max_len=spec.layout.max_len if choices["max_len"] else None,
        return_lse=True,
    )
    return {"out": out, "lse": lse}


def _registered_target(sample: Sample) -> dict[str, tuple[Any, ...]]:
    q, k, v = (sample.tensors[name] for name in "qkv")
    if sample.spec.choices["heads"] is None:
        q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
    options = (sample.offsets, _attention_scale(sample.spec), None, False)
    detached = tuple(t.detach() for t in (q, k, v))
    out, lse = torch.ops.jagged_cuda.jagged_target_attention(*detached, *options)
    gradients = (torch.randn_like(out), torch.randn_like(lse))
    return {
        "jagged_target_attention": (q, k, v, *options),
        "jagged_target_attention_backward": (*gradients, *detached, out, lse, *options),
    }


def _on_target_heads(
    definition: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., tuple[Tensor, ...]]:
    """Take and return tensors without a dimension of heads where the spec has none."""

    def wrapped(
        spec: Spec, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], *rest: Any
    ) -> tuple[Tensor, ...]:
        one_head = spec.choices["heads"] is None
        q, k, v = tensors
        if one_head:
            q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
            gradients = [None if g is None else g.unsqueeze(2) for g in gradients]
        found = definition(q, k, v, *gradients, spec.layout, _attention_scale(spec), *rest)
        if one_head:  # out, lse and dq are dense, dk and dv jagged
            dense, jagged = found[:3], found[3:]
            found = (*(t.squeeze(2) for t in dense), *(t.squeeze(1) for t in jagged))
        return found

    return wrapped


def _target_reference(spec: Spec, tensors: Tensors) -> Tensors:
    qkv = (tensors["q"], tensors["k"], tensors["v"])
    out, lse = _on_target_heads(reference.jagged_target_attention)(spec, qkv, ())
    return {"out": out, "lse": lse}


def _target_rounded(divide_last: bool) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def rounded(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        qkv = (tensors["q"], tensors["k"], tensors["v"])
        definition = _on_target_heads(reference.jagged_target_attention_rounded)
        out, lse = definition(spec, qkv, (), storage, divide_last)
        return {"out": out, "lse": lse}

    return rounded


def _target_terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    given = cotangents or {}
    qkv, gradients = [tensors[n] for n in "qkv"], [given.get("out"), given.get("lse")]
    found = _on_target_heads(reference.jagged_target_attention_terms)(spec, qkv, gradients)
    return dict(zip(("out", "lse", "grad_q", "grad_k", "grad_v"), found, strict=False))


JAGGED_TARGET_ATTENTION = Case(
    name="jagged_target_attention",
    choices={
        # None is the [B, N, D] form; else (H, G).
        "heads": (None, (1, 1), (2, 2), (4, 2), (3, 1), (8, 1)),
        "dims": (
            (1, 1),
            (3, 5),
            (8, 8),
            (16, 32),
            (24, 16),
            (32, 32),
            (40, 64),
            (64, 64),
            (65, 63),
            (96, 96),
            (128, 128),
            (128, 64),
            (192, 128),
            (250, 7),
            (256, 256),
        ),
        # Beside the edges of the kernels' tiles of rows: 16, 32, 64 and 128.
        "queries": (8, 1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129),
        "scale": (None, None, 0.3, "large", -0.2, 0.0),
        "max_len": (False, True),
    },
    shapes=_target_shapes,
    rows={"q": "seq", "k": "q", "v": "q", "out": "seq", "lse": "seq"},
    function=_call_target,
    registered=_registered_target,
    reference=_target_reference,
    rounded=(_target_rounded(divide_last=False), _target_rounded(divide_last=True)),
    terms=_target_terms,
    differentiable=("q", "k", "v"),
    product=True,
    autocast="lower_precision",
    profiles={
        "small": Profile(
            (1, 2, 4),
            (1, 9, 24),
            {"dims": ((1, 1), (3, 5), (8, 8), (16, 32)), "queries": (8, 1, 2, 5, 16, 17)},
        ),
        # Sequences of more than 512 rows are split.
        "edge": Profile((1, 3, 5), (33, 65, 130, 600)),
        "large": Profile(
            (16, 64),
            (300, 2100),
            {
                "heads": ((1, 1), (2, 2), (4, 1)),
                "dims": ((32, 32), (64, 64), (128, 128), (256, 256)),
                "queries": (1, 8, 32, 100),
            },
        ),
    },
    huge={"dims": (64, 64), "heads": (8, 8), "queries": 8},
    huge_dense={"dims": (64, 64), "heads": (8, 8), "queries": 128},
)

# --- the table

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        JAGGED_DENSE_BMM,
        JAGGED_JAGGED_BMM,
        JAGGED_JAGGED_BMM_JAGGED_OUT,
        ARRAY_JAGGED_BMM_JAGGED_OUT,
        JAGGED_SOFTMAX,
        JAGGED2_SOFTMAX,
        JAGGED_TO_PADDED,
        PADDED_TO_JAGGED,
        JAGGED_SUM,
        JAGGED_MEAN,
        JAGGED_BROADCAST,
        JAGGED_FLASH_ATTENTION,
        JAGGED_TARGET_ATTENTION,
    )
}
