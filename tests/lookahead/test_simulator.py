# SPDX-License-Identifier: Apache-2.0
"""The simulator's clocks, loads and memory; and the rules of admission under pressure.

That its steps are the engine's is shown in tests/runtime/test_simulator_engine.py.
"""

import json
import time

import numpy as np
import pytest

from spexis_runtime.lookahead import simulate as simulate_command
from spexis_runtime.lookahead.admission import AdmissionPolicy
from spexis_runtime.lookahead.cost_model import effective_batch
from spexis_runtime.lookahead.draft_law import DraftLaw, draw_draft
from spexis_runtime.lookahead.row_budget import RowBudget
from spexis_runtime.lookahead.simulator import Machine, Rows, Workload, simulate
from spexis_runtime.lookahead.simulator.workload import (
    burst_arrivals,
    lognormal_lengths,
    poisson_arrivals,
    read_trace,
)
from spexis_runtime.lookahead.step_times import StageTimes, StepTimes, write_step_times

STEP = StageTimes((1, 256), (10.0, 12.0), (1000,), (50.0,))


def machine(num_stages: int = 2, num_blocks: int = 10_000, **options: int) -> Machine:
    return Machine(
        num_stages=num_stages,
        plain=STEP,
        speculative=STEP,
        num_blocks=num_blocks,
        **options,
    )


def all_rows(theta: float | list[float]) -> Rows:
    budget = RowBudget.of_table(np.arange(257), STEP, STEP)
    return Rows(budget, DraftLaw.uniform(theta))


def vllm() -> AdmissionPolicy:
    return AdmissionPolicy.make("vllm")


def alike(count: int, output: int) -> Workload:
    ones = np.ones(count)
    return Workload.make(0 * ones, 8 * ones, output * ones)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("theta", [0.0, 0.7])
def test_throughput_is_that_of_the_cost_model(num_stages, theta):
    result = simulate(machine(num_stages), alike(64, 800), all_rows(theta), vllm())
    predicted = 1e3 * effective_batch(64, num_stages, theta) / STEP.decode_ms(64)
    half = 1e3 * 64 * 800 / np.median(result.end_ms)  # unlike the last, no outlier
    assert half == pytest.approx(predicted, rel=0.04)
    assert result.theta == pytest.approx(theta, abs=0.01)


def test_plain_pp_has_a_micro_batch_a_step():
    """Prompts of one step stay together for good, as in vLLM; two steps: two groups."""
    together = simulate(machine(), alike(64, 400), Rows(), vllm())
    assert together.busy_steps == pytest.approx(together.steps / 2, rel=0.02)
    split = machine(max_num_batched_tokens=256)
    result = simulate(split, alike(64, 400), Rows(), vllm())
    assert result.busy_steps == pytest.approx(result.steps, rel=0.03)
    predicted = 1e3 * 32 / STEP.decode_ms(32)
    assert result.throughput == pytest.approx(predicted, rel=0.03)


def test_a_lone_request_takes_the_time_of_its_steps():
    """Prefill, then each token when the one before has come through both stages."""
    plain = simulate(machine(), alike(1, 5), Rows(), vllm())
    step = STEP.decode_ms(1)
    prefill = STEP.decode_ms(0) + STEP.prefill_ms(8)
    assert plain.ttft_ms[0] == pytest.approx(2 * prefill)
    assert plain.end_ms[0] == pytest.approx(2 * prefill + 4 * 2 * step)
    drafted = simulate(machine(), alike(1, 5), all_rows(1.0), vllm())
    assert drafted.end_ms[0] == pytest.approx(2 * prefill + 4 * step, rel=1e-3)


def test_acceptance_by_depth():
    """theta of the first draft .9, of deeper ones .3."""
    law = DraftLaw.uniform([0.9, 0.3])
    rng = np.random.default_rng(0)
    for depth, theta in ((1, 0.9), (2, 0.3), (5, 0.3)):
        drafts = [
            draw_draft(law, 1, r, 7, depth, True) for r in rng.integers(9e9, size=3000)
        ]
        right, confidence = (np.array(column) for column in zip(*drafts, strict=True))
        assert right.mean() == pytest.approx(theta, abs=0.03)
        assert (confidence[right] >= 0.5).all()
        assert (confidence[~right] <= 0.8).all()
    assert not draw_draft(law, 1, 2, 7, 1, False)[0]
    deep = simulate(machine(4), alike(32, 300), all_rows([0.9, 0.3]), vllm())
    flat = simulate(machine(4), alike(32, 300), all_rows(0.9), vllm())
    assert 0.3 < deep.theta < 0.85 < flat.theta


