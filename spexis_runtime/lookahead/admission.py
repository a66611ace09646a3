# SPDX-License-Identifier: Apache-2.0
"""Whether the first waiting request may start now (paper, section 5.2 and A.3).

Asked about the head of the queue alone, and only where vLLM would admit it: first come,
first served. The rules:

    VLLM       it may: its known tokens fit into the KV blocks that are free
    HISTORY    ... and so does the peak of all that run, if each ends as earlier
               requests did (the Past-Future scheduler's rule; no trained model)
    LOOKAHEAD  ... and that peak fits with the predicted lengths; and the paper's gain
               of delaying, from the memory forecast of 64 iterations, is <= 1

With I iterations in the period, n evictions if it starts at once, the iterations
i_wait that they wait, and i_delay until it can start without any, in step times t_d of
decoding and t_p of a prefill, pdr = t_p / t_d:

    G = (I + (n + 1)(pdr - 1)) / (I + pdr - 1)
        * (bs + 1 - i_delay / I) / (bs + 1 - sum i_wait / I)

No request waits for ever: while the head is refused nobody else starts, the requests
that run end one after the other, and a head beside none is always admitted.
"""

from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.jit import compiled
from spexis_runtime.lookahead.length_history import LengthHistory, remaining_length
from spexis_runtime.lookahead.memory import (
    HORIZON,
    MAX_AGE,
    NUM_BUCKETS,
    THRESHOLDS,
    MemoryTables,
    forecast,
)

VLLM, HISTORY, LOOKAHEAD = 0, 1, 2
RULES = {"vllm": VLLM, "history": HISTORY, "lookahead": LOOKAHEAD}
RESERVE = 0.02
"""Share of the KV memory that all rules but vLLM's leave for what they misjudge."""


class AdmissionPolicy(NamedTuple):
    """A rule and what it knows."""

    rule: int
    history: LengthHistory  # kept up to date by whoever asks
    alive: np.ndarray  # of MemoryTables
    generated: np.ndarray
    rate: float  # tokens that a running request gains an iteration

    @classmethod
    def make(
        cls,
        rule: str,
        tables: MemoryTables | None = None,
        rate: float = 1.0,
        history: LengthHistory | None = None,
    ) -> "AdmissionPolicy":
        """
        Args:
            rule: one of RULES; "lookahead" needs `tables`.
            tables: of the memory forecast.
        """
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if tables is None:
            if rule == "lookahead":
                raise ValueError("the rule lookahead needs the tables of a predictor")
            blank = np.zeros((NUM_BUCKETS, MAX_AGE + 1, HORIZON))
            tables = MemoryTables(blank, blank)
        history = LengthHistory.empty() if history is None else history
        return cls(RULES[rule], history, tables.alive, tables.generated, rate)


class Requests(NamedTuple):
    """What the host knows of requests; arrays of one length."""

    tokens: np.ndarray  # int64, known so far, prompt included
    generated: np.ndarray  # int64, output tokens among them
    limit: np.ndarray  # int64, output tokens that it may have
    draw: np.ndarray  # float64 in [0, 1), see length_history
    bucket: np.ndarray  # int64, predicted remaining length
    age: np.ndarray  # int64, tokens since that prediction

    @classmethod
    def empty(cls, size: int) -> "Requests":
        return cls(
            *(
                np.zeros(size, np.float64 if f == "draw" else np.int64)
                for f in cls._fields
            )
        )


@compiled
def gain_of_delay(iterations, evictions, wait, delay, running, pdr):
    """G of section 5.2: throughput of delaying over that of starting at once.

    Args:
        iterations: I, of the period looked at.
        evictions: n, under starting at once.
        wait: iterations that evicted requests wait, summed.
        delay: i_delay.
        running: bs, requests that run before.
        pdr: time of a prefill over that of a decode step.
    """
    recomputation = (iterations + (evictions + 1) * (pdr - 1)) / (iterations + pdr - 1)
    waiting = (running + 1 - delay / iterations) / (running + 1 - wait / iterations)
    return recomputation * waiting


