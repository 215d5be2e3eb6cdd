"""One case of the fuzzer: drawn from a seed, written as one line of JSON, run, and judged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import random
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import jagged_cuda
from jagged_cuda.testing._kernels import last_kernel
from jagged_cuda.testing.cases import DTYPES, EVERY, Case, Kind, Tensors
from jagged_cuda.testing.judge import check, run
from jagged_cuda.testing.lengths import DISTRIBUTIONS, Layout, draw_layout
from jagged_cuda.testing.samples import STORAGES, Sample, Spec, draw_cotangents

BACKENDS = ("cpu", "cuda", "triton")

# Settings that make a backend take other kernels, or check offsets, and must change no result.
ENVIRONMENT: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "JAGGED_CUDA_CPU_ISA": ("baseline", "avx2", "avx512"),
        "JAGGED_CUDA_CHECK": ("1",),
    },
    "cuda": {"JAGGED_CUDA_TENSOR_CORES": ("mma_sync",), "JAGGED_CUDA_CHECK": ("1",)},
    "triton": {},
}


@dataclass(frozen=True)
class Draw:
    """An operator, its arguments, and everything else that decides what runs.

    Args:
        op: the case's key in EVERY.
        spec: the arguments.
        dtype: of the floating tensors, by name.
        backend: "cpu", "cuda" or "triton".
        device: where the tensors lie.
        backward: judge the gradients too.
        outputs: those that gradients flow from; None means all.
        gradient_storage: how incoming gradients lie in memory, by output.
        tf32: float32 products may round their operands.
        deterministic: under torch.use_deterministic_algorithms.
        threads: of PyTorch on the CPU.
        environment: variables that choose a kernel.
    """

    op: str
    spec: Spec
    dtype: str
    backend: str
    device: str
    backward: bool = True
    outputs: tuple[str, ...] | None = None
    gradient_storage: Mapping[str, str] = field(default_factory=dict)
    tf32: bool = False
    deterministic: bool = False
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return EVERY[self.op]

    def to_json(self) -> str:
        """One line; what has its default is left out."""
        return json.dumps(_without_defaults(self))

    @staticmethod
    def from_json(text: str) -> Draw:
        fields = json.loads(text)
        spec = {name: _restore(name, value) for name, value in fields.pop("spec").items()}
        return Draw(spec=Spec(**spec), **{name: _tuples(v) for name, v in fields.items()})

    def command(self) -> str:
        """The command line that judges only this draw."""
        return f"python -m jagged_cuda.fuzz --case {shlex.quote(self.to_json())}"


def _without_defaults(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not dataclasses.is_dataclass(value):
        return dict(value) if isinstance(value, Mapping) else value
    kept = {}
    for each in dataclasses.fields(value):
        held = getattr(value, each.name)
        factory = each.default_factory
        default = each.default if factory is dataclasses.MISSING else factory()
        if held != default:
            kept[each.name] = _without_defaults(held)
    return kept


def _tuples(value: Any) -> Any:
    """JSON knows lists only, and cases tuples only."""
    if isinstance(value, list):
        return tuple(_tuples(each) for each in value)
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return value


def _restore(name: str, value: Any) -> Any:
    """A field of Spec."""
    if name.endswith("dtype"):
        return getattr(torch, value)
    value = _tuples(value)
    return Layout(**value) if name.endswith("layout") and value is not None else value


# --- drawing


@dataclass(frozen=True)
class Size:
    """How large draws are.

    Args:
        weight: how often it is drawn.
        profile: of the case, whose choices are drawn from.
        num_seqs, max_len: ranges; None means those of the profile.
        kinds: of the case take its place, if it has any.
    """

    weight: float
    profile: str
    num_seqs: tuple[int, int] | None = None
    max_len: tuple[int, int] | None = None
    kinds: bool = False


# The definition pads, and attention's is quadratic: its time bounds the sizes on each machine.
SIZES: dict[str, dict[str, Size]] = {
    "cpu": {
        "small": Size(0.93, "small"),
        "edge": Size(0.05, "edge"),
        "many": Size(0.01, "small", (100, 300), (1, 12)),
        "giant": Size(0.01, "small", (1, 2), (200, 500)),
    },
    "cuda": {
        "small": Size(0.15, "small"),
        "edge": Size(0.27, "edge"),
        "many": Size(0.05, "small", (200, 3000), (1, 40)),
        "giant": Size(0.05, "edge", (1, 3), (300, 2200)),
        "large": Size(0.01, "large"),
        "kinds": Size(0.47, "edge", kinds=True),
    },
    # Each head dim is another compilation on a GPU, and each tile a second in the interpreter.
    "triton": {
        "small": Size(0.8, "small"),
        "edge": Size(0.2, "edge"),
    },
    "interpreter": {"small": Size(1.0, "small", (1, 3), (1, 20))},
}
# The longest that lengths of a file are cut to, and how many sequences a batch of them has.
FILE_LIMITS = {"cpu": (256, 8), "cuda": (2048, 32), "triton": (256, 8), "interpreter": (20, 3)}


@dataclass(frozen=True)
class Drawn:
    """A draw, and what it was drawn from; the draw does not depend on that."""

    draw: Draw
    size: str
    distribution: str


@dataclass(frozen=True)
class Wanted:
    """What to draw from.

    Args:
        ops, dtypes: names.
        size: only this one; None means all by their weight.
        lengths: of a file; else lengths are drawn from the distributions.
    """

    ops: tuple[str, ...] = tuple(EVERY)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    size: str | None = None
    lengths: tuple[int, ...] | None = None


def place_of(backend: str, device: str) -> str:
    """The key of SIZES: the backend, or Triton's interpreter."""
    on_cpu = torch.device(device).type == "cpu"
    return "interpreter" if backend == "triton" and on_cpu else backend


