# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for speculative parallelism: torch and triton only, no vLLM."""

from spexis_kernels.absorb_and_select_rows import (
    absorb_and_select_rows,
    absorb_and_select_rows_reference,
)
from spexis_kernels.constants import (
    DRAFT,
    INVALID_TOKEN,
    NORMAL,
    PAD,
    PAD_SLOT_ID,
    PREFILL,
)
from spexis_kernels.draft_head import (
    DraftHead,
    combine_draft_heads,
    combine_draft_heads_reference,
    draft_head,
    draft_head_io_bytes,
    draft_head_reference,
    draft_head_workspace,
)
from spexis_kernels.merged_attention import (
    MergedAttentionResult,
    QKNorm,
    Rotary,
    merged_attention,
    merged_attention_io_bytes,
    merged_attention_reference,
    merged_attention_workspace_size,
)
from spexis_kernels.pool import RequestPool, Rows
from spexis_kernels.rollback import absorb, absorb_reference, verify, verify_reference
from spexis_kernels.select_rows import (
    select_rows,
    select_rows_reference,
    store_drafts,
    store_drafts_reference,
)

__all__ = [
    "DRAFT",
    "DraftHead",
    "INVALID_TOKEN",
    "MergedAttentionResult",
    "NORMAL",
    "PAD",
    "PAD_SLOT_ID",
    "PREFILL",
    "QKNorm",
    "RequestPool",
    "Rotary",
    "Rows",
    "absorb",
    "absorb_and_select_rows",
    "absorb_and_select_rows_reference",
    "absorb_reference",
    "combine_draft_heads",
    "combine_draft_heads_reference",
    "draft_head",
    "draft_head_io_bytes",
    "draft_head_reference",
    "draft_head_workspace",
    "merged_attention",
    "merged_attention_io_bytes",
    "merged_attention_reference",
    "merged_attention_workspace_size",
    "select_rows",
    "select_rows_reference",
    "store_drafts",
    "store_drafts_reference",
    "verify",
    "verify_reference",
]
