"""`python -m benchmarks COMMAND`: measure, check, and report beside the peers."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import (
    attention,
    build,
    figure2,
    host,
    peers,
    plot,
    report,
    shapes,
    stamp,
    sweep,
    table,
    table1,
    target,
)
from benchmarks.session import LostDeviceError, Options, Session
from benchmarks.timing import CpuTimer, CudaTimer, Timer
from jagged_cuda import _load

COMMANDS: dict[str, ModuleType] = {
    "table1": table1,
    "attention": attention,
    "figure2": figure2,
    "target": target,
    "sweep": sweep,
    "host": host,
    "build": build,
}
# These measure nothing: they read a results file.
FILE_COMMANDS = {"plot": plot, "table": table, "stamp": stamp}
QUICK_REPETITIONS = 3


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Time jagged_cuda's operators beside their peers. Each result of ours is"
        "\nchecked before it is timed; a wrong or failing one makes the exit status 1.",
        epilog="peers:\n"
        + "\n".join(f"  {name:14} {text}" for name, text in peers.DESCRIPTIONS.items())
        + "\n\ncases:\n"
        + "\n".join(f"  {name:14} {', '.join(m.CASES)}" for name, m in COMMANDS.items())
        + f"\n\nof a results file: {', '.join(FILE_COMMANDS)} (plot --help, ...)",
    )
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where it works")
    parser.add_argument("--against", type=_names, metavar="NAME,...", help="peers; all, none")
    parser.add_argument(
        "--cases", type=_names, metavar="NAME,...", default=("*",), help="names or patterns"
    )
    parser.add_argument(
        "--dtype",
        type=_names,
        metavar="NAME,...",
        help=f"of {', '.join(shapes.PRECISIONS)}; tf32 is float32 with TF32 products",
    )
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: by the time of one")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few repetitions")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what was measured")
    parser.add_argument(
        "--seconds-budget", type=float, metavar="S", help="start no case after S seconds"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse names that nothing has."""
    modules = _modules(options.command).values()
    cases = [case for module in modules for case in module.CASES]
    for pattern in options.cases:
        if not fnmatch.filter(cases, pattern):
            expected = ", ".join(dict.fromkeys(cases))
            parser.error(f"--cases must be of {expected}, got {pattern}")
    known = [name for module in modules for name in getattr(module, "PEERS", ())]
    for name in options.against or ():
        if name not in (*known, "all", "none"):
            expected = ", ".join(dict.fromkeys((*known, "all", "none")))
            parser.error(f"--against must be of {expected}, got {name}")
    for name in options.dtype or ():
        if name not in shapes.PRECISIONS:
            parser.error(f"--dtype must be of {', '.join(shapes.PRECISIONS)}, got {name}")
    if options.repetitions is not None and options.repetitions < 1:
        parser.error(f"--repetitions must be >= 1, got {options.repetitions}")
    if options.plot is not None and not plot.is_possible():
        parser.error(f"--plot: {plot.NEEDS}")


def _modules(command: str) -> dict[str, ModuleType]:
    return COMMANDS if command == "all" else {command: COMMANDS[command]}


def _why_no_cuda() -> str | None:
    if _load.cuda_unavailable_reason is not None:
        return _load.cuda_unavailable_reason
    return None if torch.cuda.is_available() else "torch sees no GPU"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in FILE_COMMANDS:
        return FILE_COMMANDS[arguments[0]].main(arguments[1:])
    parser = _parser()
    parsed = parser.parse_args(arguments)
    _check(parser, parsed)
    reason = _why_no_cuda()
    if parsed.device == "cuda" and reason is not None:
        parser.error(f"--device cuda needs a GPU: {reason}")
    kind = parsed.device or ("cpu" if reason else "cuda")
    repetitions = parsed.repetitions or (QUICK_REPETITIONS if parsed.quick else None)
    timer: Timer
    if kind == "cuda":
        timer = CudaTimer(torch.device("cuda", torch.cuda.current_device()), repetitions)
    else:
        timer = CpuTimer(repetitions)
    options = Options(
        quick=parsed.quick,
        against=parsed.against,
        cases=parsed.cases,
        precisions=parsed.dtype,
        seconds_budget=parsed.seconds_budget,
    )
    session = Session(timer, options)
    where = report.environment(timer.device)

    def save() -> None:
        if parsed.out is not None:
            report.write_json(parsed.out, report.as_json(session, arguments, where))

    session.after_row = save
    modules = _modules(parsed.command)
    try:
        with timer.context():
            if list(modules) != ["build"]:
                session.calibrate()
            for command, module in modules.items():
                if session.out_of_time():
                    session.note(f"{command}: the time was spent")
                else:
                    module.run(session)
    except LostDeviceError as error:
        session.note(str(error))
        session.failed = True
    finally:
        with contextlib.suppress(BrokenPipeError):
            report.print_tables(session, where)
        save()
    if parsed.plot is not None:
        try:
            plot.draw(report.as_json(session, arguments, where), parsed.plot)
        except ValueError as error:
            print(error, file=sys.stderr)
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
