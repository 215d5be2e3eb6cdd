// What drivers share: random tensors, the host's side of prim/hopper.h, and the verdict.
#pragma once

#include "cuda/kernels/prim/hopper.h"
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace jagged_cuda {

bool has_wgmma() { return true; }
cudaError_t encode_tensor_map(CUtensorMap& map, const TensorMapSource& source, int box_rows,
                              int box_columns, int box_heads) {
  const int elem_bytes =
      source.type == ElementType::kBf16 || source.type == ElementType::kF16 ? 2 : 4;
  const auto stride_bytes = [&](int64_t extent, int64_t stride) {
    return (extent > 1 ? stride : source.dim) * elem_bytes;
  };
  const int64_t strides[2] = {stride_bytes(source.heads, source.head_stride),
                              stride_bytes(source.rows, source.row_stride)};
  const bool is_aligned = reinterpret_cast<uintptr_t>(source.data) % 16 == 0;
  if (!is_aligned || strides[0] % 16 != 0 || strides[1] % 16 != 0) return cudaErrorNotSupported;
  lanes::make_map(map, source.data, {source.dim, source.heads, source.rows}, strides,
                  {box_columns, box_heads, box_rows}, elem_bytes);
  return cudaSuccess;
}

}  // namespace jagged_cuda

extern "C" cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = lanes::num_sms;
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace lanes {

struct Draw {
  std::mt19937 bits;

  int below(int end) { return int(bits() % unsigned(end)); }
  bool one_in(int n) { return below(n) == 0; }
  template <size_t kCount>
  int of(const int (&values)[kCount]) {
    return values[below(int(kCount))];
  }
  float normal(float size = 1) { return std::normal_distribution<float>(0, size)(bits); }

  template <typename Element>
  Element* normals(int64_t count, const char* name, float size = 1) {
    auto* values =
        static_cast<Element*>(tensor(std::max<int64_t>(count, 1) * sizeof(Element), name, true));
    for (int64_t i = 0; i < count; ++i) values[i] = Element(normal(size));
    return values;
  }
};

template <typename Element>
Element* unwritten(int64_t count, const char* name) {
  return static_cast<Element*>(tensor(std::max<int64_t>(count, 1) * sizeof(Element), name, false));
}
inline const int64_t* offsets(const std::vector<int64_t>& values, const char* name) {
  auto* copy = static_cast<int64_t*>(tensor(values.size() * sizeof(int64_t), name, true));
  std::copy(values.begin(), values.end(), copy);
  return copy;
}

// Offsets that are not right: two of them become anything.
inline void spoil(Draw& draw, std::vector<int64_t>& offsets, int64_t total) {
  for (int i = 0; i < 2; ++i) {
    offsets[draw.below(int(offsets.size()))] = draw.one_in(8) ? INT64_MAX
                                               : draw.one_in(7)
                                                   ? INT64_MIN
                                                   : draw.below(int(3 * total + 3)) - total;
  }
}

inline int wrong = 0;

// Whether each result is within `relative` of the reference and `absolute`.
template <typename Element>
void compare(const char* name, const Element* got, const std::vector<double>& reference,
             double relative, double absolute) {
  for (size_t i = 0; i < reference.size(); ++i) {
    const double value = float(got[i]), error = std::abs(value - reference[i]);
    if (error <= relative * std::abs(reference[i]) + absolute) continue;
    printf("WRONG %s[%zu]: %g, reference %g\n", name, i, value, reference[i]);
    ++wrong;
    return;
  }
}

// Runs batches FIRST to FIRST + COUNT - 1, each drawn from its number alone.
template <typename Batch>
int main_of(int argc, char** argv, Batch batch) {
  if (argc != 3) return 3;
  const int first = atoi(argv[1]), count = atoi(argv[2]);
  for (int number = first; number < first + count; ++number) {
    Draw draw{std::mt19937(unsigned(number))};
    start(draw.bits());
    num_sms = 1 + draw.below(3);
    printf("batch %d: %s\n", number, batch(draw).c_str());
    fflush(stdout);
  }
  printf("%d batches, %d findings, %d wrong\n", count, findings(), wrong);
  return findings() + wrong > 0;
}

}  // namespace lanes
