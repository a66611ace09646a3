# SPDX-License-Identifier: Apache-2.0
"""`draft_head` on vLLM's LM heads, whose vocabulary tensor parallelism shards."""

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from spexis_kernels import DraftHead, combine_draft_heads, draft_head


def vocab_parallel_draft_head(
    hidden_states: torch.Tensor,
    lm_head: VocabParallelEmbedding,
    **sampling: torch.Tensor,
) -> DraftHead:
    """The whole vocabulary's `DraftHead` of each row, alike on all ranks.

    Args:
        hidden_states: [rows, hidden_size], of the LM head's dtype.
        sampling: temperature, seed and position of each row; none: greedy.
    """
    shard = lm_head.shard_indices
    head = draft_head(
        hidden_states,
        lm_head.weight[: shard.num_org_elements],
        vocab_start=shard.org_vocab_start_index,
        **sampling,
    )
    if get_tp_group().world_size > 1:
        head = combine_draft_heads(_of_all_shards(head))
    return head


def _of_all_shards(head: DraftHead) -> DraftHead:
    """`head` of each rank's vocabulary shard, [tensor_parallel_size, rows] each.

    In one collective: four bytes an element, whatever they mean.
    """
    fields = torch.stack([field.view(torch.int32) for field in head])
    shards = get_tp_group().all_gather(fields[None], dim=0)  # [ranks, fields, rows]
    shards = shards.transpose(0, 1).contiguous()
    return DraftHead(
        *(new.view(old.dtype) for new, old in zip(shards, head, strict=True))
    )
