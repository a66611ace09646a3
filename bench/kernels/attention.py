# SPDX-License-Identifier: Apache-2.0
"""`merged_attention` beside FA3, FlashInfer and vLLM's Triton kernel on one case."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flashinfer
import torch
from tolerances import ATTENTION_CEILING, FP8_CEILING
from vllm import _custom_ops as ops
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from bench.gpu import DISTINCT_BYTES, Launch
from bench.kernels.cases import AttentionCase
from bench.kernels.work import Work
from spexis_kernels import (
    QKNorm,
    Rotary,
    merged_attention,
    merged_attention_io_bytes,
    merged_attention_workspace_size,
)

HEAD_SIZE, BLOCK_SIZE, BF16 = 128, 16, torch.bfloat16
SCALE = HEAD_SIZE**-0.5
ON_GPU: dict[str, Any] = {"device": "cuda"}


class Batch(NamedTuple):
    """A case's tensors. Each block table is one set of inputs, on blocks of its own."""

    query_lens: list[int]
    seq_lens: list[int]
    cache: torch.Tensor  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    tables: list[torch.Tensor]  # [num_reqs, max_blocks] int32 each
    slots: list[torch.Tensor]  # [T] int64 each
    qkv: torch.Tensor  # [T, heads of all three, HEAD_SIZE]
    starts: torch.Tensor  # [num_reqs + 1] int32
    lens: torch.Tensor  # [num_reqs] int32
    live_lens: torch.Tensor  # the same, 0 where void

    def split(self, case: AttentionCase) -> tuple[torch.Tensor, ...]:
        sizes = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
        return self.qkv.split(sizes, dim=1)


