# SPDX-License-Identifier: Apache-2.0
"""A rule of admission beside vLLM's own, for the scheduler (`lookahead.admission`)."""

from collections.abc import Sequence

from vllm.v1.request import Request, RequestStatus

from spexis_runtime.lookahead.admission import AdmissionPolicy, Requests, admits
from spexis_runtime.lookahead.draft_law import LENGTH, uniform
from spexis_runtime.lookahead.length_history import record_length

ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class AdmissionControl:
    """Asked about the head of the queue; told of every request that ends.

    Args:
        rule: "history"; "lookahead" needs a length predictor, which is not there yet.
        num_blocks: of KV memory.
        block_size: tokens in a block.
        max_num_seqs: requests that may run.
        seed: of the draws that stand for what is not known of a request's length.
    """

    def __init__(
        self, rule: str, num_blocks: int, block_size: int, max_num_seqs: int, seed: int
    ):
        self.policy = AdmissionPolicy.make(rule)
        self.capacity, self.block_size = num_blocks * block_size, block_size
        self.requests = Requests.empty(max_num_seqs + 1)
        self.seed = seed
        self.num_seen = 0
        # steps in which the rule alone kept the head waiting: it would have fitted
        self.num_refusals = 0
        self.draws: dict[str, float] = {}
        # compile now, not in a step
        uniform(0, 0, 0, LENGTH)
        self._admits(2)
        record_length(AdmissionPolicy.make(rule).history, 1)

    def _admits(self, count: int) -> bool:
        # a prefill's time counts in the rule "lookahead" alone
        return bool(
            admits(
                self.policy, self.requests, count, self.capacity, self.block_size, 1.0
            )
        )

    def add(self, request: Request) -> None:
        self.draws[request.request_id] = uniform(self.seed, self.num_seen, 0, LENGTH)
        self.num_seen += 1

    def may_start(
        self, request: Request, running: Sequence[Request], free_blocks: int
    ) -> bool:
        """Whether a request that runs, or the head of the queue, may have blocks."""
        if request.status == RequestStatus.RUNNING:
            return True
        known = self.requests
        for i, r in enumerate((*running, request)):
            known.tokens[i] = r.num_tokens
            known.generated[i] = r.num_output_tokens
            known.limit[i] = r.max_tokens
            known.draw[i] = self.draws[r.request_id]
        admitted = self._admits(len(running) + 1)
        if not admitted and request.num_tokens <= free_blocks * self.block_size:
            self.num_refusals += 1
        return admitted

    def end(self, request: Request) -> None:
        """The request has ended; one that was aborted says nothing of lengths."""
        self.draws.pop(request.request_id, None)
        if request.status in ENDED_BY_ITSELF:
            record_length(self.policy.history, request.num_output_tokens)
