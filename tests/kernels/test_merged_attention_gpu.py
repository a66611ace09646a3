# SPDX-License-Identifier: Apache-2.0
"""merged_attention on a GPU: CUDA graphs, shapes of real models, large caches."""

import pytest
import torch
from attention_cases import FP8, MODELS, Case, assert_matches, bits, make_inputs, run

from spexis_kernels._attention_settings import MAX_PROGRAMS
from spexis_kernels.merged_attention import (
    merged_attention,
    merged_attention_workspace_size,
)

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


def test_graph_replays_on_new_data() -> None:
    case = Case([(1, 700), (1, 9), (1, 0), (1, 33)], 8, 2, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    size = merged_attention_workspace_size(inputs.query, inputs.key_cache)
    out = torch.empty(inputs.query.shape, dtype=BF16, device="cuda")
    buffers = {"out": out, "workspace": torch.zeros(size, device="cuda")}
    run(merged_attention, inputs, **buffers)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(merged_attention, inputs, **buffers)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(merged_attention, inputs, **buffers)
    inputs.query.mul_(-1)
    inputs.seq_lens[0] = 0
    expected = run(merged_attention, inputs)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    assert not out[0].any() and out[1].any()


@pytest.mark.parametrize("rows, context", [(8, 512), (8, 2048), (128, 2048)])
def test_runs_are_equal_to_the_bit(rows: int, context: int) -> None:
    """Rows that many programs share, whichever arrives last, again and again."""
    lens = torch.randint(context // 8, 2 * context, (rows,)).tolist()
    case = Case([(1, n) for n in lens], 64, 8, 128, dtype=BF16, rotary_dim=128)
    inputs = make_inputs(case, "cuda")
    size = merged_attention_workspace_size(inputs.query, inputs.key_cache)
    workspace = torch.zeros(size, device="cuda")
    expected = run(merged_attention, inputs, workspace=workspace)
    for _ in range(100):
        out = torch.full_like(inputs.query, float("nan"))
        run(merged_attention, inputs, out=out, workspace=workspace)
        assert torch.equal(out, expected)
    assert not workspace[:MAX_PROGRAMS].any()


@pytest.mark.parametrize(
    "model, rows, context, dtype, cache_dtype",
    [
        ("llama_70b", 8, 8192, BF16, BF16),
        ("llama_70b", 64, 2048, BF16, FP8),
        ("llama_70b", 256, 512, FP16, FP16),
        ("llama_70b_tp8", 256, 2048, BF16, BF16),
        ("llama_70b_tp8", 8, 8192, BF16, FP8),
        ("llama_8b", 128, 1024, BF16, BF16),
        ("qwen3_32b", 32, 4096, BF16, BF16),
        ("qwen3_32b", 16, 8192, BF16, FP8),
        ("smollm2_135m", 64, 1024, BF16, BF16),
        ("smollm2_135m", 64, 1024, FP16, FP16),
    ],
)
def test_real_shapes(
    model: str, rows: int, context: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Decode rows of lengths up to `context`, some void, and two prefill chunks."""
    lens = torch.randint(context // 2, context + 1, (rows,)).tolist()
    requests = [(1, seq_len if i % 7 else 0) for i, seq_len in enumerate(lens)]
    requests += [(200, context), (131, 131)]
    num_heads, num_kv_heads, head_size = MODELS[model]
    case = Case(
        requests,
        num_heads,
        num_kv_heads,
        head_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        rotary_dim=head_size,
        qk_norm=model.startswith("qwen3"),
        padding=9,
    )
    assert_matches(case, make_inputs(case, "cuda"))


def test_slots_past_2_to_the_31_elements() -> None:
    case = Case([(1, 40), (20, 40)], 8, 8, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    small, block_elements = inputs.key_cache, 2 * 16 * 8 * 128
    first_block = 2**31 // block_elements + 1  # the first wholly past it
    num_blocks = first_block + len(small)
    size = num_blocks * block_elements
    if torch.cuda.mem_get_info()[0] < 2 * size + 2**30:
        pytest.skip(f"needs {2 * size >> 20} MiB of GPU memory")
    both = torch.zeros(num_blocks, 2, 16, 8, 128, dtype=BF16, device="cuda")
    both[first_block:, 0], both[first_block:, 1] = small, inputs.value_cache
    large = inputs._replace(
        key_cache=both[:, 0],
        value_cache=both[:, 1],
        block_table=torch.where(
            inputs.block_table < len(small), inputs.block_table + first_block, 0
        ),
        slot_mapping=inputs.slot_mapping + first_block * 16,
    )
    expected = run(merged_attention, inputs)
    assert torch.equal(run(merged_attention, large), expected)
    assert torch.equal(bits(both[first_block:, 0]), bits(small))
    assert torch.equal(bits(both[first_block:, 1]), bits(inputs.value_cache))
    assert not both[:first_block].any()
