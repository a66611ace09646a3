# SPDX-License-Identifier: Apache-2.0
"""Sizes at their edges: one request at a time, blocks of 32 and 64, 32,768 tokens."""

import random
from typing import Any, NamedTuple

import pytest
import worker_probes
from conftest import shut_down
from driver import Request, differing, run
from models import VOCAB_SIZE, make_adapter, make_model, make_requests
from vllm import SamplingParams

LONGEST = 32768
LONG_SETTINGS = dict(max_model_len=LONGEST, max_num_batched_tokens=512)


class Setup(NamedTuple):
    name: str
    options: dict[str, Any]
    requests: slice  # of all


ONE_REQUEST = Setup(
    "one request at a time", dict(max_num_seqs=1, block_size=32), slice(6)
)
LONG = Setup("long contexts", LONG_SETTINGS | dict(block_size=64), slice(None))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        "llama",
        tmp_path_factory.mktemp("models"),
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
    )


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Short ones, then one that reaches `LONGEST` while others decode beside it."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(LONGEST - 40)]
    greedy = SamplingParams(
        temperature=0, max_tokens=None, ignore_eos=True, detokenize=False
    )
    return [*make_requests(8), (prompt, greedy)]


@pytest.fixture(scope="module")
def expected(start, model, requests) -> dict[int, list[int]]:
    plain = start(model, skip_tokenizer_init=True, **LONG_SETTINGS)
    outputs = run(plain, requests).outputs
    shut_down(plain)
    return outputs


@pytest.mark.works(
    "max_num_seqs=1",
    "blocks of 32 and 64 tokens (16 elsewhere)",
    "contexts of 32,768 tokens",
    stages=[2],
)
@pytest.mark.parametrize("setup", [ONE_REQUEST, LONG], ids=lambda setup: setup.name)
def test_tokens_equal_plain(start, model, requests, expected, setup, tmp_path):
    llm = start(
        model,
        exit_model=make_adapter(model, 1, tmp_path),
        pipeline_parallel_size=2,
        skip_tokenizer_init=True,
        **setup.options,
    )
    records = [(prompt, expected[i]) for i, (prompt, _) in enumerate(requests)]
    llm.collective_rpc(worker_probes.stub_drafts, args=(records, 0.7))
    llm.collective_rpc(worker_probes.poison_new_blocks)
    chosen = requests[setup.requests]
    result = run(llm, chosen, staggered=True)
    assert differing(result, {i: expected[i] for i in range(len(chosen))}) == []
    assert result.total("accepted_drafts") > 20
    if setup is LONG:
        prompt, _ = requests[-1]
        assert len(prompt) + len(result.outputs[len(requests) - 1]) == LONGEST
    llm.collective_rpc("check_integrity")
    shut_down(llm)
