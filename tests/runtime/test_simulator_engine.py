# SPDX-License-Identifier: Apache-2.0
"""The simulator against vLLM's engine loop over the real scheduler and pool operations.

Same requests, same memory, same drafts: both draw them by seed, request and position.
Then every step, row and preemption is the same.
"""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scheduler_harness import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    STOP,
    VOCAB,
    ToyEngine,
    ToyPipeline,
    int32,
    make_config,
    next_token,
    true_output,
)
from vllm.v1.core.sched.output import SchedulerOutput

from spexis_kernels import store_drafts
from spexis_kernels.pool import Rows as PoolRows
from spexis_runtime.config import SpexisConfig, SpexisConfigError
from spexis_runtime.lookahead.admission import AdmissionPolicy
from spexis_runtime.lookahead.draft_law import DraftLaw, draw_draft
from spexis_runtime.lookahead.row_budget import RowBudget
from spexis_runtime.lookahead.simulator import (
    Machine,
    Result,
    Rows,
    Workload,
    simulate,
)
from spexis_runtime.lookahead.step_times import StageTimes
from spexis_runtime.scheduler import SpexisScheduler

NUM_REQUESTS = 10  # with one digit: stages free slots in the order of the names
STEP = StageTimes((1,), (1.0,))


class Case(NamedTuple):
    num_stages: int
    theta: float
    row_budget: int | str
    num_blocks: int  # usable
    seed: int
    admission: str = "vllm"


