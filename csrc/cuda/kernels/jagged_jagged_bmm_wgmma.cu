// jagged_jagged_bmm on wgmma and TMA (compute capability 9.0), 16-bit elements: z_b = x_b^T y_b for
// each sequence b, f32 sums. Both operands are summed over their rows, so both come as they lie and
// are read transposed.
//
// Sequences are cut into parts (gemm/row_parts.cuh). Grid: x, one CTA for each unit and each tile of a
// matrix, tiles first, so that neighbours read the same rows. A unit is a slab, whose later part the
// CTA takes, or seqs_each sequences, whose first parts it takes one after another. One or two
// warpgroups, side by side or below each other, share a tile; each owns kBlocksM blocks of 64 columns
// of x and kTileN columns of y. A CTA walks a part's rows, kStepK at a time: deterministic, and alike
// in any batch. Tensor cores truncate as they add; a part has no more rows than kSumDepth, and parts
// are added rounded to nearest.
//
//     for each step i:   wait for the copies of x_i and y_i; the rows past the end become zeros
//                        wait for the product of step i - 1
//                        __syncthreads
//                        start the copies of step i + kStages - 1
//                        start the product of step i
//
// Shared memory: the barriers, then kStages stages of blocks [kStepK, 64] of 4 KiB, first those of x,
// then those of y. A stage has 3 to 5 blocks: 52 to 84 KiB.
//
// Barriers: full[stage], on which the bytes of a stage complete; a thread of each warp arrives, whether
// it copies a block or not, and all threads wait. One __syncthreads a step: the zeros have been written
// by all, and all have seen the product end whose stage is filled next; so no stage needs a barrier that
// says it is empty.
//
// Units without a part return at once. An empty sequence takes no step: zeros. Copies may reach into
// the next sequence: its rows become zeros in both operands, since 0 times NaN is NaN. Blocks of
// columns that do not exist are not copied; what they give is not stored.
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/row_parts.cuh"
#include "cuda/kernels/jagged_jagged_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/tma.cuh"

namespace jagged_cuda::gemm {
namespace {

template <typename Element_, int kBlocksM_, int kTileN_>
struct GramConfig {
  using Element = Element_;
  static constexpr int kBlocksM = kBlocksM_, kTileN = kTileN_;
  static constexpr int kBlocksN = kTileN / 64;
  static constexpr int kMaxGroups = 2, kMaxThreads = kMaxGroups * 128;
  static constexpr int kStepK = 32;
  static constexpr int kStages = 4;
  static constexpr int kMinCtas = 2;
};

template <typename Config>
struct GramStorage {
  using Block = WarpgroupTile<typename Config::Element, Config::kStepK, 64>;
  uint64_t full[Config::kStages];
  // Room for two warpgroups both ways; a launch has them one way, and asks for bytes().
  Block blocks[Config::kStages *
               (Config::kMaxGroups * Config::kBlocksM + Config::kMaxGroups * Config::kBlocksN)];

  static constexpr int bytes(int blocks) {
    return static_cast<int>(sizeof(Block)) * (Config::kStages * blocks + 1);
  }
};

struct GramParams {
  CUtensorMap x, y;  // boxes of kStepK rows and 64 columns
  JaggedJaggedBmmParams product;
  RowCuts cuts;
  int groups_m, groups_n;  // warpgroups below each other, and side by side
  int seqs_each;           // sequences for a CTA, at most 32
  int tiles_m, tiles_n;    // of a matrix
};

template <typename Config>
__global__ __launch_bounds__(Config::kMaxThreads, Config::kMinCtas) void jagged_jagged_bmm_wgmma(
    const __grid_constant__ GramParams launch) {
  using Element = typename Config::Element;
  using Storage = GramStorage<Config>;
  using Block = typename Storage::Block;
  constexpr int kStepK = Config::kStepK, kStages = Config::kStages;
  constexpr int kBlocksM = Config::kBlocksM, kBlocksN = Config::kBlocksN;
  extern __shared__ __align__(1024) char gram_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(gram_shared_bytes);
  const JaggedJaggedBmmParams& params = launch.product;
  ptx::griddepcontrol_launch_dependents();

  const int warps = blockDim.x / 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.x);
    ptx::prefetch_tensormap(launch.y);
    for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(shared.full[stage], warps);
    ptx::fence_mbarrier_init();
  }
  const uint32_t tiles = launch.tiles_m * launch.tiles_n, index = blockIdx.x / tiles,
                 tile = blockIdx.x - index * tiles,
                 slabs = static_cast<uint32_t>(launch.cuts.slabs);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  // Lane i has the i-th part of this CTA.
  RowPart parts = {-1, 0, 0, -1};
  int num_parts = 1;
  if (index < slabs) {
    parts = later_part(params.offsets, launch.cuts, index);
    if (parts.seq < 0) return;
  } else {
    const uint32_t first = (index - slabs) * launch.seqs_each;
    num_parts = min(launch.seqs_each, static_cast<int>(params.offsets.num_seqs - first));
    if (lane < num_parts) parts = first_part(params.offsets, launch.cuts, first + lane);
  }
  const int tile_m = tile / launch.tiles_n, tile_n = tile - tile_m * launch.tiles_n;
  // Blocks that a stage has room for.
  const int stage_x = launch.groups_m * kBlocksM, stage_y = launch.groups_n * kBlocksN;
  const int first_m = tile_m * stage_x * 64, first_n = tile_n * stage_y * 64;
  const int rows = static_cast<int>(params.rows) - first_m,
            columns = static_cast<int>(params.columns) - first_n;
  const int blocks_x = min((rows + 63) / 64, stage_x), blocks_y = min((columns + 63) / 64, stage_y);
  const auto stage_blocks = [&](int stage) { return shared.blocks + stage * (stage_x + stage_y); };

