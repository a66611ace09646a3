# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a step: how many decode rows, and which prefill chunks.

Which requests sit in the decode rows is chosen on stage 0's device. To the host they
are k anonymous rows of one token, before the prefill chunks:

    rows    [0, k) decode, anonymous · [k, k + p) prefill chunks
    tokens  [0, k) one a decode row  · [k, num_tokens) the chunks, one after another
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.states import RequestState

from spexis_runtime.config import SpexisConfig
from spexis_runtime.row_budget import RowChoice


@dataclass
class SpexisSchedulerOutput(SchedulerOutput):
    """vLLM's, with what the scheduler chose for `row_budget="auto"`."""

    row_choice: RowChoice = RowChoice(0, drafting=False)

    @classmethod
    def of(
        cls, output: SchedulerOutput, row_choice: RowChoice
    ) -> "SpexisSchedulerOutput":
        values = {f.name: getattr(output, f.name) for f in fields(SchedulerOutput)}
        return cls(**values, row_choice=row_choice)


class StepPlan(NamedTuple):
    """Equal on all stages, as all derive it from the same scheduler output."""

    num_decode_rows: int  # k; some stay empty where a CUDA graph is larger
    drafting: bool  # whether the exit head drafts after this step
    decode_limits: dict[str, int]  # request that could be fed -> positions it may use
    prefill_ends: dict[str, int]  # request -> end of its chunk, in row order
    scheduler_output: SchedulerOutput  # vLLM's, with anonymous decode rows


def plan_step(
    scheduler_output: SchedulerOutput,
    req_states: RequestState,
    config: SpexisConfig,
    pipeline_parallel_size: int,
    graph_size: Callable[[int], int] = lambda num_rows: num_rows,
) -> StepPlan:
    """Split the scheduled requests into decode rows and prefill chunks.

    A request decodes once its computed tokens reach `prefill_len`. Call it before the
    runner takes in the step's new requests: they all prefill.

    Args:
        graph_size: rows of the CUDA graph that so many decode rows would run in. A step
            without chunks has as many: the model runs them anyway.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    computed = {
        new.req_id: new.num_computed_tokens
        for new in scheduler_output.scheduled_new_reqs
    }
    decode_limits: dict[str, int] = {}
    for req_id, num_computed in zip(
        cached.req_ids, cached.num_computed_tokens, strict=True
    ):
        slot = req_states.req_id_to_index[req_id]
        if num_computed >= req_states.prefill_len.np[slot]:
            decode_limits[req_id] = num_computed + scheduled[req_id]
        else:
            computed[req_id] = num_computed
    # short chunks first, as vLLM orders a batch
    chunks = sorted(computed, key=lambda req_id: scheduled[req_id])
    if config.chooses_rows and isinstance(scheduler_output, SpexisSchedulerOutput):
        k, drafting = scheduler_output.row_choice
    elif config.chooses_rows:  # a step of vLLM's warm-up, which no scheduler made
        k, drafting = len(decode_limits), True
    else:
        k = config.num_rows(len(decode_limits), pipeline_parallel_size)
        # normal rows alone fill a smaller budget
        drafting = k * pipeline_parallel_size > len(decode_limits) or bool(chunks)
    k = min(k, len(decode_limits))
    if not chunks:
        k = graph_size(k)

    rows = {f"decode row {i}": 1 for i in range(k)}
    rows |= {req_id: scheduled[req_id] for req_id in chunks}
    anonymous = copy.copy(scheduler_output)
    anonymous.num_scheduled_tokens = rows
    anonymous.total_num_scheduled_tokens = sum(rows.values())
    return StepPlan(
        num_decode_rows=k,
        drafting=drafting,
        decode_limits=decode_limits,
        prefill_ends={i: computed[i] + scheduled[i] for i in chunks},
        scheduler_output=anonymous,
    )
