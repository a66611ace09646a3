# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step verifies, and that nobody starves (paper, equation 2)."""

from typing import Any, NamedTuple

import pytest
import worker_probes
from driver import Run, differing, run
from models import VOCAB_SIZE, make_adapter, make_model
from vllm import SamplingParams

NUM_STAGES = 2
NUM_SEQS = 8
MAX_TOKENS = 120


class Engine(NamedTuple):
    llm: Any
    requests: list
    expected: dict[int, list[int]]
    records: list


@pytest.fixture(scope="module")
def engine(start, tmp_path_factory) -> Engine:
    tmp = tmp_path_factory.mktemp("models")
    model = make_model("llama", tmp)
    llm = start(
        model,
        exit_model=make_adapter(model, 2, tmp),
        pipeline_parallel_size=NUM_STAGES,
        skip_tokenizer_init=True,
        max_num_seqs=NUM_SEQS,
    )
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )
    requests = [
        ([1] + [(7 * i + j * 13) % (VOCAB_SIZE - 3) + 3 for j in range(4 + i)], params)
        for i in range(NUM_SEQS)
    ]
    llm.collective_rpc(
        worker_probes.stub_drafts, args=([(p, []) for p, _ in requests], 0)
    )
    expected = run(llm, requests).outputs
    records = [(p, expected[i]) for i, (p, _) in enumerate(requests)]
    return Engine(llm, requests, expected, records)


def speculate(engine: Engine, theta: float, **rows: Any) -> Run:
    rpc = engine.llm.collective_rpc
    rpc(worker_probes.stub_drafts, args=(engine.records, theta))
    rpc(worker_probes.set_rows, kwargs=rows)
    rpc(worker_probes.watch_waits)
    result = run(engine.llm, engine.requests)
    assert differing(result, engine.expected) == []
    return result


def steady(result: Run) -> list[dict[str, Any]]:
    """Ticks in which every request decodes: after the last prefill, before any ends."""
    full = [
        i
        for i, tick in enumerate(result.iterations)
        if tick["scheduled_requests"] == tick["scheduled_tokens"] == NUM_SEQS
    ]
    # the pipeline is full N ticks later
    return result.iterations[full[0] + NUM_STAGES : full[-1] + 1]


@pytest.mark.parametrize("theta", [0.0, 0.5, 0.8, 1.0])
def test_verified_tokens_per_step(engine, theta):
    ticks = steady(speculate(engine, theta))
    assert len(ticks) > MAX_TOKENS / 2
    drafts = sum(tick["drafts_after_valid"] for tick in ticks)
    accepted = sum(tick["accepted_drafts"] for tick in ticks) / max(drafts, 1)
    assert accepted == pytest.approx(theta, abs=0.06)
    per_step = sum(tick["valid_rows"] for tick in ticks) / len(ticks)
    predicted = NUM_SEQS / (NUM_STAGES - theta * (NUM_STAGES - 1))
    assert per_step == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("row_budget", [2, 3])
def test_small_budgets_starve_nobody(engine, row_budget):
    # all drafts are wrong, and fewer rows are in flight than there are requests
    assert NUM_STAGES * row_budget < NUM_SEQS
    speculate(engine, 0.0, row_budget=row_budget)
    waited = max(engine.llm.collective_rpc(worker_probes.longest_wait))
    # N steps until the result of its last row, then at most all others before it
    assert 0 < waited <= NUM_STAGES + -(-NUM_SEQS // row_budget)


def test_budget_of_plain_pp_has_its_throughput(engine):
    """k = B / N with normal rows first is micro-batched pipeline parallelism."""
    ticks = steady(speculate(engine, 0.0, row_budget=NUM_SEQS // NUM_STAGES))
    per_step = sum(tick["valid_rows"] for tick in ticks) / len(ticks)
    assert per_step == pytest.approx(NUM_SEQS / NUM_STAGES, rel=0.05)