  // To start a copy takes a thread some hundred cycles: one of each warp starts at most one.
  const bool copies = warp < blocks_x + blocks_y, copies_x = warp < blocks_x;
  const int own_block = copies_x ? warp : stage_x + warp - blocks_x;
  const int own_column = copies_x ? first_m + warp * 64 : first_n + (warp - blocks_x) * 64;
  int copied_part = -1, copied_row = 0, copied_rows = 0, copied_begin = 0;
  // The next step's, of this part or one that follows.
  const auto start_copies = [&](int stage) {
    while (copied_row >= copied_rows) {
      if (copied_part + 1 >= num_parts) return;
      ++copied_part;
      copied_row = 0;
      copied_rows = __shfl_sync(0xffffffffu, parts.rows, copied_part);
      copied_begin = __shfl_sync(0xffffffffu, parts.begin, copied_part);
    }
    if (lane == 0) {
      uint64_t& full = shared.full[stage];
      if (copies) {
        ptx::mbarrier_arrive_expect_tx(full, sizeof(Block));
        ptx::cp_async_bulk_tensor_3d(stage_blocks(stage)[own_block].data,
                                     copies_x ? launch.x : launch.y, own_column, 0,
                                     copied_begin + copied_row, full);
      } else {
        ptx::mbarrier_arrive(full);
      }
    }
    __syncwarp();
    copied_row += kStepK;
  };

  __syncthreads();  // the barriers are initialised
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) start_copies(stage);
  const int group = warp / 4, group_m = group / launch.groups_n,
            group_n = group - group_m * launch.groups_n;
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < num_parts; ++i) {
    const int part_rows = __shfl_sync(0xffffffffu, parts.rows, i);
    Accumulator<kBlocksM, kBlocksN * 8> sum = {};
#pragma unroll 1
    for (int row = 0; row < part_rows; row += kStepK) {
      const int exist = min(part_rows - row, kStepK);
      Block* sX = stage_blocks(stage);
      ptx::mbarrier_wait(shared.full[stage], parity);
      if (exist % 16 != 0) {  // of the last 16 rows that a product reads
        const int zeros = (16 - exist % 16) * Block::kChunks;
        for (int block = warp; block < stage_x + stage_y; block += warps) {
          for (int z = lane; z < zeros; z += 32) {
            *reinterpret_cast<uint4*>(sX[block].chunk(exist + z / Block::kChunks,
                                                      z % Block::kChunks)) = make_uint4(0, 0, 0, 0);
          }
        }
        ptx::fence_proxy_async();  // the products and the copies that follow find them
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) ptx::fence_operands(sum[m]);
      __syncthreads();
      start_copies(stage == 0 ? kStages - 1 : stage - 1);
      const Block *own_x = sX + group_m * kBlocksM, *own_y = sX + stage_x + group_n * kBlocksN;
      const ptx::MatrixDescriptor y_rows = own_y->descriptor();
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStepK; k += 16) {
        if (k > 0 && k >= exist) break;
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) {
          ptx::Wgmma<Element, true, true>::run(sum[m],
                                               own_x[m].descriptor() + Block::row_step_bytes(k),
                                               y_rows + Block::row_step_bytes(k), true);
        }
      }
      ptx::wgmma_commit_group();
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) ptx::fence_operands(sum[m]);

    const int64_t elems = launch.cuts.elems;
    const int seq = __shfl_sync(0xffffffffu, parts.seq, i),
              out_slot = __shfl_sync(0xffffffffu, parts.slot, i);
    const float scale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      Accumulator<1, kBlocksN * 8>& block =
          *reinterpret_cast<Accumulator<1, kBlocksN * 8>*>(&sum[m]);
      const int own_row = (group_m * kBlocksM + m) * 64 + warp % 4 * 16 + lane / 4;
      const int own_columns = group_n * Config::kTileN;
      const int64_t place = int64_t{first_m + own_row} * params.columns + first_n + own_columns;
      if (out_slot < 0) {
        attention::store_quads(block, scale,
                               static_cast<Element*>(params.out) + seq * elems + place,
                               params.columns, rows - own_row, columns - own_columns, lane);
      } else {
        attention::store_pairs(block, scale, params.partial + out_slot * elems + place,
                               params.columns, rows - own_row, columns - own_columns, lane);
      }
    }
  }
}

