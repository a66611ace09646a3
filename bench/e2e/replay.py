# SPDX-License-Identifier: Apache-2.0
"""Replay drafting: drafts from a recorded output, spoiled at a given rate.

For models without trained adapters. The exit head still runs, so that its cost counts;
only what it drafts is replaced. Figures obtained so are labelled "replay at theta".
"""

import random
from typing import Any

import torch

from spexis_kernels.pool import Rows
from spexis_runtime.exit_head import Drafts, ExitHead


class ReplayDrafter:
    """Stage 0's drafter while `text` is generated: right at a share theta of positions.

    Args:
        text: the prompt and the output recorded for it; all requests share it.
    """

    def __init__(self, head: ExitHead, text: list[int], theta: float, seed: int):
        rng = random.Random(seed)
        device = head.hidden_states.device
        right = [rng.random() < theta for _ in text]
        drafts = [
            token if hit else (token + 1) % head.adapter.vocab_size
            for token, hit in zip(text, right, strict=True)
        ]
        self.head = head
        self.drafts = torch.tensor(drafts, dtype=torch.int32, device=device)
        self.confidence = torch.tensor(
            [rng.uniform(*((0.5, 1.0) if hit else (0.0, 0.8))) for hit in right],
            device=device,
        )

    def propose(
        self, logits_indices: torch.Tensor, rows: Rows, sampling: dict[str, Any]
    ) -> Drafts:
        self.head.propose(logits_indices, rows, sampling)
        position = (rows.positions.long() + 1).clamp(max=len(self.drafts) - 1)
        return Drafts(self.drafts[position], self.confidence[position])


def replay(worker: Any, text: list[int], theta: float, seed: int = 0) -> None:
    """For `LLM.collective_rpc`: from now on stage 0 drafts from `text`."""
    runner = worker.model_runner
    if runner.is_first_pp_rank:
        runner.drafter = ReplayDrafter(runner.drafter, text, theta, seed)
