"""The Triton twins, judged like every backend, and tests only for Triton.

On a GPU they run there; without one in Triton's CPU interpreter, in the types that it gets right.
`python tests/test_triton_ref.py bfloat16` compiles every kernel for Hopper, GPU or not.
"""

import os
import random
import sys
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU and __name__ != "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from plain import run_python, spec_of  # noqa: E402

import jagged_cuda  # noqa: E402
import triton_ref  # noqa: E402
from jagged_cuda.testing.cases import CASES, DTYPES, EVERY  # noqa: E402
from jagged_cuda.testing.draws import Draw, dtypes_of, judge_draw  # noqa: E402
from jagged_cuda.testing.judge import judge  # noqa: E402
from jagged_cuda.testing.lengths import Layout  # noqa: E402
from jagged_cuda.testing.ops import jagged_dense_bmm  # noqa: E402
from jagged_cuda.testing.samples import STORAGES  # noqa: E402
from triton_ref.common import find_tile, load_rows, num_tiles  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
SERVED = dtypes_of("triton", DEVICE)

# NumPy, under the interpreter, warns of what happens in masked lanes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

# Empty, one row, and both edges of every tile size in use: 16, 32, 64.
EDGES = (0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65)


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("op", EVERY)
def test_agrees_with_the_definition(op: str, dtype: str) -> None:
    """By the table's case and the one rule, forward and backward, from any storage."""
    case = EVERY[op]
    for seed in range(6 if ON_GPU else 3):
        rng = random.Random(f"{op} {seed}")

        def layout(rng: random.Random = rng) -> Layout:
            lengths = tuple(rng.choices(EDGES, k=2))
            return Layout(lengths, base=rng.choice((0, 3)), tail=rng.choice((0, 5, 40)))

        spec = case.draw(rng, "small" if seed else "edge", seed, layout)
        storage = {name: rng.choice(tuple(STORAGES)) for name in case.outputs}
        judge_draw(Draw(op, spec, dtype, "triton", DEVICE, gradient_storage=storage))


@pytest.mark.parametrize("op", EVERY)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(op: str, lengths: tuple[int, ...]) -> None:
    """No sequences or empty ones: zeros, LSE -inf and no gradient, whatever the rows hold."""
    for outside in (0, 1):
        spec = spec_of(Layout(lengths, base=outside, tail=2 * outside), queries=4)
        judge(EVERY[op], spec, torch.float32, DEVICE, ops=triton_ref)


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("name", ["jagged_softmax", "jagged_sum", "jagged_flash_attention"])
def test_long_sequences(name: str, dtype: str) -> None:
    """More rows than one block of any kernel takes."""
    layout = Layout((1025, 2, 1024)) if name != "jagged_flash_attention" else Layout((130, 3))
    spec = spec_of(layout, trailing=(), dims=(8, 8), heads=(2, 1), causal=True)
    judge(CASES[name], spec, DTYPES[dtype], DEVICE, ops=triton_ref)


@pytest.mark.parametrize("name", ["jagged_flash_attention", "jagged_target_attention"])
def test_widest_heads(name: str) -> None:
    spec = spec_of(Layout((17, 3)), dims=(256, 200), heads=(1, 1), queries=4)
    judge(CASES[name], spec, torch.float32, DEVICE, ops=triton_ref)


@pytest.mark.cuda
@pytest.mark.usefixtures("tf32")
def test_attention_in_tf32() -> None:
    spec = spec_of(Layout((33, 0, 7)), dims=(40, 24), heads=(4, 2), causal=True)
    judge(CASES["jagged_flash_attention"], spec, torch.float32, DEVICE, ops=triton_ref)


