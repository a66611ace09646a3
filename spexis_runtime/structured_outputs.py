# SPDX-License-Identifier: Apache-2.0
"""Grammar bitmasks on anonymous rows (design section 3, point 8).

A request with a grammar has one row in flight, so that the host knows the grammar's
state at that row. Which row it is, only the device knows.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.triton_utils import triton
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel

BLOCK_SIZE = 8192  # vLLM's
ALL_ALLOWED = -1  # a word of a bitmask


class AnonymousRowsGrammar:
    """Takes the place of vLLM's `StructuredOutputsWorker`: finds masks by slot.

    Args:
        row_slots: gives the step's slots, [num_rows] int32, on the device.
        slot_of: request -> slot, on the host.
        max_num_reqs: number of slots.
    """

    def __init__(
        self,
        row_slots: Callable[[], torch.Tensor],
        slot_of: dict[str, int],
        max_num_reqs: int,
        device: torch.device,
    ):
        self.row_slots = row_slots
        self.slot_of = slot_of
        self.max_num_reqs = max_num_reqs
        self.device = device

    def apply_grammar_bitmask(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        grammar_req_ids: list[str],
        grammar_bitmask: np.ndarray,
    ) -> None:
        """Mask `logits`, [num_rows, vocab_size], in place.

        Args:
            grammar_req_ids: requests with a grammar that the step may feed.
            grammar_bitmask: [len(grammar_req_ids), ceil(vocab_size / 32)] int32.
        """
        if not grammar_req_ids:
            return
        mask_of_slot: np.ndarray = np.zeros(self.max_num_reqs, dtype=np.int64)
        slots = [self.slot_of[req_id] for req_id in grammar_req_ids]
        mask_of_slot[slots] = np.arange(1, len(slots) + 1)
        masks = np.concatenate(
            (np.full_like(grammar_bitmask[:1], ALL_ALLOWED), grammar_bitmask)
        )
        mask_of_row = async_copy_to_gpu(mask_of_slot, device=self.device)[
            self.row_slots().long()  # padding rows take any mask
        ]
        bitmask = async_copy_to_gpu(masks, device=self.device)[mask_of_row]
        num_rows, vocab_size = logits.shape
        _apply_grammar_bitmask_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK_SIZE))](
            logits,
            logits.stride(0),
            torch.arange(num_rows, dtype=torch.int32, device=self.device),
            bitmask,
            bitmask.stride(0),
            vocab_size,
            BLOCK_SIZE=BLOCK_SIZE,
        )
