// jagged_softmax, forward and backward, where sequences are long on average: long ones by a ring in shared
// memory, read once or little more (jagged_softmax.cu: the mathematics and the grid).
//
// The result has the same bits as that of jagged_softmax_kernel, so that the host may choose by the
// batch: the same threads share a sequence, each adds its rows in the same order, and sums over threads
// are made by the same functions. Sequences of one warp are computed by the same code.
//
// Those of the CTA are cut into *stages*: kItems rows for each thread, of all operands (forward x, backward
// grad_out and p). A ring holds kStages of them, copied by cp.async. A thread reads nothing but what it
// copied itself, so no barrier is needed; it waits for its own copies. For a sequence of n stages:
//
//   for stage 0 to n - 1:  wait; take it into the sums; copy stage + kStages into its place
//   sums over the CTA
//   for stage n - 1 to 0:  (the last kStages are still there) wait; store the result;
//                          copy stage - kStages into its place, or the next sequence's first stages
//
// So a sequence of up to kStages is read once, and of a longer one all but the last kStages a second time,
// newest first, while L2 may hold them. While a sequence is computed, copies of the CTA's next one are in
// flight; those of its first one start before its warps take their short ones.
//
// Forward, the sums of one stage are made as softmax_short makes them: first the largest logits of the CTA,
// then exponentials relative to these. Those of more are made as softmax_long makes them: a stage is one of
// its steps, and exponentials are relative to the largest logit that the thread has seen.
//
// Shared memory, dynamic: the ring, of 4 items of 1 or 2 operands of 128 vectors a stage (forward 4 stages,
// 32,768 bytes with vectors of 16 bytes; backward 3, 49,152, or half of that with 8), and the partial results
// of sums (1,024). Per SM forward 5 CTAs, for registers: up to 160 KiB in flight; backward 4, or 5 with
// vectors of 8 bytes, for registers: up to 192 and 120 KiB.
//
// Barriers: one __syncthreads in each sum over the CTA, as in jagged_softmax.cu: two buffers in turn.
//
// A stage's rows behind the sequence's end are neither copied nor read.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/softmax/sequence_backward.cuh"
#include "cuda/kernels/softmax/sequence_forward.cuh"

namespace jagged_cuda::sequence_softmax {

template <typename Params>
constexpr bool kForward = std::is_same_v<Params, JaggedSoftmaxParams>;

// Batches of more rows than these for each sequence take the ring.
template <typename Params>
constexpr int kLongMean = kForward<Params> ? 104 : 64;
// Forward, many sequences take it where they have more vectors than these on average in a group of columns.
// Tails of 128 rows and 64 columns gain a fifth by it and more, sequences that all have as many lose a fifth
// where elements have 16 bits: the mean does not tell them apart.
template <typename Element>
constexpr int kLongVectors = sizeof(Element) == 4 ? 832 : 1280;

template <typename Params>
constexpr int kStages = kForward<Params> ? 4 : 3;

// Per SM, as the header says.
template <typename Params, int kVectorBytes>
constexpr int kRingCtas = kForward<Params>     ? 5
                          : kVectorBytes == 16 ? 4
                                               : 5;

template <typename Params, int kVectorBytes>
struct RingStorage {
  // [stage, item, operand, thread]
  alignas(16) unsigned char slots[kStages<Params>][kItems][kForward<Params> ? 1 : 2][kThreads]
                                 [kVectorBytes];
  SharedStorage sums;
};
static_assert(sizeof(RingStorage<JaggedSoftmaxParams, 16>) ==
              kStages<JaggedSoftmaxParams> * 8'192 + 1'024);
static_assert(sizeof(RingStorage<JaggedSoftmaxBackwardParams, 16>) ==
              kStages<JaggedSoftmaxBackwardParams> * 16'384 + 1'024);

// ---- Ring ----------------------------------------------------------------------------------------

// View: SoftmaxView or SoftmaxBackwardView.
template <typename View>
class Ring {
 public:
  using Loaded = typename View::Loaded;
  using Params = typename View::Params;
  using Storage = RingStorage<Params, sizeof(Loaded)>;
  static constexpr int kStages = sequence_softmax::kStages<Params>;

  struct Sequence {
    int64_t begin;  // first row
    int64_t len;    // 0 for a thread without columns
    int stages;     // none without rows
  };

  __device__ __forceinline__ Ring(Storage& shared, const SoftmaxLaunch<Params>& launch,
                                  const Place& place)
      : shared_(shared),
        slots_(ptx::shared_address(shared.slots[0][0][0][threadIdx.x])),
        launch_(launch),
        place_(place),
        view_(launch.params, RowRange{0, launch.params.offsets.total}, place) {}

