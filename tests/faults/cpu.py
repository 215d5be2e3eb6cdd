"""Faults of the CPU's kernels."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "a draw not repeated",
        "cpu",
        "cpu/kernels/layer_norm.inl",
        "const T kept = keep[i] == T(0) ? T(0) : grad[i] * keep[i];",
        "const T kept = grad[i];",
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
        "tail mask off by one",
        "cpu",
        "cpu/kernels/attention.inl",
        "visible.of(row_begin + i).counted_from(key_block)",
        "visible.of(row_begin + i).counted_from(key_block - 1)",
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
        name="a bias of the wrong head",
        device="cpu",
        path="cpu/kernels/attention.inl",
        text="const int64_t column = head / (p.heads / bias.kv_heads);",
        instead="const int64_t column = 0;",
        check="--op jagged_flash_attention_biased",
    ),
)
