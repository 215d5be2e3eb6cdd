"""Copies csrc so that a C++ compiler takes its kernels, and compiles a driver of one with them.

In the copy a function of prim/ that holds inline assembly has the body that BODIES names: what its
instruction does on a CPU (runtime.h). Everything else is the same text, so that a kernel cannot
differ from what the GPU gets. An instruction that BODIES lacks, and inline assembly outside prim/
that a driver would reach, are errors.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
PRIM = Path("cuda/kernels/prim")

_LAUNCH = (
    "if (!grid.is_possible()) return cudaErrorInvalidConfiguration; lanes::run([](const void* p) "
    "{{ kKernel(*static_cast<const Params*>(p)); }}, &params, grid.x, grid.y, threads, {ctas}, "
    "shared_bytes); return cudaSuccess;"
)
_NOTHING = ""  # orders what one thread's instructions do, or is a hint

# The body of each function of prim/ that a CPU has no instruction for, by the function's name.
BODIES = {
    # prim/ptx.cuh
    "ld_global_nc_16": "return valid ? *(const uint4*)global : uint4{};",
    "ld_global_nc_8": "return valid ? *(const uint2*)global : uint2{};",
    "st_global_16": "*(uint4*)global = value;",
    "ld_acquire_gpu": "return *global;",
    "red_release_gpu_add": "*global += value;",
    "st_shared_4": "*(uint32_t*)lanes::at(shared.value) = value;",
    "st_shared_16": "*(float4*)lanes::at(shared.value) = *(const float4*)value;",
    "ld_shared_4": "return *(uint32_t*)lanes::at(shared.value);",
    "ld_shared_16": "return *(uint4*)lanes::at(shared.value);",
    "cp_async_16": "lanes::cp_async(shared.value, global, 16, source_bytes);",
    "l2_policy": "return 0;",
    "cp_async_8": "lanes::cp_async(shared.value, global, 8, source_bytes);",
    "cp_async_4": "lanes::cp_async(shared.value, global, 4, source_bytes);",
    "cp_async_commit": "lanes::cp_async_commit();",
    "cp_async_wait": "lanes::cp_async_wait(kPending);",
    "cp_async_mbarrier_arrive": "lanes::cp_async_arrive(barrier);",
    "stmatrix_x4": "lanes::stmatrix(shared.value, r);",
    "ldmatrix_x4": "lanes::ldmatrix(r, shared.value, false);",
    "ldmatrix_x4_trans": "lanes::ldmatrix(r, shared.value, true);",
    "mma_m16n8k16<__half>": "lanes::mma_m16n8k16(c, a, b0, b1, false);",
    "mma_m16n8k16<__nv_bfloat16>": "lanes::mma_m16n8k16(c, a, b0, b1, true);",
    "max_nan": "return isnan(a) || isnan(b) ? NAN : a < b ? b : a;",
    "ex2_approx": "return exp2f(x);",
    "rcp_approx": "return 1.0f / x;",
    "lg2_approx": "return log2f(x);",
    "griddepcontrol_launch_dependents": _NOTHING,  # launches follow each other
    "griddepcontrol_wait": _NOTHING,
    "tid_x": "return static_cast<int>(threadIdx.x);",
    "bar_sync": "lanes::bar(id, threads, false, false);",
    "bar_red_or": "return lanes::bar(id, threads, false, value);",
    "bar_arrive": "lanes::bar(id, threads, true, false);",
    # prim/global_word.cuh, prim/shared_scalar.cuh, prim/tanh.cuh
    "ld_global_nc_4": "if (index < end) value = *(const uint32_t*)global;",
    "ld_global_nc_4_hinted": "if (index < end) value = *(const uint32_t*)global;",
    "ld_global_nc_2": "if (index < end) value = *(const uint16_t*)global;",
    "ld_4": "if (index < end) value = *(const uint32_t*)data;",
    "ld_2": "if (index < end) value = *(const uint16_t*)data;",
    "st_global_4": "if (index < end) *(uint32_t*)global = value;",
    "st_global_2": "if (index < end) *(uint16_t*)global = uint16_t(value);",
    "max_nan_x2<__half>": "return lanes::max_nan_x2<__half>(a, b);",
    "max_nan_x2<__nv_bfloat16>": "return lanes::max_nan_x2<__nv_bfloat16>(a, b);",
    "st_shared_2": "*(uint16_t*)lanes::at(shared.value) = uint16_t(value);",
    "ld_shared_2": "return *(uint16_t*)lanes::at(shared.value);",
    "ld_shared_f32": "return *(float*)lanes::at(shared.value);",
    "st_shared_f32": "*(float*)lanes::at(shared.value) = value;",
    "ld_shared_f64": "return *(double*)lanes::at(shared.value);",
    "st_shared_f64": "*(double*)lanes::at(shared.value) = value;",
    "ld_shared_8": "return *(uint2*)lanes::at(shared.value);",
    "opaque": "return value;",
    "tanh_approx": "return tanhf(x);",
    # prim/cluster.cuh, prim/launch.cuh
    "barrier_cluster": "lanes::barrier_cluster();",
    "cluster_ctarank": "return uint32_t(lanes::view->rank);",
    "mapa_shared_cluster": "return lanes::address_in_cta(shared.value, rank);",
    "ld_shared_cluster": "return *(uint32_t*)lanes::at(address);",
    "launch": _LAUNCH.format(ctas=1),
    "launch_dependent": _LAUNCH.format(ctas=1),
    "launch_clusters": _LAUNCH.format(ctas="ctas"),
    # prim/tma.cuh, prim/tma_store.cuh
    "mbarrier_init": "lanes::mbarrier_init(barrier, arrivals);",
    "fence_mbarrier_init": _NOTHING,
    "mbarrier_arrive": "lanes::mbarrier_arrive(barrier, 1, 0);",
    "mbarrier_arrive_count": "lanes::mbarrier_arrive(barrier, arrivals, 0);",
    "mbarrier_arrive_expect_tx": "lanes::mbarrier_arrive(barrier, 1, bytes);",
    "mbarrier_wait": "lanes::mbarrier_wait(barrier, parity);",
    "cp_async_bulk_tensor_3d": "lanes::tensor_load(shared, map, x, y, z, barrier);",
    "cp_async_bulk_tensor_store_3d": "lanes::tensor_store(map, shared, x, y, z);",
    "cp_async_bulk": "lanes::bulk_load(shared, global, bytes, barrier);",
    "cp_async_bulk_store": "lanes::bulk_store(global, shared, bytes, false);",
    "cp_reduce_async_bulk_add": "lanes::bulk_store(global, shared, bytes, true);",
    "cp_async_bulk_commit": "lanes::bulk_commit();",
    "cp_async_bulk_wait": "lanes::bulk_wait();",
    "cp_async_bulk_wait_read": "lanes::bulk_wait();",
    "red_global_add_16": "for (int i = 0; i < 4; ++i) global[i] += value[i];",
    "prefetch_l2": _NOTHING,
    "prefetch_tensormap": _NOTHING,
    # prim/wgmma.cuh
    "fence_proxy_async": "lanes::fence_proxy_async();",
    "wgmma_fence": _NOTHING,
    "wgmma_commit_group": "lanes::wgmma_commit();",
    "wgmma_wait_group": "lanes::wgmma_wait(kPending);",
    "setmaxnreg_dec": _NOTHING,
    "setmaxnreg_inc": _NOTHING,
    "fence_operands": _NOTHING,
}

# Not emulated: a kernel that calls one of these cannot run here.
MISSING = (
    *("ldmatrix_x2", "ldmatrix_x2_trans", "movmatrix_trans", "mma_m16n8k8_tf32", "cvt_rna_tf32"),
    *("mma_m16n8k8<__half>", "mma_m16n8k8<__nv_bfloat16>", "mbarrier_test", "st_async"),
    *("barrier_cluster_arrive_relaxed", "barrier_cluster_wait"),
)

_FUNCTION = re.compile(
    r"^((?:__device__ __forceinline__ [\w ]+?|cudaError_t) (\w+(?:<\w+>)?)\([^{};]*\)) "
    r"\{\n(.*?)^\}\n",
    re.MULTILINE | re.DOTALL,
)
_FORMS = re.compile(
    r"^#define (JAGGED_CUDA_WGMMA_(?:FORMS|TF32))\((.*?)\)(?:.*\\\n)+.*\n", re.MULTILINE
)
_RUN = (
    "static void run(float (&c)[blocks][4], MatrixDescriptor a, MatrixDescriptor b, "
    "bool accumulate) { lanes::wgmma({&c[0][0], blocks, nullptr, a.value, b.value, accumulate, "
    "kTransposedA, kTransposed, type[0] == 'b'}); } "
    "static void run(float (&c)[blocks][4], const uint32_t (&a)[4], MatrixDescriptor b, "
    "bool accumulate) { lanes::wgmma({&c[0][0], blocks, a, 0, b.value, accumulate, false, "
    "kTransposed, type[0] == 'b'}); }\n"
)
_NO_RUN = (
    "template <typename A> static void run(float (&)[blocks][4], const A&, MatrixDescriptor, bool) "
    '{ lanes::fail("wgmma of TF32"); }\n'
)
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) ([\w ]+?) (\w+)\[\];")
_IS_FOR_A_GPU = re.compile(
    r"\basm\b|\bJAGGED_CUDA_[A-Z]+\(|<<<|\blaunch_\w*kernel\(|cudaLaunchKernelEx"
)


def _for_cpu(path: Path, text: str, unknown: list[str]) -> str:
    """Returns a file of csrc as a CPU takes it; adds to `unknown` what BODIES lacks."""

    def body(function: re.Match[str]) -> str:
        head, name, inside = function.groups()
        if not _IS_FOR_A_GPU.search(inside):
            return function[0]
        if name not in BODIES and name not in MISSING:
            unknown.append(f"{path}: {name}")
        fails = f'lanes::fail("{name}");'  # which does not return: no value is needed
        return f"{head} {{ {BODIES.get(name, fails)} }}\n"

    if path.name == "wgmma_wide.cuh":
        return "#error the products of prim/wgmma_wide.cuh are not emulated\n"
    if path.parent == PRIM:
        text = _FUNCTION.sub(body, text)
        text = _FORMS.sub(
            lambda m: f"#define {m[1]}({m[2]}) {_RUN if m[1].endswith('FORMS') else _NO_RUN}",
            text,
        )
        text = text.replace("kIsSm90a = false", "kIsSm90a = true")
    text = _SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(lanes::dynamic_shared());", text)
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 __shared__", text)
    return text.replace("#ifdef __CUDACC__", "#if true")


def write_sources(folder: Path, fault: tuple[str, str, str] | None = None) -> None:
    """Copies csrc to `folder` as a CPU takes it. A `fault`: a file, its text, what it becomes."""
    unknown: list[str] = []
    for source in sorted(CSRC.rglob("*")):
        path = source.relative_to(CSRC)
        if source.suffix not in (".h", ".cuh"):
            continue
        text = source.read_text()
        if fault is not None and fault[0] == str(path):
            assert text.count(fault[1]) == 1, f"{path} has not once: {fault[1]}"
            text = text.replace(fault[1], fault[2])
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_for_cpu(path, text, unknown))
    assert not unknown, f"tests/lanes/sources.py has no CPU's body (BODIES) of {unknown}"


def has_headers(cuda: Path) -> bool:
    """Whether a toolkit's folder has what kernels include; torch's own wheels bring only a part."""
    include = cuda / "include"
    return (include / "cuda.h").is_file() and (include / "crt" / "host_defines.h").is_file()


def compile_object(
    cxx: tuple[str, ...], source: Path, sources: Path, cuda: Path, out: Path
) -> None:
    """Compiles one file; kernels, in drivers, tell the runtime of each access to memory."""
    is_driver = source.name != "runtime.cpp"
    watch = ["-fsanitize=thread", "-include", str(HERE / "runtime.h")] if is_driver else []
    folders = [f"-I{HERE}", f"-I{sources}", f"-isystem{cuda / 'include'}"]
    folders += [f"-isystem{cuda / 'include' / 'cccl'}"]  # of CUDA 13, which nvcc looks into
    options = ["-std=c++20", "-O1", "-g1", "-w", *watch, *folders]
    _run([*cxx, *options, "-c", str(source), "-o", str(out)])


def link(cxx: tuple[str, ...], objects: list[Path], program: Path) -> None:
    """Links without the sanitizer's own library: runtime.cpp has its functions."""
    wraps = [f"-Wl,--wrap={name}" for name in ("memcpy", "memset")]
    _run([*cxx, "-no-pie", *wraps, *map(str, objects), "-o", str(program)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
