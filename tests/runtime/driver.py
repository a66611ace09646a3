# SPDX-License-Identifier: Apache-2.0
"""Drive an engine step by step: arrivals, aborts, followers; and tell what it did."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from spexis_runtime.iteration_log import read_iterations

Request = tuple[list[int], SamplingParams]
MAX_STEPS = 5000


@dataclass
class Run:
    """What a workload gave: outputs by request; aborted ones as far as they got."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    # the likeliest tokens at each position, of prompt and output, where asked for
    logprobs: dict[int, list[list[int]]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    iterations: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(line[name] for line in self.iterations)

    @property
    def preemptions(self) -> int:
        return max(line["preemptions"] for line in self.iterations) - min(
            line["preemptions"] for line in self.iterations
        )


def run(
    llm: Any,
    requests: list[Request],
    *,
    seed: int = 0,
    staggered: bool = False,
    abort_rate: float = 0.0,
    on_output: Callable[[int, list[int]], Request | None] = lambda i, tokens: None,
) -> Run:
    """Run `requests` to their end.

    Args:
        staggered: half arrive at once, the others within 30 engine steps; else all.
        abort_rate: chance of an abort at each engine step.
        on_output: called with a request's number and output so far; a request that it
            returns is added, numbered from 1000 on.
    """
    engine, rng, result = llm.llm_engine, random.Random(seed), Run()
    log_dir = llm.spexis_config.log_dir
    before = len(read_iterations(log_dir))
    order = list(range(len(requests)))
    rng.shuffle(order)
    arrivals: dict[int, list[int]] = {}
    for i in order:
        late = staggered and rng.random() < 0.5
        arrivals.setdefault(rng.randint(1, 30) if late else 0, []).append(i)
    live: set[int] = set()
    name = f"run{rng.random()}"
    followers = 1000
    for step in range(MAX_STEPS):
        for i in arrivals.pop(step, []):
            engine.add_request(f"{name}-{i}", *requests[i])
            live.add(i)
        if not arrivals and not engine.has_unfinished_requests():
            break
        for output in engine.step() if engine.has_unfinished_requests() else []:
            i = int(output.request_id.rsplit("-", 1)[1])
            result.outputs[i] = list(output.outputs[0].token_ids)
            if output.finished:
                live.discard(i)
                positions = output.prompt_logprobs or output.outputs[0].logprobs or []
                result.logprobs[i] = [sorted(position or {}) for position in positions]
            follower = on_output(i, result.outputs[i])
            if follower is not None:
                engine.add_request(f"{name}-{followers}", *follower)
                followers += 1
        if live and rng.random() < abort_rate:
            i = rng.choice(sorted(live))
            live.discard(i)
            result.aborted.add(i)
            engine.abort_request([f"{name}-{i}"])
    else:
        raise AssertionError(f"no end after {MAX_STEPS} steps; live: {sorted(live)}")
    result.iterations = read_iterations(log_dir)[before:]
    return result


def abort_many(
    llm: Any, requests: list[Request], *, count: int, max_age: int, live: int = 12
) -> int:
    """Start `count` requests, `live` at a time, each one aborted at a random age.

    Ages are in engine steps. Returns how many were aborted, not done before.
    """
    engine, rng = llm.llm_engine, random.Random(count)
    name = f"abort{rng.random()}"
    deadlines: dict[str, int] = {}
    started = aborted = 0
    for step in range(MAX_STEPS):
        while started < count and len(deadlines) < live:
            request_id = f"{name}-{started}"
            engine.add_request(request_id, *rng.choice(requests))
            deadlines[request_id] = step + rng.randint(0, max_age)
            started += 1
        if not deadlines:
            return aborted
        due = [i for i, deadline in deadlines.items() if deadline <= step]
        engine.abort_request(due)
        aborted += len(due)
        for i in due:
            del deadlines[i]
        for output in engine.step() if deadlines else []:
            if output.finished:
                deadlines.pop(output.request_id, None)
    raise AssertionError(f"no end after {MAX_STEPS} steps; live: {sorted(deadlines)}")


def differing(run: Run, expected: dict[int, list[int]]) -> list[int]:
    """Requests whose output is not the expected one (a prefix of it where aborted)."""
    wrong = []
    for i, want in expected.items():
        got = run.outputs.get(i, [])
        if got != (want[: len(got)] if i in run.aborted else want):
            wrong.append(i)
    return wrong
