"""One room for each operator: its definition on padded tensors, and all that tests know about it.

A room has up to four things.

- ``definition`` is what the operator means, padded and differentiable, so plain that it needs no
  test; in float64 it judges. Arguments and results are jagged; padding is internal.
- ``rounded`` is the same padded PyTorch as one would run it in the operands' precision: operands,
  results and what is stored between two steps are rounded to ``storage``, sums run in the dtype of
  the arguments. Its error says how exact a kernel can be.
- ``terms`` is the size of the terms that are summed into each result and gradient.
- ``CASE`` is the operator's row in the table (``jagged_cuda/testing/cases.py``).
"""