  __device__ __forceinline__ Sequence sequence(const RowRange& range) const {
    // row_step * kItems, a power of two
    constexpr int kStageLog2 = 9;
    static_assert(1 << kStageLog2 == kThreads * kItems);
    const int rows_log2 = kStageLog2 - launch_.lanes_log2;
    const int64_t last = (int64_t{1} << rows_log2) - 1;
    return {range.begin, place_.exists ? range.len : 0,
            static_cast<int>((range.len + last) >> rows_log2)};
  }

  // Starts copies of the stages of `next` that find room beside `taken` ones of the sequence before.
  __device__ __forceinline__ void start(const Sequence& next, int taken) {
    const int count = min(kStages - taken, next.stages);
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) copy(next, stage, !flipped_);
  }

  // The next three are called in turn for each sequence, of which start() has been called. The latter two call
  // visit(operands [kOperands, kItems], row of item 0, rows left from there on) for each stage: all in order,
  // then the last one first. Item i is there if i * row_step < left. Copies of `next` begin as soon as there is
  // room.
  __device__ __forceinline__ void take(const Sequence& sequence, const Sequence& next) {
    flipped_ = !flipped_;
    start(next, sequence.stages);
  }
  template <typename Visit>
  __device__ __forceinline__ void visit_forwards(const Sequence& sequence, Visit visit) {
#pragma unroll 1
    for (int stage = 0; stage < sequence.stages; ++stage) {
      wait();
      with_stage(sequence, stage, visit);
      if (stage + kStages < sequence.stages) copy(sequence, stage + kStages, flipped_);
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void visit_backwards(const Sequence& sequence, const Sequence& next,
                                                  Visit visit) {
#pragma unroll 1
    for (int stage = sequence.stages - 1; stage >= 0; --stage) {
      if (stage + kStages < sequence.stages) wait();
      with_stage(sequence, stage, visit);
      if (stage >= kStages) {
        copy(sequence, stage - kStages, flipped_);
      } else if (kStages - 1 - stage < next.stages) {
        copy(next, kStages - 1 - stage, !flipped_);
      }
    }
  }

  // Likewise, for a stage that is there.
  template <typename Visit>
  __device__ __forceinline__ void with_stage(const Sequence& sequence, int stage,
                                             Visit visit) const {
    const int64_t first = first_row(stage);
    const int left = rows_left(sequence, first);
    const uint32_t slots = slots_of(stage, flipped_);
    Loaded rOperand[View::kOperands][kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * place_.row_step < left) {
#pragma unroll
        for (int k = 0; k < View::kOperands; ++k) {
          load_vector(rOperand[k][i], slots + (View::kOperands * i + k) * kSlotBytes);
        }
      }
    }
    visit(rOperand, sequence.begin + first, left);
  }

  __device__ __forceinline__ const View& view() const { return view_; }
  __device__ __forceinline__ const Place& place() const { return place_; }
  __device__ __forceinline__ SharedStorage& sums() const { return shared_.sums; }
  // 0 and 1 in turn, sequence by sequence.
  __device__ __forceinline__ int turn() const { return flipped_ ? 1 : 0; }

 private:
  static constexpr int kSlotBytes = kThreads * sizeof(Loaded);  // from one vector to the next
  static constexpr int kStageBytes = kItems * View::kOperands * kSlotBytes;

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
    const int64_t left = sequence.len - first;
    if (left <= 0) return 0;
    return left < kItems * kThreads ? static_cast<int>(left) : kItems * kThreads;
  }

