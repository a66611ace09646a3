# SPDX-License-Identifier: Apache-2.0
"""Batches for the tests of merged_attention, poisoned where nothing may be read."""

from typing import Any, NamedTuple

import torch
from tolerances import (
    ATTENTION_CEILING,
    EXACT,
    FP32_REDUCTION,
    flash_attention_bound,
    one_ulp,
)

from spexis_kernels.constants import PAD_SLOT_ID
from spexis_kernels.merged_attention import (
    MergedAttentionResult,
    QKNorm,
    Rotary,
    merged_attention,
    merged_attention_reference,
)

GARBAGE = 1 << 28  # a block or a position that no memory has

FP8 = torch.float8_e4m3fn

# (num_heads, num_kv_heads, head_size)
MODELS = {
    "llama_70b": (64, 8, 128),
    "qwen3_32b": (64, 8, 128),
    "llama_8b": (32, 8, 128),
    "llama_70b_tp8": (8, 1, 128),
    "smollm2_135m": (9, 3, 64),
}


class Case(NamedTuple):
    """A batch and a model."""

    requests: list[tuple[int, int]]  # (query_len, seq_len); seq_len 0: void
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    rotary_dim: int = 0  # 0: no RoPE
    qk_norm: bool = False
    padding: int = 0  # rows after those of the requests
    writes: bool = True  # False: the step's K and V are in the cache already
    heads_first: bool = False  # layout of a block: [heads, tokens, 2 * head_size]

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.requests) + self.padding


class Inputs(NamedTuple):
    """Arguments of merged_attention."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor | None
    options: dict[str, Any]

    def copy(self) -> "Inputs":
        """With caches of its own, of the same strides."""
        caches = []
        for cache in (self.key_cache, self.value_cache):
            copy = torch.empty_strided(
                cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device
            )
            caches.append(copy.copy_(cache))
        return self._replace(key_cache=caches[0], value_cache=caches[1])

    def only(self, req: int) -> "Inputs":
        """The batch of one of the requests alone; caches shared."""
        start, end = self.query_start_loc[req : req + 2].tolist()
        options = {**self.options, "max_query_len": end - start}
        if rotary := options["rotary"]:
            options["rotary"] = rotary._replace(positions=rotary.positions[start:end])
        block_size = self.key_cache.shape[1]
        num_blocks = -(-int(self.seq_lens[req]) // block_size)
        rows = slice(start, end)
        return Inputs(
            query=self.query[rows],
            key=None if self.key is None else self.key[rows],
            value=None if self.value is None else self.value[rows],
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            block_table=self.block_table[req : req + 1, :num_blocks],
            query_start_loc=self.query_start_loc[req : req + 2] - start,
            seq_lens=self.seq_lens[req : req + 1],
            slot_mapping=None if self.slot_mapping is None else self.slot_mapping[rows],
            options=options,
        )


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, fp8 included."""
    tensor.copy_(torch.full_like(tensor, float("nan"), dtype=torch.float32))


