# SPDX-License-Identifier: Apache-2.0
"""Times of the stages' decode steps, measured at start for `row_budget="auto"`."""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from spexis_runtime.model_runner import SpexisModelRunner

STEP_TIMES = "spexis_step_times"
"""Key of the `StepProfile` in `VllmConfig.additional_config`."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
WARM_UP, STEPS = 2, 5


class StepProfile(NamedTuple):
    """Milliseconds of a decode step by its rows."""

    rows: tuple[int, ...]
    plain_ms: tuple[float, ...]
    drafting_ms: tuple[float, ...]

    @classmethod
    def slowest(cls, stages: list["StepProfile"]) -> "StepProfile":
        """Of the slowest of several stages."""
        plain = zip(*(stage.plain_ms for stage in stages), strict=True)
        drafting = zip(*(stage.drafting_ms for stage in stages), strict=True)
        return cls(stages[0].rows, tuple(map(max, plain)), tuple(map(max, drafting)))


@torch.inference_mode()
def profile_decode_steps(runner: "SpexisModelRunner") -> StepProfile:
    """Measure one stage, while all others measure too.

    Contexts are of one token: what attention adds is left out.
    """
    rows = [k for k in ROWS if k <= runner.max_num_reqs]
    plain, drafting = (
        tuple(_milliseconds(runner, k, drafting) for k in rows)
        for drafting in (False, True)
    )
    return StepProfile(tuple(rows), plain, drafting)


def _milliseconds(runner: "SpexisModelRunner", k: int, drafting: bool) -> float:
    """Of a step of k rows, LM heads included."""
    k = runner.graph_sizes[k]
    draft = partial(runner.draft_decode_step, k, False)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(-WARM_UP, STEPS):
        if step == 0:
            begin.record()
        _, hidden_states = runner._dummy_run(k, uniform_decode=True)
        if runner.is_last_pp_rank:
            runner.model.compute_logits(hidden_states).argmax(dim=-1)
        elif runner.is_first_pp_rank and drafting:
            runner.graphs.run(("draft", k, False), draft)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS
