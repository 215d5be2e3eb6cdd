"""Run every kernel path under compute-sanitizer's four tools: ``make sanitize``.

First, without a sanitizer, draws of the fuzzer are searched for a few that together take every
kernel path of the GPU. Then those, and calls that are too large to be draws, run, forward and
backward, under memcheck, racecheck, synccheck and initcheck, and calls with wrong offsets under
memcheck, all at once. The exit status is 1 if a tool reports something.

initcheck does not see bulk stores of tensor tiles (TMA), by which the forward pass for long
sequences writes its output; its backward pass would be said to read what nobody wrote. So each such
output, and nothing else, is written once more between the two, with its own values (_Rewriting).
(Gradients that leave in the same way nobody reads, but for copies of rows padded to whole vectors,
whose draws initcheck_sees leaves out.)

One read of what nobody wrote is meant so (`nothing_is_left`, route.cuh): initcheck's reports are
counted by instruction, and those of that read are printed as such and are no failure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.draws import Draw, Wanted, run_draw
from tests.tools.covering import covering_draws

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 77  # the exit status of a tool that reports something
# The kernels whose output leaves by bulk stores: long_forward.cuh, where kStoresThroughQueries.
STORES_IN_BULK = re.compile(r"cuda\.attention\.forward\.long\.(packed\.)?d(64|96|128)")
UNSEEN = "BitwiseXor"  # in the name of the kernel that initcheck is not to look at
UNWRITTEN = re.compile(
    r"Uninitialized \S+ memory read of size (\d+) bytes\n=+ +at (.+?)\+0x([0-9a-f]+)"
)
# nothing_is_left is the first that these kernels do: its loads are of 4 bytes, at 0xd0 to 0x130.
LEFT = re.compile(r"\bjagged_cuda::attention::(forward|backward_dq|backward_dkdv)_wgmma<")
FIRST_LOADS = 0x180


@dataclass(frozen=True)
class Check:
    """A tool, and the module that it watches."""

    tool: str
    what: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, order=True)
class Read:
    """An instruction that read what nobody wrote."""

    kernel: str
    offset: int
    size: int

    @property
    def is_meant(self) -> bool:
        """Whether it is of `nothing_is_left`."""
        return self.size == 4 and self.offset < FIRST_LOADS and bool(LEFT.search(self.kernel))


@dataclass(frozen=True)
class Verdict:
    """The verdict of a tool."""

    status: int
    summary: str
    output: str
    seconds: float


def find_sanitizer() -> str | None:
    """compute-sanitizer: $COMPUTE_SANITIZER, on the PATH, in CUDA's folder, or from its wheel."""
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if named:
        return named
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    places += [path / "nvidia" for path in map(Path, sys.path)]
    for place in places:
        for path in (*place.glob("compute-sanitizer"), *place.glob("cu*/bin/compute-sanitizer")):
            if os.access(path, os.X_OK):
                return str(path)
    return None


def command(sanitizer: str, check: Check) -> list[str]:
    options = ["--tool", check.tool, "--error-exitcode", str(FOUND)]
    # A busy machine takes a while until a process has begun to use its GPU.
    options += ["--target-processes", "application-only", "--launch-timeout", "300"]
    # All of initcheck's, to be counted by instruction; of the others the first say most.
    options += ["--print-limit", "1000000" if check.tool == "initcheck" else "20"]
    if check.tool == "racecheck":
        options += ["--racecheck-report", "analysis"]
    if check.tool == "initcheck":  # which has to see who else writes memory
        options += ["--kernel-name-exclude", f"kernel_substring={UNSEEN}"]
        options += ["--show-backtrace", "device"]
    else:
        options += ["--kernel-name", "kernel_substring=jagged_cuda"]
    return [sanitizer, *options, sys.executable, "-m", *check.arguments]


def run_check(sanitizer: str, check: Check, limit: float) -> Verdict:
    # Without its cache of blocks, PyTorch's tensors are allocations of their own, with an end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command(sanitizer, check),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired as stopped:
        output = stopped.stdout.decode(errors="replace") if stopped.stdout else ""
        return Verdict(124, f"stopped after {limit:.0f} s", output, limit)
    summary = re.findall(r"=+ (?:[A-Z]+ SUMMARY: .*)", done.stdout)
    seconds = time.monotonic() - begin
    if check.tool == "initcheck" and summary and done.returncode == FOUND:
        return judge_initcheck(done.stdout, summary[-1].lstrip("= "), seconds)
    if not summary:  # a sanitizer that says nothing has watched nothing
        text = f"no summary, status {done.returncode}"
        return Verdict(done.returncode or 1, text, done.stdout, seconds)
    return Verdict(done.returncode, summary[-1].lstrip("= "), done.stdout, seconds)


def unwritten(output: str) -> tuple[Counter[Read], Counter[Read]]:
    """How often each instruction read what nobody wrote, by initcheck: meant so, and not."""
    meant, others = Counter[Read](), Counter[Read]()
    for size, kernel, offset in UNWRITTEN.findall(output):
        read = Read(kernel, int(offset, 16), int(size))
        (meant if read.is_meant else others)[read] += 1
    return meant, others


def judge_initcheck(output: str, summary: str, seconds: float) -> Verdict:
    """The verdict of a run with reports: clean if all of them are of the read that is meant so."""
    meant, others = unwritten(output)
    errors = re.search(r"\d+", summary)
    told = f"{summary}; {meant.total()} of nothing_is_left, which are meant"
    if meant and not others and errors is not None and int(errors[0]) == meant.total():
        return Verdict(0, told, output, seconds)
    lines = [
        f"{count} reads of {read.size} bytes at {read.kernel}+{read.offset:#x}"
        for read, count in sorted(others.items())
    ]
    return Verdict(FOUND, told, "\n".join([*lines, output]), seconds)


