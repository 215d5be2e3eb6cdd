"""What the compiler made of the kernels for long sequences: the order that their speed depends on.

Read from the machine code for compute capability 9.0 (SASS). No timing is needed, so a change of
compiler or of source that undoes the overlap of products and exponentials fails here, on any
machine that has the library or can compile it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from jagged_cuda import _build, _load
from tests.tools.sanitize import FIRST_LOADS, LEFT

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SOURCES = CSRC / "cuda" / "kernels" / "attention"
BF16 = "13__nv_bfloat16"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?(\S+)([^;]*);")


def _cuobjdump() -> str:
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _built_library() -> Path | None:
    """The library for 9.0a of exactly these sources, if one has been built."""
    loaded = _load.loaded.get("_C_cuda")
    if loaded is not None and "9.0a" in loaded.archs and loaded.path is not None:
        return Path(loaded.path)
    for folder in (ROOT / "jagged_cuda", *ROOT.glob("build/lib*/jagged_cuda")):
        record, library = folder / "_prebuilt.json", folder / "_C_cuda.abi3.so"
        if record.is_file() and library.is_file():
            found = json.loads(record.read_text())
            is_same = found["source_hash"] == _build.source_hash(CSRC)
            if is_same and "9.0a" in found["archs"].split(";"):
                return library
    return None


def _compiled(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, or this file of it."""
    found = _built_library()
    if found is not None:
        return found
    cuda_home = _build.find_cuda_home("13.0")
    if cuda_home is None:
        pytest.skip("no library for 9.0a, and no nvcc to compile one")
    target = tmp_path_factory.mktemp("sass") / f"{source}.cubin"
    flags = ["-cubin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_90a"]
    file = SOURCES / f"{source}.cu"
    command = [cuda_home / "bin" / "nvcc", *flags, "-I", CSRC, file, "-o", target]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled("long_bf16", tmp_path_factory)


@pytest.fixture(scope="module")
def ranged_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled("ranged_forward_bf16", tmp_path_factory)


@pytest.fixture(scope="module")
def bulk_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled("backward_bulk_bf16", tmp_path_factory)


