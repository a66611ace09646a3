# SPDX-License-Identifier: Apache-2.0
"""`draft_head` as the sampler of plain greedy requests, in stock vLLM.

    vllm serve MODEL --worker-cls spexis_runtime.greedy_head.GreedyHeadWorker

A greedy request that wants no logprobs, and whose logits nothing changes, needs the
greatest logit's token alone: `draft_head` finds it without logits in memory. Other
requests of the same step take vLLM's own way, with logits of their rows only.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu_worker import Worker

from spexis_runtime import patches
from spexis_runtime.engine_options import SUPPORTED_ARCHITECTURES
from spexis_runtime.vocab_parallel import vocab_parallel_draft_head


class GreedyHeadError(ValueError):
    """A model or a setting whose tokens `draft_head` alone does not give."""


def check_config(config: VllmConfig) -> None:
    """Raise GreedyHeadError if the settings leave `draft_head` no place."""
    model = config.model_config
    for wrong, what in (
        (
            model.architecture not in SUPPORTED_ARCHITECTURES,
            f"knows the logits of {', '.join(SUPPORTED_ARCHITECTURES)}; this model is "
            f"a {model.architecture}",
        ),
        (
            not config.use_v2_model_runner,
            "needs vLLM's V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER, and see "
            "vLLM's log for why it would not take it",
        ),
        (
            config.speculative_config is not None,
            "cannot go with speculative_config, which samples several tokens a step",
        ),
        (config.lora_config is not None, "cannot go with LoRA, whose heads differ"),
        (
            envs.VLLM_COMPUTE_NANS_IN_LOGITS,
            "cannot go with VLLM_COMPUTE_NANS_IN_LOGITS: there are no logits",
        ),
        (
            model.head_dtype != model.dtype,
            f"needs an LM head of the model's dtype {model.dtype}, got "
            f"{model.head_dtype}",
        ),
    ):
        if wrong:
            raise GreedyHeadError(f"the greedy head {what}")


def check_model(model: torch.nn.Module) -> None:
    """Raise GreedyHeadError if its logits are more than `hidden @ lm_head.T`."""
    method, processor = model.lm_head.quant_method, model.logits_processor
    if type(method) is not UnquantizedEmbeddingMethod:
        raise GreedyHeadError(
            f"the greedy head needs an LM head that is not quantised, got "
            f"{type(method).__name__}"
        )
    if processor.scale <= 0 or processor.soft_cap is not None:
        raise GreedyHeadError(
            "the greedy head needs logits with a positive scale and no soft cap, got "
            f"{processor.scale} and {processor.soft_cap}"
        )


def plain_greedy(
    sampler: Sampler, slots: np.ndarray, req_ids: list[str], grammar_req_ids: list[str]
) -> np.ndarray:
    """Which rows need the greatest logit's token and nothing else, [rows] bool.

    Args:
        slots: [rows], of each row's request in `sampler`.
        grammar_req_ids: requests whose grammar masks logits in this step.
    """
    states = sampler.sampling_states
    masked = set(grammar_req_ids)
    return (
        (states.temperature.np[slots] == 0)
        & (states.num_logprobs[slots] == NO_LOGPROBS)
        & (sampler.logprob_token_ids_state.num_token_ids.np[slots] == 0)
        & (sampler.bad_words_state.num_bad_words.np[slots] == 0)
        & ~sampler.penalties_state.use_penalty[slots]
        & ~sampler.logit_bias_state.use_logit_bias[slots]
        & np.array([req_id not in masked for req_id in req_ids], dtype=bool)
    )


def rows_of(batch: InputBatch, rows: np.ndarray, device: torch.device) -> InputBatch:
    """What the sampler looks at, of some of the batch's requests.

    Args:
        rows: [n] int, of a batch with one row to sample a request.
    """
    index = async_copy_to_gpu(rows, device=device)
    return dataclasses.replace(
        batch,
        req_ids=[batch.req_ids[row] for row in rows],
        num_reqs=len(rows),
        idx_mapping=batch.idx_mapping[index],
        idx_mapping_np=batch.idx_mapping_np[rows],
        expanded_idx_mapping=batch.expanded_idx_mapping[index],
        expanded_local_pos=batch.expanded_local_pos[index],
        seq_lens=batch.seq_lens[index],
        logits_indices=batch.logits_indices[index],
        cu_num_logits=batch.cu_num_logits[: len(rows) + 1],
        cu_num_logits_np=batch.cu_num_logits_np[: len(rows) + 1],
    )


def spread(
    of_rows: LogprobsTensors | None, index: torch.Tensor, num_rows: int
) -> LogprobsTensors | None:
    """Put the logprobs of some rows at their places; nobody looks at the others'."""
    if of_rows is None:
        return None
    tensors = (
        of_rows.logprob_token_ids,
        of_rows.logprobs,
        of_rows.selected_token_ranks,
    )
    return LogprobsTensors(
        *(
            tensor.new_zeros(num_rows, *tensor.shape[1:]).index_copy_(0, index, tensor)
            for tensor in tensors
        )
    )


class GreedyHeadRunner:
    """Mixin over vLLM's V2 model runner."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.is_last_pp_rank:
            check_model(self.model)

    def sample(
        self: Any,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """As vLLM's, of the last stage's `hidden_states`, [num_tokens, hidden_size]."""
        grammar = grammar_output and grammar_output.structured_output_request_ids
        plain = plain_greedy(
            self.sampler, input_batch.idx_mapping_np, input_batch.req_ids, grammar or []
        )
        if not plain.any():
            return super().sample(  # type: ignore[misc]
                hidden_states, input_batch, grammar_output
            )
        num_rows = input_batch.num_reqs
        logprobs = None
        if plain.all():
            tokens = self.greatest(hidden_states, input_batch)
        else:
            batches = [
                rows_of(input_batch, np.flatnonzero(mask), self.device)
                for mask in (plain, ~plain)
            ]
            others, _, _ = super().sample(  # type: ignore[misc]
                hidden_states, batches[1], grammar_output
            )
            order = np.argsort(~plain, kind="stable")  # plain ones first
            index = async_copy_to_gpu(order, device=self.device)
            tokens = torch.empty(num_rows, dtype=torch.int64, device=self.device)
            found = self.greatest(hidden_states, batches[0])
            tokens[index] = torch.cat((found, others.sampled_token_ids[:, 0]))
            logprobs = spread(others.logprobs_tensors, index[len(found) :], num_rows)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(num_rows),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def greatest(
        self: Any, hidden_states: torch.Tensor, batch: InputBatch
    ) -> torch.Tensor:
        """The token of the greatest logit, the lowest of equal ones; [rows] int64."""
        rows = hidden_states[batch.logits_indices]
        return vocab_parallel_draft_head(rows, self.model.lm_head).token.long()


class GreedyHeadGPUModelRunner(GreedyHeadRunner, GPUModelRunner):
    """vLLM's runner with the greedy head."""


class WithGreedyHead:
    """Mixin over a vLLM worker class that builds `model_runner_cls` as its runner."""

    model_runner_cls: type = GreedyHeadGPUModelRunner
    replaced_runner = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")

    def init_device(self) -> None:
        check_config(self.vllm_config)  # type: ignore[attr-defined]
        with patches.model_runner_class(*self.replaced_runner, self.model_runner_cls):
            super().init_device()  # type: ignore[misc]


class GreedyHeadWorker(WithGreedyHead, Worker):
    """vLLM's worker on a GPU, for its option `worker_cls`."""
