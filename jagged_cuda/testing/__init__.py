"""What tests, fuzzing and benchmarks share: lengths, references, comparison, the table of cases."""

from jagged_cuda.testing._kernels import kernel_paths, last_kernel

__all__ = ["kernel_paths", "last_kernel"]
