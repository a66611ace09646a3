# SPDX-License-Identifier: Apache-2.0
"""A stage's model runner: vLLM's V2 runner with decode rows that stage 0 chooses.

Stage 0 absorbs the result of N steps ago, chooses and feeds rows, and drafts again.
Rows travel beside the hidden states. The last stage samples and verifies them.
"""

import dataclasses
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, post_update_num_computed_tokens
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from spexis_kernels import absorb, select_rows, store_drafts, verify
from spexis_kernels.constants import INVALID_TOKEN
from spexis_kernels.pool import RequestPool, Rows
from spexis_runtime.config import SpexisConfig
from spexis_runtime.draft_sampling import DraftSampling
from spexis_runtime.exit_head import ExitHead
from spexis_runtime.host_embedding import move_to_host
from spexis_runtime.results import (
    ROW_FIELDS,
    ResultHandler,
    SpexisOutput,
    unpack_rows,
)
from spexis_runtime.step_graphs import StepGraphs
from spexis_runtime.step_inputs import StepInputs, StepInputsBuilder
from spexis_runtime.step_plan import StepPlan, plan_step
from spexis_runtime.structured_outputs import AnonymousRowsGrammar

ROWS = "spexis_rows"
"""Key of the decode rows, [ROW_FIELDS, k] int32, among what the next stage is sent."""


