"""What an operator's room (``ops/<op>.py``) says about it, and how arguments are drawn from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import DISTRIBUTIONS, Layout, draw_layout
from jagged_cuda.testing.samples import STORAGES, Rows, Sample, Spec, draw_sample

Tensors = dict[str, Tensor]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Profile:
    """How large samples are: candidates for B, for the longest sequence, and for the choices."""

    num_seqs: Sequence[int]
    max_len: Sequence[int]
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """Batches that take paths of a GPU's kernels that those of profiles seldom take.

    Args:
        num_seqs, max_len: ranges of B and of the longest sequence.
        choices: candidates in place of those of profile edge.
        distributions: of lengths.
        dtypes: names of those that have such kernels.
    """

    num_seqs: tuple[int, int]
    max_len: tuple[int, int]
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    dtypes: tuple[str, ...] = tuple(DTYPES)


@dataclass(frozen=True, repr=False)
class Case:
    """An operator and how to judge it. Tensors, outputs and gradients go by name.

    Args:
        name: of the public function; the stem of its files in every layer.
        registered: the arguments of each registered operator behind it, forward first.
        choices: candidates for each size and option.
        shapes: of the floating arguments of a spec.
        rows: whose rows each argument and output has: "q", "kv", "seq" (one per sequence) or
            "table" (for all sequences, as many as the choice "buckets" says),
            "matrix" (one for each element of a sequence's matrix `[L, Lk]`; the choice "capacity"
            says how many there are), "total" (those of "q" in as many as that choice says),
            "features" (one element for each of D features, of no sequence), or a function that
            gives the layout of a result that is packed anew, from row 0 on.
        function: calls the function of a module (jagged_cuda, triton_ref) on tensors, offsets and
            kv_offsets.
        reference: the padded definition, on arguments of any dtype.
        profiles: "small", "edge", "large".
        kinds: of batches that the fuzzer draws on a GPU beside those of the profiles.
        autocast: the policy under autocast.
        product: it multiplies operands, which TF32 may round.
        differentiable: its results are floating. Else they are integers or bools, which `function`
            and `reference` bring to what is judged: rows times them, for instance.
        rounded: padded PyTorch in the same precision, in each way in which it can be written:
            arguments in the dtype of sums, what is stored in the other one. Without any, the
            definition serves: it stores nothing between two steps.
        terms: of each output and, given cotangents, of each gradient: the size of the terms that
            are summed into it, which rounding errors within sums are relative to. By default the
            definition on absolute values, which is right for what is linear in each argument.
        jumps: how far each gradient may be off because sums that are off by an accuracy times their
            terms come to lie on the other side of a kink, or are stored as a neighbouring value; or
            None.
        functions: the public functions that the choice "function" names, one of which it calls in
            place of that of its name.
        huge: choices for which 4.2 million rows have more than 2^31 elements, or None.
        huge_dense: choices for which 32,775 sequences have more than 2^31 elements in tensors of
            one row per sequence, or None.
    """

    name: str
    choices: Mapping[str, Sequence[Any]]
    shapes: Callable[[Spec], dict[str, tuple[int, ...]]]
    rows: Mapping[str, Rows]
    function: Callable[[Any, Spec, Tensors, Tensor, Tensor | None], Tensors]
    registered: Callable[[Sample], dict[str, tuple[Any, ...]]]
    reference: Callable[[Spec, Tensors], Tensors]
    profiles: Mapping[str, Profile]
    autocast: Literal["lower_precision", "float32", "unchanged"]
    kinds: tuple[Kind, ...] = ()
    product: bool = False
    differentiable: bool = True
    rounded: tuple[Callable[[Spec, Tensors, torch.dtype], Tensors], ...] = ()
    terms: Callable[[Spec, Tensors, Tensors | None], Tensors] | None = None
    jumps: Callable[[Spec, Tensors, Tensors, torch.dtype, float], Tensors] | None = None
    functions: tuple[str, ...] = ()
    huge: Mapping[str, Any] | None = None
    huge_dense: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Case({self.name!r})"

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.rows if name in ("out", "lse"))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The floating arguments, each of which has a gradient."""
        return tuple(name for name in self.rows if name not in self.outputs)

    def spec(self, profile: str, seed: int) -> Spec:
        """Draw a spec from a seed."""
        rng = random.Random(f"{self.name} {profile} {seed}")
        sizes = self.profiles[profile]
        num_seqs, max_len = rng.choice(sizes.num_seqs), rng.choice(sizes.max_len)

        def layout() -> Layout:
            return draw_layout(rng, rng.choice(tuple(DISTRIBUTIONS)), num_seqs, max_len)

        return self.draw(rng, profile, seed, layout)

    def draw(
        self,
        rng: random.Random,
        profile: str,
        seed: int,
        layout: Callable[[], Layout],
        *,
        freely: bool = False,
        kind: Kind | None = None,
    ) -> Spec:
        """Draw choices, storages and the type of offsets; every generator of batches comes here.

        Args:
            rng: what is drawn from.
            profile: whose choices are drawn from.
            seed: of the values.
            layout: draws lengths; called again for keys, or columns, with lengths of their own.
            freely: for a third of the choices, or a sixth of those of a kind, take any value among
                the listed ones.
            kind: whose choices take the place of the profile's.
        """
        choices, share = {}, 1 / 3 if kind is None else 1 / 6
        preferred = dict(self.profiles[profile].choices) | (dict(kind.choices) if kind else {})
        for name, listed in self.choices.items():
            candidates = preferred.get(name, listed)
            choices[name] = rng.choice(candidates)
            if freely and rng.random() < share:
                choices[name] = _any_value(rng, name, candidates, choices[name])
        return Spec(
            seed=seed,
            layout=layout(),
            choices=choices,
            kv_layout=layout() if choices.get("cross") else None,
            storage={n: rng.choice(tuple(STORAGES)) for n in self.inputs if rng.random() < 0.4},
            offsets_dtype=rng.choice((torch.int32, torch.int64)),
        )

    def sample(self, spec: Spec, dtype: torch.dtype, device: torch.device | str) -> Sample:
        """Draw the arguments of a spec."""
        return draw_sample(spec, self.shapes(spec), self.rows, dtype, device)

    def call(self, ops: Any, sample: Sample) -> Tensors:
        """Call the function of a module on a sample."""
        return self.function(ops, sample.spec, sample.tensors, sample.offsets, sample.kv_offsets)