def make_cache(
    case: Case, num_blocks: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned caches: views of one tensor, in one of vLLM's two layouts."""
    dtype = case.cache_dtype or case.dtype
    heads, tokens, d = case.num_kv_heads, case.block_size, case.head_size
    if case.heads_first:
        both = torch.zeros(num_blocks, heads, tokens, 2 * d, dtype=dtype, device=device)
        key_cache, value_cache = both.transpose(1, 2).split(d, dim=-1)
    else:
        both = torch.zeros(num_blocks, 2, tokens, heads, d, dtype=dtype, device=device)
        key_cache, value_cache = both.unbind(1)
    poison(key_cache)
    poison(value_cache)
    return key_cache, value_cache


def make_inputs(case: Case, device: str) -> Inputs:
    """Random values where a request may read, NaN and garbage everywhere else."""
    num_reqs, d = len(case.requests), case.head_size
    cache_dtype = case.cache_dtype or case.dtype
    on_device = {"device": device}
    scale = torch.ones(1, **on_device) if cache_dtype == FP8 else None
    if scale is not None:
        # the interpreter's fp8 casts do not round: exact values there
        scale.fill_(0.037 if device == "cuda" else 0.5)

    def random_rows(*shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, **on_device)
        if scale is not None and device == "cpu":
            rows = (rows / scale).to(FP8).float() * scale
        return rows.to(case.dtype)

    blocks_of = [-(-seq_len // case.block_size) for _, seq_len in case.requests]
    num_blocks = sum(blocks_of) + 3
    key_cache, value_cache = make_cache(case, num_blocks, device)
    blocks = torch.randperm(num_blocks, dtype=torch.int32, **on_device)
    table = torch.full(
        (num_reqs, max(blocks_of, default=0) + 1), GARBAGE, dtype=torch.int32,
        **on_device,
    )  # fmt: skip
    widths = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    qkv = torch.full((case.num_tokens, sum(widths), d), float("nan"), **on_device)
    qkv = qkv.to(case.dtype)
    slots = torch.full((case.num_tokens,), PAD_SLOT_ID, dtype=torch.int64, **on_device)
    positions = torch.full_like(slots, GARBAGE)
    starts, used = [0], 0
    for req, (query_len, seq_len) in enumerate(case.requests):
        rows = slice(starts[-1], starts[-1] + query_len)
        starts.append(rows.stop)
        if seq_len == 0:
            continue
        table[req, : blocks_of[req]] = blocks[used : used + blocks_of[req]]
        used += blocks_of[req]
        first = seq_len - query_len
        oldest = max(0, first - (case.sliding_window or seq_len) + 1)
        table[req, : oldest // case.block_size] = GARBAGE
        cached = torch.arange(oldest, first if case.writes else seq_len, **on_device)
        block, offset = table[req, cached // case.block_size], cached % case.block_size
        shape = len(cached), case.num_kv_heads, d
        k, v = random_rows(*shape), random_rows(*shape)
        if scale is not None:
            k, v = k / scale, v / scale
        key_cache[block, offset] = k.to(cache_dtype)
        value_cache[block, offset] = v.to(cache_dtype)
        qkv[rows] = random_rows(query_len, sum(widths), d)
        positions[rows] = torch.arange(first, seq_len, **on_device)
        block = table[req, positions[rows] // case.block_size].long()
        slots[rows] = block * case.block_size + positions[rows] % case.block_size

    query, key, value = qkv.split(widths, dim=1)
    rotary = qk_norm = None
    if case.rotary_dim:
        max_position = max(seq_len for _, seq_len in case.requests)
        angle = torch.rand(max_position, case.rotary_dim // 2, **on_device) * 7
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(case.dtype)
        rotary = Rotary(cos_sin, positions)
    if case.qk_norm:
        weights = 1 + 0.1 * torch.randn(2, d, **on_device).to(case.dtype)
        qk_norm = QKNorm(weights[0], weights[1], 1e-6)
    return Inputs(
        query=query,
        key=key if case.writes else None,
        value=value if case.writes else None,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, **on_device),
        seq_lens=torch.tensor(
            [seq_len for _, seq_len in case.requests], dtype=torch.int32, **on_device
        ),
        slot_mapping=slots if case.writes else None,
        options={
            "max_query_len": max((q for q, _ in case.requests), default=0),
            "scale": d**-0.5,
            "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap,
            "k_scale": scale,
            "v_scale": scale,
            "rotary": rotary,
            "qk_norm": qk_norm,
        },
    )


def run(function: Any, inputs: Inputs, **more: Any) -> Any:
    return function(*inputs[:-1], **inputs.options, **more)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Comparable with torch.equal where there is NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.dtype.itemsize])


def assert_cache(
    cache: torch.Tensor,
    before: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    tolerance: dict[str, float],
) -> None:
    """`rows` are at `slots`, and every other bit is as before."""
    if rows is None or slots is None:
        assert torch.equal(bits(cache), bits(before))
        return
    kept = slots != PAD_SLOT_ID
    block_size = cache.shape[1]
    where = slots[kept] // block_size, slots[kept] % block_size
    torch.testing.assert_close(cache[where].float(), rows[kept].float(), **tolerance)
    cache = cache.clone()
    cache[where] = before[where]
    assert torch.equal(bits(cache), bits(before))


def truth(inputs: Inputs) -> torch.Tensor:
    """In fp32, reading all K and V as the step left them in the cache."""
    options = dict(inputs.options)
    k_scale, v_scale = options.pop("k_scale"), options.pop("v_scale")
    key_cache, value_cache = inputs.key_cache.float(), inputs.value_cache.float()
    if k_scale is not None:
        key_cache, value_cache = key_cache * k_scale, value_cache * v_scale
    inputs = inputs._replace(
        query=inputs.query.float(),
        key=None,
        value=None,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=None,
        options=options,
    )
    return run(merged_attention_reference, inputs).out


def assert_matches(case: Case, inputs: Inputs, **more: torch.Tensor) -> None:
    """Run once; output and caches are right, given what the reference makes of both."""
    before = inputs.copy()
    expected: MergedAttentionResult = run(merged_attention_reference, inputs)
    assert torch.equal(bits(inputs.key_cache), bits(before.key_cache))
    out = run(merged_attention, inputs, **more)

    fused = case.rotary_dim or case.qk_norm
    key_tolerance = one_ulp(inputs.key_cache.dtype) if fused else EXACT
    assert_cache(
        inputs.key_cache, before.key_cache, expected.key, expected.slots, key_tolerance
    )
    assert_cache(
        inputs.value_cache, before.value_cache, expected.value, expected.slots, EXACT
    )
    assert out.isfinite().all()
    correct = truth(inputs)
    if case.dtype == torch.float32:
        torch.testing.assert_close(out, correct, **FP32_REDUCTION)
    elif out.numel():
        bound = flash_attention_bound(correct, expected.out)
        assert (out.float() - correct).abs().max().item() <= bound
        torch.testing.assert_close(out.float(), correct, **ATTENTION_CEILING)
    live = expected.out.flatten(1).any(1)
    assert not out[~live].any()
