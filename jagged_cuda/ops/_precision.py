"""Whether float32 products may round their operands to TF32: PyTorch's own setting."""

from __future__ import annotations

import torch


def allow_tf32(dtype: torch.dtype) -> bool:
    """True if torch.backends.cuda.matmul.fp32_precision allows TF32 and the dtype is float32."""
    return dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does: torch.compile takes the result as a constant. The
# decorator itself would import torch._dynamo, which takes over a second.
allow_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
