"""Plant faults that kernels have had, one at a time; each must be caught within a minute.

    python tests/mutations.py                   # the faults of the CPU's kernels
    python tests/mutations.py --device cuda     # those of the GPU's
    python tests/mutations.py --only "lost barrier" --device cuda
    python tests/mutations.py --device cuda --jobs 6    # six copies, each compiled once

A fault is one text that is replaced by another in a copy of the sources. The copy is built, and the
fuzzer, or the test that the fault names, is run on it. The exit status is 1 if a fault is not
caught, or if the sources as they are fail. docs/testing.md holds the table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60.0
# What a copy must hold for the fuzzer and the tests to run in it.
FOLDERS = ("csrc", "jagged_cuda", "triton_ref", "tests")


@dataclass(frozen=True)
class Fault:
    """A text that occurs once in a source file, and what a mistake would have made of it.

    Args:
        name: what went wrong.
        device: whose kernels.
        path: of the file in csrc/.
        text, instead: what is replaced, and by what.
        check: arguments of the fuzzer, or of pytest if it begins with a file of tests.
    """

    name: str
    device: str
    path: str
    text: str
    instead: str
    check: str = "--op jagged_flash_attention"

    def plant(self, root: Path) -> None:
        path = root / "csrc" / self.path
        text = path.read_text()
        if text.count(self.text) != 1:
            raise ValueError(f"{self.name}: csrc/{self.path} must hold this once: {self.text}")
        path.write_text(text.replace(self.text, self.instead))


FAULTS = (
    Fault(
        "a packed row of the next head",
        "cuda",
        "cuda/kernels/attention/long_forward.cuh",
        "const int head = item.head + (own_row & ((1 << shift) - 1));",
        "const int head = item.head + (own_row + 1 & ((1 << shift) - 1));",
        "tests/test_cuda_long.py -k packed_heads",
    ),
    Fault(
        "a mask by rows of the tile",
        "cuda",
        "cuda/kernels/attention/long_forward.cuh",
        "return kPacked ? row >> params_.packed_shift : row;",
        "return row;",
        "tests/test_cuda_long.py -k packed_heads",
    ),
    Fault(
        "columns behind a padded head not zero",
        "cuda",
        "cuda/kernels/attention/padded_heads.cu",
        "if (i < valid && column < copy.dim)",
        "if (i < valid)",
    ),
    Fault(
        "a head begun at its second column",
        "cuda",
        "cuda/kernels/attention/padded_heads.cu",
        "column = 0;",
        "column = 1;",
    ),
    Fault(
        "a draw not repeated",
        "cpu",
        "cpu/kernels/layer_norm.inl",
        "const T kept = keep[i] == T(0) ? T(0) : grad[i] * keep[i];",
        "const T kept = grad[i];",
        "--op layer_norm_mul_dropout",
    ),
    Fault(
        "padding in the variance",
        "cuda",
        "cuda/kernels/norm/in_registers.cuh",
        "const float subtracted = exists.columns[i] ? mean[r] : 0.0f;",
        "const float subtracted = mean[r];",
        "--op layer_norm_mul_dropout",
    ),
    Fault(
        "a warp left out of a sum",
        "cuda",
        "cuda/kernels/norm/lanes.cuh",
        "for (int w = 1; w < warps; ++w) value[i] += sSums[turn][i][w];",
        "for (int w = 2; w < warps; ++w) value[i] += sSums[turn][i][w];",
        "tests/test_layer_norm_mul_dropout.py -k wide_rows",
    ),
    Fault(
        "a draw not repeated",
        "cuda",
        "cuda/kernels/norm/in_registers.cuh",
        "const float kept = draws.keep(g[e], r, i, e, dropped), product = kept * gate[e];",
        "const float kept = g[e], product = kept * gate[e];",
        "--op layer_norm_mul_dropout",
    ),
    Fault(
        "contextual keys one step each",
        "cpu",
        "contract/hstu_rule.h",
        "const int64_t shared = contextual > 0 ? contextual - 1 : 0;",
        "const int64_t shared = 0;",
        "tests/test_hstu.py -k agrees_with_the_definition",
    ),
    Fault(
        "contextual keys one step each",
        "cuda",
        "contract/hstu_rule.h",
        "const int64_t shared = contextual > 0 ? contextual - 1 : 0;",
        "const int64_t shared = 0;",
        "tests/test_hstu.py -k agrees_with_the_definition",
    ),
    Fault(
        "tail mask off by one",
        "cpu",
        "cpu/kernels/attention.inl",
        "visible.of(row_begin + i).counted_from(key_block)",
        "visible.of(row_begin + i).counted_from(key_block - 1)",
    ),
    Fault(
        "lost barrier",
        "cuda",
        "cuda/kernels/jagged_softmax.cu",
        "__syncthreads();\n    const int own",
        "const int own",
        "--op jagged_softmax",
    ),
    Fault(
        "swapped offset",
        "cpu",
        "cpu/jagged_flash_attention.cpp",
        "run_attention_forward(params, pairs.q, pairs.kv);",
        "run_attention_forward(params, pairs.q, pairs.q);",
    ),
    Fault(
        "wrong LSE scale",
        "cpu",
        "cpu/kernels/attention.inl",
        "lse[index] = buffers.max[i] + std::log(buffers.sum[i]);",
        "lse[index] = buffers.max[i] + std::log2(buffers.sum[i]);",
    ),
    Fault(
        "stale tile after an empty sequence",
        "cpu",
        "cpu/kernels/bmm.inl",
        "product.add = row > 0;",
        "product.add = row > 0 || item.rows == 0;",
        "--op jagged_jagged_bmm",
    ),
    Fault(
        "int32 row offset",
        "cuda",
        "cuda/kernels/jagged_softmax.cu",
        "static_cast<const Element*>(params.x) + range.begin * params.x_stride",
        "static_cast<const Element*>(params.x) + static_cast<int>(range.begin * params.x_stride)",
        "tests/test_cuda_sizes.py -k 2_to_the_31_elements and jagged_softmax",
    ),
    Fault(
        "missing GQA division",
        "cpu",
        "cpu/kernels/attention.inl",
        "const int64_t kv_head = item.head / (p.heads / p.kv_heads);",
        "const int64_t kv_head = item.head % p.kv_heads;",
    ),
    Fault(
        "dq not zeroed",
        "cpu",
        "cpu/kernels/attention.inl",
        "    if (item.wants_dq) std::fill_n(buffers.dq, item_rows * buffers.qk_row, T(0));\n",
        "",
    ),
    Fault(
        "window off by one",
        "cpu",
        "cpu/kernels.h",
        "const int64_t first = row + shift - window_left;",
        "const int64_t first = row + shift - window_left + 1;",
    ),
    Fault(
        "wrong base",
        "cpu",
        "cpu/sequences.cpp",
        "begin = std::min<int64_t>(offsets[seq], total);",
        "begin = std::min<int64_t>(offsets[seq] - offsets[0], total);",
        "--op jagged_softmax",
    ),
    Fault(
        "visible keys off by one",
        "cuda",
        "cuda/kernels/attention/visible.cuh",
        "return bits_below(end - key) & ~bits_below(begin - key);",
        "return bits_below(end - key + 1) & ~bits_below(begin - key);",
        "--op jagged_hstu_attention",
    ),
    Fault(
        "seeing tiles cut short",
        "cuda",
        "cuda/kernels/attention/visible.cuh",
        "return !is_empty() && begin < key + keys && end > key;",
        "return !is_empty() && begin < key + keys - 1 && end > key;",
        "--op jagged_hstu_attention",
    ),
    Fault(
        "tail mask off by one",
        "cuda",
        "cuda/kernels/attention/forward_wgmma.cuh",
        "tile.row + own_row, key, tile.num_keys, lane",
        "tile.row + own_row, key, tile.num_keys + 1, lane",
    ),
    Fault(
        "tail mask off by one",
        "cuda",
        "cuda/kernels/attention/long_forward.cuh",
        "replace_behind(s[0], value, seen, rows, key, tile_.num_keys, lane)",
        "replace_behind(s[0], value, seen, rows, key, tile_.num_keys + 1, lane)",
        "--op jagged_flash_attention",
    ),
    Fault(
        "range of a row off by one",
        "cuda",
        "cuda/kernels/attention/row_ranges.cuh",
        "columns_before(keys.end - first_key)",
        "columns_before(keys.end + 1 - first_key)",
        "--op jagged_hstu_attention",
    ),
    Fault(
        "tail mask off by one",
        "cuda",
        "cuda/kernels/attention/tiny_forward.cuh",
        "lane % 4 * 2 + i % 2 >= keys)",
        "lane % 4 * 2 + i % 2 > keys)",
        "--op jagged_flash_attention",
    ),
    Fault(
        "tail mask off by one",
        "cuda",
        "cuda/kernels/attention/tiny_wide_backward.cuh",
        "key < keys ? queries : 0);",
        "key <= keys ? queries : 0);",
        "--op jagged_flash_attention",
    ),
    Fault(
        "swapped offset",
        "cuda",
        "cuda/kernels/attention/forward_wgmma.cuh",
        "kv = sequence_rows(params.kv_offsets, found.seq);",
        "kv = sequence_rows(params.q_offsets, found.seq);",
    ),
    Fault(
        "wrong LSE scale",
        "cuda",
        "cuda/kernels/attention/forward_wgmma.cuh",
        "ptx::lg2_approx(sum) * kLn2",
        "ptx::lg2_approx(sum)",
    ),
    Fault(
        "stale tile after an empty sequence",
        "cuda",
        "cuda/kernels/gemm/engine.cuh",
        "      ptx::cp_async_16(&sTile[line * kLine + elem], source, line < lines ? bytes : 0);",
        "      if (line < lines) ptx::cp_async_16(&sTile[line * kLine + elem], source, bytes);",
        "--op jagged_jagged_bmm",
    ),
    Fault(
        "missing GQA division",
        "cuda",
        "cuda/kernels/attention/forward_wgmma.cuh",
        "tile.key_begin + key, head / group,",
        "tile.key_begin + key, head % attention.kv_heads,",
    ),
    Fault(
        "dq not zeroed",
        "cuda",
        "cuda/kernels/attention/backward_wgmma.cuh",
        "    store_zeros<kThreads>(row_of<Element>(params.grad_q, global_row, head),\n"
        "                          params.grad_q.row_stride, rows, params.dim_qk);\n",
        "",
    ),
    Fault(
        "dq not zeroed",
        "cuda",
        "cuda/kernels/attention/tiny_backward.cuh",
        "fill_outside(params.q_offsets, params.grad_q.data, heads * params.dim_qk / 2, 0.0f, cta);",
        "",
        "--op jagged_flash_attention",
    ),
    Fault(
        "queries counted twice",
        "cuda",
        "cuda/kernels/attention/short_backward_consumer.cuh",
        "    if (shares_page && !is_second) last[1] = 32;\n",
        "",
        "tests/test_cuda_short_tiny.py -k test_path_of_short_sequences",
    ),
    Fault(
        "sums of half the queries",
        "cuda",
        "cuda/kernels/attention/short_backward_consumer.cuh",
        "      kept[0][i][3] += sum.w;\n",
        "",
        "tests/test_cuda_short_tiny.py -k test_path_of_short_sequences",
    ),
    Fault(
        "lost ticket",
        "cuda",
        "cuda/kernels/attention/long_backward_producer.cuh",
        "while (ptx::ld_acquire_gpu(ticket) < before)",
        "while (ptx::ld_acquire_gpu(ticket) < 0)",
        "tests/test_cuda_long.py -k test_long_backward_gives_the_same_bits",
    ),
    Fault(
        "dS not waited for",
        "cuda",
        "cuda/kernels/attention/long_backward_consumer.cuh",
        "    ptx::mbarrier_wait(shared.scores_full[late.score_stage], late.score_parity);\n",
        "",
        "tests/test_cuda_long.py -k test_long_among_shorter_sequences_backward",
    ),
    Fault(
        "reference too far behind",
        "cuda",
        "cuda/kernels/attention/scores.cuh",
        "return !(sum < kLimit);",
        "return !(sum < kLimit * kLimit * kLimit);",
        "tests/test_cuda_long.py -k test_scores_that_rise_along_the_keys",
    ),
    Fault(
        "a slab's last row lost",
        "cuda",
        "cuda/kernels/prim/jagged.cuh",
        "first_of_slab ? first - before < slab_rows : before < 0;",
        "first_of_slab ? first - before < slab_rows - 1 : before < 0;",
        "tests/test_cuda_short_tiny.py -k test_tiny_among_longer_sequences",
    ),
    Fault(
        "nobody for the rows outside",
        "cuda",
        "cuda/kernels/attention/few_forward.cuh",
        "(items + Config::kTinyWarps - 1) / Config::kTinyWarps : 1),",
        "(items + Config::kTinyWarps - 1) / Config::kTinyWarps : 0),",
        "tests/test_cuda_short_tiny.py -k test_no_sequence_but_rows",
    ),
    Fault(
        "a part of the wrong head",
        "cuda",
        "cuda/kernels/attention/target_forward_wgmma.cuh",
        "part_row(attention, chunk.slot, item.kv_head, item.first_row + row);",
        "part_row(attention, chunk.slot, 0, item.first_row + row);",
        "tests/test_cuda_target.py -k test_target_attention_merges_the_parts_of_long_sequences",
    ),
    Fault(
        "keys of nobody in dQ",
        "cuda",
        "cuda/kernels/attention/target_backward_wgmma.cuh",
        "index < kKeys * KeyRows::kChunks; index += 128)",
        "index < 0; index += 128)",
        "tests/test_cuda_target.py -k test_target_attention_merges_the_parts_of_long_sequences",
    ),
    Fault(
        "a rest lost",
        "cuda",
        "cuda/kernels/attention/tf32_tile.cuh",
        "pack<__nv_bfloat16>(kIsA ? whole : rest, kIsA ? rest : whole);",
        "pack<__nv_bfloat16>(kIsA ? whole : 0.0f, kIsA ? rest : whole);",
        "tests/test_cuda_f32.py -k test_attention_of_long_sequences_in_f32",
    ),
    Fault(
        "values behind the last key",
        "cuda",
        "cuda/kernels/attention/tf32_long_forward.cuh",
        "key < keys ? *reinterpret_cast<const float4*>",
        "key < kHalf ? *reinterpret_cast<const float4*>",
        "tests/test_cuda_f32.py -k test_attention_of_long_sequences_in_f32 and 64-tf32",
    ),
    Fault(
        "the sign of a scale in LSE",
        "cuda",
        "cuda/kernels/attention/short_forward.cuh",
        "softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2",
        "softmax.reference[half], scale, ptx::lg2_approx(sum) * kLn2",
        "tests/test_cuda_short_tiny.py -k test_path_of_short_sequences",
    ),
    Fault(
        "end of a row within a word",
        "cuda",
        "cuda/kernels/softmax/row_words.cuh",
        "place.tail = (columns - (place.head ? 1 : 0)) % 2 != 0;",
        "place.tail = columns % 2 != 0;",
        "--op jagged2_softmax",
    ),
    Fault(
        "terms that are nothing beside one",
        "cuda",
        "cuda/kernels/softmax/row_words.cuh",
        "std::is_same_v<Element, __half> && !kBackward ? 4'096 : 16'320;",
        "16'320;",
        "tests/test_cuda_softmax.py -k test_softmax_counts_many_small_terms",
    ),
    Fault(
        "an element of another strip",
        "cuda",
        "cuda/kernels/softmax/strips.cuh",
        "column = kPer * word - (is_second ? second_head : first_head);",
        "column = kPer * word - first_head;",
        "tests/test_cuda_softmax.py -k test_softmax_of_large_matrices",
    ),
    Fault(
        "a lone element of no column",
        "cuda",
        "cuda/kernels/softmax/matrix_words.cuh",
        "return {(plan.elems - plan.head) % 2 != 0, plan.elems - 1, plan.columns - 1};",
        "return {plan.elems % 2 != 0, plan.elems - 1, plan.columns - 1};",
        "tests/test_cuda_softmax.py -k test_path_of_softmax_of_matrices",
    ),
    Fault(
        "rows of a band too far apart",
        "cuda",
        "cuda/kernels/gemm/ragged_band.cuh",
        "const int line_bytes = is_run ? line : kLineBytes;",
        "const int line_bytes = kLineBytes;",
        "tests/test_cuda_products.py -k test_path_of_matrices",
    ),
    Fault(
        "shift without the pitch",
        "cuda",
        "cuda/kernels/gemm/raw_lines.cuh",
        "shift_bits_[i] = shift % 2 * 16;",
        "shift_bits_[i] = first % 2 * 16;",
        "tests/test_cuda_products.py -k test_path_of_array_products",
    ),
    Fault(
        "rows of another warpgroup",
        "cuda",
        "cuda/kernels/jagged_dense_bmm_wgmma.cu",
        "task.global_row + 64 * i",
        "task.global_row + 32 * i",
        "tests/test_cuda_products.py -k test_path_of_dense_products",
    ),
    Fault(
        "one tile too far",
        "cuda",
        "cuda/kernels/prim/lane_search.cuh",
        "bounds[i] / kTile + probe <= tile;",
        "bounds[i] / kTile + probe <= tile + 1;",
        "tests/test_cuda_products.py -k test_dense_products_of_many_sequences",
    ),
    Fault(
        "pairs of columns exchanged",
        "cuda",
        "cuda/kernels/array_jagged_bmm_jagged_out_f32_wgmma.cu",
        "lane_column % 4 + 2 * first_pair",
        "lane_column % 4 + 2 * (1 - first_pair)",
        "tests/test_cuda_products.py -k test_path_of_array_products",
    ),
    Fault(
        "rows past the end of a matrix",
        "cuda",
        "cuda/kernels/array_jagged_bmm_jagged_out_f32_wgmma.cu",
        "if (k >= exist) big",
        "if (k > exist) big",
        "tests/test_cuda_products.py -k test_path_of_array_products",
    ),
    Fault(
        "small parts beside an infinite one",
        "cuda",
        "cuda/kernels/array_jagged_bmm_jagged_out_f32_wgmma.cu",
        "isfinite(whole) ? whole + small_sum[i / 4][i % 4] : whole;",
        "whole + small_sum[i / 4][i % 4];",
        "tests/test_cuda_products.py -k test_infinite_operands_in_full_precision",
    ),
    Fault(
        "rows of the first lanes alone",
        "cuda",
        "cuda/kernels/gemm/outer.cuh",
        "first = lane / lanes, step",
        "first = 0, step",
        "tests/test_cuda_products.py -k test_one_term",
    ),
    Fault(
        "y of the sequence before",
        "cuda",
        "cuda/kernels/gemm/few_columns.cuh",
        "if (owner.seq() != loaded) {",
        "if (loaded == ~0u) {",
        "tests/test_cuda_products.py -k test_few_columns",
    ),
    Fault(
        "a copy counted twice",
        "cuda",
        "cuda/kernels/jagged_index_select.cu",
        "if (k < first) rows += planned_len(params, k);",
        "if (k <= first) rows += planned_len(params, k);",
        "tests/test_rows.py -k test_many_copies",
    ),
    Fault(
        "rows of another warp",
        "cuda",
        "cuda/kernels/rows/combine_backward.cuh",
        "const int64_t begin = warp * launch.warp_rows, left",
        "const int64_t begin = warp * kRows, left",
        "tests/test_cuda_rows.py -k test_gradients_beside_padded_rows_of_any_width",
    ),
    Fault(
        "window off by one",
        "cuda",
        "cuda/kernels/attention/window.cuh",
        "row + window.diagonal - window.before - column;",
        "row + window.diagonal - window.before - column + 1;",
    ),
    Fault(
        "rows of the next sequence",
        "cuda",
        "cuda/kernels/jagged_jagged_bmm_wgmma.cu",
        "if (exist % 16 != 0) {",
        "if (exist % 16 == 1) {",
        "tests/test_cuda_products.py -k cut_sums",
    ),
    Fault(
        "the first part of a sequence lost",
        "cuda",
        "cuda/kernels/gemm/row_parts.cuh",
        "(begin / cuts.rows_each + 1) * 2}",
        "begin / cuts.rows_each * 2}",
        "tests/test_cuda_products.py -k cut_sums",
    ),
    Fault(
        "wrong base",
        "cuda",
        "cuda/kernels/prim/jagged.cuh",
        "const int64_t begin = clamped_offset(offsets, seq), end",
        "const int64_t begin = clamped_offset(offsets, seq) - clamped_offset(offsets, 0), end",
        "--op jagged_jagged_bmm",
    ),
    Fault(
        name="a bias of the wrong head",
        device="cpu",
        path="cpu/kernels/attention.inl",
        text="const int64_t column = head / (p.heads / bias.kv_heads);",
        instead="const int64_t column = 0;",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="a bias of the wrong head",
        device="cuda",
        path="cuda/kernels/attention/bias.cuh",
        text="const int column = head / (params.heads / bias.kv_heads);",
        instead="const int column = 0;",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="the last of equal buckets lost",
        device="cuda",
        path="cuda/kernels/attention/table_sums.cuh",
        text="if ((peers & below) == 0) sums[bucket] += value;",
        instead="if ((peers & below) == 0 && peers != 1u << lane) sums[bucket] += value;",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="some diagonals lost",
        device="cuda",
        path="cuda/kernels/attention/table_sums.cuh",
        text="if (plane >= 0 && plane < kPlanes) sum +=",
        instead="if (plane > 0 && plane < kPlanes) sum +=",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="a step behind its bias",
        device="cuda",
        path="cuda/kernels/attention/long_forward.cuh",
        text="if constexpr (kBiased) shared.bias.skip(bias_step);\n    take_turn();",
        instead="take_turn();",
        check="tests/test_key_ranges.py -k long_sequences_with_biases",
    ),
    Fault(
        name="infinity times a sign",
        device="cuda",
        path="cuda/kernels/attention/starting_bias.cuh",
        text="return copysignf(isinf(bias) || (bias < 0.0f && !silu_) ? INFINITY : most,"
        " quotient);",
        instead="return -INFINITY;",
        check="tests/test_key_ranges.py -k long_sequences_with_biases",
    ),
    Fault(
        name="diagonals of another row",
        device="cuda",
        path="cuda/kernels/attention/starting_bias.cuh",
        text="float2 before = pairs[-4];",
        instead="float2 before = pairs[0];",
        check="tests/test_key_ranges.py -k long_sequences_with_biases",
    ),
    Fault(
        name="a bias of the head before",
        device="cuda",
        path="cuda/kernels/attention/ranged_dkdv.cuh",
        text="bias.set_head(next_head, keys);",
        instead="",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="hidden rows of a bias",
        device="cuda",
        path="cuda/kernels/attention/ranged_dkdv.cuh",
        text=" lse = Config::kBiased ? lse_in_log2(lse, kMostLse) : lse * kLog2E;",
        instead=" lse = lse * kLog2E;",
        check="tests/test_attention_bias.py -k everything_hidden",
    ),
    Fault(
        name="some diagonals lost",
        device="cuda",
        path="cuda/kernels/attention/table_gradients.cuh",
        text="if (plane >= 0 && plane < Storage::kPlanes)\n          sum +=",
        instead="if (plane > 0 && plane < Storage::kPlanes)\n          sum +=",
        check="--op jagged_flash_attention_biased",
    ),
    Fault(
        name="an end of a table lost",
        device="cuda",
        path="cuda/kernels/attention/table_gradients.cuh",
        text="if (i == positions - 1) sum +=",
        instead="if (i == positions) sum +=",
        check="--op jagged_hstu_attention_biased",
    ),
    Fault(
        name="a step's sums in place of those before",
        device="cuda",
        path="cuda/kernels/attention/table_gradients.cuh",
        text="times_[bucket] += static_cast<float>(sum) * unit;",
        instead="times_[bucket] = static_cast<float>(sum) * unit;",
        check="tests/test_attention_bias.py -k path_of_biases",
    ),
    Fault(
        name="times counted from nothing",
        device="cuda",
        path="cuda/kernels/attention/time_tiles.cuh",
        text="static_cast<uint32_t>(away.nearest);",
        instead="0;",
        check="--op jagged_hstu_attention_biased",
    ),
    Fault(
        name="one value for a cell of times",
        device="cuda",
        path="cuda/kernels/attention/time_tiles.cuh",
        text="__ldg(gTable + behind) * unit,",
        instead="__ldg(gTable + bucket) * unit,",
        check="tests/test_attention_bias.py -k any_times",
    ),
    Fault(
        name="times counted from nothing",
        device="cuda",
        path="cuda/kernels/attention/starting_times.cuh",
        text="group.boundary += shared_.boundaries[first];",
        instead="group.boundary = shared_.boundaries[first];",
        check="tests/test_attention_bias.py -k any_times",
    ),
    Fault(
        name="one value for a cell of times",
        device="cuda",
        path="cuda/kernels/attention/starting_times.cuh",
        text="return offset + (away >= boundary ? 4 : 0);",
        instead="return offset;",
        check="tests/test_attention_bias.py -k any_times",
    ),
    Fault(
        name="keys later than their queries",
        device="cuda",
        path="cuda/kernels/attention/starting_times.cuh",
        text="first + 1 == last && away.is_ordered &&",
        instead="first + 1 == last &&",
        check="tests/test_attention_bias.py -k any_times",
    ),
    Fault(
        name="scores that start before their times",
        device="cuda",
        path="cuda/kernels/attention/starting_times.cuh",
        text="warps[row / 16].ring.wait(unit);",
        instead="",
        check="tests/test_attention_bias.py -k path_of_biases",
    ),
    Fault(
        name="unused keys get a gradient",
        device="cuda",
        path="cuda/kernels/attention/bias.cuh",
        text="kv_lengths.data == nullptr ? len : clamped_count(params.kv_lengths, seq, len);",
        instead="kv_lengths.data == nullptr ? len : len;",
        check="--op jagged_flash_attention_biased",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The result of a fault's check: whether it was caught, by what, after how many seconds."""

    caught: bool
    by: str
    seconds: float


