# SPDX-License-Identifier: Apache-2.0
"""Results on their way back: from the last stage to stage 0, and to the host."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PPHandler

from spexis_kernels.constants import PAD_SLOT_ID
from spexis_kernels.pool import Rows
from spexis_runtime.iteration_log import DraftOutcomes, RowCounts

ROW_FIELDS = len(Rows._fields) + 1
"""Of the decode rows as one [ROW_FIELDS, k] int32 tensor: those of `Rows`, and the bits
of the float32 confidence of each row's draft, for the host's statistics."""


def unpack_rows(row_block: Any) -> tuple[Rows, Any]:
    """The rows in a [ROW_FIELDS, k] tensor or array, and the bits of their confidence.

    Views; each is contiguous.
    """
    *fields, confidence = row_block
    return Rows(*fields), confidence


class PendingResult(NamedTuple):
    """The result of a step that this stage waits for."""

    work: torch.distributed.Work  # the broadcast
    accepted: torch.Tensor  # [num_rows] int32, filled by it
    rows: Rows | None  # the step's rows; None on stages between the first and the last


class ResultHandler:
    """Takes the place of vLLM's `PPHandler`, over its process group and streams.

    One [num_rows] int32 tensor, what `verify` returned, is broadcast for every step
    that has rows, on a side stream. Stages before the last consume it N steps later;
    the queue counts empty steps too.
    """

    def __init__(self, handler: PPHandler):
        self.is_last_rank = handler.is_last_rank
        self.last_rank = handler.last_rank
        self.device = handler.device
        self.main_stream = handler.main_stream
        self.broadcast_stream = handler.broadcast_stream
        self.broadcast_group = handler.broadcast_group
        num_stages = get_pp_group().world_size
        self.queue: deque[PendingResult | None] = deque([None] * num_stages)
        self.sent: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()
        # of the step being run; set by the runner
        self.rows: Rows | None = None  # on stage 0
        self.accepted: torch.Tensor  # on the last stage: what `verify` returned

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Late results die by the pool's generations, not by vLLM's."""

    def next_result(self) -> PendingResult | None:
        """The result of the step N steps ago; None if it had no rows."""
        result = self.queue.popleft()
        self.queue.append(None)
        if result is not None:
            result.work.wait()
        return result

    def receive(self, input_batch: InputBatch) -> bool:
        """Post the receive of this step's result; True: nothing else to postprocess."""
        accepted = torch.empty(
            input_batch.num_reqs, dtype=torch.int32, device=self.device
        )
        self.queue[-1] = PendingResult(self._broadcast(accepted), accepted, self.rows)
        return True

    def broadcast(
        self,
        sampled_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        input_batch: InputBatch,
    ) -> None:
        """Send which rows are valid and what they append; one row a request.

        What is sent must stay where it is until then; nothing waits for it here.
        """
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
        self.sent.append((self._broadcast(self.accepted), self.accepted))

    def _broadcast(self, accepted: torch.Tensor) -> torch.distributed.Work:
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            return torch.distributed.broadcast(
                accepted, self.last_rank, self.broadcast_group, async_op=True
            )


class SpexisOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step with the rows' requests filled in.

    The host learns here which request sat in which decode row. It gets an entry for
    every scheduled request, [] for one without a row.
    """

    def __init__(
        self,
        output: AsyncOutput,
        row_block: torch.Tensor,  # [6, num_decode_rows] int32, on the device
        known_len: torch.Tensor,  # [max_num_reqs] int32, as `verify` left it
        decode_requests: dict[int, str],  # slot -> request, as of this step
        known_lens: deque[np.ndarray],  # as `known_len`, of up to N steps before
    ):
        self.output = output
        self.decode_requests = decode_requests
        self.known_lens = known_lens
        # on the main stream: the next step will change known_len
        self.row_block = row_block.to("cpu", non_blocking=True)
        self.known_len = known_len.to("cpu", non_blocking=True, copy=True)
        self.copy_event = torch.cuda.Event(blocking=True)
        self.copy_event.record()

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        self.copy_event.synchronize()
        rows, confidence = unpack_rows(self.row_block.numpy())
        names = [
            self.decode_requests[slot] if slot != PAD_SLOT_ID else ""
            for slot in rows.slots.tolist()
        ]
        output.req_ids[: len(names)] = names
        tokens_of_row = list(map(len, output.sampled_token_ids))
        known_len = self.known_len.numpy()
        before = self.known_lens[0] if self.known_lens else known_len
        output.spexis_row_counts = RowCounts.of_rows(rows, known_len, tokens_of_row)
        output.spexis_drafts = DraftOutcomes.of_rows(
            rows,
            confidence.view(np.float32),
            known_len,
            before,
            tokens_of_row,
            max_depth=(self.known_lens.maxlen or 2) - 1,
        )
        self.known_lens.append(known_len)
        without_row = sorted(set(self.decode_requests.values()).difference(names))
        output.req_ids += without_row
        output.sampled_token_ids += [[] for _ in without_row]
        if output.logprobs is not None:  # one logit a row, whatever the sampler thought
            output.logprobs = output.logprobs._replace(cu_num_generated_tokens=None)
        output.req_id_to_index = {name: i for i, name in enumerate(output.req_ids)}
        return output