  // This thread has read what the slots held.
  __device__ __forceinline__ void copy(const Sequence& sequence, int stage, bool flipped) {
    const int64_t first = first_row(stage);
    const int left = rows_left(sequence, first);
    const uint32_t slots = slots_of(stage, flipped);
    const typename View::Elem* gOperand[View::kOperands];
#pragma unroll
    for (int k = 0; k < View::kOperands; ++k) {
      gOperand[k] = view_.operand(k) + (sequence.begin + first) * view_.stride(k);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * place_.row_step < left) {
#pragma unroll
        for (int k = 0; k < View::kOperands; ++k) {
          copy_vector(slots + (View::kOperands * i + k) * kSlotBytes, gOperand[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < View::kOperands; ++k) gOperand[k] += place_.row_step * view_.stride(k);
    }
    ptx::cp_async_commit();
    ++started_;
  }

  static __device__ __forceinline__ void copy_vector(uint32_t slot,
                                                     const typename View::Elem* global) {
    if constexpr (sizeof(Loaded) == 16) {
      ptx::cp_async_16(slot, global, 16);
    } else {
      ptx::cp_async_8(slot, global, 8);
    }
  }

  // Until the oldest stage that has not been waited for is there.
  __device__ __forceinline__ void wait() {
    ++awaited_;
    wait_for_all_but<kStages - 1>(started_ - awaited_);
  }
  // The newest `behind` stages, of which kMost count.
  template <int kMost>
  static __device__ __forceinline__ void wait_for_all_but(int behind) {
    if constexpr (kMost == 0) {
      ptx::cp_async_wait<0>();
    } else if (behind >= kMost) {
      ptx::cp_async_wait<kMost>();
    } else {
      wait_for_all_but<kMost - 1>(behind);
    }
  }

  // Spelled out, since the compiler would load each element by itself.
  static __device__ __forceinline__ void load_vector(Loaded& vector, uint32_t slot) {
    if constexpr (sizeof(Loaded) == 16) {
      *reinterpret_cast<uint4*>(vector.elems) = ptx::ld_shared_16(slot);
    } else {
      *reinterpret_cast<uint2*>(vector.elems) = ptx::ld_shared_8(slot);
    }
  }

  Storage& shared_;
  const uint32_t slots_;  // the thread's first one
  const SoftmaxLaunch<Params>& launch_;
  const Place& place_;
  const View view_;       // of all rows
  bool flipped_ = false;  // of the sequence that is taken
  int started_ = 0;       // stages whose copies were started
  int awaited_ = 0;       // and those of them that were waited for
};

// ---- One sequence --------------------------------------------------------------------------------

// The softmax of `sequence`, of which ring.start() has been called.
template <typename Element, int kVector, typename View = SoftmaxView<Element, kVector>>
__device__ __forceinline__ void softmax_of_stages(Ring<SoftmaxView<Element, kVector>>& ring,
                                                  const typename Ring<View>::Sequence& sequence,
                                                  const typename Ring<View>::Sequence& next) {
  const View& view = ring.view();
  const int step = ring.place().row_step;
  ring.take(sequence, next);
  SoftmaxSums<Element, kVector> sums;
  if (sequence.stages == 1) {
    ring.visit_forwards(sequence, [&](const auto& rOperand, int64_t first, int left) {
      sums.enlarge(view, rOperand[0], step, left);
    });
    sums.take_largest(view, ring.place(), ring.sums());
    ring.with_stage(sequence, 0, [&](const auto& rOperand, int64_t first, int left) {
      sums.add(view, rOperand[0], step, left);
    });
  } else {
    ring.visit_forwards(sequence, [&](const auto& rOperand, int64_t first, int left) {
      // A step of softmax_long, which has none without rows
      if (left > 0) sums.add_running(view, rOperand[0], step, left);
    });
    sums.take_largest_of_running(view, ring.place(), ring.sums());
  }
  sums.add_up(ring.place(), ring.sums());
  ring.visit_backwards(sequence, next, [&](const auto& rOperand, int64_t first, int left) {
    Element* gOut = view.gOut + first * view.columns;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) view.store(sums.shift, sums.sum, rOperand[0][i], gOut);
      gOut += step * view.columns;
    }
  });
}

// Its gradient.
template <typename Element, int kVector, typename View = SoftmaxBackwardView<Element, kVector>>
__device__ __forceinline__ void softmax_of_stages(Ring<SoftmaxBackwardView<Element, kVector>>& ring,
                                                  const typename Ring<View>::Sequence& sequence,
                                                  const typename Ring<View>::Sequence& next) {
  using S = typename View::S;
  const int step = ring.place().row_step;
  ring.take(sequence, next);
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
  ring.visit_forwards(sequence, [&](const auto& rOperand, int64_t first, int left) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) View::add(sum, rOperand[0][i], rOperand[1][i]);
    }
  });
  reduce_rows(sum, ring.place(), ring.sums(), ring.turn(), [](S a, S b) { return a + b; });
  ring.visit_backwards(sequence, next, [&](const auto& rOperand, int64_t first, int left) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = i * step;
      if (row < left) ring.view().store(sum, rOperand[0][i], rOperand[1][i], first + row);
    }
  });
}

// ---- Kernel --------------------------------------------------------------------------------------

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

template <typename Params, typename Element, int kVector>
using RingOf = Ring<std::conditional_t<kForward<Params>, SoftmaxView<Element, kVector>,
                                       SoftmaxBackwardView<Element, kVector>>>;

template <typename Params, typename Element, int kVector>
__global__
__launch_bounds__(kThreads, kRingCtas<Params, kVector * sizeof(Element)>) void softmax_ring_kernel(
    const __grid_constant__ SoftmaxLaunch<Params> launch) {
  using Ring = RingOf<Params, Element, kVector>;
  using Sequence = typename Ring::Sequence;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Ring::Storage*>(dynamic_shared);
  const Params& params = launch.params;
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
      softmax_of_stages<Element, kVector>(ring, sequence, next);
      sequence = next;
    }
  }
  store_zeros_outside<Element>(params);
}

template <typename Params, typename Element>
constexpr PathName kRingPath = PathName(kForward<Params> ? "cuda.jagged_softmax.ring."
                                                         : "cuda.jagged_softmax_backward.ring.") +
                               kElementName<Element>;

}  // namespace jagged_cuda::sequence_softmax
