# SPDX-License-Identifier: Apache-2.0
"""What tests change inside the stages; run there by `LLM.collective_rpc`."""

import dataclasses
import random
import time
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tolerances import LOGPROBS
from vllm.distributed.parallel_state import get_tp_group

from spexis_kernels import draft_head
from spexis_kernels.pool import Rows
from spexis_runtime.exit_head import Drafts, ExitHead

Records = Sequence[tuple[Sequence[int], Sequence[int]]]  # (prompt, its output)


class StubDrafter:
    """Drafts from recorded outputs, right at a given rate, with a matching confidence.

    Of several outputs of a prompt it takes one that has the row's token in its place.
    The exit head still runs, as a hook of the model; only its drafts are replaced.
    """

    def __init__(self, runner: Any, records: Records, theta: float, seed: int):
        self.runner = runner
        self.exit_head = exit_head(runner)
        self.texts: dict[tuple[int, ...], list[list[int]]] = {}
        for prompt, output in records:
            self.texts.setdefault(tuple(prompt), []).append([*prompt, *output])
        self.theta = theta
        self.random = random.Random(seed)

    def propose(
        self, logits_indices: torch.Tensor, rows: Rows, sampling: dict[str, Any]
    ) -> Drafts:
        drafted = [
            self.draft(slot, position + 1, token) if slot >= 0 else (0, 0.0)
            for slot, position, token in zip(
                *(x.tolist() for x in (rows.slots, rows.positions, rows.tokens)),
                strict=True,
            )
        ]
        tokens, confidence = zip(*drafted, strict=True)
        return Drafts(
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(confidence, dtype=torch.float32),
        )

    def draft(self, slot: int, position: int, before: int) -> tuple[int, float]:
        states = self.runner.req_states
        prompt = states.all_token_ids.gpu[slot, : states.prompt_len.np[slot]]
        texts = self.texts[tuple(prompt.tolist())]
        fitting = (t for t in texts if t[position - 1 : position] == [before])
        text = next(fitting, texts[0])
        token = text[position] if position < len(text) else 5
        if self.random.random() < self.theta:
            return token, self.random.uniform(0.5, 1.0)
        return (token + 1 + position % 7) % self.runner.vocab_size, self.random.uniform(
            0.0, 0.8
        )


class CheckedExitHead:
    """The exit head, whose drafts over the ranks' vocabulary shards are checked."""

    def __init__(self, head: ExitHead):
        self.exit_head = head
        shards = get_tp_group().all_gather(head.lm_head.weight.data, dim=0)
        self.weight = shards[: head.adapter.vocab_size]
        self.checked = 0

    def propose(
        self, logits_indices: torch.Tensor, rows: Rows, sampling: dict[str, Any]
    ) -> Drafts:
        drafts = self.exit_head.propose(logits_indices, rows, sampling)
        hidden_states = self.exit_head.hidden_states[logits_indices]
        whole = draft_head(hidden_states, self.weight, **sampling)
        assert torch.equal(drafts.tokens, whole.token)
        torch.testing.assert_close(drafts.confidence, whole.confidence, **LOGPROBS)
        self.checked += len(drafts.tokens)
        return drafts


def check_drafts(worker: Any) -> None:
    """From now on a draft of stage 0 that is not that of the whole vocabulary fails."""
    runner = worker.model_runner
    if runner.is_first_pp_rank:
        runner.drafter = CheckedExitHead(exit_head(runner))


def checked_drafts(worker: Any) -> int:
    runner = worker.model_runner
    return runner.drafter.checked if runner.is_first_pp_rank else 0


def stub_drafts(worker: Any, records: Records, theta: float, seed: int = 0) -> None:
    """From now on stage 0 drafts from `records`."""
    runner = worker.model_runner
    if runner.is_first_pp_rank:
        runner.drafter = StubDrafter(runner, records, theta, seed)


def exit_head(runner: Any) -> Any:
    return getattr(runner.drafter, "exit_head", runner.drafter)


def own_drafts(worker: Any) -> None:
    """From now on stage 0 drafts with its exit head again."""
    runner = worker.model_runner
    if runner.is_first_pp_rank:
        runner.drafter = exit_head(runner)