def test_same_seed_same_run():
    workload, rows = alike(40, 100), all_rows(0.6)
    one, same, other = (
        simulate(machine(), workload, rows, vllm(), seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.end_ms, same.end_ms)
    assert one.accepted_drafts != other.accepted_drafts
    # cut into pieces of one step, as the bar does it
    pieces = simulate(machine(), workload, rows, vllm(), seed=1, steps_at_once=1)
    np.testing.assert_array_equal(one.end_ms, pieces.end_ms)


# ---- memory --------------------------------------------------------------------------
def pressed(rule: str, num_blocks: int = 700, count: int = 600):
    """Twice as many requests arrive as the memory holds."""
    rng = np.random.default_rng(3)
    workload = Workload.make(
        poisson_arrivals(rng, count, 12.0),
        lognormal_lengths(rng, count, 120, 0.8, 1000),
        lognormal_lengths(rng, count, 200, 0.8, 1000),
        1000,
    )
    args = simulate_command.parse(
        ["--times", "x", "--rate", "1", "--blocks", "1", "--theta", "0.7"]
    )
    policy, confusion = simulate_command.make_policy(rule, args, workload)
    return simulate(
        machine(num_blocks=num_blocks),
        workload,
        all_rows(0.7),
        policy,
        confusion=confusion,
    )


def test_admission_under_pressure():
    vllm, history, lookahead = map(pressed, ("vllm", "history", "lookahead"))
    assert vllm.preemptions > 100
    assert vllm.recomputed_tokens > 10_000
    for other in (history, lookahead):
        assert other.preemptions < 0.3 * vllm.preemptions
        assert other.recomputed_tokens < 0.3 * vllm.recomputed_tokens
        assert other.throughput > 1.03 * vllm.throughput
        assert other.refusals > 0
        # nobody waits for ever, nor longer than under vLLM's rule
        assert np.isfinite(other.end_ms).all()
        waits = [np.percentile(r.ttft_ms, 99) for r in (other, vllm)]
        assert waits[0] < 2 * waits[1]
    assert lookahead.throughput > 0.98 * history.throughput


def test_with_plenty_of_memory_no_rule_matters():
    results = [pressed(rule, 20_000, 300) for rule in ("vllm", "history", "lookahead")]
    assert {result.preemptions for result in results} == {0}
    rates = [result.throughput for result in results]
    assert min(rates) >= 0.99 * rates[0]


def test_requests_that_never_fit_are_refused():
    with pytest.raises(
        ValueError, match="a request of 1008 tokens does not fit into 60"
    ):
        simulate(machine(num_blocks=60), alike(2, 1000), Rows(), vllm())


def test_a_budget_without_rows_is_noticed():
    budget = RowBudget.of_table(np.zeros(257, dtype=np.int64), STEP, STEP)
    with pytest.raises(RuntimeError, match="no token in .* steps"):
        simulate(machine(), alike(2, 5), Rows(budget, DraftLaw.uniform(0.5)), vllm())


# ---- loads ---------------------------------------------------------------------------
def test_loads(tmp_path):
    rng = np.random.default_rng(0)
    gaps = np.diff(poisson_arrivals(rng, 20_000, 50.0))
    assert gaps.mean() == pytest.approx(20, rel=0.03)
    assert gaps.std() == pytest.approx(20, rel=0.05)
    assert burst_arrivals(5, 2, 100.0).tolist() == [0, 0, 100, 100, 200]
    lengths = lognormal_lengths(rng, 20_000, 200, 0.5, 10_000)
    assert lengths.mean() == pytest.approx(200, rel=0.03)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival_ms": 20, "prompt_tokens": 3, "output_tokens": 4}\n'
        '{"arrival_ms": 10, "prompt_tokens": 5, "output_tokens": 6, "max_tokens": 9}\n'
    )
    workload = read_trace(trace)
    assert [column.tolist() for column in workload] == [
        [10, 20],
        [5, 3],
        [6, 4],
        [9, 4],
    ]
    trace.write_text('{"arrival_ms": 20, "prompt_tokens": 3}\n')
    with pytest.raises(
        ValueError, match=r"trace.jsonl, line 1: KeyError\('output_tokens'"
    ):
        read_trace(trace)
    with pytest.raises(ValueError, match="1 arrivals, 2 prompts and 2 outputs"):
        Workload.make(np.zeros(1), np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="arrivals must be in order"):
        Workload.make(np.array([1, 0]), np.ones(2), np.ones(2))


def test_a_million_requests_a_minute():
    """20,000 here, at most three times slower than the target."""
    rng = np.random.default_rng(0)
    workload = Workload.make(
        poisson_arrivals(rng, 20_000, 14.0),
        lognormal_lengths(rng, 20_000, 200, 0.8, 2048),
        lognormal_lengths(rng, 20_000, 200, 0.8, 2048),
        2048,
    )
    simulate(machine(), alike(4, 4), all_rows(0.7), vllm())  # compile
    start = time.process_time()
    result = simulate(machine(num_blocks=20_000), workload, all_rows(0.7), vllm())
    assert time.process_time() - start < 20_000 / 1e6 * 60 * 3
    assert np.isfinite(result.end_ms).all()


# ---- the command ---------------------------------------------------------------------
def test_command(tmp_path, capsys):
    path, out = tmp_path / "times.json", tmp_path / "out.json"
    stages = {(2, 1, False): STEP, (2, 1, True): STEP}
    write_step_times(StepTimes("m", "n", "s", stages), path)
    load = [
        "--times",
        str(path),
        "--requests",
        "60",
        "--blocks",
        "500",
        "--json",
        str(out),
    ]
    rules = ["--admission", "vllm", "history"]
    simulate_command.main(
        [*load, "--rate", "5", "--theta", "0.6", "--rows", "4", *rules]
    )
    figures = json.loads(out.read_text())["figures"]
    assert figures.keys() == {"vllm", "history"}
    assert 0.6 < figures["vllm"]["theta"] < 1  # the confident ones are fed
    assert "tokens_per_second" in capsys.readouterr().out
    for wrong, message in (
        (["--rate", "5", "--stages", "4"], "error: no step times of PP=4 TP=1 among"),
        (["--rate", "5", "--admission", "no"], "error: rule must be one of vllm"),
        (["--trace", str(tmp_path / "no")], "error: .*No such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            simulate_command.main([*load, *wrong])
