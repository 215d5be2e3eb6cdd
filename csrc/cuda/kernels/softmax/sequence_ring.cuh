// jagged_softmax's gradients where sequences are long on average: long ones by a ring in shared memory,
// read once or little more (jagged_softmax.cu: the mathematics and the grid).
//
//   dx[i, c] = scale p[i, c] (dp[i, c] - sum_j dp[j, c] p[j, c])
//
// The result has the same bits as that of jagged_softmax_kernel, so that the host may choose by the
// batch: the same threads share a sequence, each adds its rows in the same order, and sums over threads
// are made by the same functions. Sequences of one warp are computed by the same code.
//
// Those of the CTA are cut into *stages*: kItems rows for each thread, both operands. A ring holds
// kStages of them, copied by cp.async. A thread reads nothing but what it copied itself, so no barrier
// is needed; it waits for its own copies. For a sequence of n stages:
//
//   for stage 0 to n - 1:  wait; sum += dp p; copy stage + kStages into its place
//   sum over the CTA
//   for stage n - 1 to 0:  (the last kStages are still there) wait; store dx;
//                          copy stage - kStages into its place, or the next sequence's first stages
//
// So a sequence of up to kStages is read once, and of a longer one all but the last kStages a second time,
// newest first, while L2 may hold them. While a sequence is computed, copies of the CTA's next one are in
// flight; those of its first one start before its warps take their short ones.
//
// Shared memory, dynamic: the ring, 3 stages of 4 items of 2 operands of 128 vectors (49,152 bytes with
// vectors of 16 bytes, 24,576 with 8), and the partial results of sums (1,024). Per SM 4 CTAs, or 5 with
// vectors of 8 bytes, where registers bind: up to 192 and 120 KiB in flight.
//
// Barriers: one __syncthreads in each sum over the CTA, as in jagged_softmax.cu: two buffers in turn.
//
// A stage's rows behind the sequence's end are neither copied nor read.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/softmax/sequence_backward.cuh"

namespace jagged_cuda::sequence_softmax {

// Batches of more rows than these for each sequence take the ring.
constexpr int kLongMean = 64;
constexpr int kStages = 3;

// Per SM, as shared memory allows, and registers for vectors of 8 bytes.
template <int kVectorBytes>
constexpr int kRingCtas = kVectorBytes == 16 ? 4 : 5;

template <int kVectorBytes>
struct RingStorage {
  // [stage, item, dp or p, thread]
  alignas(16) unsigned char slots[kStages][kItems][2][kThreads][kVectorBytes];
  SharedStorage sums;
};
static_assert(sizeof(RingStorage<16>) == 49'152 + 1'024 && sizeof(RingStorage<8>) == 24'576 + 1'024,
              "as the header says");

template <typename Element, int kVector>
class BackwardRing {
 public:
  using View = SoftmaxBackwardView<Element, kVector>;
  using Loaded = typename View::Loaded;
  using S = typename View::S;
  using Storage = RingStorage<sizeof(Loaded)>;

  struct Sequence {
    View view;
    int stages;  // none without rows
  };

  __device__ __forceinline__ BackwardRing(Storage& shared,
                                          const SoftmaxLaunch<JaggedSoftmaxBackwardParams>& launch,
                                          const Place& place)
      : shared_(shared),
        slots_(ptx::shared_address(shared.slots[0][0][0][threadIdx.x])),
        launch_(launch),
        place_(place) {}

  __device__ __forceinline__ Sequence sequence(const RowRange& range) const {
    // row_step * kItems, a power of two
    constexpr int kStageLog2 = 9;
    static_assert(1 << kStageLog2 == kThreads * kItems);
    const int rows_log2 = kStageLog2 - launch_.lanes_log2;
    const int64_t last = (int64_t{1} << rows_log2) - 1;
    return {View(launch_.params, range, place_), static_cast<int>((range.len + last) >> rows_log2)};
  }

  // Starts copies of the stages of `next` that find room beside `taken` ones of the sequence before.
  __device__ __forceinline__ void start(const Sequence& next, int taken) {
    const int count = min(kStages - taken, next.stages);
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) copy(next, stage, !flipped_);
  }

