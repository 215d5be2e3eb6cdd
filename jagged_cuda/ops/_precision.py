"""Whether float32 products may round their operands to TF32: PyTorch's own setting."""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result
def allow_tf32() -> bool:
    """True if torch.backends.cuda.matmul.fp32_precision (set_float32_matmul_precision) allows TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
