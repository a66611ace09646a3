# SPDX-License-Identifier: Apache-2.0
"""Build a step's `InputBatch` from decode rows on the device and prefill chunks.

Takes the place of the V2 runner's `prepare_inputs`, which takes each row's request from
the host. Layout of rows and tokens: `step_plan`.
"""

from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    InputBuffers,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
)
from vllm.v1.worker.gpu.states import RequestState

from spexis_kernels.constants import PAD_SLOT_ID, PREFILL
from spexis_kernels.pool import RequestPool, Rows
from spexis_runtime.step_plan import StepPlan


class StepInputs(NamedTuple):
    """A step as the runner executes it."""

    batch: InputBatch
    rows: Rows  # [k + p]: the decode rows, then one row a chunk, for its last token
    decode_slots_np: np.ndarray  # [num_candidates] slots among which rows were chosen
    prefill_slots: torch.Tensor  # [p] int32


def build_step_inputs(
    plan: StepPlan,
    decode_rows: Rows,
    batch_desc: BatchExecutionDescriptor,
    pool: RequestPool,
    buffers: InputBuffers,
    req_states: RequestState,
) -> StepInputs:
    """Fill `buffers` and describe the batch.

    Args:
        decode_rows: [k] int32 each, as `select_rows` chose them on stage 0.
        batch_desc: vLLM's padded sizes for the step.
        pool: only `generation` is read.
    """
    device = buffers.device
    k, chunks = plan.num_decode_rows, plan.prefill_ends
    scheduled = plan.scheduler_output.num_scheduled_tokens
    num_reqs, num_tokens = len(scheduled), sum(scheduled.values())
    num_reqs_padded = batch_desc.num_reqs or num_reqs
    slot_of = req_states.req_id_to_index

    query_lens = np.fromiter(scheduled.values(), dtype=np.int32, count=num_reqs)
    query_start_loc_np = np.full(buffers.max_num_reqs + 1, num_tokens, dtype=np.int32)
    query_start_loc_np[0] = 0
    np.cumsum(query_lens, out=query_start_loc_np[1 : num_reqs + 1])
    async_copy_to_gpu(query_start_loc_np, out=buffers.query_start_loc)
    query_start_loc = buffers.query_start_loc

    decode_slots_np = np.array([slot_of[i] for i in plan.decode_limits], dtype=np.int32)
    prefill_slots_np = np.array([slot_of[i] for i in chunks], dtype=np.int32)
    prefill_slots = async_copy_to_gpu(prefill_slots_np, device=device)

    # decode rows: token, position and length travel with the row
    is_row = decode_rows.slots != PAD_SLOT_ID
    buffers.input_ids[:k] = decode_rows.tokens.clamp(min=0)
    buffers.positions[:k] = decode_rows.positions
    buffers.seq_lens[:k] = torch.where(is_row, decode_rows.positions + 1, 0)
    # prefill chunks: from the prompt, by vLLM's kernels on the tail of the batch
    if chunks:
        prepare_prefill_inputs(
            buffers.input_ids,
            req_states.next_prefill_tokens,
            prefill_slots,
            query_start_loc[k:],
            req_states.all_token_ids.gpu,
            req_states.prefill_len.gpu,
            req_states.num_computed_tokens.gpu,
        )
        prepare_pos_seq_lens(
            prefill_slots,
            query_start_loc[k:],
            req_states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens[k:],
        )
    else:
        buffers.seq_lens[k:].zero_()

    slots = torch.cat((decode_rows.slots, prefill_slots))
    idx_mapping = slots.clamp(min=0)  # padding rows must load from a slot that exists
    logits_indices = query_start_loc[1 : num_reqs + 1].long() - 1
    rows = Rows(
        slots=slots,
        generations=torch.cat(
            (decode_rows.generations, pool.generation[prefill_slots.long()])
        ),
        positions=buffers.positions[logits_indices].int(),
        tokens=buffers.input_ids[logits_indices],
        kinds=torch.cat((decode_rows.kinds, torch.full_like(prefill_slots, PREFILL))),
    )

    # What the host knows a row by. A decode row's request is unknown to it: any of the
    # candidates stands for it, with the largest bounds among them.
    row_slots_np = np.concatenate((decode_slots_np[:k], prefill_slots_np))
    longest = max(plan.decode_limits.values(), default=0)
    ends = np.array([longest] * k + list(chunks.values()), dtype=np.int32)
    seq_lens_upper_bound: np.ndarray = np.zeros(num_reqs_padded, dtype=np.int32)
    seq_lens_upper_bound[:num_reqs] = ends
    computed_np = ends - query_lens
    prefill_len_np = req_states.prefill_len.np[row_slots_np]
    is_prefilling_np = np.arange(num_reqs) >= k

    batch = InputBatch(
        req_ids=list(scheduled),
        num_reqs=num_reqs,
        num_reqs_after_padding=num_reqs_padded,
        idx_mapping=idx_mapping,
        idx_mapping_np=row_slots_np,
        expanded_idx_mapping=idx_mapping,
        expanded_local_pos=torch.zeros_like(idx_mapping),
        num_scheduled_tokens=query_lens,
        num_tokens=num_tokens,
        num_tokens_after_padding=batch_desc.num_tokens,
        num_draft_tokens=0,
        num_draft_tokens_per_req=None,
        query_start_loc=query_start_loc[: num_reqs_padded + 1],
        query_start_loc_np=query_start_loc_np[: num_reqs_padded + 1],
        seq_lens=buffers.seq_lens[:num_reqs_padded],
        seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens_upper_bound),
        dcp_local_seq_lens=None,
        num_computed_tokens_np=computed_np,
        prefill_len_np=prefill_len_np,
        num_computed_prefill_tokens_np=np.where(
            is_prefilling_np, computed_np, prefill_len_np
        ),
        is_prefilling_np=is_prefilling_np,
        max_seq_len_np=None,
        input_ids=buffers.input_ids[: batch_desc.num_tokens],
        positions=buffers.positions[: batch_desc.num_tokens],
        is_padding=buffers.is_padding[: batch_desc.num_tokens],
        logits_indices=logits_indices,
        cu_num_logits=torch.arange(num_reqs + 1, dtype=torch.int32, device=device),
        cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
        has_structured_output_reqs=False,
        prompt_lens=None,
    )
    return StepInputs(batch, rows, decode_slots_np, prefill_slots)
