// What the host knows of the matrices of a batch, by which it chooses tiles.
#pragma once

#include "cuda/kernels/prim/matrices.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

struct MatricesShape {
  // `rows`: of the matrices, or of their transposed ones.
  MatricesShape(int64_t capacity, const OffsetsView& rows)
      : row(rows.total > 0 ? capacity / rows.total : 0),
        skew(rows.total > 0 ? static_cast<double>(row) * static_cast<double>(rows.num_seqs) /
                                  static_cast<double>(rows.total)
                            : 0.0) {}

  // Long-tailed lengths: as log-normal ones with sigma 1.2 have 3 to 4.
  bool is_skewed() const { return skew >= 2.0; }

  int64_t row;  // elements of a row, on average of all rows: long sequences have most of them
  double skew;  // the same over the mean length, of square matrices: 1 if all are alike
};

}  // namespace jagged_cuda::gemm
