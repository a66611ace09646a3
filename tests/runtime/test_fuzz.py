# SPDX-License-Identifier: Apache-2.0
"""Random requests, arrivals, aborts and cache resets against plain vLLM, in fp32.

`make fuzz MINUTES=60` goes on for longer, and over four stages too.
"""

import itertools
import os
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import worker_probes
from conftest import shut_down
from fuzz import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    Played,
    Request,
    Round,
    make_round,
    play,
)
from models import make_adapter
from small_models import VOCABULARY, save_small_model
from tolerances import LOGPROBS
from vllm import SamplingParams

from spexis_runtime.iteration_log import read_iterations

MINUTES = float(os.environ.get("FUZZ_MINUTES") or 1)
SEED = int(os.environ.get("FUZZ_SEED") or 1)  # of the first round; then one more each
STAGES = [int(n) for n in os.environ.get("FUZZ_STAGES", "2").split()]
NUM_GPU_BLOCKS = 25  # requests get preempted
LAST_PROMPT = [5, 6, 7]
ENOUGH_ROUNDS = 6  # to have met everything that a round may hold


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def plain(start, model) -> Any:
    """On one stage, with room for all of a round and without a prefix cache."""
    llm = start(
        model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        max_logprobs=len(VOCABULARY),
        log_dir=None,
    )
    llm.collective_rpc(worker_probes.round_products_once)
    return llm


class Pipeline(NamedTuple):
    llm: Any
    num_stages: int


@pytest.fixture(scope="module", params=STAGES, ids=lambda n: f"{n} stages")
def pipeline(request, start, model, tmp_path_factory) -> Iterator[Pipeline]:
    num_stages = request.param
    exit_layer = 2 if num_stages == 2 else 1
    llm = start(
        model,
        exit_model=make_adapter(model, exit_layer, tmp_path_factory.mktemp("adapter")),
        pipeline_parallel_size=num_stages,
        num_gpu_blocks_override=NUM_GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
    )
    llm.collective_rpc(worker_probes.round_products_once)
    llm.collective_rpc(worker_probes.poison_new_blocks)
    yield Pipeline(llm, num_stages)
    shut_down(llm)


@pytest.mark.works(
    "`reset_prefix_cache` while requests run",
    "most of these together, at random (`make fuzz`)",
    stages=[2, 4],
)
@pytest.mark.timeout(60 * MINUTES + 400)
def test_random_rounds_equal_plain(plain, pipeline):
    begin, met = time.monotonic(), Counter[str]()
    for rounds in itertools.count(1):
        round_ = make_round(SEED + rounds - 1, pipeline.num_stages)
        print(f"{pipeline.num_stages} stages, {round_}", flush=True)
        again = f"make fuzz SEED={round_.seed} STAGES={pipeline.num_stages} MINUTES=0"
        with Note(lambda text=f"{round_}\nonce more: {again}": text):
            met += play_round(plain, pipeline, round_)
        seconds = time.monotonic() - begin
        print(
            f"    {rounds} rounds in {seconds:.0f} s: {met['requests']} requests, "
            f"{met['tokens']} tokens, {met['aborted']} aborted",
            flush=True,
        )
        if seconds >= 60 * MINUTES:
            break
    log = read_iterations(pipeline.llm.spexis_config.log_dir)
    met["preemptions"] = log[-1]["preemptions"]
    met["accepted drafts"] = sum(line["accepted_drafts"] for line in log)
    print(dict(met), flush=True)
    if rounds >= ENOUGH_ROUNDS:
        wanted = ("aborted", "preemptions", "accepted drafts", "stop", "length")
        assert [name for name in (*wanted, "stop string") if not met[name]] == []


class Note:
    """Adds what `text` returns to whatever is raised inside."""

    def __init__(self, text: Callable[[], str]):
        self.text = text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(self.text())