def _any_value(rng: random.Random, name: str, candidates: Sequence[Any], listed: Any) -> Any:
    """Any value between the candidates, if they are only examples of what is allowed."""
    tuples = (each for each in candidates if type(each) is tuple)
    largest = max((n for each in tuples for n in each if type(n) is int), default=1)
    if name == "heads":
        kv_heads = rng.randint(1, 3)
        return kv_heads * rng.randint(1, 4), kv_heads
    if name == "dims":
        return _any_dims(rng, largest)
    if name == "window_size":
        return rng.randint(-1, largest), rng.randint(-1, largest)
    if {type(candidate) for candidate in candidates} == {int} and min(candidates) > 0:
        return rng.randint(min(candidates), max(candidates))
    return listed


def _any_dims(rng: random.Random, largest: int) -> tuple[int, int]:
    """D and Dv for each head dim that kernels are compiled for as often; half are whole vectors."""
    fewer = rng.choice((0, *(dim for dim in HEAD_DIMS if dim < largest)))
    most = min(largest, *(dim for dim in HEAD_DIMS if dim > fewer))
    dims = [rng.randint(fewer + 1, most), rng.randint(1, most)]
    rng.shuffle(dims)
    if rng.random() < 0.5:
        dims = [min(most, -(-dim // 8) * 8) for dim in dims]
    return dims[0], dims[1]


def absolute_terms(
    definition: Callable[[Spec, Tensors], Tensors],
    spec: Spec,
    tensors: Tensors,
    cotangents: Tensors | None,
) -> Tensors:
    """The terms of a function that is linear in each argument: the function and its gradients
    on absolute values."""
    leaves = {name: t.abs().requires_grad_() for name, t in tensors.items()}
    out = definition(spec, leaves)["out"]
    found = {"out": out.detach()}
    if cotangents is not None:
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangents["out"].abs())
        found |= {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return found


# --- what several operators draw from

# What kernels of attention are compiled for, or are chosen by.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
FEATURES = (1, 2, 3, 8, 15, 16, 31, 32, 33, 40, 64, 65, 128, 129, 200)
CAPACITIES = ("exact", "exact", "spare", "short")
# x[T] alone, and no column at all, are allowed.
TRAILING = ((), (1,), (3,), (8,), (16,), (65,), (2, 3), (1, 1, 7), (0,), (300,))

PRODUCT_PROFILES = {
    "small": Profile((1, 2, 4), (1, 9, 24), {"D": (1, 3, 8, 16), "N": (1, 5, 8)}),
    "edge": Profile((1, 3, 6), (33, 65, 130)),
    "large": Profile((64, 500), (200, 700), {"D": (64, 256, 257), "N": (8, 40, 128, 384)}),
}
MATRIX_PROFILES = PRODUCT_PROFILES | {
    "large": Profile((16, 100), (200, 500), {"D": (64, 256, 257), "N": (8, 40, 128, 384)})
}
# Few terms per sum, and few columns, in either product and in its gradient.
PRODUCT_KINDS = (
    Kind((1, 6), (20, 130), {"D": (1,), "N": (32, 72, 128)}),
    Kind((1, 6), (20, 130), {"D": (8, 16), "N": (64, 72, 128)}),
    Kind((1, 6), (20, 130), {"D": (64, 128, 256), "N": (8, 8, 1)}),
    # Sums over rows that are cut: every 256 rows with few columns, every 1,024 with many.
    Kind((1, 4), (300, 1200), {"D": (8, 64), "N": (1, 8, 64)}, dtypes=("float16", "bfloat16")),
    Kind((1, 3), (1100, 2600), {"D": (512, 520), "N": (64, 128)}, dtypes=("float16", "bfloat16")),
)


def matrix_kinds(name: str) -> tuple[Kind, ...]:
    """Whole vectors, and columns enough for wgmma; `name` is the choice that says how many."""
    columns = {name: (64, 72, 96, 128, 200)}
    return tuple(
        Kind((1, 6), (20, 130), columns, dtypes=dtypes)
        for dtypes in (("float16", "bfloat16"), ("float32",))
    )


ROW_PROFILES = {
    "small": Profile((1, 2, 4), (1, 9, 24)),
    "edge": Profile((1, 3, 6), (33, 65, 300)),
    "large": Profile((64, 500), (200, 3000), {"trailing": ((8,), (4, 64), (257,))}),
}
