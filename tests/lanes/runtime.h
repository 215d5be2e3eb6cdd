// CUDA's threads, and the instructions of prim/, on a CPU: what the sources of kernels are compiled
// against (runtime.cpp says how they run). Included before everything else.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#undef __shared__
#undef __launch_bounds__
#undef __global__
#undef __noinline__
#undef __forceinline__
#undef __device__
#undef __host__
#define __shared__ \
  static  // extern ones, of a size that the launch names, are lanes::dynamic_shared
#define __launch_bounds__(...)
#define __global__
#undef __grid_constant__
#define __grid_constant__
#define __noinline__
#define __forceinline__ inline
#define __device__
#define __host__

namespace lanes {

struct Dim {
  unsigned x, y, z;
};
struct View {  // what a thread knows of itself
  Dim thread, block, block_dim, grid_dim;
  int rank, lane;
};
extern View* view;
extern int num_sms;

// --- The tensors of a launch, its order, and what was found
void start(unsigned seed);  // forgets all tensors
void* tensor(size_t bytes, const char* name, bool is_written);
// With offsets that are not right, only accesses outside of tensors count: neighbours overlap.
void judge_bounds_alone(bool alone);
// Where a product has rows that nobody stores: of what they are made nobody wrote.
void products_may_read_unwritten(bool may);
int findings();
using Kernel = void (*)(const void*);
void run(Kernel kernel, const void* params, int64_t grid_x, int64_t grid_y, int threads,
         int cluster, int shared_bytes);
[[noreturn]] void fail(const char* text);

// --- Memory
char* dynamic_shared();
uint32_t shared_address(const void* pointer);
char* at(uint32_t shared_address);  // of any CTA of the cluster
uint32_t address_in_cta(uint32_t shared_address, uint32_t rank);

// --- Barriers and collectives
const uint64_t* exchange(int kind, unsigned lanes, uint64_t value);  // the values of 32 lanes
void syncwarp();
void syncthreads();
bool bar(int id, int threads, bool arrives_only, bool value);
void barrier_cluster();
void mbarrier_init(uint64_t& barrier, int arrivals);
void mbarrier_arrive(uint64_t& barrier, int arrivals, int bytes);
void mbarrier_wait(uint64_t& barrier, int parity);
void fence_proxy_async();

// --- Copies and products that go on by themselves
void make_map(CUtensorMap& map, const void* base, const int64_t (&dims)[3],
              const int64_t (&strides_bytes)[2], const int (&box)[3], int elem_bytes);
void tensor_load(const void* shared, const CUtensorMap& map, int x, int y, int z,
                 uint64_t& barrier);
void tensor_store(const CUtensorMap& map, const void* shared, int x, int y, int z);
void bulk_load(const void* shared, const void* global, int bytes, uint64_t& barrier);
void bulk_store(void* global, const void* shared, int bytes, bool adds);
void bulk_commit();
void bulk_wait();
void cp_async(uint32_t shared, const void* global, int bytes, int source_bytes);
void cp_async_commit();
void cp_async_wait(int pending);
void cp_async_arrive(uint64_t& barrier);
struct Product {  // a [64, 16] in registers or in shared memory, b [16, 8 blocks]
  float* c;
  int blocks;
  const uint32_t* a_registers;
  uint64_t a, b;
  bool accumulates, is_a_transposed, is_b_transposed, is_bf16;
};
void wgmma(const Product& product);
void wgmma_commit();
void wgmma_wait(int pending);
void stmatrix(uint32_t shared, const uint32_t (&r)[4]);
void ldmatrix(uint32_t (&r)[4], uint32_t shared, bool is_transposed);
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool is_bf16);

template <typename To, typename From>
inline To bits(From from) {
  To to{};
  __builtin_memcpy(&to, &from, std::min(sizeof to, sizeof from));
  return to;
}

// The larger of each half's element, NaN if either is.
template <typename Element>
inline uint32_t max_nan_x2(uint32_t a, uint32_t b) {
  uint32_t pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint16_t x = uint16_t(a >> shift), y = uint16_t(b >> shift);
    const float of_x(bits<Element>(x)), of_y(bits<Element>(y));
    const bool is_nan = std::isnan(of_x) || std::isnan(of_y);
    pair |= uint32_t(is_nan ? 0x7fff : of_x < of_y ? y : x) << shift;
  }
  return pair;
}

}  // namespace lanes

// --- CUDA's own functions, those that the drivers' kernels call
#define threadIdx (lanes::view->thread)
#define blockIdx (lanes::view->block)
#define blockDim (lanes::view->block_dim)
#define gridDim (lanes::view->grid_dim)
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return lanes::shared_address(pointer);
}
inline void __syncthreads() { lanes::syncthreads(); }
inline int __syncthreads_or(int value) { return lanes::bar(0, int(blockDim.x), false, value != 0); }
inline void __syncwarp(unsigned = ~0u) { lanes::syncwarp(); }
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const uint64_t* values = lanes::exchange(1, mask, value);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= unsigned((mask >> i & 1) && values[i]) << i;
  return votes;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == mask; }
inline unsigned __match_any_sync(unsigned mask, int value) {
  const uint64_t* values = lanes::exchange(15, mask, unsigned(value));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i)
    same |= unsigned((mask >> i & 1) && values[i] == unsigned(value)) << i;
  return same;
}
// Of kernels that share their items out; orders nothing, and is not looked at.
unsigned long long atomicAdd(unsigned long long* counter, unsigned long long count);
int atomicAdd(int* counter, int count);
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
  return lanes::bits<T>(lanes::exchange(2, mask, lanes::bits<uint64_t>(value))[lane & 31]);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
  const int lane = (lanes::view->lane ^ distance) & 31;
  return lanes::bits<T>(lanes::exchange(3, mask, lanes::bits<uint64_t>(value))[lane]);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, int distance) {
  const uint64_t* values = lanes::exchange(4, mask, lanes::bits<uint64_t>(value));
  const int lane = lanes::view->lane - distance;
  return lane < 0 ? value : lanes::bits<T>(values[lane]);
}
template <typename T, typename Combine>
inline T reduce_lanes(unsigned mask, T value, Combine combine) {
  const uint64_t* values = lanes::exchange(5, mask, lanes::bits<uint64_t>(value));
  T all = value;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && i != lanes::view->lane) all = combine(all, lanes::bits<T>(values[i]));
  }
  return all;
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T value) {
  return reduce_lanes(mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T value) {
  return reduce_lanes(mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
inline T __reduce_add_sync(unsigned mask, T value) {
  return reduce_lanes(mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
inline T __ldcs(const T* pointer) {
  return *pointer;
}
template <typename T>
inline T __ldg(const T* pointer) {
  return *pointer;
}
template <typename T>
inline T __ldcg(const T* pointer) {
  return *pointer;
}
template <typename A, typename B>
inline auto min(A a, B b) {
  using Both = decltype(a + b);
  return Both(b) < Both(a) ? Both(b) : Both(a);
}
template <typename A, typename B>
inline auto max(A a, B b) {
  using Both = decltype(a + b);
  return Both(a) < Both(b) ? Both(b) : Both(a);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return uint64_t(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned x) { return lanes::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return lanes::bits<unsigned>(x); }
inline int __float_as_int(float x) { return lanes::bits<int>(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __uint2float_rz(unsigned x) { return float(x); }  // exact below 2^24
using std::isnan;
