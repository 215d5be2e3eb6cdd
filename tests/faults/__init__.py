"""Faults that kernels have had: tests/mutations.py plants each, and expects it to be caught."""

from __future__ import annotations

from faults import cpu, cuda, cuda_attention
from faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*cpu.FAULTS, *cuda_attention.FAULTS, *cuda.FAULTS)