def draw(wanted: Wanted, seed: int, backend: str, device: str, index: int) -> Drawn:
    """The draw of a number under a seed: always the same one for the same arguments."""
    rng = random.Random(f"{seed} {backend} {index}")
    where = place_of(backend, device)
    op = _draw_op(rng, wanted.ops, where)
    case = EVERY[op]
    sizes = SIZES[where]
    if wanted.size is not None:
        sizes = {wanted.size: sizes[wanted.size]}
    size_name = rng.choices(tuple(sizes), [size.weight for size in sizes.values()])[0]
    size = sizes[size_name]
    kind = rng.choice(case.kinds) if size.kinds and case.kinds else None
    spec, distribution = _draw_spec(rng, case, size, kind, wanted.lengths, where)
    outputs = tuple(case.outputs)
    dtypes = [d for d in dtypes_of(backend, device) if d in wanted.dtypes]
    if kind is not None:
        dtypes = [d for d in dtypes if d in kind.dtypes] or dtypes
    dtype = _draw_dtype(rng, dtypes, where)
    return Drawn(
        Draw(
            op=op,
            spec=spec,
            dtype=dtype,
            backend=backend,
            device=device,
            backward=rng.random() < 0.9,
            outputs=(rng.choice(outputs),) if len(outputs) > 1 and rng.random() < 0.2 else None,
            gradient_storage={
                name: rng.choice(_storages(case, name, where))
                for name in outputs
                if rng.random() < 0.3
            },
            tf32=backend == "cuda" and dtype == "float32" and rng.random() < 0.6,
            deterministic=rng.random() < (0.3 if where == "cuda" else 0.15),
            threads=rng.choice((2, 3)) if where == "cpu" and rng.random() < 0.05 else 1,
            environment=_draw_environment(rng, backend, spec),
        ),
        size_name,
        distribution,
    )


def _draw_op(rng: random.Random, ops: tuple[str, ...], where: str) -> str:
    """Any as often; on a GPU those more often that have more kernel paths."""
    if where != "cuda":
        return rng.choice(ops)
    return rng.choices(ops, [1.0 + 0.7 * len(EVERY[op].kinds) for op in ops])[0]


def _draw_dtype(rng: random.Random, dtypes: list[str], where: str) -> str:
    """Any as often, but on a GPU float64, for which its kernels have few paths."""
    if where != "cuda":
        return rng.choice(dtypes)
    return rng.choices(dtypes, [0.4 if dtype == "float64" else 1.0 for dtype in dtypes])[0]


def _storages(case: Case, name: str, where: str) -> tuple[str, ...]:
    """How a gradient may lie in memory: of a vector, on a GPU, in ways that are not contiguous."""
    if where == "cuda" and case.rows[name] == "matrix":
        return ("fused", "odd_stride", "misaligned", "misaligned")
    return tuple(STORAGES)


def dtypes_of(backend: str, device: str) -> tuple[str, ...]:
    """Those that a backend serves on a device."""
    if backend != "triton":
        return tuple(DTYPES)
    # The interpreter computes with NumPy, which has no bf16 and rounds fp16 in its own way.
    interpreted = torch.device(device).type == "cpu"
    return ("float32", "float64") if interpreted else ("float32", "float16", "bfloat16")