def play_round(plain: Any, pipeline: Pipeline, round_: Round) -> Counter[str]:
    """Play it on both engines, compare, and tell what was met."""
    llm, rpc = pipeline.llm, pipeline.llm.collective_rpc
    want = play(plain, round_.to_compare_with())
    if round_.theta is None:
        rpc(worker_probes.own_drafts)
    else:
        records = [
            (round_.requests[i].prompt, completion.token_ids)
            for (i, _), completion in want.completions.items()
        ]
        records.append((LAST_PROMPT, []))
        rpc(worker_probes.stub_drafts, args=(records, round_.theta, round_.seed))
    rpc(worker_probes.set_rows, kwargs=round_.rows)
    assert llm.reset_prefix_cache()  # the round must not depend on those before
    got = play(llm, round_)
    for i, request in enumerate(round_.requests):
        check_request(plain, request, i, got, want)
    # aborted requests give back what they hold at the next step: let there be one
    last = SamplingParams(max_tokens=2, temperature=0)
    llm.generate([{"prompt_token_ids": LAST_PROMPT}], last, use_tqdm=False)
    assert read_iterations(llm.spexis_config.log_dir)[-1]["kv_blocks_used"] == 0
    states = rpc("check_integrity")
    assert all(state == states[0] for state in states), "slot numbers differ"
    met = Counter(
        requests=len(round_.requests), tokens=got.num_tokens, aborted=len(got.aborted)
    )
    for completion in got.completions.values():
        met[str(completion.finish_reason)] += 1
        met["stop string"] += isinstance(completion.stop_reason, str)
    return met


def check_request(
    plain: Any, request: Request, i: int, got: Played, want: Played
) -> None:
    aborted = i in got.aborted
    for number in range(request.options.get("n", 1)):
        a, b = got.completions.get((i, number)), want.completions[i, number]
        if a is None and aborted:
            continue
        with (
            Note(lambda number=number: f"output {number} of request {i}: {request}"),
            Note(lambda k=number, a=a, b=b: first_difference(plain, request, k, a, b)),
        ):
            assert a is not None, "no output"
            check_completion(request, a, b, aborted and a.finish_reason is None)
    if aborted and i not in got.prompt_logprobs:
        return
    with Note(lambda: f"prompt logprobs of request {i}: {request}"):
        check_logprobs(
            got.prompt_logprobs.get(i),
            want.prompt_logprobs.get(i),
            request.prompt,
            request.options.get("prompt_logprobs"),
        )


def check_completion(request: Request, got: Any, want: Any, part: bool) -> None:
    """`part`: of an aborted request, so a beginning."""
    length = len(got.token_ids) if part else None
    assert got.token_ids == want.token_ids[:length]
    if part:
        assert want.text.startswith(got.text)
    else:
        assert got.text == want.text
        assert got.finish_reason == want.finish_reason
        assert got.stop_reason == want.stop_reason
    check_logprobs(
        got.logprobs,
        want.logprobs and want.logprobs[:length],
        got.token_ids,
        request.options.get("logprobs"),
    )


def check_logprobs(got: Any, want: Any, tokens: list[int], count: int | None) -> None:
    """Of each token, and of the `count` likeliest ones in its place.

    `want` has those of the whole vocabulary: which of two tokens that are equally
    likely, to the bit, comes first is chance.
    """
    assert (got is None) == (want is None) == (count is None)
    for token, told, all_told in zip(
        tokens, got or (), want or (), strict=count is not None
    ):
        if all_told is None:  # the first token of a prompt has none
            assert told is None
            continue
        values = sorted(-one.logprob for one in all_told.values())
        for other, one in told.items():
            value = all_told[other].logprob
            assert one.logprob == pytest.approx(
                value, abs=LOGPROBS["atol"], rel=LOGPROBS["rtol"]
            )
            assert (
                bisect_left(values, -value) < one.rank <= bisect_right(values, -value)
            )
        assert {one.rank for one in told.values()} >= set(range(1, count + 1))
        assert token in told
        assert len(told) <= count + 1


def first_difference(plain: Any, request: Request, number: int, a: Any, b: Any) -> str:
    """Where the tokens part, and how likely plain vLLM finds the two: nearly a tie?"""
    if a is None:
        return "nothing came"
    pairs = itertools.zip_longest(a.token_ids, b.token_ids)
    at = next((at for at, (x, y) in enumerate(pairs) if x != y), None)
    if at is None or at >= min(len(a.token_ids), len(b.token_ids)):
        return f"no token differs; {len(a.token_ids)} of {len(b.token_ids)}: {a}\n{b}"
    params = Request(request.prompt, request.options | {"logprobs": -1}).params()
    [output] = plain.generate(
        [{"prompt_token_ids": request.prompt}], params, use_tqdm=False
    )
    logprobs = output.outputs[number].logprobs[at]
    got, want = a.token_ids[at], b.token_ids[at]
    return (
        f"token {at} is {got}, must be {want}; logprobs without penalties and bias: "
        f"{logprobs[got].logprob} and {logprobs[want].logprob}"
    )