  // The gradient of `sequence`, of which start() has been called. Copies of `next` begin as soon as there
  // is room.
  __device__ __forceinline__ void take(const Sequence& sequence, const Sequence& next) {
    flipped_ = !flipped_;
    start(next, sequence.stages);
    S sum[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll 1
    for (int stage = 0; stage < sequence.stages; ++stage) {
      wait();
      for_each_row(sequence, stage, [&](const Loaded& rGrad, const Loaded& rP, int64_t /*row*/) {
        View::add(sum, rGrad, rP);
      });
      if (stage + kStages < sequence.stages) copy(sequence, stage + kStages, flipped_);
    }
    reduce_rows(sum, place_, shared_.sums, flipped_ ? 1 : 0, [](S a, S b) { return a + b; });
#pragma unroll 1
    for (int stage = sequence.stages - 1; stage >= 0; --stage) {
      if (stage + kStages < sequence.stages) wait();
      for_each_row(sequence, stage, [&](const Loaded& rGrad, const Loaded& rP, int64_t row) {
        sequence.view.store(sum, rGrad, rP, row);
      });
      if (stage >= kStages) {
        copy(sequence, stage - kStages, flipped_);
      } else if (kStages - 1 - stage < next.stages) {
        copy(next, kStages - 1 - stage, !flipped_);
      }
    }
  }

 private:
  static constexpr int kSlotBytes = kThreads * sizeof(Loaded);  // from one vector to the next
  static constexpr int kStageBytes = kItems * 2 * kSlotBytes;

  // The thread's vectors of a stage. Every other sequence is flipped: its stages fill the ring from the
  // end, since the one before leaves the places of its first stages last.
  __device__ __forceinline__ uint32_t slots_of(int stage, bool flipped) const {
    const int index = stage % kStages;
    return slots_ + (flipped ? kStages - 1 - index : index) * kStageBytes;
  }

  __device__ __forceinline__ int64_t first_row(int stage) const {
    return place_.row + int64_t{stage} * (kItems * place_.row_step);
  }
  // Rows from the thread's first one of a stage to the end, none of them without columns; or as many as no
  // stage has.
  __device__ __forceinline__ int rows_left(const Sequence& sequence, int64_t first) const {
    const int64_t left = sequence.view.len - first;
    if (left <= 0) return 0;
    return left < kItems * kThreads ? static_cast<int>(left) : kItems * kThreads;
  }

  // This thread has read what the slots held.
  __device__ __forceinline__ void copy(const Sequence& sequence, int stage, bool flipped) {
    const View& view = sequence.view;
    const int64_t first = first_row(stage);
    const int left = rows_left(sequence, first);
    const uint32_t slots = slots_of(stage, flipped);
    const Element* gGrad = view.gGrad + first * view.grad_stride;
    const Element* gP = view.gP + first * view.p_stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * place_.row_step < left) {
        copy_vector(slots + 2 * i * kSlotBytes, gGrad);
        copy_vector(slots + (2 * i + 1) * kSlotBytes, gP);
      }
      gGrad += place_.row_step * view.grad_stride;
      gP += place_.row_step * view.p_stride;
    }
    ptx::cp_async_commit();
    ++started_;
  }

  static __device__ __forceinline__ void copy_vector(uint32_t slot, const Element* global) {
    if constexpr (sizeof(Loaded) == 16) {
      ptx::cp_async_16(slot, global, 16);
    } else {
      ptx::cp_async_8(slot, global, 8);
    }
  }

  // Until the oldest stage that has not been waited for is there.
  __device__ __forceinline__ void wait() {
    ++awaited_;
    const int behind = started_ - awaited_;
    if (behind >= kStages - 1) {
      ptx::cp_async_wait<kStages - 1>();
    } else if (behind == 1) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
  }

  // Calls visit(dp, p, row) for the thread's rows of a stage, in order.
  template <typename Visit>
  __device__ __forceinline__ void for_each_row(const Sequence& sequence, int stage,
                                               Visit visit) const {
    const int64_t first = first_row(stage);
    const int left = rows_left(sequence, first);
    const uint32_t slots = slots_of(stage, flipped_);
    Loaded rGrad[kItems], rP[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * place_.row_step < left) {
        load(rGrad[i], slots + 2 * i * kSlotBytes);
        load(rP[i], slots + (2 * i + 1) * kSlotBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = i * place_.row_step;
      if (row < left) visit(rGrad[i], rP[i], first + row);
    }
  }

  // Spelled out, since the compiler would load each element by itself.
  static __device__ __forceinline__ void load(Loaded& vector, uint32_t slot) {
    if constexpr (sizeof(Loaded) == 16) {
      *reinterpret_cast<uint4*>(vector.elems) = ptx::ld_shared_16(slot);
    } else {
      *reinterpret_cast<uint2*>(vector.elems) = ptx::ld_shared_8(slot);
    }
  }

  Storage& shared_;
  const uint32_t slots_;  // the thread's first one
  const SoftmaxLaunch<JaggedSoftmaxBackwardParams>& launch_;
  const Place& place_;
  bool flipped_ = false;  // of the sequence that is taken
  int started_ = 0;       // stages whose copies were started
  int awaited_ = 0;       // and those of them that were waited for
};

