# SPDX-License-Identifier: Apache-2.0
"""KV memory that the running requests will hold over the next 64 iterations.

With all drafts fed, a request gains a token one iteration after the last with
probability theta, and otherwise N after it. A forecast starts at no token in
particular, so its first one comes after r iterations with probability

    P(R = r) = P(gap >= r) / mu,   mu = theta + (1 - theta) N        (1 <= r <= N)

and with n - 1 further gaps, w ~ Binomial(n - 1, 1 - theta) of them long, the n-th token
is there by iteration i with probability

    F_n(i) = sum_r P(R = r) P(w (N - 1) <= i - r - (n - 1))

A request of length l that ends after n more tokens then holds, on average,

    l (1 - F_n(i)) + sum_{m < n} (F_m(i) - F_n(i))    tokens at iteration i

which is exact. The mean over n needs no request: it is a table by the predicted bucket
of the remaining length and the prediction's age. `algorithm_1` is the paper's estimate.
"""

import math
from dataclasses import dataclass

import numpy as np

from spexis_runtime.lookahead.jit import compiled

HORIZON = 64
"""Iterations looked ahead."""
THRESHOLDS = (4, 8, 16, 32, 64)
"""Bucket b of the remaining length: below THRESHOLDS[b], and not below the one before;
the last bucket is not below any."""
NUM_BUCKETS = len(THRESHOLDS) + 1
MAX_AGE = 16
"""A prediction at least so many tokens old counts as so old."""


def bucket_of(remaining: int) -> int:
    """
    >>> [bucket_of(n) for n in (1, 3, 4, 63, 64, 500)]
    [0, 0, 1, 4, 5, 5]
    """
    return sum(remaining >= threshold for threshold in THRESHOLDS)


def completion(theta: float, num_stages: int, iterations: int = HORIZON) -> np.ndarray:
    """F[n, i]: probability that a request gains at least n tokens in i iterations.

    Args:
        theta: acceptance of drafts, or, where not all of them are fed, the theta that
            gives the measured tokens a request and iteration, 1 / (N - theta (N - 1)).

    Returns:
        [iterations + 1, iterations + 1] float64.
    """
    size = iterations + 1
    mean_gap = theta + (1 - theta) * num_stages
    first = np.full(num_stages, (1 - theta) / mean_gap)
    first[0] = 1 / mean_gap
    table = np.zeros((size, size))
    table[0] = 1.0
    long_gaps = np.zeros(size)  # probability of w long gaps among n - 1
    long_gaps[0] = 1.0
    for n in range(1, size):
        at_most = long_gaps.cumsum()
        for r in range(1, num_stages + 1):
            left: np.ndarray = np.arange(size) - r - (n - 1)
            fits = left >= 0
            # with one stage a long gap is no longer than a short one
            most = left[fits] // (num_stages - 1) if num_stages > 1 else iterations
            table[n, fits] += first[r - 1] * at_most[most]
        long_gaps[1:] = theta * long_gaps[1:] + (1 - theta) * long_gaps[:-1]
        long_gaps[0] *= theta
    return table


@dataclass(frozen=True)
class RemainingLengths:
    """P(remaining = n | predicted bucket), as calibrated on requests that have ended.

    `probability`: [NUM_BUCKETS, HORIZON + MAX_AGE + 1] float64; column n - 1 is that of
    n more tokens, the last column that of more than HORIZON + MAX_AGE. Rows sum to 1.
    """

    probability: np.ndarray

    @classmethod
    def from_counts(cls, counts: np.ndarray) -> "RemainingLengths":
        """Calibrate on counts of the same shape; one is added to what each bucket says.

        Args:
            counts: how often a request had n tokens left where bucket b was predicted.
        """
        prior = np.zeros_like(counts, dtype=np.float64)
        low = 1
        for bucket, high in enumerate((*THRESHOLDS, counts.shape[1] + 1)):
            prior[bucket, low - 1 : high - 1] = 1 / (high - low)
            low = high
        smoothed = counts + prior
        return cls(smoothed / smoothed.sum(axis=1, keepdims=True))

    def aged(self) -> np.ndarray:
        """[NUM_BUCKETS, MAX_AGE + 1, HORIZON + 1]: the same, `age` tokens later.

        The last column is that of more than HORIZON tokens.
        """
        aged = np.zeros((NUM_BUCKETS, MAX_AGE + 1, HORIZON + 1))
        for age in range(MAX_AGE + 1):
            left = self.probability[:, age:]
            alive = left.sum(axis=1, keepdims=True)
            # wrong for sure, as the request still runs: then nothing is known of it
            left = np.where(alive > 0, left / np.where(alive > 0, alive, 1), 0)
            aged[:, age, :HORIZON] = left[:, :HORIZON]
            aged[:, age, HORIZON] = 1 - aged[:, age, :HORIZON].sum(axis=1)
        return aged


