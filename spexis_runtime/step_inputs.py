# SPDX-License-Identifier: Apache-2.0
"""Build a step's `InputBatch` from decode rows on the device and prefill chunks.

Takes the place of the V2 runner's `prepare_inputs`, which takes each row's request from
the host. Layout of rows and tokens: `step_plan`.
"""

from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.block_table import BlockTables
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


class StepInputsBuilder:
    """Fills the runner's buffers for each step.

    Args:
        pool: only `generation` is read.
        buffers, req_states, block_tables: the runner's own.
    """

    def __init__(
        self,
        pool: RequestPool,
        buffers: InputBuffers,
        req_states: RequestState,
        block_tables: BlockTables,
    ):
        self.pool = pool
        self.buffers = buffers
        self.req_states = req_states
        self.block_tables = block_tables
        device, most = buffers.device, buffers.max_num_reqs
        # contents that never change
        self.counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.row_numbers = torch.arange(most, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(most, dtype=torch.int32, device=device)
        # of a step without chunks, the slot in each row
        self.idx_mapping = torch.zeros(most, dtype=torch.int32, device=device)

    # ---- on the device ------------------------------------------------------------
    def fill_decode_step(self, rows: Rows) -> None:
        """All of a step without chunks, into buffers that stay, block tables included.

        Args:
            rows: [k] int32 each, as `select_rows` chose them on stage 0.
        """
        buffers, k = self.buffers, len(rows.slots)
        idx_mapping = self.idx_mapping[:k]
        self._fill_decode_rows(rows)
        torch.clamp(self.counting, max=k, out=buffers.query_start_loc)
        buffers.seq_lens[k:].zero_()
        # padding rows must load from a slot that exists
        torch.clamp(rows.slots, min=0, out=idx_mapping)
        self.block_tables.gather_block_tables(idx_mapping, num_reqs_padded=k)
        self.fill_slot_mappings(rows, idx_mapping, buffers.query_start_loc[: k + 1], k)

    def fill_slot_mappings(
        self,
        decode_rows: Rows,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_tokens_padded: int,
    ) -> torch.Tensor:
        """vLLM's, with PAD_SLOT_ID for rows that are padding."""
        slot_mappings = self.block_tables.compute_slot_mappings(
            idx_mapping, query_start_loc, self.buffers.positions, num_tokens_padded
        )
        padding = decode_rows.slots == PAD_SLOT_ID
        slot_mappings[:, : len(padding)].masked_fill_(padding, PAD_SLOT_ID)
        return slot_mappings

    def fill_mixed_step(
        self, plan: StepPlan, decode_rows: Rows
    ) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """The rows, slots and lengths of a step that has prefill chunks.

        Returns the step's [k + p] rows, the index of the last token of each among the
        step's tokens, [k + p] int64, and the slots of the chunks, [p] int32.
        """
        buffers, slot_of = self.buffers, self.req_states.req_id_to_index
        scheduled = plan.scheduler_output.num_scheduled_tokens.values()
        num_reqs = len(scheduled)
        ends = np.full(buffers.max_num_reqs + 1, sum(scheduled), dtype=np.int32)
        ends[0] = 0
        np.cumsum(list(scheduled), out=ends[1 : num_reqs + 1])
        async_copy_to_gpu(ends, out=buffers.query_start_loc)
        prefill_slots = async_copy_to_gpu(
            np.array([slot_of[i] for i in plan.prefill_ends], dtype=np.int32),
            device=buffers.device,
        )
        self._fill_decode_rows(decode_rows)
        self._fill_chunks(plan.num_decode_rows, prefill_slots)
        logits_indices = buffers.query_start_loc[1 : num_reqs + 1].long() - 1
        rows = self._with_chunks(decode_rows, prefill_slots, logits_indices)
        return rows, logits_indices, prefill_slots

    def _fill_decode_rows(self, rows: Rows) -> None:
        """Token, position and length of a decode row travel with it."""
        buffers, k = self.buffers, len(rows.slots)
        torch.clamp(rows.tokens, min=0, out=buffers.input_ids[:k])
        buffers.positions[:k] = rows.positions
        torch.add(rows.positions, 1, out=buffers.seq_lens[:k])
        buffers.seq_lens[:k].masked_fill_(rows.slots == PAD_SLOT_ID, 0)

    def _fill_chunks(self, k: int, prefill_slots: torch.Tensor) -> None:
        """Prefill chunks: from the prompt, by vLLM's kernels on the batch's tail."""
        buffers, states = self.buffers, self.req_states
        prepare_prefill_inputs(
            buffers.input_ids,
            states.next_prefill_tokens,
            prefill_slots,
            buffers.query_start_loc[k:],
            states.all_token_ids.gpu,
            states.prefill_len.gpu,
            states.num_computed_tokens.gpu,
        )
        prepare_pos_seq_lens(
            prefill_slots,
            buffers.query_start_loc[k:],
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens[k:],
        )

    def _with_chunks(
        self, rows: Rows, prefill_slots: torch.Tensor, logits_indices: torch.Tensor
    ) -> Rows:
        """The decode rows and then a row for the last token of each chunk."""
        generations = self.pool.generation[prefill_slots.long()]
        kinds = torch.full_like(prefill_slots, PREFILL)
        return Rows(
            slots=torch.cat((rows.slots, prefill_slots)),
            generations=torch.cat((rows.generations, generations)),
            positions=self.buffers.positions[logits_indices].int(),
            tokens=self.buffers.input_ids[logits_indices],
            kinds=torch.cat((rows.kinds, kinds)),
        )

    # ---- on the host --------------------------------------------------------------
    def describe(
        self,
        plan: StepPlan,
        batch_desc: BatchExecutionDescriptor,
        rows: Rows,
        idx_mapping: torch.Tensor,
        logits_indices: torch.Tensor,
        prefill_slots: torch.Tensor,
    ) -> StepInputs:
        """What the host knows of a step whose buffers are filled, as vLLM wants it.

        A decode row's request is unknown to it: any of the candidates stands for it,
        with the largest bounds among them.
        """
        buffers, slot_of = self.buffers, self.req_states.req_id_to_index
        k, chunks = plan.num_decode_rows, plan.prefill_ends
        scheduled = plan.scheduler_output.num_scheduled_tokens
        num_reqs, num_tokens = len(scheduled), sum(scheduled.values())
        num_reqs_padded = batch_desc.num_reqs or num_reqs

        query_lens = np.fromiter(scheduled.values(), dtype=np.int32, count=num_reqs)
        query_start_loc_np: np.ndarray = np.full(
            num_reqs_padded + 1, num_tokens, dtype=np.int32
        )
        query_start_loc_np[0] = 0
        np.cumsum(query_lens, out=query_start_loc_np[1 : num_reqs + 1])
        decode_slots_np = np.array(
            [slot_of[i] for i in plan.decode_limits], dtype=np.int32
        )
        prefill_slots_np = np.array([slot_of[i] for i in chunks], dtype=np.int32)
        row_slots_np = np.concatenate((np.resize(decode_slots_np, k), prefill_slots_np))
        longest = max(plan.decode_limits.values(), default=0)
        ends = np.array([longest] * k + list(chunks.values()), dtype=np.int32)
        seq_lens_upper_bound: np.ndarray = np.zeros(num_reqs_padded, dtype=np.int32)
        seq_lens_upper_bound[:num_reqs] = ends
        computed_np = ends - query_lens
        prefill_len_np = self.req_states.prefill_len.np[row_slots_np]
        is_prefilling_np = np.arange(num_reqs) >= k

        batch = InputBatch(
            req_ids=list(scheduled),
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs_padded,
            idx_mapping=idx_mapping,
            idx_mapping_np=row_slots_np,
            expanded_idx_mapping=idx_mapping,
            expanded_local_pos=self.zeros[:num_reqs],
            num_scheduled_tokens=query_lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=batch_desc.num_tokens,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=buffers.query_start_loc[: num_reqs_padded + 1],
            query_start_loc_np=query_start_loc_np,
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
            cu_num_logits=self.counting[: num_reqs + 1],
            cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
            has_structured_output_reqs=False,
            prompt_lens=None,
        )
        return StepInputs(batch, rows, decode_slots_np, prefill_slots)
