# SPDX-License-Identifier: Apache-2.0
"""merged_attention: kernel = reference = torch's own attention; no batch effects.

Every cache slot, row, position and block-table entry that must not be used is poisoned
(attention_cases), so that finite output says that none of them was.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    FP8,
    Case,
    assert_cache,
    assert_matches,
    bits,
    make_inputs,
    run,
)
from tolerances import EXACT, FP32_REDUCTION

from spexis_kernels._attention_settings import MAX_PROGRAMS
from spexis_kernels.constants import PAD_SLOT_ID
from spexis_kernels.merged_attention import (
    QKNorm,
    Rotary,
    merged_attention,
    merged_attention_io_bytes,
    merged_attention_reference,
    merged_attention_workspace_size,
)

# decode rows, a void one, a chunk, a chunk without context, a request without rows
MIXED = [(1, 7), (1, 0), (9, 63), (0, 20), (1, 131), (7, 7), (1, 1), (3, 0), (2, 33)]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# The interpreter multiplies the bit patterns of bf16 as integers: GPU only.
gpu = pytest.mark.gpu

CASES = [
    pytest.param(Case([(1, 1)]), id="one_row"),
    pytest.param(Case([(1, 0)]), id="one_void_row"),
    pytest.param(Case([(5, 0)]), id="void_chunk"),
    pytest.param(Case([], padding=3), id="padding_only"),
    pytest.param(Case([(0, 9)], padding=2), id="no_rows"),
    pytest.param(Case([(1, 7), (1, 63), (1, 131)]), id="odd_lengths"),
    pytest.param(Case([(1, 16), (1, 17), (1, 32), (1, 33)]), id="block_edges"),
    pytest.param(Case([(7, 7), (63, 63), (131, 131)]), id="chunks_without_context"),
    pytest.param(Case([(7, 63), (63, 131), (2, 131)]), id="chunks"),
    pytest.param(Case(MIXED, padding=5), id="mixed"),
    pytest.param(Case(MIXED, writes=False, padding=5), id="mixed_nothing_new"),
    pytest.param(Case(MIXED, heads_first=True), id="mixed_heads_first"),
    pytest.param(Case(MIXED, block_size=32), id="block_32"),
    pytest.param(Case(MIXED, block_size=64), id="block_64"),
    pytest.param(Case(MIXED, num_kv_heads=1), id="mqa"),
    pytest.param(Case(MIXED, num_kv_heads=4), id="mha"),
    pytest.param(Case(MIXED, num_heads=9, num_kv_heads=3), id="group_of_3"),
    pytest.param(Case(MIXED, num_heads=17, num_kv_heads=1), id="group_of_17"),
    pytest.param(Case(MIXED, head_size=80, rotary_dim=80), id="head_80"),
    pytest.param(Case(MIXED, head_size=96), id="head_96"),
    pytest.param(Case(MIXED[:4], head_size=256), id="head_256"),
    pytest.param(Case(MIXED, sliding_window=1), id="window_1"),
    pytest.param(Case(MIXED, sliding_window=20), id="window_20"),
    pytest.param(Case(MIXED, sliding_window=20, writes=False), id="window_nothing_new"),
    pytest.param(Case(MIXED, soft_cap=0.5), id="soft_cap"),
    pytest.param(Case(MIXED, rotary_dim=32), id="rope"),
    pytest.param(Case(MIXED, rotary_dim=12), id="partial_rope"),
    pytest.param(Case(MIXED, qk_norm=True), id="qk_norm"),
    pytest.param(
        Case(MIXED, rotary_dim=32, qk_norm=True, sliding_window=40, soft_cap=2.0),
        id="everything",
    ),
    pytest.param(
        Case(MIXED, rotary_dim=32, qk_norm=True, writes=False), id="query_only"
    ),
    pytest.param(Case([(1, 257), (1, 258), (1, 600)]), id="splits"),
    pytest.param(Case([(1, 700)], sliding_window=300), id="splits_in_window"),
    pytest.param(Case(MIXED, dtype=FP16), id="fp16"),
    pytest.param(Case(MIXED, dtype=FP16, rotary_dim=32, qk_norm=True), id="fp16_rope"),
    pytest.param(Case(MIXED, dtype=FP16, cache_dtype=FP8), id="fp16_fp8"),
    pytest.param(Case(MIXED, dtype=FP32, cache_dtype=FP8), id="fp32_fp8"),
    pytest.param(Case([(1, 700)], dtype=FP16, cache_dtype=FP8), id="fp8_splits"),
    pytest.param(Case(MIXED, dtype=BF16), id="bf16", marks=gpu),
    pytest.param(
        Case(MIXED, dtype=BF16, rotary_dim=32, qk_norm=True), id="bf16_rope", marks=gpu
    ),
    pytest.param(Case(MIXED, dtype=BF16, cache_dtype=FP8), id="bf16_fp8", marks=gpu),
    pytest.param(
        Case(MIXED, dtype=BF16, cache_dtype=FP8, rotary_dim=32, qk_norm=True),
        id="bf16_fp8_rope",
        marks=gpu,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_kernel(case: Case, device: str) -> None:
    assert_matches(case, make_inputs(case, device))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int, device: str) -> None:
    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), ()))]

    torch.manual_seed(seed)
    requests = []
    for _ in range(pick(1, 3, 8)):
        query_len = pick(0, 1, 1, 1, 2, 5, 19)
        requests.append(
            (query_len, pick(0, query_len, query_len + pick(1, 15, 16, 90)))
        )
    head_size = pick(16, 24, 64)
    case = Case(
        requests,
        num_heads=pick(4, 8, 12),
        num_kv_heads=pick(1, 2, 4),
        head_size=head_size,
        block_size=pick(16, 32),
        dtype=pick(FP32, FP16),
        sliding_window=pick(None, None, 3, 50),
        soft_cap=pick(None, 1.0),
        rotary_dim=pick(0, 8, head_size),
        qk_norm=pick(False, True),
        padding=pick(0, 1, 9),
        writes=pick(True, True, False),
        heads_first=pick(False, True),
    )
    assert_matches(case, make_inputs(case, device))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case([*MIXED, (1, 300), (17, 90)], padding=4), id="fp32"),
        pytest.param(
            Case([*MIXED, (1, 600)], dtype=FP16, rotary_dim=32, qk_norm=True), id="fp16"
        ),
        pytest.param(
            Case(
                [*MIXED, (1, 9000), (200, 3000)], 32, 8, 128, dtype=BF16, rotary_dim=128
            ),
            id="bf16",
            marks=gpu,
        ),
        pytest.param(
            Case([*MIXED, (1, 9000)], 8, 1, 128, dtype=BF16, cache_dtype=FP8),
            id="bf16_fp8",
            marks=gpu,
        ),
    ],
)
def test_other_rows_change_no_bit(case: Case, device: str) -> None:
    inputs = make_inputs(case, device)
    together = inputs.copy()
    out = run(merged_attention, together)
    starts = inputs.query_start_loc.tolist()
    for req in range(len(case.requests)):
        alone = inputs.only(req)
        rows = slice(starts[req], starts[req + 1])
        assert torch.equal(bits(run(merged_attention, alone)), bits(out[rows]))
    assert torch.equal(bits(inputs.key_cache), bits(together.key_cache))
    assert torch.equal(bits(inputs.value_cache), bits(together.value_cache))


def test_rows_without_a_slot_are_computed_but_not_written(device: str) -> None:
    inputs = make_inputs(Case(MIXED), device)
    assert inputs.slot_mapping is not None
    before, written = inputs.copy(), inputs.copy()
    out = run(merged_attention, written)
    slots = inputs.slot_mapping.clone()
    slots[::2] = PAD_SLOT_ID
    partly = inputs._replace(slot_mapping=slots)
    assert torch.equal(run(merged_attention, partly), out)
    for name in ("key", "value"):
        assert_cache(
            getattr(partly, f"{name}_cache"),
            getattr(before, f"{name}_cache"),
            getattr(inputs, name),
            slots,
            EXACT,
        )


def test_fp8_saturates(device: str) -> None:
    case = Case([(1, 20)], dtype=FP16, cache_dtype=FP8)
    inputs = make_inputs(case, device)
    assert inputs.key is not None and inputs.slot_mapping is not None
    inputs.key[:] = 3e4
    inputs.value[:] = -3e4
    assert_matches(case, inputs)
    where = divmod(int(inputs.slot_mapping[0]), 16)
    assert (inputs.key_cache[where].float() == 448).all()
    assert (inputs.value_cache[where].float() == -448).all()


def test_allocates_nothing_when_given_out_and_workspace(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(Case([(1, 700), (3, 40)]), device)
    size = merged_attention_workspace_size(inputs.query, inputs.key_cache)
    expected = run(merged_attention, inputs)
    # out need not be contiguous either
    out = torch.full((4, 5, 32), float("nan"), device=device)[:, 1:]
    workspace = torch.full((size,), float("nan"), device=device)
    workspace[:MAX_PROGRAMS] = 0

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("torch.empty was called")

    monkeypatch.setattr(torch, "empty", refuse)
    assert run(merged_attention, inputs, out=out, workspace=workspace) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(MIXED, rotary_dim=32, qk_norm=True, padding=5), id="mixed"),
        pytest.param(Case(MIXED, writes=False), id="nothing_new"),
        pytest.param(Case(MIXED, dtype=BF16), id="bf16"),
        pytest.param(Case(MIXED, dtype=BF16, cache_dtype=FP8), id="fp8"),
    ],
)
def test_cpu_tensors_take_the_reference(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    before = inputs.copy()
    expected = run(merged_attention_reference, inputs)
    assert torch.equal(run(merged_attention, inputs), expected.out)
    for name in ("key", "value"):
        assert_cache(
            getattr(inputs, f"{name}_cache"),
            getattr(before, f"{name}_cache"),
            getattr(expected, name),
            expected.slots,
            EXACT,
        )


def test_reference_is_torch_attention() -> None:
    """One chunk with context, against torch's own norm, rotation and attention."""
    case = Case([(9, 40)], rotary_dim=32, qk_norm=True)
    inputs = make_inputs(case, "cpu")
    assert inputs.key is not None and inputs.value is not None
    norm: QKNorm = inputs.options["qk_norm"]
    rotary: Rotary = inputs.options["rotary"]

    def prepare(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, (32,), weight, norm.eps)
        cos, sin = rotary.cos_sin_cache[rotary.positions][:, None].chunk(2, -1)
        turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
        return torch.cat((turned.real, turned.imag), -1)

    q, new_k = prepare(inputs.query, norm.q_weight), prepare(inputs.key, norm.k_weight)
    position = torch.arange(31)
    where = inputs.block_table[0, position // 16].long(), position % 16
    k = torch.cat((inputs.key_cache[where], new_k))
    v = torch.cat((inputs.value_cache[where], inputs.value))
    visible = torch.ones(9, 40, dtype=torch.bool).tril(31)
    correct = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=visible,
        enable_gqa=True,
    ).transpose(0, 1)
    result = run(merged_attention_reference, inputs)
    torch.testing.assert_close(result.out, correct, **FP32_REDUCTION)
    torch.testing.assert_close(result.key, new_k, **FP32_REDUCTION)
    assert torch.equal(result.value, inputs.value)
    assert torch.equal(result.slots, inputs.slot_mapping)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": torch.zeros(3, 4, 32, dtype=torch.float64)}, "query must be"),
        ({"query": torch.zeros(3, 3, 32)}, "multiple of the cache's heads, got 3"),
        ({"query": torch.zeros(3, 32, 4).transpose(1, 2)}, "query must be"),
        ({"key": torch.zeros(2, 2, 32)}, r"key must be \[3, 2, 32\] float32"),
        ({"value": None}, "key and value must be given together"),
        ({"slot_mapping": None}, "slot_mapping must be given"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping must be \[3\] int64"),
        ({"key_cache": torch.zeros(9, 16, 2, 32).half()}, "key_cache must be"),
        ({"value_cache": torch.zeros(9, 16, 2, 32)}, "value_cache must be"),
        ({"block_table": torch.zeros(3, 4).int()}, r"block_table must be \[2, any"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be"),
        ({"query_start_loc": torch.zeros(2).int()}, "query_start_loc must be"),
        ({"k_scale": torch.ones(1)}, "k_scale is for a float8_e4m3fn cache"),
        ({"max_query_len": -1}, "max_query_len must be >= 0, got -1"),
        ({"sliding_window": 0}, "sliding_window must be positive or None, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive or None, got 0.0"),
        (
            {"rotary": Rotary(torch.zeros(9, 34), torch.zeros(3).long())},
            "rotary.cos_sin_cache must have an even number of columns in 2 .. 32",
        ),
        ({"out": torch.zeros(3, 4, 32).half()}, "out must be"),
        (
            {"workspace": torch.zeros(7)},
            r"workspace must have \d+ elements or more, got 7",
        ),
    ],
)
def test_errors(change: dict[str, Any], message: str, device: str) -> None:
    inputs = make_inputs(Case([(1, 700), (2, 9)]), device)
    positional = {**inputs._asdict()}
    options = positional.pop("options")
    for name, value in change.items():
        value = value.to(device) if isinstance(value, torch.Tensor) else value
        (positional if name in positional else options)[name] = value
    with pytest.raises(ValueError, match=message):
        merged_attention(*positional.values(), **options)


def test_io_bytes() -> None:
    model: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 4,
        "dtype": BF16,
    }
    head = 4 * 2  # bytes
    # a decode row: q and out; new k and v read and written; 9 cached k and v
    assert merged_attention_io_bytes([1], [10], cache_dtype=BF16, **model) == (
        2 * 8 * head + 2 * 2 * 2 * head + 9 * 2 * 2 * head
    )
    # a chunk of 3 on 7 cached tokens, of which a window of 4 shows 3
    assert merged_attention_io_bytes(
        [3], [10], cache_dtype=FP8, sliding_window=4, **model
    ) == (3 * 2 * 8 * head + 3 * 2 * 2 * (head + 4) + 3 * 2 * 2 * 4)
    # a void row: out alone; nothing new: all 10 from the cache
    assert merged_attention_io_bytes(
        [1, 1], [0, 10], cache_dtype=BF16, writes_cache=False, **model
    ) == (8 * head + 2 * 8 * head + 10 * 2 * 2 * head)
