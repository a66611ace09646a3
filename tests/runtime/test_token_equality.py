# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no token: against plain vLLM over the same pipeline, in fp32."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import worker_probes
from conftest import shut_down
from driver import Run, abort_many, differing, run
from features import EOS, FEATURES, answers, check_equal, feature_requests
from models import make_adapter, make_model, make_requests
from tolerances import CHI_SQUARE_SIGMAS
from vllm import SamplingParams

from spexis_runtime.iteration_log import read_iterations

MAX_NUM_SEQS, MAX_MODEL_LEN = 8, 256
NUM_DRAWS, DRAWS_PROMPT, ALLOWED = 360, [9, 8, 7], [5, 6, 7, 8]
DEGREES = len(ALLOWED) - 1
CHI_SQUARE_BOUND = DEGREES + CHI_SQUARE_SIGMAS * math.sqrt(2 * DEGREES)
LAST_REQUEST = [5, 6, 7], SamplingParams(max_tokens=2, detokenize=False)


class Setup(NamedTuple):
    family: str
    exit_layer: int
    num_layers: int
    num_gpu_blocks: int  # small: requests get preempted


SETUPS = {  # by the number of stages
    2: Setup("llama", 2, 4, 25),
    3: Setup("qwen2", 1, 5, 400),
    4: Setup("qwen3", 2, 6, 25),
}
DRAWN = 2, 4  # stages


class Pipeline(NamedTuple):
    llm: Any
    num_stages: int
    setup: Setup
    requests: list
    expected: dict[int, list[int]]
    logprobs: dict[int, list[list[int]]]
    features: list  # what plain vLLM answers to FEATURES
    draws: list[Counter] | None  # plain vLLM's samples without a seed, where compared
    records: list


