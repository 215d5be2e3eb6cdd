// jagged_to_padded on the CPU: items are sequences.
#include "contract/rows.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

template <class Bits>
void fill_elements(void* out, int64_t count, uint64_t bits) {
  std::fill_n(static_cast<Bits*>(out), count, static_cast<Bits>(bits));
}

Tensor jagged_to_padded(Tensor x, Tensor offsets, int64_t max_len, double fill) {
  constexpr const char* op = "jagged_to_padded";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, max_len, fill});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  x = as_contiguous(op, x, 1);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.B, max_len}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const int64_t x_row_bytes = x.stride(0) * elem_bytes;
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* result = static_cast<char*>(out.mutable_data_ptr());
  const uint64_t bits = element_bits(x.scalar_type(), fill);

  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B && row_bytes > 0; ++seq) {
    items.add(seq, max_len * row_bytes * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) {
    const Sequence& sequence = sequences[static_cast<size_t>(seq)];
    const char* from = source + sequence.begin * x_row_bytes;
    char* to = result + seq * max_len * row_bytes;
    const int64_t rows = std::min(sequence.len, max_len);
    copy_rows(to, from, rows, row_bytes, x_row_bytes);
    const int64_t left = (max_len - rows) * sizes.rest;
    (elem_bytes == 8   ? fill_elements<uint64_t>
     : elem_bytes == 4 ? fill_elements<uint32_t>
     : elem_bytes == 2 ? fill_elements<uint16_t>
                       : fill_elements<uint8_t>)(to + rows * row_bytes, left, bits);
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_to_padded", TORCH_BOX(&jagged_cuda::cpu::jagged_to_padded));
}
