# SPDX-License-Identifier: Apache-2.0
"""What the stages make of a scheduler output, and how many rows the settings allow."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from spexis_runtime.config import SpexisConfig
from spexis_runtime.row_budget import RowChoice
from spexis_runtime.step_plan import SpexisSchedulerOutput, StepPlan, plan_step

NUM_STAGES = 4
CHOICE = RowChoice(7, drafting=False)  # the scheduler's, where it chooses


def plan(
    requests: dict[str, tuple[int | None, int, int]], **settings: Any
) -> tuple[StepPlan, SchedulerOutput]:
    """Plan a step of requests: (prefill_len, None if new; computed; scheduled)."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: n for name, (_, _, n) in requests.items()}
    old = {name: r for name, r in requests.items() if r[0] is not None}
    output.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, num_computed_tokens=computed)
        for name, (_, computed, _) in requests.items()
        if name not in old
    ]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.scheduled_cached_reqs.req_ids = list(old)
    output.scheduled_cached_reqs.num_computed_tokens = [c for _, c, _ in old.values()]
    lengths = np.array([length for length, _, _ in old.values()], dtype=np.int32)
    states = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(old)},
        prefill_len=SimpleNamespace(np=lengths),
    )
    config = SpexisConfig(exit_model="toy", **settings)
    chosen = SpexisSchedulerOutput.of(output, CHOICE)
    return plan_step(chosen, states, config, NUM_STAGES), output


def test_requests_decode_once_their_prompt_is_computed() -> None:
    step, output = plan(
        {
            "long chunk": (20, 8, 7),
            "decoding": (5, 9, 1),
            "first decode": (5, 5, 1),
            "last token of its prompt": (5, 4, 1),
            "new": (None, 0, 3),
            "new, with a cache hit": (None, 16, 4),
        }
    )
    assert step.num_decode_rows == 2
    assert step.decode_limits == {"decoding": 10, "first decode": 6}
    # short chunks first
    assert list(step.prefill_ends.items()) == [
        ("last token of its prompt", 5),
        ("new", 3),
        ("new, with a cache hit", 20),
        ("long chunk", 15),
    ]
    rows = step.scheduler_output.num_scheduled_tokens
    assert list(rows.values()) == [1, 1, 1, 3, 4, 7]
    assert list(rows)[2:] == list(step.prefill_ends)
    assert not set(list(rows)[:2]) & output.num_scheduled_tokens.keys()
    assert step.scheduler_output.total_num_scheduled_tokens == 17
    assert output.num_scheduled_tokens["decoding"] == 1, "vLLM's own was changed"
    new = step.scheduler_output.scheduled_new_reqs
    assert new is output.scheduled_new_reqs


def test_empty_step() -> None:
    step, _ = plan({})
    assert step[:4] == (0, False, {}, {})
    assert step.scheduler_output.total_num_scheduled_tokens == 0


@pytest.mark.parametrize(
    "settings, num_rows, drafting",
    [
        ({}, 7, False),  # CHOICE
        ({"row_budget": 2}, 2, False),  # normal rows alone fill it
        ({"row_budget": 5}, 5, True),
        ({"row_budget": 12}, 9, True),
        ({"drop_ratio": 0.0}, 9, True),
        ({"drop_ratio": 0.5}, 4, True),  # 9 / (1 + 0.5 * 3) = 3.6
        ({"drop_ratio": 0.999}, 3, True),  # never fewer than 9 / NUM_STAGES
    ],
)
def test_row_budget(settings: dict[str, Any], num_rows: int, drafting: bool) -> None:
    requests = {f"request-{i}": (3, 4 + i, 1) for i in range(9)}
    step, _ = plan(requests, **settings)
    assert (step.num_decode_rows, step.drafting) == (num_rows, drafting)
    assert len(step.decode_limits) == 9
    assert step.scheduler_output.total_num_scheduled_tokens == num_rows


def test_rows_fill_the_graph_that_runs_them() -> None:
    """But not beside prefill chunks, whose steps run in no graph of decode rows."""
    states = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        prefill_len=SimpleNamespace(np=np.array([3, 3, 3], dtype=np.int32)),
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.scheduled_cached_reqs.req_ids = ["a", "b", "c"]
    output.num_scheduled_tokens = {"a": 1, "b": 1, "c": 1}
    config = SpexisConfig(exit_model="toy", row_budget=8)
    for last, num_rows in ((5, 4), (1, 2)):
        output.scheduled_cached_reqs.num_computed_tokens = [4, 5, last]
        step = plan_step(
            SpexisSchedulerOutput.of(output, CHOICE),
            states,
            config,
            NUM_STAGES,
            graph_size=lambda k: -(-k // 4) * 4,
        )
        assert step.num_decode_rows == num_rows