def _instructions(library: Path, function: str) -> list[tuple[int, str, str]]:
    command = [_cuobjdump(), "-arch", "sm_90a", "-sass", "-fun", function, str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [(int(m[1], 16), m[2], m[3].strip()) for m in INSTRUCTION.finditer(text)]
    assert len(found) > 1000, f"{function} is not in {library}: {text[:200]}"
    return found


def _loops(code: list[tuple[int, str, str]]) -> list[list[tuple[int, str, str]]]:
    """What lies between the target of each backward branch and the branch."""
    found = []
    for address, opcode, operands in code:
        target = re.search(r"0x([0-9a-f]+)$", operands)
        if opcode == "BRA" and target and int(target[1], 16) < address:
            begin = int(target[1], 16)
            found.append([line for line in code if begin <= line[0] <= address])
    return found


def _products(code: list[tuple[int, str, str]]) -> int:
    return sum(opcode.startswith("HGMMA") for _, opcode, _ in code)


def _key_loop(code: list[tuple[int, str, str]], products: int) -> list[tuple[int, str, str]]:
    """The shortest loop with at least so many products."""
    return min((loop for loop in _loops(code) if _products(loop) >= products), key=len)


def _places(code: list[tuple[int, str, str]], prefix: str) -> list[int]:
    return [i for i, (_, opcode, _) in enumerate(code) if opcode.startswith(prefix)]


def _spills(code: list[tuple[int, str, str]]) -> int:
    return len(_places(code, "STL")) + len(_places(code, "LDL"))


def _name(kernel: str, config: str, params: str, of: str) -> str:
    """`of`: the arguments of the config."""
    parts = (f"{len(name)}{name}" for name in (kernel, config, params))
    kernel_part, config_part, params_part = parts
    return f"_ZN11jagged_cuda9attention{kernel_part}INS0_{config_part}I{of}EEEEEvNS0_{params_part}E"


@pytest.mark.parametrize(
    ("dim", "packed"), [(64, False), (96, False), (128, False), (64, True), (128, True)]
)
def test_a_turn_of_the_long_forward_is_products_and_nothing_else(
    library: Path, dim: int, packed: bool
) -> None:
    """While one warpgroup's products run, the others are at their exponentials.

    So a turn, from its barrier to the next warpgroup's, starts both products of a key tile without
    a wait between them, and no exponential lies in it.
    """
    name = _name(
        "long_forward", "LongForwardConfig", "LongForwardParams", f"{BF16}Li{dim}ELb{packed:d}"
    )
    loop = _key_loop(_instructions(library, name), products=dim // 16 + 8)
    (passed,), (vote,) = _places(loop, "BAR.ARV"), _places(loop, "BAR.RED")
    products = [i for i in _places(loop, "HGMMA") if i < vote]
    assert len(products) == dim // 16 + 128 // 16  # S over D, O over 128 keys
    waits, exponentials = _places(loop, "WARPGROUP.DEPBAR"), _places(loop, "MUFU.EX2")
    (turn,) = [i for i in _places(loop, "BAR.SYNC") if i < products[0]][-1:]
    assert turn < products[0] < products[-1] < passed < vote
    assert not [i for i in waits if turn < i < passed], "a product is waited for within a turn"
    assert not [i for i in exponentials if turn < i < passed]
    # S is waited for alone (the product with P goes on), after the turn, before its exponentials.
    after = [i for i in waits if i > passed]
    assert loop[after[0]][2].endswith("0x1") and after[0] < min(exponentials)
    # No maximum up to the vote, behind which S is computed once more where it is needed.
    assert len([i for i in exponentials if i < vote]) == 64
    assert not [i for i in _places(loop, "FMNMX") if i < vote]
    assert len(_places(loop[vote:], "HGMMA")) == dim // 16
    assert _spills(loop[:vote]) == 0
    assert len(_places(loop, "R2UR")) <= 8, "products take descriptors lane by lane"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("silu", [False, True], ids=["softmax", "silu"])
@pytest.mark.parametrize("biases", ["", "keys", "positions", "keys and positions"])
def test_ranges_cost_nothing_where_all_rows_see_a_step(
    ranged_library: Path, dim: int, silu: bool, biases: str
) -> None:
    """A turn is products and nothing else there, too, silu takes one special function per score,
    and what rows see is looked up behind branches: no score is compared unless a warp needs it."""
    kinds = f"ELb{int('keys' in biases)}ELb{int('positions' in biases)}"
    config = f"{BF16}Li{dim}ELb{int(silu)}{kinds}"
    name = _name("long_forward", "RangedForwardConfig", "LongForwardParams", config)
    loop = _key_loop(_instructions(ranged_library, name), products=dim // 16 + 8)
    products = _places(loop, "HGMMA")
    assert len(products) == dim // 16 + 128 // 16
    waits, (passed,) = _places(loop, "WARPGROUP.DEPBAR"), _places(loop, "BAR.ARV")
    special = _places(loop, "MUFU")
    assert len(special) <= 66, "more than one special function per score, and two of its row"
    assert not [i for i in (*waits, *special) if products[0] < i < passed]
    # With biases an address and a flag.
    assert _spills(loop) <= (2 if biases and not silu and dim == 64 else 0)
    assert len(_places(loop, "R2UR")) <= 8, "products take descriptors lane by lane"
    if not silu:
        # O is waited for before the maxima, beside which exponentials then run.
        maxima, exponentials = _places(loop, "FMNMX"), _places(loop, "MUFU.EX2")

        def maxima_beside_exponentials(wait: int) -> int:
            behind = [i for i in exponentials if i > wait]
            return sum(wait < i < behind[63] for i in maxima) if len(behind) >= 64 else 0

        assert max(map(maxima_beside_exponentials, waits)) >= 60


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("silu", [False, True], ids=["softmax", "silu"])
def test_times_cost_loads_alone(ranged_library: Path, dim: int, silu: bool) -> None:
    """What computes has no comparison of times: a step's scores start from as many loads as they
    have blocks of 8 keys, which run behind the exponentials, or the silu, of the step before."""
    name = _name(
        "long_forward", "TimedForwardConfig", "LongForwardParams", f"{BF16}Li{dim}ELb{int(silu)}"
    )
    keys = 128 if dim == 64 else 64
    loop = _key_loop(_instructions(ranged_library, name), products=dim // 16 + keys // 16)
    products, (passed,) = _places(loop, "HGMMA"), _places(loop, "BAR.ARV")
    assert len(products) == dim // 16 + keys // 16
    waits, special = _places(loop, "WARPGROUP.DEPBAR"), _places(loop, "MUFU")
    assert not [i for i in (*waits, *special) if products[0] < i < passed]
    loads = [i for i in _places(loop, "LDS.128") if i > special[keys // 8]]
    assert len(loads) == keys // 8
    # Two warpgroups write biases, which leaves 160 registers.
    assert _spills(loop) <= 4


@pytest.mark.parametrize("in_order", [0, 1], ids=["", "in_order"])
@pytest.mark.parametrize("dim", [64, 128])
def test_products_of_the_long_backward_are_not_serialised(
    library: Path, dim: int, in_order: int
) -> None:
    """Where ptxas cannot follow the registers of a product it waits for each one by itself."""
    config = f"{BF16}Li{dim}ELb{in_order}"
    name = _name("long_backward", "LongBackwardConfig", "LongBackwardOperands", config)
    code = _instructions(library, name)
    loop = max(_loops(code), key=lambda loop: _products(loop) / len(loop))
    products, waits = _products(loop), len(_places(loop, "WARPGROUP.DEPBAR"))
    assert products >= 5 * 4 and waits * 4 <= products, (products, waits)
    assert _spills(loop) <= 8, "more than addresses and flags is spilled"
    assert len(_places(loop, "R2UR")) <= 16, "products take descriptors lane by lane"


@pytest.mark.parametrize(
    ("kernel", "config", "of", "params"),
    [
        ("forward_wgmma", "ForwardWgmmaConfig", "Li64ELi1EEELb1E", "ForwardWgmmaParams"),
        ("backward_dq_wgmma", "DqWgmmaConfig", "Li64ELi64EEELb1ELi0E", "AttentionBackwardParams"),
        (
            "backward_dkdv_wgmma",
            "DkdvWgmmaConfig",
            "Li64ELi64EEELb1ELi0E",
            "AttentionBackwardParams",
        ),
    ],
)
def test_first_loads_are_those_that_initcheck_may_name(
    kernel: str, config: str, of: str, params: str
) -> None:
    """`make sanitize` takes what these kernels read first for the flag of nothing_is_left."""
    built = _built_library()
    if built is None:
        pytest.skip("no library for 9.0a has been built (setup.py builds one); not worth two files")
    place = "NS0_" if kernel == "forward_wgmma" else "NS_"
    name = (
        f"_ZN11jagged_cuda9attention{len(kernel)}{kernel}INS0_{len(config)}{config}I{BF16}{of}"
        f"EEv{place}{len(params)}{params}E"
    )
    code = _instructions(built, name)
    loads = [opcode for at, opcode, _ in code if at < FIRST_LOADS and opcode.startswith("LDG")]
    assert loads == ["LDG.E.STRONG.GPU"] * 2
    assert LEFT.search(f"void jagged_cuda::attention::{kernel}<Config>(Params)")


@pytest.mark.parametrize(
    ("kernel", "config", "of", "params"),
    [
        *(
            (
                "forward_wgmma",
                "NS0_18ForwardWgmmaConfig",
                f"Li{dim}ELi1EEELb{looped}EE",
                "NS0_18Forward",
            )
            for dim in (64, 96, 128)
            for looped in (0, 1)
        ),
        *(
            ("forward_tiny_wide", "NS0_21TinyWideForwardConfig", f"Li{dim}EEEE", "NS_15Attention")
            for dim in (192, 256)
        ),
    ],
)
def test_the_long_kernel_starts_when_its_plan_is_there(
    kernel: str, config: str, of: str, params: str
) -> None:
    """The kernel in front waits for the plan before it lets the long one start (plan_is_there)."""
    built = _built_library()
    if built is None:
        pytest.skip("no library for 9.0a has been built (setup.py builds one); not worth two files")
    tail = "WgmmaParams" if params.endswith("Forward") else "Params"
    name = f"_ZN11jagged_cuda9attention{len(kernel)}{kernel}I{config}I{BF16}{of}Ev{params}{tail}E"
    code = _instructions(built, name)
    waits, (starts_next,) = _places(code, "ACQBULK"), _places(code, "PREEXIT")
    assert waits and waits[0] < starts_next


@pytest.mark.parametrize(("kernel", "products"), [("dq", 20), ("dkdv", 24)])
def test_a_step_of_an_item_stays_in_registers(
    bulk_library: Path, kernel: str, products: int
) -> None:
    """Those who take items have so few registers that they spill; those who compute do not.

    A step starts its products from uniform registers and has one exponential for each score.
    """
    name = _name(f"backward_{kernel}_items", "ItemsBackwardConfig", "BulkBackwardParams", BF16)
    code = _instructions(bulk_library, name.replace("EEEEEv", "EEEEv"))
    loop = _key_loop(code, products)
    assert len(_places(loop, "HGMMA")) == products
    assert len(_places(loop, "MUFU.EX2")) == 64 * 64 // 128
    assert _spills(loop) == 0
    assert len(_places(loop, "R2UR")) <= 16, "products take descriptors lane by lane"
    assert not _places(loop, "LDGSTS"), "those who compute do not copy"
