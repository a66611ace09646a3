# SPDX-License-Identifier: Apache-2.0
"""The gain of delaying, what it is made of, and the rules of admission."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis_runtime.lookahead.admission import (
    RESERVE,
    AdmissionPolicy,
    Requests,
    admits,
    gain_of_delay,
    look_ahead,
    projected_peak,
)
from spexis_runtime.lookahead.length_history import (
    WINDOW,
    LengthHistory,
    record_length,
    remaining_length,
)
from spexis_runtime.lookahead.memory import (
    HORIZON,
    MAX_AGE,
    NUM_BUCKETS,
    MemoryTables,
    RemainingLengths,
)

BLOCK = 16


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 200),
    st.integers(1, 5),
    st.floats(0, 60),
    st.floats(0, 60),
    st.integers(1, 256),
    st.floats(1, 50),
)
def test_gain_is_the_ratio_of_the_appendix(period, n, wait, delay, running, pdr):
    """Tokens and times of A.3, without the algebra."""
    aggressive = ((running + 1) * period - wait) / ((period - (n + 1)) + (n + 1) * pdr)
    delayed = ((running + 1) * period - delay) / ((period - 1) + pdr)
    gain = gain_of_delay(period, n, wait, delay, running, pdr)
    assert gain == pytest.approx(delayed / aggressive)


def test_gain_says_what_the_paper_says_of_it():
    # many requests: recomputation decides; few, and a long delay: waiting does
    assert gain_of_delay(64, 2, 10, 40, 128, 5.0) > 1
    assert gain_of_delay(64, 1, 2, 60, 2, 1.5) < 1
    # no recomputation cost and equal waits: it does not matter
    assert gain_of_delay(64, 3, 20, 20, 8, 1.0) == pytest.approx(1)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ([50.0] * 10, (0, 0, 0)),  # always room
        ([95.0] * 10, (1, 9, 10)),  # never: evicted at once, and it does not come back
        # evicted at iteration 2, back at 5 with the 12 tokens that it has by then
        ([85, 89, 89, 89, 60, 60, 60, 60, 60, 60], (1, 3, 3)),
        # back at 4, evicted again at 6 and back at 7
        ([85, 89, 89, 60, 60, 90, 60, 60, 60, 60], (2, 3, 6)),
    ],
)
def test_look_ahead(memory, expected):
    """Room for 100 tokens, a newcomer of 10 that gains one an iteration."""
    result = look_ahead(np.array(memory, dtype=float), 100.0, 10, 1.0)
    assert tuple(map(int, result)) == expected


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=9)
)
def test_projected_peak_is_that_of_playing_it_out(requests):
    held, remaining = (np.array(column) for column in zip(*requests, strict=True))
    played = max(
        (held + t)[remaining >= t].sum() for t in range(1, remaining.max() + 1)
    )
    assert projected_peak(held.copy(), remaining.copy(), len(requests)) == played


def test_history():
    history = LengthHistory.empty()
    assert remaining_length(history, 0, 0.5) == -1
    rng = np.random.default_rng(0)
    for length in rng.permutation(np.arange(1, 34)):
        record_length(history, length)
    assert remaining_length(history, 0, 0.0) == 1
    assert remaining_length(history, 0, 0.999) == 33
    assert remaining_length(history, 30, 0.0) == 1
    assert remaining_length(history, 30, 0.999) == 3
    assert remaining_length(history, 33, 0.5) == 33  # half done
    lengths = rng.integers(1, 500, 3 * WINDOW)
    for length in lengths:
        record_length(history, length)
    np.testing.assert_array_equal(history.ordered, np.sort(lengths[-WINDOW:]))


def never_ends() -> MemoryTables:
    probability = np.zeros((NUM_BUCKETS, HORIZON + MAX_AGE + 1))
    probability[:, -1] = 1
    return MemoryTables.make(RemainingLengths(probability), 1.0, 2)


def requests(tokens: list[int], *, generated: int = 0, limit: int = 1000) -> Requests:
    made = Requests.empty(len(tokens))
    made.tokens[:], made.generated[:], made.limit[:] = tokens, generated, limit
    made.draw[:] = 0.5
    made.bucket[:] = NUM_BUCKETS - 1
    return made


@pytest.mark.parametrize("rule", ["vllm", "history", "lookahead"])
def test_a_head_beside_none_is_admitted(rule):
    """So none waits for ever: while it is refused, those that run only end."""
    policy = AdmissionPolicy.make(rule, never_ends())
    record_length(policy.history, 10_000)
    assert admits(policy, requests([100]), 1, 100, BLOCK, 10.0)


def test_vllm_admits_whatever_fits_now():
    policy = AdmissionPolicy.make("vllm")
    assert admits(policy, requests([100, 100]), 2, 200, BLOCK, 10.0)


def test_history_admits_up_to_the_projected_peak():
    policy = AdmissionPolicy.make("history")
    assert admits(policy, requests([100, 100]), 2, 200, BLOCK, 10.0)  # nothing is known
    record_length(policy.history, 50)
    peak = 2 * (100 + BLOCK // 2 + 50) / (1 - RESERVE)
    assert admits(policy, requests([100, 100]), 2, np.ceil(peak), BLOCK, 10.0)
    assert not admits(policy, requests([100, 100]), 2, np.floor(peak), BLOCK, 10.0)
    # no request gains more than it may
    few = requests([100, 100], limit=10)
    assert admits(policy, few, 2, np.floor(peak), BLOCK, 10.0)


def test_lookahead_delays_while_that_gains():
    policy = AdmissionPolicy.make("lookahead", never_ends())
    running = [500] * 64
    need = 65 * (500 + HORIZON + BLOCK / 2) / (1 - RESERVE)
    waiting = requests([*running, 500])
    assert admits(policy, waiting, 65, need + 1, BLOCK, 10.0)
    assert not admits(policy, waiting, 65, need - 20, BLOCK, 10.0)
    # a prefill that costs nothing is worth an eviction
    assert admits(policy, waiting, 65, need - 20, BLOCK, 1.0)


def test_lookahead_knows_who_ends():
    """The same memory, but a quarter of the requests ends within three tokens."""
    probability = np.zeros((NUM_BUCKETS, HORIZON + MAX_AGE + 1))
    probability[0, 2] = probability[1:, -1] = 1
    tables = MemoryTables.make(RemainingLengths(probability), 1.0, 2)
    policy = AdmissionPolicy.make("lookahead", tables)
    waiting = requests([500] * 65)
    capacity = 65 * (500 + HORIZON) - 20
    assert not admits(policy, waiting, 65, capacity, BLOCK, 10.0)
    waiting.bucket[:16] = 0
    assert admits(policy, waiting, 65, capacity, BLOCK, 10.0)
    waiting.age[:16] = 3  # they should have ended: they do not count as such
    assert not admits(policy, waiting, 65, capacity, BLOCK, 10.0)


def test_lookahead_projects_the_peak_with_predicted_lengths():
    """The forecast of 64 iterations has room; who ends long after it matters too."""
    ends_late = np.zeros((NUM_BUCKETS, HORIZON + MAX_AGE + 1))
    ends_late[0, 2] = ends_late[1:, -1] = 1
    tables = MemoryTables.make(RemainingLengths(ends_late), 1.0, 2)
    policy = AdmissionPolicy.make("lookahead", tables)
    record_length(policy.history, 1000)
    waiting = requests([500] * 4, limit=2000)
    enough = 4 * (500 + BLOCK / 2 + 1000) / (1 - RESERVE)
    assert admits(policy, waiting, 4, enough + 1, BLOCK, 10.0)
    assert not admits(policy, waiting, 4, enough - 10, BLOCK, 10.0)
    waiting.bucket[:2] = (
        0  # two are to end soon; what is predicted of the head counts not
    )
    assert admits(policy, waiting, 4, enough - 10, BLOCK, 10.0)
    waiting.bucket[:2] = NUM_BUCKETS - 1
    waiting.bucket[3] = 0
    assert not admits(policy, waiting, 4, enough - 10, BLOCK, 10.0)


def test_what_cannot_be_a_policy_is_refused():
    with pytest.raises(ValueError, match="must be one of vllm, history, lookahead"):
        AdmissionPolicy.make("random")
    with pytest.raises(ValueError, match="lookahead needs the tables"):
        AdmissionPolicy.make("lookahead")
