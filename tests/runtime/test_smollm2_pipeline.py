# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M with its shipped adapter, over two and four stages: real text."""

import json
import re

import pytest
from conftest import shut_down
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from spexis_runtime.demo import ADAPTER
from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.iteration_log import acceptance, read_iterations
from spexis_runtime.tools.smollm2 import ensure_smollm2

CHATS = [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS[:7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),  # some end by EOS
    # stop strings that span tokens: a space begins the next one
    SamplingParams(temperature=0, max_tokens=48, stop=["e "]),
    SamplingParams(temperature=0, max_tokens=48, stop=["the "], min_tokens=8),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=32, bad_words=["the", "is", "a"]),
]
GREETINGS = [
    [{"role": "user", "content": text}]
    for text in ("Say yes.", "What is 2 + 2?", "Name one fruit.", "Hello!")
]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
GRAMMARS = {  # beside requests that speculate
    "choice": StructuredOutputsParams(choice=["purple", "yellow"]),
    "one choice": StructuredOutputsParams(choice=["Paris."]),  # all tokens forced
    "regex": StructuredOutputsParams(regex=r"[0-9]{3}-[0-9]{4}"),
    "json": StructuredOutputsParams(json=PERSON),
}


def answers(llm) -> tuple[list, list]:
    """(tokens, text, finish reason) of each chat; the tokens of each beam."""
    outputs = [*llm.chat(CHATS, PARAMS, use_tqdm=False)]
    outputs += llm.chat(
        GREETINGS * 2,
        [PARAMS[0]] * len(GREETINGS)
        + [
            SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar)
            for grammar in GRAMMARS.values()
        ],
        use_tqdm=False,
    )
    beams = llm.beam_search(
        [{"prompt": "The capital of France is"}],
        BeamSearchParams(beam_width=2, max_tokens=6),
    )
    answered = [
        (
            list(o.outputs[0].token_ids),
            o.outputs[0].text,
            o.outputs[0].finish_reason,
        )
        for o in outputs
    ]
    return answered, [list(beam.tokens) for beam in beams[0].sequences]


OPTIONS = dict(max_model_len=512, max_num_seqs=4)


@pytest.fixture(scope="module")
def expected(start) -> tuple[list, list]:
    """The answers of plain vLLM."""
    plain = start(ensure_smollm2(dtype="float32"), pipeline_parallel_size=2, **OPTIONS)
    answered = answers(plain)
    shut_down(plain)
    return answered