def test_matrices_where_they_are_said_to_begin() -> None:
    offsets = torch.tensor([1, 3, 6], device=DEVICE)
    x = torch.ones(7, 4, device=DEVICE)
    begins = torch.tensor([3, 7, 16], device=DEVICE)
    found = triton_ref.jagged_jagged_bmm_jagged_out(
        x, x, offsets, matrix_offsets=begins, total_out=18
    )
    assert found.tolist() == [0.0] * 3 + [4.0] * 13 + [0.0] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_are_exact(dtype: torch.dtype) -> None:
    """As they are in the operators: sums wrap around, differences and orders do not."""
    layout = Layout((30, 0, 7, 300), base=2, tail=3)
    offsets = layout.offsets(DEVICE)
    bounds = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(*bounds, shape, generator=generator).to(DEVICE, dtype)

    x, y, score = drawn(layout.total, 3), drawn(4, 9, 3), drawn(layout.total)
    functions = [
        lambda ops: ops.jagged_dense_add(x, y, offsets),
        lambda ops: ops.jagged_topk(score, offsets, 5),
        lambda ops: ops.jagged_topk(score % 2 == 0, offsets, 5),
    ]
    if dtype is not torch.bool:
        gaps = ((score, 0), (score // 8, 3), *((score, gap * 2.0**62) for gap in (1, 2, 3)))
        for time, gap in gaps:
            functions.append(
                lambda ops, time=time, gap=gap: torch.cat(
                    ops.jagged_sessionize(time, offsets, gap, sessions=layout.total)
                )
            )
    for index, function in enumerate(functions):
        assert torch.equal(function(triton_ref), function(jagged_cuda)), index


@pytest.mark.parametrize("name", ["padded_to_jagged", "jagged_broadcast"])
def test_the_size_is_read_where_it_is_not_given(name: str) -> None:
    offsets = torch.tensor([1, 3, 6], device=DEVICE)
    found = getattr(triton_ref, name)(torch.ones(2, 3, device=DEVICE), offsets)
    assert len(found) == 6


@pytest.mark.parametrize("total", [None, 3, 30])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_rows_move_as_the_operators_move_them(
    offsets_dtype: torch.dtype, total: int | None
) -> None:
    """Parallel tensors of other widths and types, and the functions that are not operators."""
    layout = Layout((3, 0, 9, 1), base=2, tail=3)
    offsets = layout.offsets(DEVICE, offsets_dtype)
    numbers = torch.arange(layout.total, device=DEVICE)
    xs = [numbers.float()[:, None] + 0.5, numbers.to(torch.int16), numbers % 3 == 0]
    n = torch.tensor([1, 2, 4, 0], device=DEVICE, dtype=offsets_dtype)
    picked = torch.tensor([2, 0, 2], device=DEVICE)
    both = None if total is None else (total, total)
    dense = torch.ones(4, 2, 1, device=DEVICE)

    def moved(ops: object) -> list[torch.Tensor]:
        results = [
            ops.jagged_select(xs, offsets, xs[2], total=total),
            ops.jagged_slice(xs, offsets, 1, n, total=total),
            ops.jagged_first(xs, offsets, n, total=total),
            ops.jagged_last(xs, offsets, 2, total=total),
            ops.jagged_index_select(xs, offsets, picked, total=total),
            *ops.jagged_split(xs[0], offsets, n=n, totals=both),
            *ops.jagged_split(xs[1], offsets, left_offsets=offsets.clamp(max=6), totals=both),
            ops.jagged_concat([dense, xs[0]], [None, offsets], total=total),
            ops.jagged_concat([xs[1], xs[1]], [offsets, offsets], total=total),
        ]
        return [t for ys, ends in results for t in (*(ys if isinstance(ys, list) else [ys]), ends)]

    for index, (found, expected) in enumerate(
        zip(moved(triton_ref), moved(jagged_cuda), strict=True)
    ):
        assert found.dtype == expected.dtype and torch.equal(found, expected), index


def test_products_differentiate_twice() -> None:
    """On small integers, so that every sum is exact."""
    layout = Layout((3, 0, 2), base=1, tail=1)
    offsets = layout.offsets(DEVICE)
    generator = torch.Generator().manual_seed(2)
    x, y = (
        torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE).requires_grad_()
        for shape in ((layout.total, 3), (3, 3, 2))
    )

    def gradients(z):
        first = torch.autograd.grad(z.pow(3).sum(), (x, y), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, y))

    found = gradients(triton_ref.jagged_dense_bmm(x, y, offsets))
    expected = gradients(jagged_dense_bmm.definition(x, y, layout))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_softmax_of_infinities_agrees_with_torch() -> None:
    x = torch.tensor([[-float("inf")] * 3, [1.0, -float("inf"), float("inf")]], device=DEVICE)
    out = triton_ref.jagged_softmax(x, torch.tensor([0, 2], device=DEVICE))
    torch.testing.assert_close(out, torch.softmax(x, 0), equal_nan=True)


