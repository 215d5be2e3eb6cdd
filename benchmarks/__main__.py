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
    grid,
    host,
    hstu,
    mixed,
    modules,
    norm,
    peers,
    plot,
    report,
    rows,
    shapes,
    stamp,
    sweep,
    table,
    table1,
    unseen,
)
from benchmarks.session import Command, LostDeviceError, Options, Session
from benchmarks.timing import CpuTimer, CudaTimer, Timer
from jagged_cuda import _load

COMMANDS: dict[str, Command] = {
    "table1": table1.COMMAND,
    **attention.COMMANDS,
    "unseen": unseen.COMMAND,
    "mixed": mixed.COMMAND,
    "rows": rows.COMMAND,
    "norm": norm.COMMAND,
    "sweep": sweep.COMMAND,
    "host": host.COMMAND,
    "modules": modules.COMMAND,
    "build": build.COMMAND,
    "grid": grid.COMMAND,
    # Last, since torch.compile takes its time for each mask of FlexAttention.
    "hstu": hstu.COMMAND,
}
# These measure nothing: they read a results file.
FILE_COMMANDS: dict[str, ModuleType] = {"plot": plot, "table": table, "stamp": stamp}
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
        + "\n".join(f"  {name:14} {', '.join(c.cases)}" for name, c in COMMANDS.items())
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
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        default=1,
        help="time the implementations of a case in turn, A B A B, and keep each median",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few repetitions")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--seconds-budget",
        type=float,
        metavar="S",
        help="start no case and no peer after S seconds",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse names that nothing has."""

    def require(option: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
        for name in names or ():
            if not fnmatch.filter(known, name):
                expected = ", ".join(dict.fromkeys(known))
                parser.error(f"{option} must be of {expected}, got {name}")

    commands = _commands(options.command).values()
    require("--cases", options.cases, [case for c in commands for case in c.cases])
    require("--against", options.against, [*(p for c in commands for p in c.peers), "all", "none"])
    require("--dtype", options.dtype, list(shapes.PRECISIONS))
    for option, number in (("repetitions", options.repetitions), ("rounds", options.rounds)):
        if number is not None and number < 1:
            parser.error(f"--{option} must be >= 1, got {number}")


def _commands(name: str) -> dict[str, Command]:
    return COMMANDS if name == "all" else {name: COMMANDS[name]}


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
        rounds=parsed.rounds,
    )
    session = Session(timer, options)
    where = report.environment(timer)

    def save() -> None:
        if parsed.out is not None:
            report.write_json(parsed.out, report.as_json(session, arguments, where))

    session.after_row = save
    commands = _commands(parsed.command)
    try:
        with timer.context():
            if list(commands) != ["build"]:
                session.calibrate()
            for name, command in commands.items():
                if session.out_of_time():
                    session.note(f"{name}: the time was spent")
                else:
                    command.run(session)
    except LostDeviceError as error:
        session.note(str(error))
        session.failed = True
    finally:
        with contextlib.suppress(BrokenPipeError):
            print(report.tables(session, where), flush=True)
        save()
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