// Up to kWarps sequences from `first` on. All lanes of a warp call its functions together.
class SequenceList {
 public:
  template <typename Params>
  __device__ __forceinline__ SequenceList(const SoftmaxLaunch<Params>& launch, int64_t first) {
    const OffsetsView& offsets = launch.params.offsets;
    const int lane = threadIdx.x % 32;
    if (lane < launch.seqs_each && first + lane < offsets.num_seqs) {
      own_ = sequence_rows(offsets, first + lane);
    }
    const bool is_long = own_.len > (32 * kItems) >> launch.lanes_log2;
    long_ones_ = __ballot_sync(0xffffffffu, is_long);
  }

  // The sequence that this warp takes alone; no rows where there is none.
  __device__ __forceinline__ RowRange of_warp() const {
    const int warp = threadIdx.x / 32;
    const RowRange range = rows_of(warp);
    return (long_ones_ >> warp & 1) == 0 ? range : RowRange{0, 0};
  }

  // The next one that the CTA takes together, without rows behind the last.
  __device__ __forceinline__ RowRange next_of_cta() {
    if (long_ones_ == 0) return {0, 0};
    const RowRange range = rows_of(__ffs(static_cast<int>(long_ones_)) - 1);
    long_ones_ &= long_ones_ - 1;
    return range;
  }

 private:
  __device__ __forceinline__ RowRange rows_of(int i) const {
    return {__shfl_sync(0xffffffffu, own_.begin, i), __shfl_sync(0xffffffffu, own_.len, i)};
  }

  RowRange own_{0, 0};  // lane i: of sequence first + i
  unsigned long_ones_;  // those of the CTA that are left, a bit each
};

template <typename Element, int kVector>
__global__
__launch_bounds__(kThreads, kRingCtas<kVector * sizeof(Element)>) void softmax_backward_ring_kernel(
    const __grid_constant__ SoftmaxLaunch<JaggedSoftmaxBackwardParams> launch) {
  using Ring = BackwardRing<Element, kVector>;
  using Sequence = typename Ring::Sequence;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Ring::Storage*>(dynamic_shared);
  const JaggedSoftmaxBackwardParams& params = launch.params;
  const int64_t first_vector = int64_t{blockIdx.x} << launch.lanes_log2;
  const int64_t step = int64_t{gridDim.y} * launch.seqs_each;
  const Place place(true, launch.lanes_log2, first_vector, kVector, params.columns);
  Ring ring(shared, launch, place);
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.y} * launch.seqs_each; first < params.offsets.num_seqs;
       first += step) {
    SequenceList list(launch, first);
    Sequence sequence = ring.sequence(list.next_of_cta());
    ring.start(sequence, 0);
    if (const RowRange range = list.of_warp(); range.len > 0) {
      softmax_short<Element, kVector>(
          params, range, Place(false, launch.lanes_log2, first_vector, kVector, params.columns),
          shared.sums);
    }
#pragma unroll 1
    while (sequence.stages > 0) {
      const Sequence next = ring.sequence(list.next_of_cta());
      ring.take(sequence, next);
      sequence = next;
    }
  }
  Element* gGradX = static_cast<Element*>(params.grad_x);
  store_zeros(gGradX, 0, clamped_offset(params.offsets, 0) * params.columns);
  store_zeros(gGradX, clamped_offset(params.offsets, params.offsets.num_seqs) * params.columns,
              params.offsets.total * params.columns);
}

template <typename Element>
constexpr PathName kRingPath =
    PathName("cuda.jagged_softmax_backward.ring.") + kElementName<Element>;

}  // namespace jagged_cuda::sequence_softmax