@pytest.mark.parametrize(("first", "bucket"), [(2**63 - 1, 0), (-(2**63), 2)])
def test_positions_beyond_the_table(first: int, bucket: int) -> None:
    zeros, v = torch.zeros(3, 1, 16, device=DEVICE), torch.ones(3, 1, 16, device=DEVICE)
    table = torch.zeros(3, device=DEVICE, requires_grad=True)
    out = triton_ref.jagged_hstu_attention(
        *(zeros, zeros, v, torch.tensor([0, 3], device=DEVICE)),
        divisor=1.0,
        position_bias=jagged_cuda.PositionBias(table, first),
    )
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.nonzero().flatten().tolist() == [bucket]


@pytest.mark.cuda
def test_graph_replays_with_other_lengths() -> None:
    """Nothing synchronises, and the grid depends on shapes alone."""
    torch.manual_seed(7)
    offsets = Layout((70, 2, 28)).offsets(DEVICE)
    x = torch.randn(100, 2, 16, device=DEVICE, requires_grad=True)
    y = torch.randn(3, 32, 8, device=DEVICE)

    def step(ops):
        z = ops.jagged_flash_attention(x, x, x, offsets, causal=True)
        z = ops.jagged_dense_bmm(ops.jagged_softmax(z, offsets).reshape(100, 32), y, offsets)
        return torch.autograd.grad(z.pow(2).sum(), x)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        step(triton_ref)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(triton_ref)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(triton_ref)
    for lengths in ((1, 98, 1), (33, 33, 34)):
        offsets.copy_(Layout(lengths).offsets())
        graph.replay()
        torch.testing.assert_close(got, step(jagged_cuda), rtol=1e-3, atol=1e-5)


@triton.jit
def list_tiles_kernel(p_offsets, p_tiles, num_seqs, total, TILE: tl.constexpr):
    i_tile = tl.program_id(0)
    i_seq, first_row = find_tile(p_offsets, i_tile, num_seqs, total, TILE)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    tl.store(p_tiles + i_tile * 4, i_seq)
    tl.store(p_tiles + i_tile * 4 + 1, first_row)
    tl.store(p_tiles + i_tile * 4 + 2, begin)
    tl.store(p_tiles + i_tile * 4 + 3, end)


@pytest.mark.parametrize("wrong", [False, True], ids=["offsets", "wrong-offsets"])
def test_tiles(wrong):
    """Right offsets: each row in one tile, of its sequence. Wrong ones: no row out of bounds."""
    tile, total = 4, 30
    batches = ([2, 2, 5, 9, 13, 17, 29], [0, 30], [7], [0, 0, 0, 30, 30])
    if wrong:
        batches = ([20, 5, 99, -4, 30], [1 << 40, 0], [-1], [40, 40, -(1 << 40), 3])
    for batch in batches:
        num_seqs = len(batch) - 1
        count = num_tiles(total, num_seqs, tile)
        tiles = torch.empty(count, 4, dtype=torch.int64, device=DEVICE)
        offsets = torch.tensor(batch, device=DEVICE)
        list_tiles_kernel[(count,)](offsets, tiles, num_seqs, total, TILE=tile)
        covered = []
        for i_seq, first_row, begin, end in tiles.tolist():
            assert 0 <= begin <= end <= total
            assert begin <= first_row
            rows = range(first_row, min(first_row + tile, end))
            covered += [(row, i_seq) for row in rows]
        if not wrong:
            bounds = [0, *batch, total]
            want = [(r, s - 1) for s in range(num_seqs + 2) for r in range(*bounds[s : s + 2])]
            assert covered == want


