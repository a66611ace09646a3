# SPDX-License-Identifier: Apache-2.0
"""Times of a stage's steps: for `row_budget="auto"`, and for `spexis profile`."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from spexis_runtime.model_runner import SpexisModelRunner

STEP_TIMES = "spexis_step_times"
"""Key of the `StepProfile` in `VllmConfig.additional_config`."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
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


class ProfileExtension:
    """What `spexis profile` asks of a stage: a `worker_extension_cls` of vLLM."""

    model_runner: Any

    @torch.inference_mode()
    def profile_stage(self, drafting: bool) -> dict[str, list[Any]]:
        """Fields of `lookahead.step_times.StageTimes`, of this stage alone.

        All stages are to be asked at once. Prefill is one prompt of its own.
        """
        runner = self.model_runner
        rows = [k for k in ROWS if k <= runner.max_num_reqs]
        most = min(runner.max_num_tokens, runner.max_model_len)
        tokens = [n for n in PREFILL_TOKENS if n <= most] or [most]
        return dict(
            rows=rows,
            milliseconds=[_milliseconds(runner, k, drafting) for k in rows],
            prefill_tokens=tokens,
            prefill_milliseconds=[_time(runner, _prefill(runner, n)) for n in tokens],
        )


def _prefill(runner: Any, num_tokens: int) -> Callable[[], None]:
    """A step with one prompt of `num_tokens` tokens, LM head included."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"prompt": num_tokens}
    output.total_num_scheduled_tokens = num_tokens

    def step() -> None:
        received = None
        if not runner.is_first_pp_rank:
            received = runner.intermediate_tensors[:num_tokens]
        runner.execute_model(output, intermediate_tensors=received, dummy_run=True)
        if runner.is_last_pp_rank:
            hidden_states = runner.execute_model_state.hidden_states
            runner.execute_model_state = None
            runner.model.compute_logits(hidden_states[-1:]).argmax(dim=-1)

    return step


def _milliseconds(runner: Any, k: int, drafting: bool) -> float:
    """Of a step of k rows, LM heads included."""
    if drafting:
        k = runner.graph_sizes[k]
        draft = partial(runner.draft_decode_step, k, False)

    def step() -> None:
        _, hidden_states = runner._dummy_run(k, uniform_decode=True)
        if runner.is_last_pp_rank:
            runner.model.compute_logits(hidden_states).argmax(dim=-1)
        elif runner.is_first_pp_rank and drafting:
            runner.graphs.run(("draft", k, False), draft)

    return _time(runner, step)


def _time(runner: Any, step: Callable[[], None]) -> float:
    """Milliseconds of `step`, the mean of some runs after a warm-up."""
    for _ in range(WARM_UP):
        step()
    if runner.device.type == "cpu":
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - start) * 1e3 / STEPS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS
