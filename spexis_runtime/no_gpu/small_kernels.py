# SPDX-License-Identifier: Apache-2.0
"""The small Triton kernels of vLLM's every step, in plain torch.

They move a few integers for each request. Triton's interpreter takes milliseconds for
that, and most of the time of a step of a small model. Signatures and effects are those
of the functions of `vllm.v1.worker.gpu` that they replace (`patches`); what the no-GPU
path does not have, tokens drafted by vLLM's own speculation, is left to those.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

_combine_sampled_and_draft_tokens = input_batch.combine_sampled_and_draft_tokens
_post_update = input_batch.post_update


def gather_block_tables(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    num_reqs, slots = len(idx_mapping), idx_mapping.long()
    gathered = tuple(self.input_block_tables) if out is None else out
    for table, to in zip(self.block_tables, gathered, strict=True):
        torch.index_select(table.gpu, 0, slots, out=to[:num_reqs])
        to[num_reqs:num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in gathered)


def compute_slot_mappings(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert self.cp_size == 1, "context parallelism without a GPU"
    starts, ends = _spans(query_start_loc, len(idx_mapping))
    slots = idx_mapping.long().repeat_interleave(ends - starts)
    positions = positions[: len(slots)]
    slot_mappings = self.slot_mappings if out is None else out
    for i, table in enumerate(self.block_tables):
        block_size = self.kernel_block_sizes[i]
        blocks = table.gpu[slots, positions // block_size]
        slot_mappings[i, : len(slots)] = blocks * block_size + positions % block_size
        slot_mappings[i, len(slots) :] = PAD_SLOT_ID
    return slot_mappings[:, :num_tokens_padded]


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    num_reqs = len(idx_mapping)
    starts, ends = _spans(query_start_loc, num_reqs)
    computed = num_computed_tokens[idx_mapping.long()]
    seq_lens[:num_reqs] = computed + ends - starts
    seq_lens[num_reqs:] = 0
    first, last = int(query_start_loc[0]), int(query_start_loc[num_reqs])
    offset = (computed - starts).repeat_interleave(ends - starts)
    pos[first:last] = torch.arange(first, last) + offset


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> torch.Tensor:
    num_reqs = len(idx_mapping)
    if num_logits != num_reqs or num_new_sampled_tokens != 1:
        return _combine_sampled_and_draft_tokens(
            input_ids,
            idx_mapping,
            last_sampled_tokens,
            query_start_loc,
            seq_lens,
            prefill_len,
            draft_tokens,
            cu_num_logits,
            num_logits,
            num_new_sampled_tokens,
        )
    slots = idx_mapping.long()
    logits_indices = query_start_loc[1 : num_reqs + 1].long() - 1
    generates = seq_lens[:num_reqs] > prefill_len[slots]
    last = last_sampled_tokens.flatten()[slots[generates]]
    input_ids[logits_indices[generates]] = last.to(input_ids.dtype)
    return logits_indices


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_reqs = len(idx_mapping)
    in_prompt = seq_lens[:num_reqs] < prefill_len[idx_mapping.long()]
    num_sampled.masked_fill_(in_prompt, 0)
    starts, ends = _spans(cu_num_logits, num_reqs)
    return num_sampled, (ends - starts - num_sampled).masked_fill_(in_prompt, 0)


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    if sampled_tokens.shape[1] != 1:
        return _post_update(
            idx_mapping,
            num_computed_tokens,
            last_sampled_tokens,
            output_bin_counts,
            sampled_tokens,
            num_sampled,
            num_rejected,
            query_start_loc,
            all_token_ids,
            total_len,
        )
    computed = -num_rejected
    if query_start_loc is not None:
        starts, ends = _spans(query_start_loc, len(idx_mapping))
        computed = computed + ends - starts
    kept = idx_mapping >= 0
    num_computed_tokens[idx_mapping[kept].long()] += computed[kept]
    sampled = kept & (num_sampled > 0)
    slots, tokens = idx_mapping[sampled].long(), sampled_tokens[sampled, 0]
    last_sampled_tokens.view(-1)[slots] = tokens.to(last_sampled_tokens.dtype)
    all_token_ids[slots, total_len[slots].long()] = tokens.to(all_token_ids.dtype)
    total_len[slots] += 1
    if output_bin_counts is not None:
        output_bin_counts[slots, tokens.long()] += 1


def compute_token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    return logits.float().log_softmax(dim=-1).gather(1, token_ids.long())


def apply_grammar_bitmask(
    self: StructuredOutputsWorker,
    logits: torch.Tensor,
    input_batch: input_batch.InputBatch,
    grammar_req_ids: list[str],
    grammar_bitmask: np.ndarray,
) -> None:
    row_of = {req_id: row for row, req_id in enumerate(input_batch.req_ids)}
    allowed = np.unpackbits(grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    for req_id, mask in zip(grammar_req_ids, torch.from_numpy(allowed), strict=True):
        forbidden = mask[: logits.shape[1]] == 0
        logits[row_of[req_id]].masked_fill_(forbidden, -torch.inf)


def _spans(start_loc: torch.Tensor, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return start_loc[:num_reqs], start_loc[1 : num_reqs + 1]


REPLACED: dict[str, tuple[Any, ...]] = {
    "vllm.v1.worker.gpu.input_batch": (
        prepare_pos_seq_lens,
        combine_sampled_and_draft_tokens,
        get_num_sampled_and_rejected,
        post_update,
    ),
    "vllm.v1.worker.gpu.sample.logprob": (compute_token_logprobs,),
    "vllm.v1.worker.gpu.block_table.BlockTables": (
        gather_block_tables,
        compute_slot_mappings,
    ),
    # which also asks for pinned memory, and so for a CUDA driver
    "vllm.v1.worker.gpu.structured_outputs.StructuredOutputsWorker": (
        apply_grammar_bitmask,
    ),
}
"""Owner of each function's original -> the functions."""