@compiled
def look_ahead(memory, capacity, newcomer, rate):
    """What happens to a newcomer that starts now, and when it could start in peace.

    Whoever started last is evicted first, as in vLLM: the newcomer, who comes back when
    it fits again.

    Args:
        memory: [I] float64, tokens held by the others at iterations 1 to I.
        capacity: tokens that there is room for.
        newcomer: tokens that it holds at first.
        rate: tokens that it gains an iteration.

    Returns:
        (evictions, iterations it waits for them, iterations to delay it by).
    """
    evictions, wait, evicted_at, own = 0, 0, 0, float(newcomer)
    for i in range(1, len(memory) + 1):
        if evicted_at == 0:
            own += rate
            if memory[i - 1] + own > capacity:
                evictions += 1
                evicted_at = i
        elif memory[i - 1] + own <= capacity:
            wait += i - evicted_at
            evicted_at = 0
    if evicted_at:
        wait += len(memory) - evicted_at
    delay = 0
    for i in range(len(memory), 0, -1):  # is there always room from iteration i on?
        fits = True
        for j in range(i, len(memory) + 1):
            fits &= memory[j - 1] + newcomer + rate * (j - i + 1) <= capacity
        if not fits:
            delay = i
            break
    return evictions, wait, delay


@compiled
def projected_peak(held, remaining, count):
    """Most tokens ever held, if nobody starts any more and all gain tokens alike.

    Args:
        held, remaining: [>= count] int64, tokens now, and tokens still to come; sorted
            in place, those that remain longest first.
    """
    gap = count // 2
    while gap:  # Shell's sort: short, and quick for some hundred requests
        for i in range(gap, count):
            mine, left, j = held[i], remaining[i], i
            while j >= gap and remaining[j - gap] < left:
                held[j], remaining[j] = held[j - gap], remaining[j - gap]
                j -= gap
            held[j], remaining[j] = mine, left
        gap //= 2
    total, peak = 0, 0
    for r in range(count):
        total += held[r]
        # when r ends, the r that remain longer are still there
        peak = max(peak, total + (r + 1) * remaining[r])
    return peak


@compiled
def _peak_fits(policy, requests, count, capacity, block_size):
    """Whether the projected peak fits, for LOOKAHEAD with its predicted lengths."""
    remaining = np.empty(count, dtype=np.int64)
    held = np.empty(count, dtype=np.int64)
    for r in range(count):
        generated = requests.generated[r]
        left = remaining_length(policy.history, generated, requests.draw[r])
        if left < 0:
            return True  # nothing is known
        if policy.rule == LOOKAHEAD and r < count - 1:  # the head has no prediction
            bucket = requests.bucket[r]
            if bucket:
                left = max(left, THRESHOLDS[bucket - 1] - requests.age[r])
            if bucket < len(THRESHOLDS):
                left = min(left, max(1, THRESHOLDS[bucket] - 1 - requests.age[r]))
        remaining[r] = min(left, requests.limit[r] - generated)
        held[r] = requests.tokens[r] + block_size // 2
    return projected_peak(held, remaining, count) <= capacity


@compiled
def _gain_is_small(policy, requests, count, capacity, block_size, pdr):
    others = count - 1
    memory, running = np.empty(HORIZON), np.empty(HORIZON)
    forecast(
        requests.tokens,
        requests.bucket,
        requests.age,
        others,
        policy.alive,
        policy.generated,
        memory,
        running,
    )
    memory += running * (block_size / 2)
    newcomer = requests.tokens[others] + block_size / 2
    evictions, wait, delay = look_ahead(memory, capacity, newcomer, policy.rate)
    if evictions == 0:
        return True
    return gain_of_delay(HORIZON, evictions, wait, delay, others, pdr) <= 1


@compiled
def admits(policy, requests, count, capacity, block_size, pdr):
    """Whether the head of the queue may start, given that it fits now.

    Args:
        policy: AdmissionPolicy.
        requests: Requests; the first `count` - 1 run, entry `count` - 1 is the head.
        capacity: tokens that the KV blocks hold.
        block_size: tokens in a block; a request wastes half of one on average.
        pdr: time of the step that prefills the head over that of a decode step.
    """
    if policy.rule == VLLM or count == 1:
        return True
    usable = capacity * (1 - RESERVE)
    if not _peak_fits(policy, requests, count, usable, block_size):
        return False
    return policy.rule == HISTORY or _gain_is_small(
        policy, requests, count, usable, block_size, pdr
    )