def round_products_once(worker: Any) -> None:
    """From now on products and softmax are those of float64, rounded to their dtype.

    A sum of products in fp32 depends on the order of summation, and so on the shape of
    the batch: two tokens whose logits nearly tie might change places. Not these.
    """
    linear, einsum = torch.nn.functional.linear, torch.einsum
    softmax = torch.Tensor.softmax

    def once(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def rounded(*args: Any, **kwargs: Any) -> torch.Tensor:
            [dtype] = {a.dtype for a in args if isinstance(a, torch.Tensor)}
            wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
            return function(*wide, **kwargs).to(dtype)

        return rounded

    torch.nn.functional.linear = once(linear)
    torch.einsum = once(einsum)
    torch.Tensor.softmax = once(softmax)


def set_rows(
    worker: Any, row_budget: Any = "auto", drop_ratio: Any = None, graph_rows: int = 1
) -> None:
    """Another row budget or drop ratio, without a restart.

    Decode steps get a multiple of `graph_rows` rows, as where they run in CUDA graphs.
    """
    runner = worker.model_runner
    most = runner.max_num_reqs
    runner.graph_sizes = [
        min(-(-n // graph_rows) * graph_rows, most) for n in range(most + 1)
    ]
    runner.spexis_config = dataclasses.replace(
        runner.spexis_config, row_budget=row_budget, drop_ratio=drop_ratio
    )


def poison_new_blocks(worker: Any) -> None:
    """From now on a KV block that a request is given holds NaN until it is written.

    Rows of the block's last owner that are still in flight have passed this stage by
    then, as stages are FIFO. Blocks from the prefix cache are left alone.
    """
    runner = worker.model_runner
    if hasattr(runner, "poisoned"):
        return
    runner.poisoned = 0
    add_requests, update_requests = runner.add_requests, runner.update_requests

    def poison(block_ids: Sequence[int]) -> None:
        runner.poisoned += len(block_ids)
        for cache in runner.kv_caches:
            cache[list(block_ids)] = float("nan")

    def add(scheduler_output: Any) -> None:
        block_size = runner.block_tables.block_sizes[0]
        for new in scheduler_output.scheduled_new_reqs:
            poison(new.block_ids[0][-(-new.num_computed_tokens // block_size) :])
        add_requests(scheduler_output)

    def update(scheduler_output: Any) -> None:
        for new_blocks in scheduler_output.scheduled_cached_reqs.new_block_ids:
            if new_blocks is not None:
                poison(new_blocks[0])
        update_requests(scheduler_output)

    runner.add_requests, runner.update_requests = add, update


def poisoned_blocks(worker: Any) -> int:
    return worker.model_runner.poisoned


def longest_wait(worker: Any) -> int:
    """Most steps that a request which could be fed has gone without a row, so far."""
    return getattr(worker.model_runner, "longest_wait", 0)


def watch_waits(worker: Any) -> None:
    """Keep `longest_wait`, on stage 0."""
    runner = worker.model_runner
    if not runner.is_first_pp_rank:
        return
    if not hasattr(runner, "longest_wait"):
        feed = runner.feed

        def watched(row_block: torch.Tensor) -> None:
            pool = runner.pool
            feed(row_block)
            normal = (pool.limit > 0) & (pool.head < pool.known_len)
            waits = runner.step - pool.last_fed[normal]
            runner.longest_wait = max([runner.longest_wait, *waits.tolist()])

        runner.feed = watched
    runner.longest_wait = 0


def warm_up(worker: Any) -> None:
    """What vLLM does at the start on a GPU, with steps of its own making."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    with unittest.mock.patch("torch.accelerator.synchronize"):
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


def step_profile(worker: Any) -> Any:
    """`profile_decode_steps` by the clock of a machine without a GPU."""
    with unittest.mock.patch("torch.cuda.Event", WallClock):
        return worker.profile_decode_steps()


class WallClock:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "WallClock") -> float:
        return 1e3 * (end.seconds - self.seconds)