class _Rewriting:
    """The operators; an output of attention that leaves by bulk stores is written once more."""

    # Whether an operator itself has read such an output before, to copy it (padded_heads.cu).
    reads_before = False

    def __getattr__(self, name: str) -> Any:
        return getattr(jagged_cuda, name)

    def jagged_flash_attention(self, *args: Any, **options: Any) -> Any:
        out, lse = jagged_cuda.jagged_flash_attention(*args, **options)
        if STORES_IN_BULK.fullmatch(last_kernel("cuda")):
            self.reads_before |= out.size(-1) % 8 != 0
            words = out.data.view(torch.int16)  # of `data`: autograd does not see a change
            copy = torch.zeros_like(words)  # which initcheck takes for written
            torch.bitwise_xor(words, 0, out=copy)
            words.copy_(copy)
        return out, lse


def initcheck_sees(given: Draw) -> bool:
    """Whether all outputs of a draw that leave by bulk stores can be rewritten in time."""
    ops = _Rewriting()
    run_draw(given, ops)
    return not ops.reads_before


# Of 64 heads: more tiles of 64 rows than have CTAs of their own (backward_items.cuh).
MANY_TILES = (65, 130, 0, 63, 1, 100, 40, 129, 64, 200, 300, 70, 66, 10, 128, 90)


def _run_large(ops: Any) -> None:
    """So many long sequences and heads that first tiles of keys store dq (long_workspace.cuh).

    Without a mask shorter ones, too, beside which dk and dv of others are computed last; and tiles
    that warpgroups take one after another. And narrow heads in tiles of two warpgroups. For the
    fuzzer, which judges its draws in float64, they are too many.
    """
    heads = 64
    batches = (((1024, 1024), True), ((700, 513, 40), False), (MANY_TILES, True))
    narrow = (((1300, 193, 129, 700), False), ((1300, 65, 129, 700), True))
    cases = (*itertools.product((64, 128), batches), *((32, batch) for batch in narrow))
    for dim, (lengths, causal) in cases:
        offsets = jagged_cuda.offsets_from_lengths(torch.tensor(lengths, device="cuda"))
        size = (sum(lengths), heads, dim)
        leaves = [
            torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        out, _ = ops.jagged_flash_attention(*leaves, offsets, causal=causal, return_lse=True)
        torch.autograd.grad(out, leaves, torch.randn_like(out))
        torch.cuda.synchronize()


def _run_draws(path: Path, ops: Any) -> None:
    for line in path.read_text().splitlines():
        try:
            run_draw(Draw.from_json(line), ops)
            torch.cuda.synchronize()  # so that what a kernel did is laid to its draw
        except Exception:
            print(f"failed in the draw {line}", flush=True)
            raise
    _run_large(jagged_cuda if ops is None else ops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", type=float, default=40.0, help="seconds to look for draws")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for each tool")
    parser.add_argument("--run", metavar="FILE", type=Path, help="run draws, one a line")
    parser.add_argument("--rewrite", action="store_true", help="of --run: as initcheck wants it")
    options = parser.parse_args()
    if options.run is not None:
        _run_draws(options.run, _Rewriting() if options.rewrite else None)
        return 0
    if not torch.cuda.is_available():
        print("sanitize: there is no NVIDIA GPU here, so nothing was checked")
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "sanitize: compute-sanitizer was not found, so nothing was checked: install CUDA's"
            " package cuda-sanitizer, or pip install nvidia-cuda-sanitizer-api"
        )
        return 0
    draws, missed = covering_draws(
        Wanted(), "cuda", "cuda", seed=options.seed, seconds=options.search
    )
    print(f"sanitize: {len(draws)} draws for every kernel path", flush=True)
    seen = [each for each in draws if initcheck_sees(each)] if "initcheck" in options.tool else []
    with tempfile.TemporaryDirectory() as folder:

        def check(tool: str) -> Check:
            chosen, more = (seen, ("--rewrite",)) if tool == "initcheck" else (draws, ())
            file = Path(folder, f"{tool}.txt")
            file.write_text("\n".join(each.to_json() for each in chosen))
            run = ("tests.tools.sanitize", "--run", str(file), *more)
            return Check(tool, f"{len(chosen)} draws", run)

        wrong = ("tests.tools.corrupt", "--device", "cuda", "--batches", "280", "--bare")
        checks = [check(tool) for tool in options.tool]
        if "memcheck" in options.tool:
            checks.append(Check("memcheck", "wrong offsets", wrong))
        with concurrent.futures.ThreadPoolExecutor(len(checks)) as pool:
            futures = [pool.submit(run_check, sanitizer, c, options.limit) for c in checks]
            verdicts = [future.result() for future in futures]
    return print_table(checks, verdicts, sorted(missed))


def print_table(checks: list[Check], verdicts: list[Verdict], missed: list[str]) -> int:
    failed = [verdict for verdict in verdicts if verdict.status != 0]
    for verdict in failed:
        output = verdict.output
        # The first report says most; the last lines hold the summary.
        print(output if len(output) < 12_000 else f"{output[:8000]}\n[...]\n{output[-4000:]}")
    print(f"\n{'tool':<10} {'on':<16} {'seconds':>7}  result")
    for check, verdict in zip(checks, verdicts, strict=True):
        word = "clean" if verdict.status == 0 else f"FAILED ({verdict.status})"
        print(
            f"{check.tool:<10} {check.what:<16} {verdict.seconds:>7.0f}  {word}: {verdict.summary}"
        )
    if missed:
        print(f"kernel paths that no draw took: {', '.join(missed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
