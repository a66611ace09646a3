# SPDX-License-Identifier: Apache-2.0
"""Decode rows shared by programs: who does what changes no bit; launch settings."""

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from attention_cases import FP8, MODELS, Case, assert_matches, bits, make_inputs, run

from spexis_kernels._attention_settings import (
    INTERPRETER,
    MAX_PROGRAMS,
    Device,
    Settings,
    attention_settings,
)
from spexis_kernels.merged_attention import (
    merged_attention,
    merged_attention_workspace_size,
)

# at units of 32 tokens and at most three of them: none, one, two and three, longer
# ones, and last ones of every kind
LENGTHS = [1, 2, 32, 33, 34, 65, 97, 98, 200]
WITH_OTHERS = [(1, 0), (1, 70), (0, 9), (1, 1), (5, 40), (1, 131), (3, 0), (1, 63)]

CASES = [
    pytest.param(Case([(1, n) for n in LENGTHS]), id="lengths"),
    pytest.param(Case([(1, n) for n in LENGTHS], sliding_window=70), id="window"),
    pytest.param(Case([*WITH_OTHERS, (1, 300)], padding=2), id="mixed"),
    pytest.param(Case([(1, 0)] * 7), id="all_void"),
    pytest.param(Case([(1, 200)] * 3, num_kv_heads=1, writes=False), id="mqa"),
    pytest.param(
        Case(WITH_OTHERS, dtype=torch.float16, rotary_dim=32, qk_norm=True), id="fused"
    ),
    pytest.param(Case([(1, 200)], dtype=torch.float16, cache_dtype=FP8), id="fp8"),
]


def few_tokens(monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    """Units of 32 tokens, at most three a row, dealt among `num_programs`."""

    def settings(*model: Any) -> Settings:
        chosen = attention_settings(*model)
        return chosen._replace(
            block_n=16,
            unit_tiles=2,
            max_units=3,
            num_programs=num_programs,
            mixed_programs=num_programs,
        )

    module = importlib.import_module("spexis_kernels.merged_attention")
    monkeypatch.setattr(module, "attention_settings", settings)


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """The interpreter runs the programs of a launch in another order."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        set_grid_idx = builder.set_grid_idx

        def permuted(x: int, y: int, z: int) -> None:
            order = list(range(builder.grid_dim[0]))
            random.Random(seed).shuffle(order)
            set_grid_idx(order[x], y, z)

        patch.setattr(builder, "set_grid_idx", permuted)
        yield


@pytest.mark.parametrize("case", CASES)
def test_shared_rows(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and the same to the bit for any number of programs; counters end zero."""
    inputs = make_inputs(case, device)
    outs = []
    for num_programs in (1, 3, 8):
        few_tokens(monkeypatch, num_programs)
        size = merged_attention_workspace_size(inputs.query, inputs.key_cache)
        workspace = torch.full((size,), float("nan"), device=device)
        workspace[:MAX_PROGRAMS] = 0
        out = torch.full_like(inputs.query, float("nan"))
        outs.append(run(merged_attention, inputs.copy(), out=out, workspace=workspace))
        assert not bits(workspace[:MAX_PROGRAMS]).any()
    for out in outs[1:]:
        assert torch.equal(bits(out), bits(outs[0]))
    assert_matches(case, inputs, workspace=workspace)
    assert not bits(workspace[:MAX_PROGRAMS]).any()


def test_the_last_to_arrive_may_be_any(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("a GPU orders programs as it likes")
    inputs = make_inputs(Case([(1, n) for n in LENGTHS]), device)
    few_tokens(monkeypatch, 8)
    expected = run(merged_attention, inputs.copy())
    for seed in range(2):
        with shuffled_programs(seed):
            out = run(merged_attention, inputs.copy())
        assert torch.equal(bits(out), bits(expected))


def test_several_launches_share_a_workspace(device: str) -> None:
    """Of other batches, larger and smaller, one after the other."""
    model = {"num_heads": 4, "num_kv_heads": 2, "dtype": torch.float16}
    lengths = [[(1, 700)], [(1, 9)] * 7, [(1, 40), (9, 40)], [(1, 300), (1, 700)]]
    batches = [make_inputs(Case(requests, **model), device) for requests in lengths]
    query, key_cache = batches[0].query, batches[0].key_cache
    size = merged_attention_workspace_size(query, key_cache)
    workspace = torch.zeros(size, device=device)
    for inputs in batches:
        expected = run(merged_attention, inputs.copy())
        out = run(merged_attention, inputs, workspace=workspace)
        assert torch.equal(bits(out), bits(expected))


def shared_bytes(settings: Settings, head_size: int, itemsize: int) -> int:
    """Tiles of K and V that a program holds at a time; what else it needs is small."""
    tiles = 2 * (settings.num_stages - 1)
    width = triton.next_power_of_2(head_size)
    return tiles * settings.block_n * width * itemsize


# capability: shared memory of a multiprocessor, less what a program reserves
SHARED_MEMORY = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


@pytest.mark.parametrize("capability", [*SHARED_MEMORY, INTERPRETER.capability])
@pytest.mark.parametrize("model", [*MODELS, "head_256", "mqa_64"])
def test_settings(model: str, capability: tuple[int, int]) -> None:
    others = {"head_256": (16, 8, 256), "mqa_64": (64, 1, 128)}
    num_heads, num_kv_heads, head_size = (MODELS | others)[model]
    group = num_heads // num_kv_heads
    device = Device(capability, 132)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cache_dtype in (dtype, FP8):
            shape = num_kv_heads, group, head_size, dtype, cache_dtype
            settings = attention_settings(*shape, device)
            assert settings == attention_settings(*shape, device)
            assert settings.decode_m >= group and settings.block_m >= group
            for tile in (settings.decode_m, settings.block_m, settings.block_n):
                assert tile >= 16 and tile & (tile - 1) == 0
            assert settings.unit_tiles * settings.block_n in (128, 256)
            assert 0 < settings.num_programs <= MAX_PROGRAMS
            assert 0 < settings.mixed_programs <= settings.num_programs
            # a launch of another size may change no arithmetic
            fewer = attention_settings(*shape, device._replace(num_sms=60))
            programs = {"num_programs": 0, "mixed_programs": 0}
            assert fewer._replace(**programs) == settings._replace(**programs)
            per_sm = settings.num_programs // device.num_sms
            needed = per_sm * shared_bytes(settings, head_size, cache_dtype.itemsize)
            kilobytes = SHARED_MEMORY.get(capability, 163)
            assert needed <= (kilobytes - 10 * per_sm) * 1024


def test_settings_of_unknown_devices() -> None:
    """Those of the nearest older device; older than all known ones: the oldest's."""
    shape = 8, 8, 128, torch.bfloat16, torch.bfloat16
    of = {
        capability: attention_settings(*shape, Device(capability, 100))
        for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (10, 0)]
    }
    assert of[7, 5] == of[8, 6] == of[8, 0] != of[8, 9]
    assert of[10, 3] == of[10, 0]