class Workshop:
    """A copy of the project, and a cache, in which only what a fault changes is compiled.

    Args:
        folder: where both lie.
    """

    def __init__(self, folder: Path) -> None:
        self.copy = folder / "copy"
        self.cache = folder / "cache"
        self.cache.mkdir(mode=0o700, parents=True)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.copy),
            "JAGGED_CUDA_CACHE": str(self.cache),
        }

    def prepare(self, fault: Fault | None) -> None:
        """Copy the sources and plant the fault; raises if they do not compile then."""
        shutil.rmtree(self.copy, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.copy / name, ignore=shutil.ignore_patterns("*.so"))
        shutil.copy(ROOT / "pyproject.toml", self.copy)
        if fault is not None:
            fault.plant(self.copy)
        self._python("-c", "import jagged_cuda", check=True)

    def run(self, check: str, device: str) -> Outcome:
        """The check's outcome; a kernel that hangs is not caught, but ends."""
        begin = time.monotonic()
        try:
            return self._outcome(check, device, begin)
        except subprocess.TimeoutExpired as error:
            return Outcome(False, f"no result after {error.timeout:.0f} s", error.timeout)

    def _outcome(self, check: str, device: str, begin: float) -> Outcome:
        file, _, selection = check.partition(" -k ")
        if file.startswith("tests/"):
            done = self._python(
                "-m", "pytest", "-q", "-x", file, *(["-k", selection] * bool(selection))
            )
            found = re.search(r"(?m)^FAILED (\S+)", done.stdout)
            by = found[1] if found else ""
            caught = done.returncode == 1 and found is not None
        else:
            words = f"--device {device} --seed 1 --seconds {SECONDS - 10:.0f} {check}".split()
            done = self._python("-m", "jagged_cuda.fuzz", *words)
            found = re.search(r"\n\n(\w+: .{,120})", done.stdout)
            by = f"the fuzzer: {found[1]}" if found else ""
            caught = done.returncode == 1 and found is not None
        if done.returncode not in (0, 1):
            by = f"status {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
        return Outcome(caught, by, time.monotonic() - begin)

    def _python(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.copy,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and done.returncode:
            raise RuntimeError(f"the copy does not build:\n{done.stderr[-2000:]}")
        return done


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=sorted({fault.name for fault in FAULTS}))
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its copy")
    options = parser.parse_args(given)
    chosen = [
        fault
        for fault in FAULTS
        if fault.device == options.device and options.only in (None, fault.name)
    ]
    # One after another in one copy, since each is undone by compiling what the next compiles, too.
    of_file: dict[str, list[Fault | None]] = {"": [None]}
    for fault in chosen:
        of_file.setdefault(fault.path, []).append(fault)
    with tempfile.TemporaryDirectory(prefix="jagged_cuda_mutations") as folder:
        workshops: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(options.jobs):
            workshops.put(Workshop(Path(folder) / str(number)))

        def caught(fault: Fault | None, workshop: Workshop) -> bool:
            try:
                workshop.prepare(fault)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                outcome = Outcome(False, str(error), 0.0)
            else:
                check = "--cases 300" if fault is None else fault.check
                outcome = workshop.run(check, options.device)
            if fault is None:
                print(f"sources as they are: {outcome.by or 'right'}", flush=True)
                return not outcome.by
            verdict = outcome.by if outcome.caught else f"NOT CAUGHT {outcome.by}"
            at = f"{fault.name} (csrc/{fault.path})"
            print(f"{at}: {outcome.seconds:.0f} s, {verdict}", flush=True)
            return outcome.caught

        def count_failed(faults: list[Fault | None]) -> int:
            workshop = workshops.get()
            try:
                return [caught(fault, workshop) for fault in faults].count(False)
            finally:
                workshops.put(workshop)

        with ThreadPoolExecutor(options.jobs) as pool:
            failed = sum(pool.map(count_failed, of_file.values()))
    print(
        f"{len(chosen)} faults, {failed} not caught" if failed else f"{len(chosen)} faults caught"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