@pytest.fixture(scope="module", params=SETUPS, ids="{}-stages".format)
def num_stages(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def pipeline(num_stages, start, tmp_path_factory) -> Iterator[Pipeline]:
    setup, tmp = SETUPS[num_stages], tmp_path_factory.mktemp("models")
    model = make_model(setup.family, tmp, num_hidden_layers=setup.num_layers)
    options = dict(
        pipeline_parallel_size=num_stages,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        skip_tokenizer_init=True,
    )
    requests = make_requests()
    # with room: vLLM 0.26 keeps late results of a preempted request and may then repeat
    # a token (pull request 38624 describes it)
    plain = start(model, **options)
    reference = run(plain, requests)
    expected = reference.outputs
    assert len(reference.logprobs[4]) == len(requests[4][0]), "prompt logprobs"
    assert len(reference.logprobs[0]) == len(expected[0]), "logprobs"
    features = answers(plain, feature_requests(MAX_MODEL_LEN))
    plain_draws = draws(plain) if num_stages in DRAWN else None
    shut_down(plain)
    assert len({t for output in expected.values() for t in output}) > 200, "too tame"
    llm = start(
        model,
        exit_model=make_adapter(model, setup.exit_layer, tmp),
        num_gpu_blocks_override=setup.num_gpu_blocks,
        **options,
    )
    llm.collective_rpc(worker_probes.poison_new_blocks)
    records = [(p, expected[i]) for i, (p, _) in enumerate(requests)]
    records.append((LAST_REQUEST[0], []))
    records += [(o.prompt_token_ids, o.outputs[0].token_ids) for o in features]
    yield Pipeline(
        llm,
        num_stages,
        setup,
        requests,
        expected,
        reference.logprobs,
        features,
        plain_draws,
        records,
    )
    shut_down(llm)


def speculate(pipeline: Pipeline, theta: float, rows: dict | None = None, **how) -> Run:
    rpc = pipeline.llm.collective_rpc
    rpc(worker_probes.stub_drafts, args=(pipeline.records, theta))
    rpc(worker_probes.set_rows, kwargs=rows or {})
    result = run(pipeline.llm, pipeline.requests, **how)
    # aborted requests give back what they hold at the next step: let there be one
    after = run(pipeline.llm, [LAST_REQUEST])
    assert after.iterations[-1]["kv_blocks_used"] == 0
    states = rpc("check_integrity")
    assert all(state == states[0] for state in states), "slot numbers differ"
    assert min(rpc(worker_probes.poisoned_blocks)) > 0
    return result


LEAST: dict[str, Any] = dict(row_budget="least")  # ceil(B / N)
CASES: list[tuple[float, dict, dict]] = [
    (1.0, {}, {}),
    (0.0, {}, {}),
    (0.6, dict(graph_rows=4), dict(staggered=True)),
    (0.8, LEAST, dict(seed=1)),
    (0.5, dict(row_budget=6), dict(seed=2, staggered=True)),
    (0.7, dict(drop_ratio=0.5, graph_rows=8), dict(seed=3)),
    (0.7, dict(drop_ratio=0.15), dict(seed=4, staggered=True)),
    (0.6, dict(graph_rows=3), dict(seed=5, abort_rate=0.06)),
    (0.4, LEAST, dict(seed=6, abort_rate=0.06, staggered=True)),
]


@pytest.mark.works(
    "chunked prefill among decodes",
    "preemption, repeatedly",
    "aborts",
    "row budgets and drop ratios",
)
@pytest.mark.parametrize("theta, rows, how", CASES)
def test_tokens_equal_plain(pipeline, theta, rows, how):
    if rows is LEAST:
        rows = dict(row_budget=-(-MAX_NUM_SEQS // pipeline.num_stages))
    result = speculate(pipeline, theta, rows, **how)
    assert differing(result, pipeline.expected) == []
    for i in result.outputs.keys() - result.aborted:
        assert result.logprobs[i] == pipeline.logprobs[i], f"logprobs of request {i}"
    drafts, accepted = result.total("draft_rows"), result.total("accepted_drafts")
    if theta == 0:
        assert accepted == 0 < drafts
    if theta == 1:  # but for drafts past the end of a request, which are wrong
        assert accepted > 0.9 * result.total("drafts_after_valid")
    if how.get("abort_rate"):
        assert result.aborted
    elif pipeline.setup.num_gpu_blocks < 100:
        assert result.preemptions > 0, "the KV cache was meant to be too small"
    if "row_budget" in rows:
        most = max(i["normal_rows"] + i["draft_rows"] for i in result.iterations)
        assert most <= rows["row_budget"]


@pytest.mark.works("500 aborts at any age: nothing is left")
def test_aborts_at_any_age_leave_nothing(pipeline):
    """500 requests, aborted as they wait, prefill, decode, or have been preempted."""
    rpc = pipeline.llm.collective_rpc
    rpc(worker_probes.stub_drafts, args=(pipeline.records, 0.6))
    rpc(worker_probes.set_rows)
    aborted = abort_many(pipeline.llm, pipeline.requests, count=500, max_age=20)
    assert aborted > 400, "the others came to their end before"
    # and what runs afterwards is right
    assert differing(speculate(pipeline, 0.6), pipeline.expected) == []


@pytest.fixture(scope="module")
def speculative_features(pipeline) -> list:
    rpc = pipeline.llm.collective_rpc
    rpc(worker_probes.stub_drafts, args=(pipeline.records, 0.7))
    rpc(worker_probes.set_rows)
    return answers(pipeline.llm, feature_requests(MAX_MODEL_LEN))


@pytest.mark.works
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_equals_plain(pipeline, speculative_features, feature):
    number = list(FEATURES).index(feature)
    check_equal(speculative_features[number], pipeline.features[number])


def test_features_do_what_their_names_say(pipeline):
    """So that the comparison is one of outputs that the feature made."""
    by_name = dict(zip(FEATURES, pipeline.features, strict=True))

    def output(name: str) -> Any:
        return by_name[name].outputs[0]

    assert output("stop_token_ids").finish_reason == "stop"
    assert 12 <= len(output("min_tokens").token_ids) < 28
    assert output("end of sequence").token_ids[-1] == EOS
    assert EOS in output("ignore_eos").token_ids[:-1]
    assert len(output("max_model_len").token_ids) == 25
    assert set(output("logit_bias").token_ids) & {7, 8}
    assert len({tuple(o.token_ids) for o in by_name["n"].outputs}) == 3
    sampled = [output(name).token_ids for name in ("temperature", "top_k", "top_p")]
    assert all(len(set(tokens)) > 5 for tokens in sampled)


def draws(llm: Any) -> list[Counter]:
    """Of many requests without a seed, the tokens drawn at each position."""
    params = SamplingParams(
        temperature=2.0,
        max_tokens=3,
        allowed_token_ids=ALLOWED,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": DRAWS_PROMPT}] * NUM_DRAWS
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = zip(*(output.outputs[0].token_ids for output in outputs), strict=True)
    return [Counter(at_position) for at_position in tokens]


@pytest.mark.works("sampling without a seed: the distribution")
@pytest.mark.parametrize("num_stages", DRAWN, indirect=True, scope="module")
def test_unseeded_samples_follow_the_distribution_of_plain(pipeline):
    """Two-sample chi-square, with drafts that are always the same token."""
    rpc = pipeline.llm.collective_rpc
    rpc(worker_probes.stub_drafts, args=([(DRAWS_PROMPT, [])], 1.0))
    rpc(worker_probes.set_rows)
    log_dir = pipeline.llm.spexis_config.log_dir
    before = len(read_iterations(log_dir))
    drawn = draws(pipeline.llm)
    log = read_iterations(log_dir)[before:]
    accepted = sum(line["accepted_drafts"] for line in log)
    assert 0 < accepted < sum(line["drafts_after_valid"] for line in log)
    for got, want in zip(drawn, pipeline.draws, strict=True):
        assert chi_square(got, want) < CHI_SQUARE_BOUND
        # a third of the other tokens drawn as the draft instead would show
        biased = Counter({token: 2 * n // 3 for token, n in got.items()})
        biased[ALLOWED[0]] += NUM_DRAWS - biased.total()
        assert chi_square(biased, want) > CHI_SQUARE_BOUND


def chi_square(a: Counter, b: Counter) -> float:
    """Of two samples of the same size."""
    assert min(a[token] + b[token] for token in ALLOWED) >= 10, "too rare to tell"
    return sum((a[token] - b[token]) ** 2 / (a[token] + b[token]) for token in ALLOWED)