template <typename Element>
constexpr PathName kPath = PathName("cuda.jagged_jagged_bmm.wgmma.") + kElementName<Element>;

template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmParams& params, const RowCuts& cuts, int groups_m,
                          int groups_n, cudaStream_t stream) {
  using Storage = GramStorage<Config>;
  const auto encode = [&](CUtensorMap& map, const void* data, int64_t columns, int64_t stride) {
    const int64_t total = params.offsets.total;
    // A tensor without rows is never copied from, but its map must be valid.
    const TensorMapSource source{
        total > 0 ? data : params.out, params.type, total, 1, columns, stride, 0};
    return encode_tensor_map(map, source, Config::kStepK, 64);
  };
  const auto tiles = [](int64_t extent, int tile) {
    return static_cast<int>((extent + tile - 1) / tile);
  };
  const int tiles_m = tiles(params.rows, groups_m * Config::kBlocksM * 64),
            tiles_n = tiles(params.columns, groups_n * Config::kTileN);
  // Where there are many CTAs one takes two sequences: the rows of the second come while the first is
  // multiplied and stored. The sums are the same.
  constexpr int64_t kManyCtas = 8192;
  const int seqs_each = params.offsets.num_seqs * tiles_m * tiles_n >= kManyCtas ? 2 : 1;
  GramParams launch_params{{}, {}, params, cuts, groups_m, groups_n, seqs_each, tiles_m, tiles_n};
  cudaError_t error = encode(launch_params.x, params.x, params.rows, params.x_stride);
  if (error == cudaSuccess) {
    error = encode(launch_params.y, params.y, params.columns, params.y_stride);
  }
  // What is allowed once must hold for every choice of warpgroups.
  constexpr int kMostBytes =
      Storage::bytes(Config::kMaxGroups * (Config::kBlocksM + Config::kBlocksN));
  if (error == cudaSuccess) {
    error = allow_shared_memory<jagged_jagged_bmm_wgmma<Config>>(kMostBytes);
  }
  if (error != cudaSuccess) return error;
  const int64_t units = cuts.slabs + (params.offsets.num_seqs + seqs_each - 1) / seqs_each;
  const int64_t ctas = units * tiles_m * tiles_n;
  const int blocks = groups_m * Config::kBlocksM + groups_n * Config::kBlocksN;
  return launch<jagged_jagged_bmm_wgmma<Config>>(launch_params, {ctas}, groups_m * groups_n * 128,
                                                 Storage::bytes(blocks), stream,
                                                 kPath<typename Config::Element>);
}

template <typename Element>
cudaError_t launch_element(const JaggedJaggedBmmParams& params, const RowCuts& cuts,
                           cudaStream_t stream) {
  if (params.columns <= 64) {
    const int groups = params.rows > 128 ? 2 : 1;
    return launch_config<GramConfig<Element, 2, 64>>(params, cuts, groups, 1, stream);
  }
  const bool is_wide = params.rows <= 64 && params.columns > 128;
  return launch_config<GramConfig<Element, 1, 128>>(
      params, cuts, is_wide || params.rows <= 64 ? 1 : 2, is_wide ? 2 : 1, stream);
}

}  // namespace

cudaError_t launch_wgmma(const JaggedJaggedBmmParams& params, const RowCuts& cuts,
                         cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, cuts, stream)
                                           : launch_element<__half>(params, cuts, stream);
}

}  // namespace jagged_cuda::gemm
