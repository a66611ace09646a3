# SPDX-License-Identifier: Apache-2.0
"""Output lengths of the requests that ended last, and what they say of the others.

A request that has generated g tokens ends like one of those in the history that went
beyond g. Which of them is a draw in [0, 1) that a request keeps for life.
"""

from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.jit import compiled

WINDOW = 1024
"""Requests remembered."""


class LengthHistory(NamedTuple):
    """The last WINDOW lengths; num_ended[0] requests have ended so far."""

    ends: np.ndarray  # [WINDOW] int64, a ring
    ordered: np.ndarray  # [WINDOW] int64, the same, sorted
    num_ended: np.ndarray  # [1] int64

    @classmethod
    def empty(cls) -> "LengthHistory":
        return cls(*(np.zeros(n, dtype=np.int64) for n in (WINDOW, WINDOW, 1)))


@compiled
def _num_up_to(ordered, filled, length):
    """How many of the first `filled` entries are at most `length`."""
    low, high = 0, filled
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] <= length:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def record_length(history, length):
    """A request ended with `length` output tokens; `history` changes in place."""
    ended, ordered = history.num_ended[0], history.ordered
    filled = min(ended, WINDOW)
    if ended >= WINDOW:  # the oldest makes room
        gone = _num_up_to(ordered, filled, history.ends[ended % WINDOW]) - 1
        ordered[gone : filled - 1] = ordered[gone + 1 : filled].copy()
        filled -= 1
    at = _num_up_to(ordered, filled, length)
    ordered[at + 1 : filled + 1] = ordered[at:filled].copy()
    ordered[at] = length
    history.ends[ended % WINDOW] = length
    history.num_ended[0] = ended + 1


@compiled
def remaining_length(history, generated, draw):
    """Output tokens still to come, or -1 where no request has ended yet.

    A request longer than all that are remembered is taken to be half done.
    """
    filled = min(history.num_ended[0], WINDOW)
    if filled == 0:
        return -1
    not_longer = _num_up_to(history.ordered, filled, generated)
    if not_longer == filled:
        return max(generated, 1)
    at = not_longer + int(draw * (filled - not_longer))
    return history.ordered[at] - generated
