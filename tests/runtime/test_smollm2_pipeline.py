# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M over two stages with its shipped adapter: a real model, real text."""

import pytest
from conftest import shut_down
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from spexis_runtime.demo import ADAPTER
from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.iteration_log import acceptance, read_iterations
from spexis_runtime.tools.smollm2 import ensure_smollm2

CHATS = [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS[:6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),  # some end by EOS
    # stop strings that span tokens: a space begins the next one
    SamplingParams(temperature=0, max_tokens=48, stop=["e "]),
    SamplingParams(temperature=0, max_tokens=48, stop=["the "], min_tokens=8),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.3),
]
GREETINGS = [
    [{"role": "user", "content": text}]
    for text in ("Say yes.", "What is 2 + 2?", "Name one fruit.", "Hello!")
]


def answers(llm) -> list:
    outputs = [*llm.chat(CHATS, PARAMS, use_tqdm=False)]
    outputs += llm.chat(GREETINGS, PARAMS[0], use_tqdm=False)
    return [
        (
            list(o.outputs[0].token_ids),
            o.outputs[0].text,
            o.outputs[0].finish_reason,
        )
        for o in outputs
    ]


OPTIONS = dict(pipeline_parallel_size=2, max_model_len=512, max_num_seqs=4)


@pytest.fixture(scope="module")
def expected(start) -> list:
    """The answers of plain vLLM."""
    plain = start(ensure_smollm2(dtype="float32"), **OPTIONS)
    answered = answers(plain)
    shut_down(plain)
    return answered


@pytest.fixture(scope="module")
def speculative(start, expected):
    return start(ensure_smollm2(dtype="float32"), exit_model=ADAPTER, **OPTIONS)


@pytest.fixture(scope="module")
def both(expected, speculative):
    """Answers without speculation and with it, and the log of the latter."""
    log_dir = speculative.spexis_config.log_dir
    return expected, answers(speculative), read_iterations(log_dir)


def test_answers_are_those_of_plain_pp(both):
    expected, got, _ = both
    assert got == expected


def test_the_cases_are_what_they_are_meant_to_be(both):
    """Ends by EOS, by a stop string and by length are all among the answers."""
    expected, _, _ = both
    assert {answer[2] for answer in expected} == {"stop", "length"}
    assert not expected[1][1].count("e "), "a stop string is not part of the text"
    assert expected[1][2] == expected[2][2] == "stop"
    assert any(answer[2] == "stop" for answer in expected[6:]), "none ends by EOS"
    assert len(expected[3][0]) == 1


def test_trained_drafts_are_accepted(both):
    assert acceptance(both[2]) > 0.3


def test_structured_output_is_refused(both, speculative):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["a", "b"])
    )
    with pytest.raises(
        ValueError, match="structured_outputs cannot go with exit_model"
    ):
        speculative.chat(CHATS[0], params, use_tqdm=False)
    assert speculative.chat(GREETINGS[0], PARAMS[0], use_tqdm=False), "still serving"