class CountingScheduler(SpexisScheduler):
    """Counts what is scheduled for prefill, and to be computed again."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.num_prefill_tokens = self.num_tokens_again = 0

    def schedule(self, *args: Any) -> SchedulerOutput:
        output = super().schedule(*args)
        for new in output.scheduled_new_reqs:
            if self.requests[new.req_id].num_preemptions:
                self.num_tokens_again += len(new.prefill_token_ids)
        self.num_prefill_tokens += self.prefill_tokens[-1]
        return output


def draw_drafts(pipeline: ToyPipeline, law: DraftLaw, seed: int) -> None:
    """From now on the drafts of `pipeline` are those that the simulator draws."""

    def draft(rows: PoolRows, cells: list[list[int]]) -> None:
        tokens, confidences = [], []
        last = pipeline.last.pool
        names = pipeline.first.req_states.index_to_req_id
        columns = (rows.slots, rows.positions, rows.tokens)
        for row, (slot, position, token) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if slot < 0:
                tokens.append(0)
                confidences.append(0.0)
                continue
            request = int(names[slot].split("-")[1])
            prefix_right = position == last.known_len[slot] - 1
            prefix_right &= token == last.last_token[slot]
            right, confidence = draw_draft(
                law, seed, request, position + 1, 1, bool(prefix_right)
            )
            true = next_token(cells[row])
            tokens.append(true if right else (true + 1) % VOCAB)
            confidences.append(float(confidence))
        store_drafts(
            pipeline.first.pool, rows, int32(tokens), torch.tensor(confidences)
        )

    pipeline.draft = draft  # type: ignore[method-assign]


def random_requests(seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(STOP + 1, VOCAB) for _ in range(rng.randint(1, 20))],
            rng.choice([1, 2, rng.randint(3, 26), rng.randint(3, 26)]),
        )
        for _ in range(NUM_REQUESTS)
    ]


def run_engine(case: Case, law: DraftLaw, monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    config = make_config(case.num_stages)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    engine = ToyEngine(
        case.num_stages,
        scheduler_cls=CountingScheduler,
        num_blocks=case.num_blocks + 1,
        row_budget=case.row_budget,
        admission=case.admission,
    )
    if engine.scheduler.admission is not None:
        engine.scheduler.admission.seed = case.seed
    draw_drafts(engine.pipeline, law, case.seed)
    for prompt, max_tokens in random_requests(case.seed):
        engine.submit(prompt, max_tokens)
    while engine.busy:
        engine.step()
    assert all(engine.outputs[i] == engine.expected(i) for i in engine.outputs)
    return engine


def run_simulator(case: Case, law: DraftLaw) -> Result:
    most = MAX_NUM_SEQS if case.row_budget == "auto" else case.row_budget
    fixed = [min(most, decodes) for decodes in range(MAX_NUM_SEQS + 1)]
    machine = Machine(
        num_stages=case.num_stages,
        plain=STEP,
        speculative=STEP,
        num_blocks=case.num_blocks,
        block_size=BLOCK,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    requests = random_requests(case.seed)
    workload = Workload.make(
        np.zeros(NUM_REQUESTS),
        np.array([len(prompt) for prompt, _ in requests]),
        np.array([len(true_output(*request)) for request in requests]),
        np.array([max_tokens for _, max_tokens in requests]),
    )
    budget = RowBudget.of_table(np.array(fixed), STEP, STEP)
    policy = AdmissionPolicy.make(case.admission)
    return simulate(machine, workload, Rows(budget, law), policy, seed=case.seed)


def check_equal(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> tuple[ToyEngine, Result]:
    law = DraftLaw.uniform(case.theta)
    engine, simulated = run_engine(case, law, monkeypatch), run_simulator(case, law)
    scheduler, pipeline = engine.scheduler, engine.pipeline
    drafts = pipeline.accepted_drafts + pipeline.rejected_drafts
    assert simulated.steps == pipeline.num_steps
    assert simulated.preemptions == scheduler.num_preemptions
    assert simulated.request_preemptions.tolist() == [
        engine.requests[i].num_preemptions for i in sorted(engine.requests)
    ]
    assert simulated.prefill_tokens == scheduler.num_prefill_tokens
    assert simulated.recomputed_tokens == scheduler.num_tokens_again
    # a request that is preempted again before all is computed
    assert scheduler.num_recomputed_tokens <= scheduler.num_tokens_again
    if scheduler.admission is not None:
        assert simulated.refusals == scheduler.admission.num_refusals
    assert simulated.accepted_drafts == pipeline.accepted_drafts
    assert simulated.drafts_after_valid == drafts
    return engine, simulated


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_simulator_is_the_engine(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preemptions = 0
    for seed, (theta, row_budget, num_blocks) in enumerate(
        [
            (0.7, "auto", 16),
            (0.7, 5, 16),
            (0.5, MAX_NUM_SEQS // num_stages, 16),
            (0.9, 1, 16),
            (0.0, "auto", 200),
            (1.0, 6, 200),
        ]
    ):
        case = Case(num_stages, theta, row_budget, num_blocks, 100 * num_stages + seed)
        preemptions += check_equal(case, monkeypatch)[1].preemptions
    assert preemptions > 10


def test_admission_by_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule in both, and it preempts less than vLLM's."""
    preemptions, refusals = {"vllm": 0, "history": 0}, 0
    for seed in range(8):
        case = Case(2, 0.7, "auto", 16, seed)
        for admission in preemptions:
            engine, simulated = check_equal(
                case._replace(admission=admission), monkeypatch
            )
            preemptions[admission] += simulated.preemptions
            refusals += simulated.refusals
        assert engine.scheduler.admission is not None
        assert engine.scheduler.admission.draws == {}
        assert engine.scheduler.admission.policy.history.num_ended[0] == NUM_REQUESTS
    assert refusals > 10
    assert preemptions["history"] < 0.7 * preemptions["vllm"]


def test_aborted_requests_say_nothing_of_lengths() -> None:
    engine = ToyEngine(2, admission="history")
    kept, aborted = engine.submit([1, 2, 3], 5), engine.submit([1, 2, 4], 30)
    while engine.busy:
        engine.step()
        if aborted in engine.live and engine.requests[aborted].num_output_tokens:
            engine.abort(aborted, in_flight=False)
    admission = engine.scheduler.admission
    assert admission is not None
    history = admission.policy.history
    assert history.num_ended[0] == 1
    assert history.ends[0] == len(engine.outputs[kept]) == len(engine.expected(kept))
    assert admission.draws == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"admission": "lookahead"},
            "admission must be 'vllm' or 'history', got 'look",
        ),
        ({"admission": "history", "exit_model": None}, "'history' needs exit_model"),
    ],
)
def test_settings_of_admission(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpexisConfigError, match=message):
        SpexisConfig(**({"exit_model": "toy"} | settings))
