# SPDX-License-Identifier: Apache-2.0
"""The host side of the protocol: random schedules, and the traps that it avoids."""

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import (
    BLOCK,
    MAX_NUM_SEQS,
    STOP,
    VOCAB,
    Stage,
    ToyEngine,
    kv_of,
    make_config,
    true_output,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from spexis_runtime import patches
from spexis_runtime.config import SpexisConfigError
from spexis_runtime.iteration_log import read_iterations
from spexis_runtime.model_runner import SpexisModelRunner
from spexis_runtime.row_budget import AllRows, RowChoice
from spexis_runtime.scheduler import LoggedScheduler, SpexisScheduler

SMALL, AMPLE = 22, 300  # KV blocks; the null block is one of them
MAX_QUIET = 60  # steps within which some running request must gain a token


class RandomRowBudget(AllRows):
    """Any number of rows, with drafts for some steps and then without for some."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.drafting, self.switches = True, 0

    def choose(self, num_decodes: int) -> RowChoice:
        if self.random.random() < 0.1:
            self.drafting, self.switches = not self.drafting, self.switches + 1
        num_rows = self.random.randint(1, max(num_decodes, 1))
        return RowChoice(num_rows, self.drafting)


class PlainPipeline(AllRows):
    def __init__(self, num_stages: int):
        self.num_stages = num_stages

    def choose(self, num_decodes: int) -> RowChoice:
        return RowChoice(math.ceil(num_decodes / self.num_stages), drafting=False)


class CheckedScheduler(SpexisScheduler):
    """Checks after each of the engine's calls what must hold between them."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.prefill_len: dict[str, int] = {}  # request -> tokens when it was admitted
        self.num_masks = 0

    def schedule(self, *args: Any) -> SchedulerOutput:
        output = super().schedule(*args)
        for new in output.scheduled_new_reqs:
            self.prefill_len[new.req_id] = len(new.prefill_token_ids)
        self.check()
        return output

    def update_from_output(self, *args: Any) -> Any:
        outputs = super().update_from_output(*args)
        self.check()
        return outputs

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """A mask is made for the state after all tokens: no result may be missing."""
        assert not scheduler_output.pending_structured_output_tokens
        for req_id in scheduler_output.num_scheduled_tokens:
            r = self.requests[req_id]
            if r.use_structured_output and not r.is_prefill_chunk:
                assert r.num_output_placeholders == 1, "another row is in flight"
                self.num_masks += 1

    def check(self) -> None:
        for r in self.running:
            if r.is_prefill_chunk:
                assert r.num_output_placeholders == 0
                continue
            assert r.num_tokens + r.num_output_placeholders - r.num_computed_tokens == 1
            assert r.num_output_placeholders <= self.pp_size + 1
            # the prompt's last token was fed with it; a newer one may be a draft's yet
            sound = max(self.prefill_len[r.request_id], r.num_tokens - 1)
            blocks = self.kv_cache_manager.get_blocks(r.request_id).blocks[0]
            cached = sum(block.block_hash is not None for block in blocks)
            assert cached * BLOCK <= sound, "the newest known token is cached"


def check_cached_blocks(engine: ToyEngine) -> None:
    """What the prefix cache offers of a running request is that request's own KV."""
    for r in engine.scheduler.running:
        right = kv_of(list(r.all_token_ids))
        manager = engine.scheduler.kv_cache_manager
        for i, block in enumerate(manager.get_blocks(r.request_id).blocks[0]):
            if block.block_hash is not None:
                first = block.block_id * BLOCK
                held = engine.pipeline.kv[first : first + BLOCK]
                assert held == right[i * BLOCK : (i + 1) * BLOCK], (
                    "KV of a cached block"
                )


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(STOP + 1, VOCAB) for _ in range(count)]


