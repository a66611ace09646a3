# SPDX-License-Identifier: Apache-2.0
"""Host side of the protocol (design section 4): vLLM's async scheduler, every step.

A running request is eligible at every step, not at every N-th as in plain pipeline
parallelism, unless `row_budget.py` prefers that for now. Each step that feeds it adds a
placeholder; a step that yielded nothing for it gives the placeholder back, so

    num_tokens + num_output_placeholders - num_computed_tokens == 1

holds for every decoding request between two calls, which keeps vLLM's own arithmetic
right and makes lookahead blocks unnecessary.
"""

import math
import random
import sys
import time
from collections import deque
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from spexis_runtime import patches
from spexis_runtime.admission_control import AdmissionControl
from spexis_runtime.config import METRICS, SpexisConfig, SpexisConfigError
from spexis_runtime.iteration_log import IterationLog, RowCounts
from spexis_runtime.row_budget import AllRows, AutoRows, Policy
from spexis_runtime.step_plan import SpexisSchedulerOutput
from spexis_runtime.step_profile import STEP_TIMES

NEVER = sys.maxsize  # a step


class LoggedScheduler(AsyncScheduler):
    """vLLM's async scheduler that writes the per-iteration log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spexis_config = SpexisConfig.from_additional_config(
            self.vllm_config.additional_config
        )
        log_dir = self.spexis_config.log_dir
        self.iteration_log = None if log_dir is None else IterationLog(log_dir)
        # to the server's metrics, in vLLM's statistics
        self.sends_iterations = self.log_stats and METRICS in (
            self.vllm_config.additional_config
        )
        self.last_result: float | None = None  # None: no step has been in flight since
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # of preempted requests, prompts included
        self.admission: AdmissionControl | None = None  # vLLM's own rule
        self.num_steps = 0  # whose results have arrived
        self.prefill_tokens: deque[int] = deque()  # of each step in flight

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        self.num_preemptions += 1

    def prefilling(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Requests that compute known tokens in a step that was just scheduled."""
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        scheduled = scheduler_output.num_scheduled_tokens
        return new | {i for i in scheduled if self.requests[i].is_prefill_chunk}

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        prefilling = self.prefilling(scheduler_output)
        self.prefill_tokens.append(sum(scheduled[i] for i in prefilling))
        self.num_recomputed_tokens += sum(
            scheduled[i] for i in prefilling if self.requests[i].num_preemptions
        )
        super()._update_after_schedule(scheduler_output)

    def row_counts(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> RowCounts:
        """In plain pipeline parallelism each sampled row is a normal one and valid."""
        tokens = sum(map(len, output.sampled_token_ids or []))
        return RowCounts(tokens, 0, tokens, 0, 0, tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        counts = self.row_counts(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.num_steps += 1
        prefill_tokens = self.prefill_tokens.popleft()
        step_milliseconds = self._step_milliseconds()
        if self.iteration_log is None and not self.sends_iterations:
            return outputs
        blocks = self.kv_cache_manager.block_pool
        drafts = getattr(model_runner_output, "spexis_drafts", None)
        iteration = dict(
            step=self.num_steps,
            stages=self.vllm_config.parallel_config.pipeline_parallel_size,
            scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            scheduled_requests=len(scheduler_output.num_scheduled_tokens),
            prefill_tokens=prefill_tokens,
            **counts._asdict(),
            acceptance=counts.acceptance,
            drafts_by_confidence="" if drafts is None else drafts.by_confidence(),
            running=len(self.running),
            waiting=len(self.waiting) + len(self.skipped_waiting),
            preemptions=self.num_preemptions,
            recomputed_tokens=self.num_recomputed_tokens,
            refusals=0 if self.admission is None else self.admission.num_refusals,
            # one block is vLLM's null block, never free
            kv_blocks_used=blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
            step_milliseconds=step_milliseconds,
        )
        if self.iteration_log is not None:
            self.iteration_log.write(**iteration)
        if self.sends_iterations:
            for output in outputs.values():
                if output.scheduler_stats is not None:
                    output.scheduler_stats.kv_connector_stats = iteration
        return outputs

    def _step_milliseconds(self) -> float | None:
        """Since the result before; None if the pipeline was empty in between."""
        now = time.perf_counter()
        since = None if self.last_result is None else now - self.last_result
        in_flight = bool(self.prefill_tokens)  # an entry a step
        self.last_result = now if in_flight else None
        return None if since is None else round(since * 1e3, 3)

    def shutdown(self) -> None:
        super().shutdown()
        if self.iteration_log is not None:
            self.iteration_log.close()


class FedStep(NamedTuple):
    """Of a step in flight, what is needed when its results arrive."""

    placeholders: set[str]  # requests that the step gave a placeholder
    generations: dict[str, int]  # request -> num_preemptions when it was scheduled


class SpexisScheduler(LoggedScheduler):
    """Schedules every running request at every step; stage 0 chooses among them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise SpexisConfigError(
                "SpexisScheduler needs async_scheduling, got async_scheduling=False"
            )
        patches.allocate_without_caching(self.kv_cache_manager)
        self.steps_in_flight: deque[FedStep] = deque()
        self.seeds = random.Random(self.vllm_config.model_config.seed)
        self.num_stages = self.parallel_config.pipeline_parallel_size
        self.row_budget = self._row_budget()
        self.drafting = True  # in the step being scheduled
        if self.spexis_config.admission != "vllm":
            self.admission = control = AdmissionControl(
                self.spexis_config.admission,
                # one block is vLLM's null block, never used
                self.kv_cache_manager.block_pool.num_gpu_blocks - 1,
                self.block_size,
                self.max_num_running_reqs,
                self.vllm_config.model_config.seed,
            )
            free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks
            patches.ask_before_admission(
                self.kv_cache_manager,
                lambda r: control.may_start(r, self.running, free_blocks()),
            )

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.temperature > 0 and params.seed is None:
            # all stages must draw with the same noise
            request.sampling_params = params.clone()
            request.sampling_params.seed = self.seeds.getrandbits(63)
        super().add_request(request)
        if self.admission is not None:
            self.admission.add(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.admission is not None:
            self.admission.end(request)
        return super()._free_request(request, *args, **kwargs)

    def _row_budget(self) -> Policy:
        profile = self.vllm_config.additional_config.get(STEP_TIMES)
        if profile is None:
            return AllRows()
        max_num_seqs = self.scheduler_config.max_num_seqs
        return AutoRows(profile, self.num_stages, max_num_seqs)

    def schedule(self, *args: Any, **kwargs: Any) -> SpexisSchedulerOutput:
        decodes = [r for r in self.running if not r.is_prefill_chunk]
        choice = self.row_budget.choose(len(decodes))
        self.drafting = choice.drafting
        if not choice.drafting:
            self._hold_back(decodes)
        output = super().schedule(*args, **kwargs)
        return SpexisSchedulerOutput.of(output, choice)

    def _hold_back(self, decodes: list[Request]) -> None:
        """Plain pipeline parallelism: 1/N of the requests a step, longest idle first.

        vLLM alone keeps requests together that were prefilled in one step.
        """
        step = self.current_step + 1  # that `schedule` begins
        due = [r for r in decodes if r.next_decode_eligible_step <= step]
        due.sort(key=lambda request: request.next_decode_eligible_step)
        for request in due[math.ceil(len(decodes) / self.num_stages) :]:
            request.next_decode_eligible_step = step + 1

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduled = {i: self.requests[i] for i in scheduler_output.num_scheduled_tokens}
        before = {i: r.num_output_placeholders for i, r in scheduled.items()}
        prefilling = self.prefilling(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        for req_id, request in scheduled.items():
            # one row in flight for a request with a grammar: its mask is made on the
            # host, for the state after all tokens before
            if request.use_structured_output and request.num_output_placeholders:
                request.next_decode_eligible_step = NEVER
            elif self.drafting:
                request.next_decode_eligible_step = 0
            # else vLLM's own rule: N steps later
            if req_id in prefilling:  # KV of known tokens: sound from the next step on
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        self.steps_in_flight.append(
            FedStep(
                {
                    i
                    for i, r in scheduled.items()
                    if r.num_output_placeholders > before[i]
                },
                {i: r.num_preemptions for i, r in scheduled.items()},
            )
        )

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        # results still in flight belong to an older generation and will be dropped
        request.num_output_placeholders = 0
        request.next_decode_eligible_step = 0

    def row_counts(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> RowCounts:
        return getattr(output, "spexis_row_counts", RowCounts(0, 0, 0, 0, 0, 0))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        step = self.steps_in_flight.popleft()
        drafts = getattr(model_runner_output, "spexis_drafts", None)
        if drafts is not None:
            self.row_budget.observe(drafts)
        for request_id, generation in step.generations.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            row = model_runner_output.req_id_to_index[request_id]
            if request.num_preemptions != generation:
                model_runner_output.sampled_token_ids[row] = []
                model_runner_output.prompt_logprobs_dict.pop(request_id, None)
            elif request_id in step.placeholders:
                if request.next_decode_eligible_step == NEVER:
                    request.next_decode_eligible_step = 0
                if not model_runner_output.sampled_token_ids[row]:
                    request.num_computed_tokens -= 1
                    request.num_output_placeholders -= 1
        return super().update_from_output(scheduler_output, model_runner_output)