@dataclass(frozen=True)
class MemoryTables:
    """What a request adds to the forecast: alive[b, a, i] l + generated[b, a, i].

    [NUM_BUCKETS, MAX_AGE + 1, HORIZON] float64 each, for iterations 1 to HORIZON.
    """

    alive: np.ndarray  # probability that it still runs
    generated: np.ndarray  # tokens gained since, 0 if it has ended

    @classmethod
    def make(
        cls, remaining: RemainingLengths, theta: float, num_stages: int
    ) -> "MemoryTables":
        gained = completion(theta, num_stages)
        # a request that ends after n tokens, n = 1 ... HORIZON, or later
        ends = np.vstack((gained[1:], np.zeros((1, HORIZON + 1))))
        before = np.vstack((np.zeros((1, HORIZON + 1)), gained[1:].cumsum(axis=0)))
        held = before - np.arange(HORIZON + 1)[:, None] * ends
        aged = remaining.aged()
        return cls(
            np.ascontiguousarray(1 - (aged @ ends)[:, :, 1:]),
            np.ascontiguousarray((aged @ held)[:, :, 1:]),
        )


@compiled
def forecast(lengths, buckets, ages, count, alive, generated, tokens, running):
    """Tokens held and requests running at each of the next HORIZON iterations.

    Args:
        lengths: [>= count] int64, tokens that each request holds now.
        buckets, ages: [>= count] int64, the prediction and its age in tokens.
        count: requests to look at.
        alive, generated: as in MemoryTables.
        tokens, running: [HORIZON] float64; written.
    """
    num_ages = alive.shape[1]
    held = np.zeros((alive.shape[0], num_ages))
    requests = np.zeros((alive.shape[0], num_ages))
    for r in range(count):
        age = min(ages[r], num_ages - 1)
        held[buckets[r], age] += lengths[r]
        requests[buckets[r], age] += 1
    tokens[:] = 0
    running[:] = 0
    for bucket in range(alive.shape[0]):
        for age in range(num_ages):
            number, length = requests[bucket, age], held[bucket, age]
            if number > 0:
                for i in range(len(tokens)):
                    tokens[i] += (
                        length * alive[bucket, age, i]
                        + number * generated[bucket, age, i]
                    )
                    running[i] += number * alive[bucket, age, i]


def algorithm_1(
    lengths: np.ndarray,
    remaining: np.ndarray,
    precision: np.ndarray,
    theta: float,
    num_stages: int,
) -> np.ndarray:
    """The paper's Algorithm 1: tokens held at iterations 1 to HORIZON, [HORIZON].

    Kept as a reference. Its p_{i,w} is the probability that some token comes exactly at
    iteration i, after w rejections; these sum to 1 / (N - theta (N - 1)) in the long
    run, not to 1, so that it counts too few generated and too few finished.

    Args:
        lengths: [R], tokens that each request holds now.
        remaining: [R], the predicted threshold; np.inf: beyond the last.
        precision: [R], that of the prediction.
    """
    estimate = np.zeros(HORIZON)
    for i in range(1, HORIZON + 1):
        expected_generated, finished = 0.0, np.zeros(len(lengths))
        for w in range(i // num_stages + 1):
            accepted = i - num_stages * w
            generated = accepted + w
            probability = (
                math.comb(generated, accepted) * theta**accepted * (1 - theta) ** w
            )
            expected_generated += generated * probability
            finished += precision * (generated >= remaining) * probability
        estimate[i - 1] = (
            lengths.sum()
            + (len(lengths) - finished.sum()) * expected_generated
            - (lengths * finished).sum()
        )
    return estimate