def _draw_spec(
    rng: random.Random,
    case: Case,
    size: Size,
    kind: Kind | None,
    lengths: tuple[int, ...] | None,
    where: str,
) -> tuple[Spec, str]:
    """A spec, and the distribution that its lengths are of."""
    profile = case.profiles[size.profile]
    distributions = tuple(DISTRIBUTIONS) if kind is None else kind.distributions
    if kind is not None:
        num_seqs, max_len = rng.randint(*kind.num_seqs), rng.randint(*kind.max_len)
    elif size.num_seqs is not None and size.max_len is not None:
        num_seqs, max_len = rng.randint(*size.num_seqs), rng.randint(*size.max_len)
    else:
        num_seqs = rng.randint(1, max(profile.num_seqs) + 1)
        max_len = rng.choice((rng.choice(profile.max_len), rng.randint(1, max(profile.max_len))))
    if lengths is not None:
        max_len, most_seqs = FILE_LIMITS[where]
        num_seqs = rng.randint(1, most_seqs)
    elif rng.random() < 0.02:
        num_seqs = 0
    names: list[str] = []

    def layout() -> Layout:
        names.append("file" if lengths else rng.choice(distributions))
        if not lengths:
            return draw_layout(rng, names[-1], num_seqs, max_len)
        drawn = tuple(min(max_len, n) for n in rng.choices(lengths, k=num_seqs))
        return dataclasses.replace(draw_layout(rng, "constant", 1, 1), lengths=drawn)

    # On a GPU each size is another compilation of Triton.
    freely, seed = where != "triton", rng.randrange(10**6)
    spec = case.draw(rng, size.profile, seed, layout, freely=freely, kind=kind)
    return dataclasses.replace(spec, poisoned=rng.random() < 0.9), names[0]


def _draw_environment(rng: random.Random, backend: str, spec: Spec) -> dict[str, str]:
    drawn = {}
    for name, values in ENVIRONMENT[backend].items():
        if name == "JAGGED_CUDA_CPU_ISA":
            values = cpu_isas()
        often = 0.3 if name == "JAGGED_CUDA_TENSOR_CORES" else 0.15  # a third of a GPU's kernels
        if name not in os.environ and values and rng.random() < often:
            drawn[name] = rng.choice(values)
    if "short" in spec.choices.values():  # what does not fit is an error where it is checked
        drawn.pop("JAGGED_CUDA_CHECK", None)
    return drawn


@functools.cache
def cpu_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can be asked for."""

    def runs(isa: str) -> bool:
        with (
            mock.patch.dict(os.environ, JAGGED_CUDA_CPU_ISA=isa),
            contextlib.suppress(RuntimeError),
        ):
            jagged_cuda.jagged_softmax(torch.zeros(1), torch.tensor([0, 1]))
            return True
        return False

    return tuple(isa for isa in ENVIRONMENT["cpu"]["JAGGED_CUDA_CPU_ISA"] if runs(isa))


# --- running


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


@contextlib.contextmanager
def _settings(given: Draw) -> Iterator[None]:
    """PyTorch and the environment as a draw wants them."""
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ, given.environment), _tf32(given.tf32):
        if given.deterministic:
            torch.use_deterministic_algorithms(True)
        if given.threads != threads:
            torch.set_num_threads(given.threads)
        try:
            yield
        finally:
            if given.threads != threads:
                torch.set_num_threads(threads)
            if given.deterministic:
                torch.use_deterministic_algorithms(False)


def operators(backend: str) -> Any:
    """The module whose functions a backend is."""
    return importlib.import_module("triton_ref" if backend == "triton" else "jagged_cuda")


@dataclass(frozen=True)
class Results:
    """Results of a draw, and the gradients that were passed in; none without a backward pass."""

    sample: Sample
    found: Tensors
    cotangents: Tensors | None
    paths: tuple[str, ...]


def run_draw(given: Draw, ops: Any = None) -> Results:
    """Call the operator as the draw says. `ops` is the module to call in place of the backend's."""
    case, ops = given.case, operators(given.backend) if ops is None else ops
    paths: list[str] = []
    cotangents: Tensors = {}

    def note_path() -> None:
        if given.backend != "triton":
            paths.append(last_kernel(given.backend))

    def call(sample: Sample) -> Tensors:
        found = case.call(ops, sample)
        note_path()
        return found

    def draw_gradients(found: Tensors) -> Tensors:
        chosen = {name: found[name] for name in given.outputs or case.outputs}
        for name, values in draw_cotangents(chosen, given.spec, case.rows).items():
            storage = given.gradient_storage.get(name, "contiguous")
            cotangents[name] = STORAGES[storage](values)
        return cotangents

    with _settings(given):
        sample = case.sample(given.spec, DTYPES[given.dtype], given.device)
        found = run(case, sample, call, draw_gradients if given.backward else None)
        if given.backward:
            note_path()
    return Results(sample, found, cotangents if given.backward else None, tuple(paths))


def judge_draw(given: Draw, ops: Any = None) -> tuple[str, ...]:
    """Raise MismatchError if a result is wrong; return the kernel paths that were taken."""
    results = run_draw(given, ops)
    with _tf32(given.tf32):
        check(given.case, results.sample, results.found, results.cotangents, command=given.command)
    return results.paths
