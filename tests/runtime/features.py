# SPDX-License-Identifier: Apache-2.0
"""Requests that use one feature of vLLM each, for models without a tokenizer."""

import random
from typing import Any

import pytest
from models import VOCAB_SIZE
from tolerances import LOGPROBS
from vllm import SamplingParams

EOS = 2
OFTEN = list(range(3, 60))  # one of these tokens comes up every 20 tokens or so
SAMPLED: dict[str, Any] = dict(temperature=0.8, seed=11)

# name -> SamplingParams; greedy where nothing else is said
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": SAMPLED,
    "top_k": SAMPLED | dict(top_k=12),
    "top_p": SAMPLED | dict(top_p=0.6),
    "min_p": SAMPLED | dict(min_p=0.1),
    "n": SAMPLED | dict(n=3),
    "logprobs": dict(logprobs=3),
    "logprobs of sampled tokens": SAMPLED | dict(logprobs=2),
    "prompt_logprobs": dict(prompt_logprobs=2),
    "presence_penalty": dict(presence_penalty=1.5),
    "frequency_penalty": dict(frequency_penalty=1.2),
    "repetition_penalty": dict(repetition_penalty=1.6),
    "logit_bias": dict(logit_bias={7: 6.0, 8: 6.0, 9: -100.0}),
    "allowed_token_ids": dict(allowed_token_ids=[5, 6, 7, 8, 300, 301, 302]),
    "stop_token_ids": dict(stop_token_ids=OFTEN),
    "min_tokens": dict(stop_token_ids=OFTEN, min_tokens=12),
    "end of sequence": dict(logit_bias={EOS: 9.0}, ignore_eos=False),
    "ignore_eos": dict(logit_bias={EOS: 9.0}, ignore_eos=True),
    "max_tokens=1": dict(max_tokens=1),
    "prompt of one token": {},
    "max_model_len": dict(max_tokens=None),
}


def feature_requests(max_model_len: int) -> list[tuple[list[int], SamplingParams]]:
    """A request a feature, in their order, each with a prompt of its own."""
    rng = random.Random(5)
    requests = []
    for i, (name, options) in enumerate(FEATURES.items()):
        length = 1 if name == "prompt of one token" else rng.randint(4, 30)
        if name == "max_model_len":  # reached with rows in flight
            length = max_model_len - 25
        prompt = [100 + i, *(rng.randrange(3, VOCAB_SIZE) for _ in range(length - 1))]
        defaults = dict(temperature=0.0, max_tokens=28, ignore_eos=True)
        params = SamplingParams(detokenize=False, **(defaults | options))
        requests.append((prompt, params))
    return requests


def answers(llm: Any, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """What a user gets for each request."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [params for _, params in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def check_equal(got: Any, want: Any) -> None:
    """Same tokens and reasons; logprobs within what a batch's shape changes."""
    assert len(got.outputs) == len(want.outputs)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        _check_logprobs(a.logprobs, b.logprobs)
    _check_logprobs(got.prompt_logprobs, want.prompt_logprobs)


def _check_logprobs(got: Any, want: Any) -> None:
    assert (got is None) == (want is None)
    for a, b in zip(got or (), want or (), strict=True):
        assert (a is None) == (b is None)
        if b is None:  # the first token of a prompt has none
            continue
        assert a.keys() == b.keys()
        for token, value in b.items():
            assert a[token].rank == value.rank
            assert a[token].logprob == pytest.approx(
                value.logprob, abs=LOGPROBS["atol"], rel=LOGPROBS["rtol"]
            )
