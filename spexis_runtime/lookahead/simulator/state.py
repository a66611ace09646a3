# SPDX-License-Identifier: Apache-2.0
"""State of a simulation, in arrays that are changed in place.

A slot is that of a running request, on the host and on the stages. Results of another
stamp than the slot's are late, and dropped.
"""

from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.protocol import empty_slots

# indices of `counts`
NUM_STEPS = 0  # of the pipeline, empty ones included
NUM_BUSY_STEPS = 1
NUM_RUNNING = 2
NUM_FREE_SLOTS = 3
NUM_LEAVING = 4
NUM_PREEMPTED = 5  # waiting, at the head of the queue
NUM_ARRIVED = 6
NUM_STARTED = 7  # of those that arrived, in order
NUM_ENDED = 8
FREE_BLOCKS = 9
LAST_STAMP = 10
IN_QUEUE = 11  # steps whose results the host has not had
ROWS = 12  # decode rows run, padding included
FED_ROWS = 13  # decode rows with a request
VALID_ROWS = 14  # that yielded a token, last prefill chunks included
DRAFTS_AFTER_VALID = 15
ACCEPTED_DRAFTS = 16
PREEMPTIONS = 17
PREFILL_TOKENS = 18
RECOMPUTED_TOKENS = 19
REFUSALS = 20  # of the head of the queue by the policy, where it would have fitted
LAST_ROWS = 21  # k of the last step, as the row budget chose it; < 0: without drafts
BLOCK_STEPS = 22  # blocks in use, summed over busy steps
NUM_COUNTS = 23

# columns of `ring`, and its flags
OF_SLOT, STAMP, FLAGS = 0, 1, 2
PLACEHOLDER, PRODUCED = 1, 2


REQUEST: np.dtype = np.dtype(
    [
        ("generated", np.int64),
        ("preemptions", np.int64),
        ("first_token_ms", np.float64),
        ("end_ms", np.float64),
    ]
)


class Sizes(NamedTuple):
    """What vLLM is started with."""

    num_stages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    speculative: bool


class State(NamedTuple):
    counts: np.ndarray  # [NUM_COUNTS] int64
    clock: np.ndarray  # [1] float64, ms; the host's
    stage_free: np.ndarray  # [num_stages] float64, ms
    slots: np.recarray  # [max_num_seqs] of SLOT
    running: np.ndarray  # slots in order of admission
    free_slots: np.ndarray  # a stack
    leaving: np.ndarray  # slots to be freed by the next step, [2 * max_num_seqs]
    # of steps in flight, [num_stages + 2, max_num_seqs], by step modulo
    ring: np.ndarray  # [num_stages + 2, max_num_seqs, 3] int64: slot, stamp, flags
    ring_size: np.ndarray  # [num_stages + 2]
    ring_ms: np.ndarray  # [num_stages + 2] float64, when its result is there
    preempted: np.ndarray  # a stack of requests that wait again
    requests: np.recarray  # [num_requests] of REQUEST

    @classmethod
    def initial(cls, sizes: Sizes, num_requests: int) -> "State":
        seqs, ring = sizes.max_num_seqs, sizes.num_stages + 2

        def int64(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int64)

        requests = np.zeros(num_requests, dtype=REQUEST).view(np.recarray)
        requests.first_token_ms = requests.end_ms = np.nan
        counts = int64(NUM_COUNTS)
        counts[NUM_FREE_SLOTS], counts[FREE_BLOCKS] = seqs, sizes.num_blocks
        return cls(
            counts=counts,
            clock=np.zeros(1),
            stage_free=np.zeros(sizes.num_stages),
            slots=empty_slots(seqs),
            running=int64(seqs),
            free_slots=np.arange(seqs),
            leaving=int64(2 * seqs),
            ring=int64(ring, seqs, 3),
            ring_size=int64(ring),
            ring_ms=np.zeros(ring),
            preempted=int64(num_requests),
            requests=requests,
        )