def make_batch(case: AttentionCase) -> Batch:
    torch.manual_seed(0)
    low, high = case.context, case.context + 1
    if case.mixed:
        low, high = case.context // 8, 2 * case.context - case.context // 8
    seq_lens = torch.randint(low, high, (case.rows,)).tolist()
    query_lens = [1] * case.rows
    if case.chunk:
        seq_lens.append(case.context + case.chunk)
        query_lens.append(case.chunk)
    blocks = [-(-n // BLOCK_SIZE) for n in seq_lens]
    block_bytes = 2 * BLOCK_SIZE * case.num_kv_heads * HEAD_SIZE * 2
    sets = min(16, DISTINCT_BYTES // (sum(blocks) * block_bytes) + 1)
    num_blocks = sum(blocks) * sets
    shape = num_blocks, 2, BLOCK_SIZE, case.num_kv_heads, HEAD_SIZE
    cache = torch.randn(shape, dtype=BF16, **ON_GPU)
    ids = torch.randperm(num_blocks, dtype=torch.int32)
    tables, slots, used = [], [], 0
    for _ in range(sets):
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        where = []
        for req, count in enumerate(blocks):
            table[req, :count] = ids[used : used + count]
            used += count
            position = torch.arange(seq_lens[req] - query_lens[req], seq_lens[req])
            block = table[req, position // BLOCK_SIZE].long()
            where.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        tables.append(table.cuda())
        slots.append(torch.cat(where).cuda())
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32, **ON_GPU)
    live_lens = lens.clone()
    if case.chunk:
        live_lens[: case.rows : 8] = 0
    width = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(sum(query_lens), width, HEAD_SIZE, dtype=BF16, **ON_GPU)
    return Batch(
        query_lens, seq_lens, cache, tables, slots, qkv, starts.cuda(), lens, live_lens
    )


def fused_arguments(batch: Batch) -> tuple[Rotary, QKNorm]:
    weights = 1 + 0.1 * torch.randn(2, HEAD_SIZE, dtype=BF16, **ON_GPU)
    angle = torch.rand(max(batch.seq_lens), HEAD_SIZE // 2, **ON_GPU) * 7
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1).to(BF16)
    pairs = zip(batch.query_lens, batch.seq_lens, strict=True)
    positions = torch.cat([torch.arange(n - q, n, **ON_GPU) for q, n in pairs])
    return Rotary(cos_sin, positions), QKNorm(weights[0], weights[1], 1e-6)


def ours(
    case: AttentionCase, batch: Batch, fused: tuple[Any, Any], fp8: bool
) -> tuple[torch.Tensor, list[Launch]]:
    """Its output, and a launch for each block table."""
    cache = batch.cache
    one = torch.ones(1, **ON_GPU) if fp8 else None
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    query, key, value = batch._replace(qkv=batch.qkv.clone()).split(case)
    out = torch.empty(query.shape, dtype=BF16, **ON_GPU)
    size = merged_attention_workspace_size(query, cache[:, 0])
    workspace = torch.zeros(size, **ON_GPU)

    def launch(table: torch.Tensor, slots: torch.Tensor) -> Launch:
        return lambda: merged_attention(
            query,
            key if case.fused else None,
            value if case.fused else None,
            cache[:, 0],
            cache[:, 1],
            table,
            batch.starts,
            batch.live_lens,
            slots if case.fused else None,
            max_query_len=max(batch.query_lens),
            scale=SCALE,
            k_scale=one,
            v_scale=one,
            rotary=fused[0] if case.fused else None,
            qk_norm=fused[1] if case.fused else None,
            out=out,
            workspace=workspace,
        )

    return out, [launch(*pair) for pair in zip(batch.tables, batch.slots, strict=True)]


def triton_unified(
    case: AttentionCase, batch: Batch, query: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    segments = 16
    shape = len(query), case.num_heads, segments
    sums = torch.empty(*shape, HEAD_SIZE, **ON_GPU)
    maxima, weights = torch.empty(shape, **ON_GPU), torch.empty(shape, **ON_GPU)

    def launch(table: torch.Tensor) -> Launch:
        return lambda: unified_attention(
            q=query,
            k=batch.cache[:, 0],
            v=batch.cache[:, 1],
            out=out,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=max(batch.query_lens),
            seqused_k=batch.lens,
            max_seqlen_k=max(batch.seq_lens),
            softmax_scale=SCALE,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=128 // case.num_kv_heads,
            num_par_softmax_segments=segments,
            softmax_segm_output=sums,
            softmax_segm_max=maxima,
            softmax_segm_expsum=weights,
        )

    return [launch(table) for table in batch.tables]


def fa3(
    case: AttentionCase, batch: Batch, query: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    longest = {
        "max_seqlen_q": max(batch.query_lens),
        "max_seqlen_k": max(batch.seq_lens),
    }
    plan = get_scheduler_metadata(  # not timed: vLLM makes it once a step
        batch_size=len(batch.seq_lens),
        cache_seqlens=batch.lens,
        num_heads_q=case.num_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=HEAD_SIZE,
        page_size=BLOCK_SIZE,
        cu_seqlens_q=batch.starts,
        causal=True,
        window_size=(-1, -1),
        **longest,
    )

    def launch(table: torch.Tensor) -> Launch:
        return lambda: flash_attn_varlen_func(
            q=query,
            k=batch.cache[:, 0],
            v=batch.cache[:, 1],
            out=out,
            cu_seqlens_q=batch.starts,
            seqused_k=batch.lens,
            softmax_scale=SCALE,
            causal=True,
            block_table=table,
            fa_version=3,
            scheduler_metadata=plan,
            **longest,
        )

    return [launch(table) for table in batch.tables]


def flash_infer(
    case: AttentionCase, batch: Batch, query: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    cache = batch.cache[:, 0], batch.cache[:, 1]
    blocks = [-(-n // BLOCK_SIZE) for n in batch.seq_lens]
    counts = torch.tensor([0, *blocks]).cumsum(0).int().cuda()
    last = torch.tensor([(n - 1) % BLOCK_SIZE + 1 for n in batch.seq_lens]).int().cuda()
    launches = []
    for table in batch.tables[:4]:  # each has 128 MiB of its own
        rows = zip(table, blocks, strict=True)
        used = torch.cat([row[:count] for row, count in rows])
        space = torch.empty(128 << 20, dtype=torch.uint8, **ON_GPU)
        heads = case.num_heads, case.num_kv_heads, HEAD_SIZE, BLOCK_SIZE
        types = {"q_data_type": BF16, "kv_data_type": BF16}
        wrapper: Any
        if case.chunk:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
            wrapper.plan(batch.starts, counts, used, last, *heads, causal=True, **types)
        else:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space, "NHD", use_tensor_cores=True
            )
            wrapper.plan(counts, used, last, *heads, **types)
        launches.append(partial(wrapper.run, query, cache, out=out))
    return launches


RIVALS = {"vllm_triton": triton_unified, "fa3": fa3, "flashinfer": flash_infer}


def before_attention(
    case: AttentionCase, batch: Batch, rotary: Rotary, qk_norm: QKNorm
) -> list[Launch]:
    """vLLM's own two launches: q/k norm with RoPE, in place, and the cache write."""
    _, key, value = batch.split(case)
    rows = batch.qkv.flatten(1)
    one = torch.ones(1, **ON_GPU)
    sizes = case.num_heads, case.num_kv_heads, case.num_kv_heads, HEAD_SIZE

    def launch(slots: torch.Tensor) -> Launch:
        def both() -> None:
            ops.fused_qk_norm_rope(
                rows, *sizes, qk_norm.eps, qk_norm.q_weight, qk_norm.k_weight,
                rotary.cos_sin_cache, True, rotary.positions,
            )  # fmt: skip
            ops.reshape_and_cache_flash(
                key, value, batch.cache[:, 0], batch.cache[:, 1], slots, "auto",
                one, one,
            )  # fmt: skip

        return both

    return [launch(slots) for slots in batch.slots]


def in_turn(first: Launch, then: Launch) -> Launch:
    def both() -> None:
        first()
        then()

    return both


def build(case: AttentionCase) -> Work:
    batch = make_batch(case)
    fused = fused_arguments(batch)
    out, launches = ours(case, batch, fused, case.fp8)
    launches[0]()
    live = torch.repeat_interleave(
        batch.live_lens > 0, torch.tensor(batch.query_lens, **ON_GPU)
    )
    rivals: dict[str, Sequence[Launch]] = {}
    before: list[Launch] = []
    wrong = []
    if case.fused:
        before = before_attention(case, batch, *fused)
        before[0]()  # q, k and the cache become what the rivals' attention finds
    query = batch.split(case)[0].contiguous()
    expected = torch.empty_like(out)
    if case.fp8:
        expected, plain = ours(case, batch, fused, False)
        plain[0]()
        rivals["ours_bf16"] = plain
        error = (out.float() - expected.float()).abs().max().item()
        if not error <= FP8_CEILING["atol"]:
            wrong.append(f"fp8 and bf16 differ by {error}")
    for name, rival in {} if case.fp8 else RIVALS.items():
        attention = rival(case, batch, query, expected)
        expected.fill_(float("nan"))
        attention[0]()
        difference = (out[live].float() - expected[live].float()).abs()
        allowed = ATTENTION_CEILING["atol"]
        allowed += ATTENTION_CEILING["rtol"] * expected[live].float().abs()
        if not bool((difference <= allowed).all()):  # NaN is not
            wrong.append(f"{name} differs by {difference.max().item()}")
        if case.fused:
            attention = [
                in_turn(*pair) for pair in zip(before, attention, strict=False)
            ]
        rivals[name] = attention
    return Work(
        launches,
        rivals,
        io_bytes=merged_attention_io_bytes(
            batch.query_lens,
            batch.live_lens.tolist(),
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_size=HEAD_SIZE,
            dtype=BF16,
            cache_dtype=torch.float8_e4m3fn if case.fp8 else BF16,
            writes_cache=case.fused,
        ),
        wrong="; ".join(wrong),
    )
