# SPDX-License-Identifier: Apache-2.0
"""The cases that are measured: shapes of Llama-70B, Qwen3-32B, Llama-8B and shards."""

from typing import NamedTuple

HEADS = [(64, 8), (32, 8), (8, 1)]  # query and KV heads
ROWS = [8, 32, 64, 128, 256]
CONTEXTS = [512, 2048]


class AttentionCase(NamedTuple):
    """Decode rows, and perhaps a prefill chunk, of heads of 128 elements."""

    num_heads: int
    num_kv_heads: int
    rows: int
    context: int  # tokens; of mixed lengths the mean
    mixed: bool = False  # lengths between 1/8 and 15/8 of `context`
    chunk: int = 0  # tokens of a prefill chunk after `context` ones; 1 row in 8 void
    fused: bool = False  # with q/k norm, RoPE and the KV write
    fp8: bool = False  # KV in e4m3, against ours in bf16

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        context = f"mixed {self.context}" if self.mixed else str(self.context)
        chunk = f" + chunk {self.chunk}" if self.chunk else ""
        return f"{heads} x {self.rows} x {context}{chunk}"


class HeadCase(NamedTuple):
    """`draft_head` on an LM head."""

    hidden_size: int
    vocab_size: int
    rows: int
    sampled: bool = False

    @property
    def name(self) -> str:
        how = " sampled" if self.sampled else ""
        return f"{self.hidden_size} x {self.vocab_size} x {self.rows}{how}"


class PoolCase(NamedTuple):
    """Kernels on the request pool: `verify`, or `absorb` and `select_rows`."""

    operation: str
    slots: int

    @property
    def name(self) -> str:
        return f"{self.operation} {self.slots}"


DECODE = [
    *(
        AttentionCase(*heads, rows, context)
        for heads in HEADS
        for rows in ROWS
        for context in CONTEXTS
    ),
    AttentionCase(64, 8, 64, 8192),
    AttentionCase(64, 8, 128, 2048, mixed=True),
    AttentionCase(64, 8, 256, 1024, mixed=True),
]

Case = AttentionCase | HeadCase | PoolCase

CASES: dict[str, list[Case]] = {
    "merged_attention": [*DECODE],
    "merged_attention_fused": [case._replace(fused=True) for case in DECODE],
    "merged_attention_chunks": [
        AttentionCase(64, 8, rows, 2048, chunk=chunk)
        for rows in (32, 128)
        for chunk in (256, 1024)
    ],
    "merged_attention_fp8": [
        AttentionCase(64, 8, rows, context, fp8=True)
        for rows, context in ((128, 2048), (256, 2048), (64, 8192))
    ],
    "draft_head": [
        HeadCase(*shape, rows, sampled)
        for shape in ((8192, 128256), (5120, 151936))
        for rows in (16, 64, 128, 256)
        for sampled in (False, True)
    ],
    "pool": [
        PoolCase("absorb_and_select_rows", 256),
        PoolCase("absorb_and_select_rows", 1024),
        PoolCase("verify", 256),
    ],
}
"""By operation, which names the file of results too."""