def test_errors():
    offsets = torch.tensor([0, 2, 3], device=DEVICE)
    x = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"^jagged_dense_bmm: y must be \[2, 4, N\], got \[2, 5"):
        triton_ref.jagged_dense_bmm(x, torch.zeros(2, 5, 6, device=DEVICE), offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_jagged_bmm: y must be float32, got"):
        triton_ref.jagged_jagged_bmm(x, x.half(), offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_softmax: offsets must be int32 or int64"):
        triton_ref.jagged_softmax(x, offsets.float())
    with pytest.raises(RuntimeError, match=r"^jagged_flash_attention: q must be .* H a multiple"):
        q = torch.zeros(3, 4, 8, device=DEVICE)
        triton_ref.jagged_flash_attention(q, q[:, :3], q[:, :3], offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_softmax: x must be one of float32, float16"):
        triton_ref.jagged_softmax(x.to(torch.float64 if ON_GPU else torch.bfloat16), offsets)


@pytest.mark.parametrize("bias", [-1e9, -1e30])
def test_a_large_bias_for_all_keys(bias: float) -> None:
    """The mean of the values, and no gradient, since float32 has lost what P is made of."""
    leaves = [torch.randn(19, 2, 16, device=DEVICE).requires_grad_() for _ in range(3)]
    offsets = torch.tensor([0, 19], device=DEVICE)
    kv_bias = torch.full((19,), bias, device=DEVICE)
    out = triton_ref.jagged_flash_attention(*leaves, offsets, kv_bias=kv_bias)
    torch.testing.assert_close(out, leaves[2].mean(0).expand_as(out))
    assert all((g == 0).all() for g in torch.autograd.grad(out.square().sum(), leaves))


def test_a_key_that_stands_out_far_below_without_a_bias() -> None:
    """Its probability is 1, its value gets the whole gradient, though the LSE is below -2^24."""
    far = torch.full((1, 2, 16), 4096.0, device=DEVICE)
    leaves = [t.requires_grad_() for t in (far, -far, torch.randn(1, 2, 16, device=DEVICE))]
    offsets = torch.tensor([0, 1], device=DEVICE)
    out = triton_ref.jagged_flash_attention(*leaves, offsets, scale=1.0)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, leaves[2], grad)[0], grad)


def test_target_attention_with_a_bias() -> None:
    offsets, used = (torch.tensor(t, device=DEVICE) for t in ([0, 9, 12], [5, 2**40]))
    q, kv_bias = torch.randn(2, 3, 2, 16, device=DEVICE), torch.randn(12, device=DEVICE)
    k, v = (torch.randn(12, 1, 16, device=DEVICE) for _ in range(2))
    options = {"kv_lengths": used, "kv_bias": kv_bias}
    found, expected = (
        ops.jagged_target_attention(q, k, v, offsets, **options)
        for ops in (triton_ref, jagged_cuda)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles_for_hopper(dtype: str) -> None:
    run_python(__file__, dtype, cwd=ROOT, TRITON_INTERPRET="0")


def compile_for_hopper(dtype: torch.dtype) -> None:
    """Run forward and backward on meta tensors, with each launch turned into a compilation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    def compile_launch(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        signature, constants = {}, {}
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            one = value is None or (isinstance(value, int) and value == 1)
            if parameter.is_constexpr or (one and not parameter.do_not_specialize):
                signature[parameter.name], constants[(i,)] = "constexpr", value
            else:
                signature[parameter.name] = mangle_type(value)
                if isinstance(value, tuple):
                    numbers = ((j, n) for j, n in enumerate(value) if isinstance(n, int))
                    constants |= {(i, j): 1 for j, n in numbers if n == 1}
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled.add(kernel.__name__)

    compiled = set()
    triton.JITFunction.run = compile_launch
    offsets = torch.tensor([0, 20, 100], device="meta")

    def values(*shape):
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    x, matrices = values(100, 16), values(6800)
    begins = {"matrix_offsets": offsets}
    q, k, v = values(100, 2, 16), values(100, 1, 16), values(100, 1, 8)
    results = [
        triton_ref.jagged_dense_bmm(x, values(2, 16, 8), offsets),
        triton_ref.jagged_jagged_bmm_jagged_out(x, x, offsets, total_out=6800, **begins),
        triton_ref.array_jagged_bmm_jagged_out(matrices, x, offsets, **begins),
        triton_ref.jagged_softmax(x, offsets),
        *(triton_ref.jagged2_softmax(matrices, offsets, dim=dim, **begins) for dim in (-1, -2)),
        triton_ref.jagged_to_padded(x, offsets, 70),
        triton_ref.jagged_sum(x, offsets),
        triton_ref.jagged_dense_add(x, values(2, 70, 16), offsets),
        triton_ref.jagged_dense_mul(x, values(2, 70, 16), offsets),
        triton_ref.jagged_select(x, offsets, offsets.new_empty(100, dtype=bool), total=100)[0],
        triton_ref.jagged_first(x, offsets, 7, total=14)[0],
        *triton_ref.jagged_flash_attention(q, k, v, offsets, return_lse=True),
    ]
    counts, rows = torch.tensor([2, 3], device="meta"), values(100).detach().float()
    for given in (None, counts):
        ranges = triton_ref.hstu_key_ranges(
            offsets, num_targets=given, contextual_len=2, causal=given is None, total=100
        )
    masked = {"key_ranges": ranges}
    results += triton_ref.jagged_flash_attention(q, k, v, offsets, return_lse=True, **masked)
    masked |= {"divisor": "length", "row_scale": rows}
    results.append(triton_ref.jagged_hstu_attention(q, k, v, offsets, **masked))
    results.append(triton_ref.jagged_hstu_attention(q, k, v, offsets, divisor=3.0))
    times, table = rows.long(), torch.empty(2, 7, device="meta", requires_grad=True)
    biases = {
        "kv_lengths": counts,
        "kv_bias": torch.empty(100, 2, device="meta", requires_grad=True),
        "time_bias": (table, times, times, times[:6], False),
        "position_bias": (table, -3),
    }
    results += triton_ref.jagged_flash_attention(q, k, v, offsets, return_lse=True, **biases)
    results.append(triton_ref.jagged_hstu_attention(q, k, v, offsets, divisor=3.0, **biases))
    shared = {
        "kv_bias": values(100).detach().float(),
        "time_bias": (table[0], *biases["time_bias"][1:]),
    }
    results.append(triton_ref.jagged_flash_attention(q, k, v, offsets, **shared))
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for drop in ({}, {"p": 0.3, "seed": seed}):
        results.append(triton_ref.layer_norm_mul_dropout(x, x, values(16), values(16), **drop))
    torch.autograd.backward(results, [torch.empty_like(z) for z in results])
    for activation in ("relu", "gelu", "silu", "sigmoid", "tanh"):
        operands = (x, values(2, 16, 8), offsets)
        triton_ref.jagged_dense_bmm(*operands, bias=values(2, 8), activation=activation)
    triton_ref.jagged_positions(offsets, total=100, targets=1)
    triton_ref.jagged_topk(values(100), offsets, 5)
    triton_ref.jagged_sessionize(values(100), offsets, 0.5, sessions=100)
    numbers = offsets.new_empty(100)
    for gap in (3, 2.0**63):
        triton_ref.jagged_sessionize(numbers, offsets, gap, sessions=100)
    triton_ref.jagged_topk(numbers, offsets, 5)
    triton_ref.jagged_dense_add(numbers, offsets.new_empty(2, 70), offsets)
    triton_ref.matrix_offsets(offsets)
    modules = [module for name, module in sys.modules.items() if name.startswith("triton_ref.")]
    expected = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert compiled == expected, compiled


if __name__ == "__main__":
    compile_for_hopper(getattr(torch, sys.argv[1]))
