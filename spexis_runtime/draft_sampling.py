# SPDX-License-Identifier: Apache-2.0
"""Drafts share the target's noise (design section 3, point 7).

The target draws its token with noise seeded by (request seed, position). The draft head
draws with the same, so that a draft is accepted about as often as a greedy one.
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu

from spexis_kernels.pool import Rows


class DraftSampling:
    """Temperature and seed of each slot, on stage 0."""

    def __init__(self, max_num_reqs: int, device: torch.device):
        self.temperature = torch.zeros(max_num_reqs, device=device)
        self.seed = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.temperature_np: np.ndarray = np.zeros(max_num_reqs, dtype=np.float32)

    def add_requests(self, slots: list[int], params: list[SamplingParams]) -> None:
        """The scheduler has given a seed to each request that samples."""
        temperature = np.array([p.temperature for p in params], dtype=np.float32)
        seed = np.array([p.seed or 0 for p in params], dtype=np.int64)
        self.temperature_np[slots] = temperature
        index = async_copy_to_gpu(np.array(slots), device=self.seed.device)
        self.temperature[index] = async_copy_to_gpu(
            temperature, device=self.seed.device
        )
        self.seed[index] = async_copy_to_gpu(seed, device=self.seed.device)

    def any_sampled(self, candidates: np.ndarray) -> bool:
        """Whether any of the slots `candidates` samples; if not, all are greedy."""
        return bool(self.temperature_np[candidates].any())

    def of_rows(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The arguments of `draft_head` for a step's rows."""
        slots = rows.slots.long()  # padding rows take any slot's
        return dict(
            temperature=self.temperature[slots],
            seed=self.seed[slots],
            position=rows.positions,
        )
