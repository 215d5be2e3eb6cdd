"""Judge operators by hand: ``python -m jagged_cuda.testing jagged_softmax --seed 3``."""

from __future__ import annotations

import argparse

import torch

from jagged_cuda.testing._kernels import last_kernel
from jagged_cuda.testing.cases import DTYPES, EVERY, Case, key_of
from jagged_cuda.testing.comparison import with_environment
from jagged_cuda.testing.judge import judge


def judge_seed(
    case: Case, profile: str, seed: int, dtype: str, device: str, *, backward: bool = True
) -> None:
    """Judge the spec that a seed draws; a failure says how to draw it again."""
    text = (
        f"python -m jagged_cuda.testing {key_of(case)} --profile {profile} --seed {seed}"
        f" --dtype {dtype} --device {device}{'' if backward else ' --forward'}"
    )
    spec = case.spec(profile, seed)
    judge(
        case,
        spec,
        DTYPES[dtype],
        device,
        backward=backward,
        command=lambda: with_environment(text),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jagged_cuda.testing", description=__doc__)
    parser.add_argument("operator", nargs="*", choices=[[], *EVERY], metavar="operator")
    parser.add_argument("--profile", default="edge", help="small, edge or large")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--forward", action="store_true", help="leave the gradients out")
    options = parser.parse_args()
    for name in options.operator or EVERY:
        for dtype in options.dtype:
            for seed in options.seed:
                judge_seed(
                    EVERY[name],
                    options.profile,
                    seed,
                    dtype,
                    options.device,
                    backward=not options.forward,
                )
        path = last_kernel(torch.device(options.device).type)
        print(f"{name}: right for {len(options.seed)} seeds; last kernel {path}")


if __name__ == "__main__":
    main()
