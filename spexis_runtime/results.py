# SPDX-License-Identifier: Apache-2.0
"""Results on their way back: from the last stage to stage 0, and to the host."""

from collections import deque
from typing import NamedTuple

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, stream
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PPHandler

from spexis_kernels.constants import INVALID_TOKEN, PAD_SLOT_ID
from spexis_kernels.pool import Rows
from spexis_runtime.iteration_log import RowCounts


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
        self.rows: Rows | None = None  # of the step being run; set by the runner

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
        """Send which rows are valid and what they append; one row a request."""
        accepted = torch.where(
            num_sampled > 0, sampled_token_ids[:, 0].int(), INVALID_TOKEN
        )
        self.sent.append((self._broadcast(accepted), accepted))
        while len(self.sent) > len(self.queue):  # long since received
            self.sent.popleft()[0].wait()

    def _broadcast(self, accepted: torch.Tensor) -> torch.distributed.Work:
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            accepted.record_stream(self.broadcast_stream)
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
        decode_slots: torch.Tensor,  # [num_decode_rows] int32, on the device
        decode_requests: dict[int, str],  # slot -> request, as of this step
        row_counts: torch.Tensor,  # [5] int64, on the device
        main_stream: torch.cuda.Stream,
        copy_stream: torch.cuda.Stream,
    ):
        self.output = output
        self.decode_requests = decode_requests
        self.device_tensors = decode_slots, row_counts  # kept until copied
        self.copy_event = torch.cuda.Event(blocking=True)
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            self.decode_slots = decode_slots.to("cpu", non_blocking=True)
            self.row_counts = row_counts.to("cpu", non_blocking=True)
            self.copy_event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        self.copy_event.synchronize()
        rows = [
            self.decode_requests[slot] if slot != PAD_SLOT_ID else ""
            for slot in self.decode_slots.tolist()
        ]
        output.req_ids[: len(rows)] = rows
        without_row = sorted(set(self.decode_requests.values()).difference(rows))
        output.req_ids += without_row
        output.sampled_token_ids += [[] for _ in without_row]
        if output.logprobs is not None:  # one logit a row, whatever the sampler thought
            output.logprobs = output.logprobs._replace(cu_num_generated_tokens=None)
        output.req_id_to_index = {name: i for i, name in enumerate(output.req_ids)}
        output.spexis_row_counts = RowCounts(*self.row_counts.tolist())
        return output