class SpexisModelRunner(GPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.spexis_config = SpexisConfig.from_additional_config(
            vllm_config.additional_config
        )
        self.num_stages = get_pp_group().world_size
        self.results = ResultHandler(vars(self)["pp_handler"])
        self.pp_handler = self.results
        self.pool = RequestPool.empty(self.max_num_reqs, self.num_stages, device)
        # on the last stage: the pool's known_len after each of the last N steps
        self.known_lens: deque[np.ndarray] = deque(maxlen=self.num_stages)
        self.graphs = StepGraphs()
        # the number of rows that vLLM's graph for so many has; as many without one
        self.graph_sizes = list(range(self.max_num_reqs + 1))
        self.draft_sampling = DraftSampling(self.max_num_reqs, device)
        # of k decode rows and p chunks, the last k + p of the first max_num_reqs + p
        self.rejected = torch.zeros(2 * self.max_num_reqs, dtype=torch.int32).to(device)
        self.rejected[: self.max_num_reqs] = 1
        # fed steps that stage 0 has begun, [1] int32; and the rows of those without
        # prefill chunks, whose graphs read and write them here
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.static_rows = torch.zeros(
            ROW_FIELDS * self.max_num_reqs, dtype=torch.int32, device=device
        )
        self.plan: StepPlan
        self.inputs: StepInputs
        self.received_tensors: IntermediateTensors | None = None
        self.has_rows = False  # in this step
        self.row_block: torch.Tensor  # the decode rows, [ROW_FIELDS, k] int32

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.is_first_pp_rank:
            exit_model = self.spexis_config.exit_model
            assert exit_model is not None
            with set_default_torch_dtype(self.dtype), self.device:
                self.drafter = ExitHead(self.vllm_config, self.model, exit_model)
            self.model.register_forward_hook(self.drafter.after_model, with_kwargs=True)
            embedding = self.model.model.embed_tokens
            if self.device.type == "cuda" and self.drafter.lm_head is not embedding:
                self.host_embedding = move_to_host(embedding)
        if self.is_last_pp_rank:
            self.structured_outputs_worker = AnonymousRowsGrammar(
                lambda: self.inputs.rows.slots,
                self.req_states.req_id_to_index,
                self.max_num_reqs,
                self.device,
            )

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_kv_cache(kv_cache_config)
        self.inputs_builder = StepInputsBuilder(
            self.pool, self.input_buffers, self.req_states, self.block_tables
        )

    # ---- CUDA graphs --------------------------------------------------------------
    @torch.inference_mode()
    def capture_model(self) -> int:
        num_bytes = super().capture_model()
        manager = self.cudagraph_manager
        for n in range(1, self.max_num_reqs + 1):
            desc = manager.dispatch(n, n, uniform_token_count=1, num_active_loras=0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                self.graph_sizes[n] = desc.num_reqs
        self.graphs.capture(
            {
                ("inputs", k): partial(self.fill_decode_step, k)
                for k in self.captured_sizes()
            },
            self.device,
        )
        self.capture_drafts()
        return num_bytes

    def captured_sizes(self) -> list[int]:
        """Rows of the model's graphs for decode steps, the most first."""
        manager = self.cudagraph_manager
        descs = [] if manager is None else list(manager.graphs)
        sizes = {d.num_reqs for d in descs if d.uniform_token_count == 1}
        return sorted(sizes, reverse=True)

    def capture_drafts(self) -> None:
        """To be called again where another drafter takes the place of the first."""
        if not self.is_first_pp_rank:
            return
        self.graphs.capture(
            {
                ("draft", k, sampled): partial(self.draft_decode_step, k, sampled)
                for k in self.captured_sizes()
                for sampled in (False, True)
            },
            self.device,
        )

    def rows_of_decode_step(self, k: int) -> torch.Tensor:
        """Decode rows of a step without chunks: always in the same place."""
        return self.static_rows[: ROW_FIELDS * k].view(-1, k)

    # ---- a step -------------------------------------------------------------------
    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        if dummy_run:
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run=True, **kwargs
            )
        self.has_rows = False
        self.plan = plan_step(
            scheduler_output,
            self.req_states,
            self.spexis_config,
            self.num_stages,
            self.graph_sizes.__getitem__,
        )
        self.received_tensors = intermediate_tensors
        output = super().execute_model(
            self.plan.scheduler_output, intermediate_tensors, **kwargs
        )
        if isinstance(output, IntermediateTensors):
            output.tensors[ROWS] = self.row_block
        return output

    def update_pp_decode_requests(self) -> None:
        """Absorb the result of N steps ago; the queue counts empty steps too."""
        if self.is_last_pp_rank:
            return
        result = self.results.next_result()
        if result is not None and result.rows is not None:
            absorb(self.pool, result.rows, result.accepted)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Free slots in sorted order: slot numbers travel between the stages.

        vLLM walks a set of strings, whose order differs from process to process.
        """
        preempted = scheduler_output.preempted_req_ids or set()
        for req_id in sorted(scheduler_output.finished_req_ids | preempted):
            self._remove_request(req_id)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        if not new:
            return
        slot_of = self.req_states.req_id_to_index
        values = [
            (
                slot_of[r.req_id],
                r.num_computed_tokens,
                len(r.prefill_token_ids),
                r.prefill_token_ids[-1],
            )
            for r in new
        ]
        slots, head, known_len, last_token = async_copy_to_gpu(
            np.array(values, dtype=np.int32).T.copy(), device=self.device
        )
        pool, slots = self.pool, slots.long()
        pool.head[slots] = head
        pool.known_len[slots] = known_len
        pool.last_token[slots] = last_token
        pool.generation[slots] += 1
        pool.draft[slots] = INVALID_TOKEN
        if self.is_first_pp_rank:
            self.draft_sampling.add_requests(
                [value[0] for value in values], [r.sampling_params for r in new]
            )

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_desc: BatchExecutionDescriptor
    ) -> InputBatch:
        self.has_rows = True
        if self.is_first_pp_rank:
            self.upload_limits()
        else:
            self.row_block = self.receive_rows()
        prepare = self.mixed_step if self.plan.prefill_ends else self.decode_step
        self.inputs = prepare(batch_desc)
        return self.inputs.batch

    def upload_limits(self) -> None:
        """Stage 0: how far each request may be fed."""
        limit: np.ndarray = np.zeros(self.max_num_reqs, dtype=np.int32)
        for req_id, positions in self.plan.decode_limits.items():
            limit[self.req_states.req_id_to_index[req_id]] = positions
        async_copy_to_gpu(limit, out=self.pool.limit)

    def receive_rows(self) -> torch.Tensor:
        assert self.received_tensors is not None
        block = self.received_tensors.tensors.get(ROWS)
        if block is None:  # vLLM sends no empty tensor
            block = torch.empty(ROW_FIELDS, 0, dtype=torch.int32)
        return block.to(self.device)

    def feed(self, row_block: torch.Tensor) -> None:
        """Stage 0: choose the decode rows and advance their requests."""
        self.step.add_(1)
        rows, confidence = unpack_rows(row_block)
        select_rows(self.pool, num_rows=row_block.shape[1], step=self.step, out=rows)
        torch.index_select(
            self.pool.draft_confidence,
            0,
            rows.slots.clamp(min=0),
            out=confidence.view(torch.float32),
        )

    def decode_step(self, batch_desc: BatchExecutionDescriptor) -> StepInputs:
        """A step without prefill chunks."""
        k = self.plan.num_decode_rows
        row_block = self.rows_of_decode_step(k)
        if not self.is_first_pp_rank:
            row_block.copy_(self.row_block)
        self.graphs.run(("inputs", k), partial(self.fill_decode_step, k))
        if self.is_first_pp_rank:  # what is sent, and absorbed N steps later, must stay
            self.row_block = row_block.clone()
            self.results.rows = unpack_rows(self.row_block)[0]
        builder = self.inputs_builder
        return builder.describe(
            self.plan,
            batch_desc,
            unpack_rows(row_block)[0],
            idx_mapping=builder.idx_mapping[:k],
            logits_indices=builder.row_numbers[:k],
            prefill_slots=builder.zeros[:0],
        )

    def fill_decode_step(self, k: int) -> None:
        """The device's part of `decode_step`."""
        row_block = self.rows_of_decode_step(k)
        if self.is_first_pp_rank:
            self.feed(row_block)
        self.inputs_builder.fill_decode_step(unpack_rows(row_block)[0])

    def mixed_step(self, batch_desc: BatchExecutionDescriptor) -> StepInputs:
        """A step with prefill chunks."""
        if self.is_first_pp_rank:
            shape = ROW_FIELDS, self.plan.num_decode_rows
            self.row_block = torch.empty(shape, dtype=torch.int32, device=self.device)
            self.feed(self.row_block)
        rows, logits_indices, prefill_slots = self.inputs_builder.fill_mixed_step(
            self.plan, unpack_rows(self.row_block)[0]
        )
        if self.is_first_pp_rank:
            slots = prefill_slots.long()
            ends = np.array(list(self.plan.prefill_ends.values()), dtype=np.int32)
            self.pool.head[slots] = async_copy_to_gpu(ends, device=self.device)
            self.pool.last_fed[slots] = self.step
            self.results.rows = rows
        return self.inputs_builder.describe(
            self.plan,
            batch_desc,
            rows,
            idx_mapping=rows.slots.clamp(min=0),
            logits_indices=logits_indices,
            prefill_slots=prefill_slots,
        )

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        builder, num_tokens = self.inputs_builder, input_batch.num_tokens_after_padding
        num_reqs = input_batch.num_reqs_after_padding
        if not self.plan.prefill_ends:  # `fill_decode_step` has filled them
            return (
                self.block_tables.get_dummy_block_tables(num_reqs),
                self.block_tables.slot_mappings[:, :num_tokens],
            )
        return (
            self.block_tables.gather_block_tables(input_batch.idx_mapping, num_reqs),
            builder.fill_slot_mappings(
                unpack_rows(self.row_block)[0],
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                num_tokens,
            ),
        )

    def row_candidates(self) -> np.ndarray:
        """Slots that may sit in the step's rows, as far as the host knows."""
        chunks = self.inputs.batch.idx_mapping_np[self.plan.num_decode_rows :]
        return np.concatenate((self.inputs.decode_slots_np, chunks))

    def draft(self) -> None:
        """Stage 0, once its output is on its way: draft the token after each row."""
        sampled = self.draft_sampling.any_sampled(self.row_candidates())
        if self.plan.prefill_ends:
            self.draft_after(
                self.inputs.rows, self.inputs.batch.logits_indices, sampled
            )
        else:
            k = self.plan.num_decode_rows
            self.graphs.run(
                ("draft", k, sampled), partial(self.draft_decode_step, k, sampled)
            )

    def draft_decode_step(self, k: int, sampled: bool) -> None:
        rows = unpack_rows(self.rows_of_decode_step(k))[0]
        self.draft_after(rows, self.inputs_builder.row_numbers[:k], sampled)

    def draft_after(
        self, rows: Rows, logits_indices: torch.Tensor, sampled: bool
    ) -> None:
        sampling = self.draft_sampling.of_rows(rows) if sampled else {}
        drafts = self.drafter.propose(logits_indices, rows, sampling)
        store_drafts(self.pool, rows, drafts.tokens, drafts.confidence)

    # ---- last stage ---------------------------------------------------------------
    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample every row and keep what the valid ones yield.

        The sampler's per-row host fields are "any over the batch": it gets all requests
        that may sit in a row.
        """
        inputs, k = self.inputs, self.plan.num_decode_rows
        candidates = self.row_candidates()
        batch = dataclasses.replace(input_batch, idx_mapping_np=candidates)
        output, _, _ = super().sample(hidden_states, batch, grammar_output)
        sampled = output.sampled_token_ids[:, 0]
        self.results.accepted = verify(self.pool, inputs.rows, sampled)
        output.num_sampled = (self.results.accepted != INVALID_TOKEN).int()
        # so that vLLM's count of computed tokens moves by prefill chunks alone
        first = self.max_num_reqs - k
        output.num_rejected = self.rejected[first : first + len(sampled)]
        return output, output.num_sampled, output.num_rejected

    def postprocess_sampled(
        self, idx_mapping: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        # with PAD_SLOT_ID for padding rows, which vLLM's kernel skips
        super().postprocess_sampled(self.inputs.rows.slots, *args, **kwargs)

    def postprocess_num_computed_tokens(self, input_batch: InputBatch) -> None:
        k, prefill_slots = self.plan.num_decode_rows, self.inputs.prefill_slots
        if len(prefill_slots):
            post_update_num_computed_tokens(
                prefill_slots,
                self.req_states.num_computed_tokens.gpu,
                input_batch.query_start_loc[k:],
            )

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        if not isinstance(output, AsyncOutput):
            return output
        slot_of = self.req_states.req_id_to_index
        return SpexisOutput(
            output,
            self.row_block,
            self.pool.known_len,
            {slot_of[i]: i for i in self.plan.decode_limits},
            self.known_lens,
        )

    # ---- tests and idle checks ----------------------------------------------------
    def check_integrity(self) -> dict[str, Any]:
        """Raise AssertionError if the state is broken; return what all stages share."""
        states = self.req_states
        used = set(states.req_id_to_index.values())
        assert used.isdisjoint(states.free_indices), "a slot is both used and free"
        assert len(used) + len(states.free_indices) == self.max_num_reqs, "slot leaked"
        return {
            "slots": dict(states.req_id_to_index),
            "free": list(states.free_indices),
        }
