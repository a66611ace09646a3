# SPDX-License-Identifier: Apache-2.0
"""Two ways to let the target write: vLLM where it has a GPU, or plain transformers.

Both draw sampled tokens with the noise of `spexis_kernels.gumbel`, seeded by (request,
position), so that drafts can share it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from spexis_kernels.gumbel import gumbel_noise_reference
from spexis_runtime.train.target import Target, load_target
from spexis_runtime.train.texts import Labels

MAX_ROWS = 4096  # bounds the memory for logits
NOISE_ROWS = 64
CPU_KV_BYTES = 1 << 30
VLLM_MAX_NUM_SEQS = 512  # the most rows that its CUDA graphs hold


class Request(NamedTuple):
    ids: list[int]
    temperature: float  # 0: greedy
    seed: int


class Answer(NamedTuple):
    ids: list[int]  # with the end token, if it came to one
    labels: Labels | None


class Engine(Protocol):
    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, top_logits: int
    ) -> list[Answer]:
        """The target's answers; with the best `top_logits` at each token, if any."""
        ...

    def close(self) -> None:
        """Give the memory back; it cannot generate afterwards."""
        ...


class VllmEngine:
    """`options` are those of vllm.LLM."""

    def __init__(self, path: str, max_model_len: int, top_logits: int, **options: Any):
        # the runner whose sampler has this noise
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        # asking torch for GPUs has made this process unfit to be forked
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
        from vllm import LLM

        defaults: dict[str, Any] = dict(
            max_model_len=max_model_len,
            max_num_seqs=VLLM_MAX_NUM_SEQS,
            max_logprobs=max(top_logits, 1),
            enable_prefix_caching=False,
        )
        self.llm = LLM(path, **(defaults | options))

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, top_logits: int
    ) -> list[Answer]:
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": r.ids} for r in requests],
            [
                SamplingParams(
                    temperature=r.temperature,
                    seed=r.seed,
                    max_tokens=max_new_tokens,
                    logprobs=top_logits or None,
                    detokenize=False,
                )
                for r in requests
            ],
        )
        answers = []
        for output in outputs:
            (one,) = output.outputs
            labels = None
            if top_logits:
                # vLLM adds the token itself where it is not among the best
                best = [
                    sorted(at.items(), key=lambda item: -item[1].logprob)[:top_logits]
                    for at in one.logprobs
                ]
                labels = Labels(
                    torch.tensor([[t for t, _ in at] for at in best]).int(),
                    torch.tensor([[x.logprob for _, x in at] for at in best]).half(),
                )
            answers.append(Answer(list(one.token_ids), labels))
        return answers

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class SharedNoise(LogitsProcessor):
    """Makes greedy decoding sample: the argmax of logits / T + noise."""

    def __init__(self, requests: Sequence[Request], width: int, device: torch.device):
        self.temperature = torch.tensor(
            [r.temperature for r in requests], device=device
        )
        self.seed = torch.tensor([r.seed for r in requests], device=device)
        # of a row's first token; prompts are padded on the left to `width`
        self.start = torch.tensor([width - len(r.ids) for r in requests], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - 1 - self.start
        token = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.float()
        for rows in self.temperature.nonzero()[:, 0].split(NOISE_ROWS):
            noise = gumbel_noise_reference(
                self.seed[rows, None], position[rows, None], token
            )
            scores[rows] = scores[rows] / self.temperature[rows, None] + noise
        return scores


class TransformersEngine:
    def __init__(self, target: Target):
        self.target = target

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, top_logits: int
    ) -> list[Answer]:
        """Rows of like length share a batch."""
        order = sorted(
            range(len(requests)), key=lambda i: len(requests[i].ids), reverse=True
        )
        budget = _kv_budget(self.target)
        answers: dict[int, Answer] = {}
        while order:
            longest = len(requests[order[0]].ids) + max_new_tokens
            rows = min(MAX_ROWS, max(1, budget // longest))
            batch, order = order[:rows], order[rows:]
            of_batch = [requests[i] for i in batch]
            ids = self._generate_batch(of_batch, max_new_tokens)
            answers |= {
                i: Answer(own, self._labels(requests[i].ids, own, top_logits))
                for i, own in zip(batch, ids, strict=True)
            }
        return [answers[i] for i in range(len(requests))]

    def close(self) -> None:
        del self.target
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _generate_batch(
        self, batch: Sequence[Request], max_new_tokens: int
    ) -> list[list[int]]:
        device = self.target.device
        width = max(len(request.ids) for request in batch)
        ends = self.target.ends
        pad = min(ends, default=0)
        rows = [[pad] * (width - len(r.ids)) + r.ids for r in batch]
        mask = [[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in batch]
        output = self.target.model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
            repetition_penalty=1.0,
            do_sample=False,
            logits_processor=LogitsProcessorList([SharedNoise(batch, width, device)]),
        )
        responses = []
        for response in output[:, width:].tolist():
            length = next((i + 1 for i, t in enumerate(response) if t in ends), None)
            responses.append(response[:length])
        return responses

    @torch.inference_mode()
    def _labels(
        self, prompt: list[int], response: list[int], top_logits: int
    ) -> Labels | None:
        if not top_logits:
            return None
        ids = torch.tensor([prompt + response], device=self.target.device)
        out = self.target.model(input_ids=ids, logits_to_keep=len(response) + 1)
        logprobs = out.logits[0, :-1].float().log_softmax(-1)
        best = logprobs.topk(min(top_logits, logprobs.shape[-1]))
        return Labels(best.indices.int().cpu(), best.values.half().cpu())


def make_engine(
    path: str, max_model_len: int, top_logits: int, **options: Any
) -> Engine:
    """vLLM, with `options` of vllm.LLM, where there is a GPU; else transformers."""
    if torch.cuda.is_available():
        try:
            return VllmEngine(path, max_model_len, top_logits, **options)
        except ImportError:
            pass
    return TransformersEngine(load_target(path))


def _kv_budget(target: Target) -> int:
    """Tokens whose KV a batch may hold: a quarter of the GPU's free memory."""
    config = target.model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    free = CPU_KV_BYTES
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(target.device)[0] // 4
    return free // (per_token * target.model.dtype.itemsize)