@pytest.fixture(scope="module", params=[2, 4], ids="{}-stages".format)
def num_stages(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def speculative(num_stages, start, expected):
    llm = start(
        ensure_smollm2(dtype="float32"),
        exit_model=ADAPTER,
        pipeline_parallel_size=num_stages,
        **OPTIONS,
    )
    yield llm
    shut_down(llm)


@pytest.fixture(scope="module")
def both(expected, speculative):
    """Answers without speculation and with it, and the log of the latter."""
    log_dir = speculative.spexis_config.log_dir
    return expected, answers(speculative), read_iterations(log_dir)


@pytest.mark.works(
    "LLM.chat",
    "detokenised text",
    "bad_words",
    "stop strings that span tokens",
    "beam_search",
)
def test_answers_are_those_of_plain_pp(both):
    expected, got, _ = both
    assert got == expected
    assert len(got[1]) == 2, "beams"


def test_the_cases_are_what_they_are_meant_to_be(both):
    """Ends by EOS, by a stop string and by length are all among the answers."""
    expected = both[0][0]
    assert {answer[2] for answer in expected} == {"stop", "length"}
    assert not expected[1][1].count("e "), "a stop string is not part of the text"
    assert expected[1][2] == expected[2][2] == "stop"
    greetings = expected[len(CHATS) :][: len(GREETINGS)]
    assert any(answer[2] == "stop" for answer in greetings), "none ends by EOS"
    assert len(expected[3][0]) == 1
    assert not re.search(r"\b(the|is|a)\b", expected[6][1]), "bad words"


@pytest.mark.works(
    "structured output: choice, regex, JSON schema",
    "a grammar that forces all tokens",
    "a grammar that ends the request",
)
def test_grammars_are_followed(both):
    """With rows of their own kind beside rows that speculate; see also equality."""
    texts = dict(
        zip(GRAMMARS, (a[1] for a in both[1][0][-len(GRAMMARS) :]), strict=True)
    )
    assert texts["choice"] in ("purple", "yellow")
    assert texts["one choice"] == "Paris."
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", texts["regex"])
    assert isinstance(json.loads(texts["json"])["name"], str)
    assert {a[2] for a in both[1][0][-len(GRAMMARS) :]} == {"stop"}


def test_trained_drafts_are_accepted(both):
    assert acceptance(both[2]) > 0.3


def logged_acceptance(llm, work) -> tuple[list, float]:
    """What `work()` returns, and the acceptance in the meantime."""
    log_dir = llm.spexis_config.log_dir
    before = len(read_iterations(log_dir))
    outputs = work()
    return outputs, acceptance(read_iterations(log_dir)[before:])


@pytest.mark.works("drafts of sampled requests share the target's noise")
def test_sampled_drafts_share_the_noise(both, speculative):
    """At temperature 0.7 drafts are accepted nearly as often as greedy ones."""
    rates = []
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        _, rate = logged_acceptance(
            speculative, lambda p=params: speculative.chat(CHATS, p, use_tqdm=False)
        )
        rates.append(rate)
    greedy, sampled = rates
    # drafts drawn with other noise would be right in a fifth of the cases or so
    assert sampled > 0.7 * greedy > 0.2


@pytest.mark.works(
    "prefix caching: hits of parts and of whole prompts keep tokens and acceptance"
)
def test_prefix_hits_keep_tokens_and_drafts(speculative):
    """Hits of a part of a prompt, then of whole ones, against no hits at all."""
    preface = " ".join(DEMO_PROMPTS)  # 100 tokens and more
    prompts = [f"{preface} {question}" for question in DEMO_PROMPTS[:6]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def one_by_one(reset: bool) -> list:
        outputs = []
        for prompt in prompts:
            if reset:
                assert speculative.reset_prefix_cache()
            outputs += speculative.generate([prompt], params, use_tqdm=False)
        return outputs

    without, rate = logged_acceptance(speculative, lambda: one_by_one(reset=True))
    assert [o.num_cached_tokens for o in without] == [0] * len(prompts)
    texts = [o.outputs[0].token_ids for o in without]
    assert speculative.reset_prefix_cache()
    for least in (64, 128):  # cached tokens: of the preface; of all but the last block
        outputs, hit_rate = logged_acceptance(
            speculative, lambda: one_by_one(reset=False)
        )
        assert [o.outputs[0].token_ids for o in outputs] == texts
        hits = [o.num_cached_tokens for o in outputs]
        assert min(hits[1:]) >= least, hits
        assert abs(hit_rate - rate) < 0.02


@pytest.mark.works("streaming: text in order")
def test_streamed_text_grows_to_the_answer(both, speculative):
    """Pieces arrive in order: each text so far continues the one before."""
    engine, texts = speculative.llm_engine, {}
    prompts = [
        speculative.get_tokenizer().apply_chat_template(
            c, tokenize=False, add_generation_prompt=True
        )
        for c in CHATS[:3]
    ]
    # not one of PARAMS: `LLM.chat` has told those to give the final output only
    params = SamplingParams(temperature=0, max_tokens=32)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"stream-{i}", prompt, params)
    pieces = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            text = output.outputs[0].text
            assert text.startswith(texts.get(output.request_id, ""))
            pieces += text != texts.get(output.request_id)
            texts[output.request_id] = text
    assert pieces > 60
    want = speculative.generate(prompts, params, use_tqdm=False)
    assert list(texts.values()) == [o.outputs[0].text for o in want]
