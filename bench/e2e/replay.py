# SPDX-License-Identifier: Apache-2.0
"""Replay drafting: drafts from a known output, spoiled at a given rate.

For models of noise, which have no trained adapter. The exit head still runs, so that
its cost counts; only what it drafts is replaced. Logits of such models nearly tie, and
another batch size breaks the ties otherwise; so their output is made one token for
ever, which leaves the work of a step as it was. Figures obtained so are labelled
"replay at theta".

The functions are for `LLM.collective_rpc`.
"""

from typing import Any

import torch

from spexis_kernels.pool import Rows
from spexis_runtime.exit_head import Drafts, ExitHead

OUTPUT_TOKEN = 0  # the first of equal logits
PERIOD = 4096  # positions after which the pattern of right drafts recurs


def constant_output(worker: Any) -> None:
    """From now on the greedy output is OUTPUT_TOKEN, whatever came before."""
    runner = worker.model_runner
    if runner.is_last_pp_rank:
        runner.model.model.norm.weight.data.zero_()


class ReplayDrafter:
    """Right at a share theta of the positions of each slot, with fitting confidence."""

    def __init__(self, head: ExitHead, num_slots: int, theta: float, seed: int):
        device = head.hidden_states.device
        noise = torch.Generator().manual_seed(seed)
        shape = num_slots, PERIOD
        right = torch.rand(shape, generator=noise) < theta
        level = torch.rand(shape, generator=noise)
        self.head = head
        drafts = torch.where(right, OUTPUT_TOKEN, OUTPUT_TOKEN + 1)
        self.drafts = drafts.int().to(device)
        self.confidence = torch.where(right, 0.5 + 0.5 * level, 0.8 * level).to(device)

    def propose(
        self, logits_indices: torch.Tensor, rows: Rows, sampling: dict[str, Any]
    ) -> Drafts:
        self.head.propose(logits_indices, rows, sampling)
        slots = rows.slots.clamp(min=0).long()
        positions = ((rows.positions + 1) % PERIOD).long()
        return Drafts(self.drafts[slots, positions], self.confidence[slots, positions])


def replay(worker: Any, theta: float, seed: int = 0) -> None:
    """From now on stage 0's drafts are right at a rate of theta."""
    runner = worker.model_runner
    if runner.is_first_pp_rank:
        head = getattr(runner.drafter, "head", runner.drafter)
        runner.drafter = ReplayDrafter(head, runner.max_num_reqs, theta, seed)
        runner.capture_drafts()


def set_row_budget(worker: Any, row_budget: Any) -> None:
    """Another row budget, without a restart."""
    import dataclasses

    runner = worker.model_runner
    runner.spexis_config = dataclasses.replace(
        runner.spexis_config, row_budget=row_budget, drop_ratio=None
    )
