// All kernels, for one instruction set: included inside the namespace of isa_*.cpp, which defines
// kVectorBytes and JAGGED_F16C.

#include "cpu/simd/vector.inl"
#include "cpu/simd/rows.inl"
#include "cpu/simd/product.inl"
#include "cpu/kernels/bmm.inl"
#include "cpu/kernels/combine.inl"
#include "cpu/kernels/softmax.inl"
#include "cpu/kernels/softmax_lines.inl"
#include "cpu/kernels/layer_norm.inl"
#include "cpu/kernels/sum.inl"
#include "cpu/kernels/attention.inl"

// Constants: tables of instruction sets that the machine lacks are read too, but none of their code
// may run.
template <class T>
constexpr Kernels make_kernels() {
  return {dense_bmm<T>,
          jagged_bmm<T>,
          sum_parts<T>,
          softmax<T>,
          softmax_statistics<T>,
          softmax_combine<T>,
          softmax_write<T>,
          softmax_lines<T>,
          sum_rows<T>,
          store_sums<T>,
          combine_elements<T>,
          layer_norm<T>,
          layer_norm_backward<T>,
          attention_forward<T>,
          attention_backward<T>};
}

constexpr KernelTable make_table(const char* name) {
  return {name, make_kernels<float>(), make_kernels<double>()};
}
