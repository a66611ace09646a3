# SPDX-License-Identifier: Apache-2.0
"""The greedy head in stock vLLM: its tokens, its logits, what it refuses; in fp32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from conftest import shut_down
from features import FEATURES, answers, check_equal, feature_requests
from models import make_model, make_requests
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)

MAX_MODEL_LEN = 256
WORKER = "spexis_runtime.greedy_head.GreedyHeadWorker"
OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=64 << 20,
    skip_tokenizer_init=True,
)
# whose rows need logits: sampled, or changed before the greatest is taken
WITH_LOGITS = {
    *("temperature", "top_k", "top_p", "min_p", "n"),
    *("logprobs", "logprobs of sampled tokens", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "min_tokens"),
    *("end of sequence", "ignore_eos"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("qwen2", tmp_path_factory.mktemp("models"))  # tied


@pytest.fixture(scope="module")
def expected(model):
    plain = vllm.LLM(str(model), **OPTIONS)
    features = answers(plain, feature_requests(MAX_MODEL_LEN))
    mixed = answers(plain, make_requests())
    shut_down(plain)
    return features, mixed


@pytest.fixture(scope="module")
def llm(model, expected):
    llm = vllm.LLM(str(model), worker_cls=WORKER, **OPTIONS)
    llm.collective_rpc(watch)
    yield llm
    shut_down(llm)


def watch(worker: Any) -> None:
    """Count rows of logits."""
    runner = worker.model_runner
    compute_logits, runner.rows_of_logits = runner.model.compute_logits, 0

    def counted(hidden_states: torch.Tensor) -> torch.Tensor:
        runner.rows_of_logits += len(hidden_states)
        return compute_logits(hidden_states)

    runner.model.compute_logits = counted


def interpret(worker: Any) -> None:
    """Sample with the kernel, in Triton's interpreter."""
    from spexis_kernels.dispatch import interpreted_kernels

    sample = worker.model_runner.sample

    def interpreted(*args: Any) -> Any:
        with interpreted_kernels():
            return sample(*args)

    worker.model_runner.sample = interpreted


def rows_of_logits(worker: Any) -> int:
    return worker.model_runner.rows_of_logits


def logits(llm: Any) -> int:
    [rows] = llm.collective_rpc(rows_of_logits)
    return rows


@pytest.mark.parametrize("name", FEATURES)
def test_each_request_alone(llm, expected, name):
    """Its tokens, and whether it had logits at all."""
    number = list(FEATURES).index(name)
    before = logits(llm)
    [got] = answers(llm, [feature_requests(MAX_MODEL_LEN)[number]])
    check_equal(got, expected[0][number])
    assert (logits(llm) > before) == (name in WITH_LOGITS)


def test_requests_of_all_kinds_in_one_step(llm, expected):
    """Logits are of the others' rows only. The head is the kernel here."""
    llm.collective_rpc(interpret)
    requests = feature_requests(MAX_MODEL_LEN)
    before = logits(llm)
    for got, want in zip(answers(llm, requests), expected[0], strict=True):
        check_equal(got, want)
    others = sum(
        len(output.token_ids)
        for name, answer in zip(FEATURES, expected[0], strict=True)
        for output in answer.outputs
        if name in WITH_LOGITS
    )
    prompts = sum(len(prompt) for prompt, _ in requests)
    assert others <= logits(llm) - before < others + prompts
    for got, want in zip(answers(llm, make_requests()), expected[1], strict=True):
        check_equal(got, want)


def test_stages_of_two_ranks(start, model, expected):
    """A vocabulary in shards, on the last of two stages."""
    options = {name: OPTIONS[name] for name in ("max_model_len", "skip_tokenizer_init")}
    llm = start(
        model,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        worker_cls=WORKER,
        **options,
    )
    llm.collective_rpc(watch)
    for got, want in zip(answers(llm, make_requests()), expected[1], strict=True):
        check_equal(got, want)
    before = llm.collective_rpc(rows_of_logits)
    number = list(FEATURES).index("greedy")
    [got] = answers(llm, [feature_requests(MAX_MODEL_LEN)[number]])
    check_equal(got, expected[0][number])
    assert llm.collective_rpc(rows_of_logits) == before
    assert before[-1] > 0


class Broken:
    """A configuration that fits, but for what a test changes."""

    def __init__(self, **changes: Any):
        model = dict(
            architecture="LlamaForCausalLM",
            dtype=torch.bfloat16,
            head_dtype=torch.bfloat16,
        )
        self.model_config = SimpleNamespace(**model | changes)
        self.use_v2_model_runner = changes.get("v2", True)
        self.speculative_config = changes.get("speculative_config")
        self.lora_config = changes.get("lora_config")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "Gemma2ForCausalLM"}, "this model is a Gemma2ForCausalLM"),
        ({"v2": False}, "needs vLLM's V2 model runner"),
        ({"speculative_config": object()}, "cannot go with speculative_config"),
        ({"lora_config": object()}, "cannot go with LoRA"),
        ({"head_dtype": torch.float32}, "torch.bfloat16, got torch.float32"),
    ],
)
def test_settings_that_are_refused(changes, reason):
    from spexis_runtime.greedy_head import GreedyHeadError, check_config

    check_config(Broken())
    with pytest.raises(GreedyHeadError, match=reason):
        check_config(Broken(**changes))


def test_no_counting_of_nans(monkeypatch):
    from spexis_runtime.greedy_head import GreedyHeadError, check_config

    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    with pytest.raises(GreedyHeadError, match="there are no logits"):
        check_config(Broken())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": object()}, "not quantised, got object"),
        ({"scale": -1.0}, "got -1.0 and None"),
        ({"soft_cap": 30.0}, "got 1.0 and 30.0"),
    ],
)
def test_models_that_are_refused(changes, reason):
    from spexis_runtime.greedy_head import GreedyHeadError, check_model

    fits = dict(method=UnquantizedEmbeddingMethod(), scale=1.0, soft_cap=None)

    def model(method: Any, **processor: Any) -> Any:
        head = SimpleNamespace(quant_method=method)
        return SimpleNamespace(
            lm_head=head, logits_processor=SimpleNamespace(**processor)
        )

    check_model(model(**fits))
    with pytest.raises(GreedyHeadError, match=reason):
        check_model(model(**fits | changes))