def random_prompt(
    rng: random.Random, shared: list[int], engine: ToyEngine
) -> list[int]:
    """Of one to 30 tokens; some share a prefix, some follow what another generated."""
    kind = rng.random()
    if kind < 0.3:
        return shared[: rng.randint(1, 14)] + random_tokens(rng, rng.randint(1, 3))
    if kind < 0.6 and engine.requests:
        known = list(rng.choice(list(engine.requests.values())).all_token_ids)
        return known[: min(len(known), 28) // BLOCK * BLOCK] + random_tokens(rng, 1)
    return random_tokens(rng, rng.randint(1, 30))


def serve_random_requests(
    seed: int, num_stages: int, num_blocks: int, num_requests: int = 14
) -> Counter[str]:
    """Serve a random workload, checking all that must hold; returns what happened."""
    rng = random.Random(seed)
    row_budget = rng.choice(["auto", "random", 1, MAX_NUM_SEQS // num_stages, 6])
    engine = ToyEngine(
        num_stages,
        scheduler_cls=CheckedScheduler,
        num_blocks=num_blocks,
        theta=rng.choice([0.0, 0.3, 0.6, 0.8, 0.95, 1.0]),
        row_budget="auto" if row_budget == "random" else row_budget,
        seed=seed,
    )
    if row_budget == "random":
        engine.scheduler.row_budget = RandomRowBudget(seed)
    shared = random_tokens(rng, 14)
    abort_rate = rng.choice([0.0, 0.02, 0.1])
    aborted: set[str] = set()
    left, quiet, reset = num_requests, 0, 0
    while left or engine.busy:
        while left and (not engine.busy or rng.random() < 0.4):
            left -= 1
            max_tokens = rng.choice([1, 2, rng.randint(3, 30), rng.randint(3, 30)])
            grammar = rng.random() < 0.2
            engine.submit(random_prompt(rng, shared, engine), max_tokens, grammar)
        if engine.live and rng.random() < abort_rate:
            victim = rng.choice(sorted(engine.live))
            aborted.add(victim)
            engine.abort(victim, in_flight=rng.random() < 0.5)
        if rng.random() < 0.005:
            reset += len(engine.scheduler.running)
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        new_tokens = engine.step()
        engine.pipeline.check_reads()
        check_cached_blocks(engine)
        quiet = 0 if new_tokens or not engine.scheduler.running else quiet + 1
        assert quiet < MAX_QUIET, "no progress"

    for request_id, output in engine.outputs.items():
        expected = engine.expected(request_id)
        if request_id in aborted:
            expected = expected[: len(output)]
        assert output == expected, f"output of {request_id}"
    blocks = engine.scheduler.kv_cache_manager.block_pool
    assert blocks.get_num_free_blocks() == num_blocks - 1, "blocks leaked"
    for stage in (engine.pipeline.first, engine.pipeline.last):
        assert stage.check_integrity()["slots"] == {}
    stopped = [o for o in engine.outputs.values() if o and o[-1] == STOP]
    return Counter(
        preemptions=engine.scheduler.num_preemptions - reset,
        preempted_again=sum(r.num_preemptions > 1 for r in engine.requests.values()),
        reset=reset,
        aborted=len(aborted),
        stopped=len(stopped),
        accepted_drafts=engine.pipeline.accepted_drafts,
        rejected_drafts=engine.pipeline.rejected_drafts,
        requests_without_row=engine.pipeline.requests_without_row,
        cached_tokens=engine.pipeline.cached_tokens,
        masks=engine.scheduler.num_masks,
        drafts=engine.pipeline.num_drafts,
        right_depths=engine.pipeline.right_depths,
        switches=getattr(engine.scheduler.row_budget, "switches", 0),
    )


@pytest.mark.parametrize("num_blocks", [SMALL, AMPLE])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_random_schedules_are_lossless(num_stages: int, num_blocks: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(12):
        happened += serve_random_requests(
            1000 * num_stages + seed, num_stages, num_blocks
        )
    assert (happened["preemptions"] > 10) == (num_blocks == SMALL)
    # but for the first drafts of these short requests, and after steps without a row
    assert happened["right_depths"] > 0.8 * happened["drafts"]
    assert happened["preempted_again"] > 0 or num_blocks != SMALL
    for what in (
        "reset",
        "aborted",
        "stopped",
        "accepted_drafts",
        "rejected_drafts",
        "requests_without_row",
        "cached_tokens",
        "masks",
        "switches",
    ):
        assert happened[what] > 0, f"no {what}: the schedules are too tame"


def ticks(num_stages: int, theta: float, num_tokens: int = 30) -> int:
    engine = ToyEngine(num_stages, theta=theta)
    for first in (1, 2, 3):
        engine.submit([first, 7], num_tokens)
    while engine.busy:
        engine.step()
    assert all(engine.outputs[i] == engine.expected(i) for i in engine.outputs)
    assert max(map(len, engine.outputs.values())) == num_tokens
    return engine.num_steps


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_ticks_per_token(num_stages: int) -> None:
    """One with right drafts, N with wrong ones, and the pipeline's fill and drain."""
    num_tokens, ends = 30, 2 * num_stages + 2
    assert 0 <= ticks(num_stages, 1.0) - num_tokens <= ends
    assert -num_stages <= ticks(num_stages, 0.0) - num_stages * num_tokens <= ends


@pytest.mark.parametrize(
    ("num_stages", "num_requests"), [(2, 1), (2, 6), (3, 6), (4, 3)]
)
def test_without_drafts_it_is_plain_pipeline_parallelism(
    num_stages: int, num_requests: int
) -> None:
    """Requests take turns, N steps apart, and a step without any is empty."""
    engine = ToyEngine(num_stages, theta=1.0)
    engine.scheduler.row_budget = PlainPipeline(num_stages)
    prompts = ([i, 7] for i in range(1, 99))
    long = [prompt for prompt in prompts if len(true_output(prompt, 24)) == 24]
    for prompt in long[:num_requests]:  # all prefilled in one step
        engine.submit(prompt, 24)
    fed: list[set[str]] = []
    while engine.busy:
        before = engine.pipeline.num_steps
        engine.step()
        if engine.pipeline.num_steps > before and len(engine.live) == num_requests:
            fed.append(set(engine.pipeline.first.plan.decode_limits))
    assert all(engine.outputs[i] == engine.expected(i) for i in engine.outputs)
    assert engine.pipeline.accepted_drafts == engine.pipeline.rejected_drafts == 0
    turns = fed[2 * num_stages :]
    assert len(turns) > 5 * num_stages
    for i, requests in enumerate(turns[:-num_stages]):
        assert requests == turns[i + num_stages]
        assert len(requests) <= math.ceil(num_requests / num_stages)
    assert len(set().union(*turns[:num_stages])) == num_requests


def test_one_token_needs_one_row() -> None:
    engine = ToyEngine(3)
    request_id = engine.submit([5, 6, 7, 8, 9], 1)
    scheduled = []
    while engine.busy:
        engine.step()
        scheduled.append(engine.pipeline.first.plan.decode_limits)
    assert engine.outputs[request_id] == engine.expected(request_id)
    assert not any(scheduled)


def test_log_lines_add_up(tmp_path: Path) -> None:
    engine = ToyEngine(2, theta=0.6, log_dir=str(tmp_path), num_blocks=SMALL)
    for i in range(6):
        engine.submit([i + 1, 7], 20)
    while engine.busy:
        engine.step()
    engine.scheduler.shutdown()
    lines = read_iterations(tmp_path)
    assert len(lines) == engine.pipeline.num_steps
    emitted = sum(map(len, engine.outputs.values()))
    assert sum(line["valid_rows"] for line in lines) >= emitted
    assert sum(line["accepted_drafts"] for line in lines) == (
        engine.pipeline.accepted_drafts
    )
    assert lines[-1]["preemptions"] == engine.scheduler.num_preemptions > 0
    assert lines[-1]["running"] == lines[-1]["waiting"] == 0
    assert lines[-1]["kv_blocks_used"] == 0 < max(x["kv_blocks_used"] for x in lines)


def test_synchronous_scheduling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_config(2).scheduler_config, "async_scheduling", False)
    with pytest.raises(SpexisConfigError, match="needs async_scheduling"):
        ToyEngine(2)


# ---- trap: slot numbers that differ between stages -----------------------------------
def print_slot_maps() -> None:
    """In a process of its own: where requests sit after some have left, by remedy."""
    maps = {}
    for name, finish in (
        ("ours", SpexisModelRunner.finish_requests),
        ("vllm", GPUModelRunner.finish_requests),
    ):
        stage = Stage(make_config(2), is_first=True)
        left = SchedulerOutput.make_empty()
        left.finished_req_ids = {f"old-{i}" for i in range(4)}
        left.preempted_req_ids = {"old-4", "old-5"}
        for i in range(MAX_NUM_SEQS):
            stage.req_states.add_request(f"old-{i}", 1, [1], 0, 1)
        finish(stage, left)
        for i in range(5):
            stage.req_states.add_request(f"new-{i}", 1, [1], 0, 1)
        maps[name] = stage.check_integrity()
    print(json.dumps(maps))


def test_slot_numbers_are_equal_in_all_processes() -> None:
    """Sets of strings have another order in each process; vLLM's numbers follow it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "import test_scheduler as t; t.print_slot_maps()"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    one, other = (
        json.loads(process.communicate()[0].splitlines()[-1]) for process in processes
    )
    assert one["ours"] == other["ours"]
    assert len(one["ours"]["slots"]) == MAX_NUM_SEQS - 1
    assert one["vllm"]["slots"] != other["vllm"]["slots"]


# ---- trap: a rejected draft's KV in the prefix cache ---------------------------------
def cache_at_once(kv_cache_manager: Any) -> None:
    """No remedy: vLLM caches the newest known token's block when it is scheduled."""


def cache_where_no_placeholder(kv_cache_manager: Any) -> None:
    """Half a remedy: a decoding request whose steps all came back void has none."""
    allocate_slots = kv_cache_manager.allocate_slots

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        delay = request.num_output_placeholders > 0
        return allocate_slots(request, *args, **kwargs | {"delay_cache_blocks": delay})

    kv_cache_manager.allocate_slots = allocate


def wrong_followers(seed: int, wait_for_void: bool) -> tuple[int, int]:
    """Followers with wrong output, and all; each comes when its parent fills a block.

    Args:
        wait_for_void: instead, when besides all steps of the parent came back void,
            which happens where the host stops before its last token.
    """
    rng = random.Random(seed)
    engine = ToyEngine(2, theta=0.3, row_budget=1, seed=seed)
    parents = []
    for _ in range(MAX_NUM_SEQS - 1):
        prompt = random_tokens(rng, rng.randint(3, 9))
        max_tokens = rng.randint(4, 12)
        max_tokens -= (
            len(prompt) + max_tokens - 1
        ) % BLOCK  # the last one fills a block
        parents.append(engine.submit(prompt, max_tokens))
    followers: dict[tuple[str, int], str] = {}
    while engine.busy:
        engine.step()
        for parent in engine.live.intersection(parents):
            r = engine.requests[parent]
            now = r.num_output_tokens > 0 and r.num_tokens % BLOCK == 0
            now &= not (wait_for_void and r.num_output_placeholders)
            room = len(engine.live) < MAX_NUM_SEQS
            if now and room and (parent, r.num_tokens) not in followers:
                prompt = [*r.all_token_ids, 7]
                followers[parent, r.num_tokens] = engine.submit(prompt, 1)
    assert all(engine.outputs[i] == engine.expected(i) for i in parents)
    wrong = [i for i in followers.values() if engine.outputs[i] != engine.expected(i)]
    return len(wrong), len(followers)


@pytest.mark.parametrize(
    "wait_for_void, broken",
    [(False, cache_at_once), (True, cache_where_no_placeholder)],
)
def test_prefix_cache_holds_no_rejected_draft(
    wait_for_void: bool, broken: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [wrong_followers(seed, wait_for_void) for seed in range(10)]
    assert sum(wrong for wrong, _ in ours) == 0
    assert sum(total for _, total in ours) > 20
    monkeypatch.setattr(patches, "allocate_without_caching", broken)
    theirs = [wrong_followers(seed, wait_for_void) for seed in range(10)]
    assert sum(wrong for wrong, _ in theirs) > 0


def serve_a_shared_prompt() -> int:
    """Two requests come together, a third one step later; returns their cache hits."""
    engine = ToyEngine(2)
    for last in (8, 9):
        engine.submit([1, 2, 3, 4, 5, 6, last], 4)
    engine.step()
    engine.submit([1, 2, 3, 4, 5, 6, 7], 4)
    while engine.busy:
        engine.pipeline.check_reads()
        engine.step()
    assert all(engine.outputs[i] == engine.expected(i) for i in engine.outputs)
    return engine.pipeline.cached_tokens


def test_no_prompt_is_read_in_the_step_that_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert serve_a_shared_prompt() == BLOCK
    monkeypatch.setattr(patches, "allocate_without_caching", cache_at_once)
    with pytest.raises(AssertionError, match="read in the step that writes it"):
        serve_a_shared_prompt()


# ---- trap: results that arrive after a preemption ------------------------------------
class KeepsPlaceholders(SpexisScheduler):
    def _preempt_request(self, request: Any, timestamp: float) -> None:
        LoggedScheduler._preempt_request(self, request, timestamp)


class KeepsLateResults(SpexisScheduler):
    def update_from_output(self, *args: Any) -> Any:
        generations = self.steps_in_flight[0].generations
        for request_id in generations.keys() & self.requests.keys():
            generations[request_id] = self.requests[request_id].num_preemptions
        return super().update_from_output(*args)


def serve_with_little_memory(scheduler_cls: type[SpexisScheduler], seed: int) -> int:
    engine = ToyEngine(3, scheduler_cls=scheduler_cls, num_blocks=SMALL, theta=0.7)
    rng = random.Random(seed)
    for _ in range(8):
        engine.submit(random_tokens(rng, rng.randint(3, 12)), 24)
    while engine.busy:
        engine.step()
        assert engine.num_steps < 2000, "no progress"
    for request_id, output in engine.outputs.items():
        assert output == engine.expected(request_id)
    return engine.scheduler.num_preemptions


def test_late_results_of_a_preempted_request_are_dropped() -> None:
    for seed in range(3):
        assert serve_with_little_memory(SpexisScheduler, seed) > 0
    with pytest.raises(IndexError):  # the host counts tokens that there are not
        serve_with_little_memory(KeepsPlaceholders, 0)
    with pytest.raises(AssertionError) as refused:  # vLLM's own
        serve_with_little_memory(KeepsLateResults, 0)
    assert "num_output_placeholders >= 0" in str(refused.traceback[-1].statement)


def test_late_prompt_logprobs_of_a_preempted_request_are_dropped() -> None:
    """They are computed again; vLLM asserts that they come with a token."""
    engine = ToyEngine(2)
    request_id = engine.submit([1, 2, 3], 5, prompt_logprobs=1)
    engine.step()
    scheduler, pipeline = engine.scheduler, engine.pipeline
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.requests[request_id].status == RequestStatus.PREEMPTED
    late = engine.batch_queue[-1][0].result()
    late.prompt_logprobs_dict = {request_id: ("tokens", "logprobs", "ranks")}
    while engine.busy:
        engine.step()
    assert engine.outputs[request_id] == engine.expected(request_id)
    assert pipeline.first.check_integrity()["slots"] == {}
