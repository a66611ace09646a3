# SPDX-License-Identifier: Apache-2.0
"""Drafts by a joint law of confidence and acceptance, by depth.

What becomes of the draft for a position of a request depends on nothing but the seed,
the request and the position: two runs with other budgets, policies or orders of rows
meet the same drafts, and so does an engine whose drafter draws from here.
"""

from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.jit import compiled

HIT, CONFIDENCE, BUCKET, LENGTH = 1, 2, 3, 4  # what a draw is for


class DraftLaw(NamedTuple):
    """Depth d - 1 of the arrays is that of a draft with d - 1 more in flight before it;
    deeper drafts are as the last."""

    theta: np.ndarray  # [depth] float64, acceptance if the prefix is right
    right: (
        np.ndarray
    )  # [depth, points] float64, quantiles of a right draft's confidence
    wrong: (
        np.ndarray
    )  # [depth, points] float64, of a wrong one's, or one of a wrong prefix

    @classmethod
    def uniform(
        cls,
        theta: float | list[float],
        right: tuple[float, float] = (0.5, 1.0),
        wrong: tuple[float, float] = (0.0, 0.8),
    ) -> "DraftLaw":
        """Confidence uniform in one range if right, in another if wrong."""
        depths = np.atleast_1d(np.asarray(theta, dtype=np.float64))
        ones = np.ones((len(depths), 1))
        return cls(depths, ones * np.array(right), ones * np.array(wrong))


@compiled
def uniform(seed, request, position, use):
    """A draw in [0, 1) for a use of a request's position: splitmix64, twice."""
    x = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(request + 1)
    for value in (np.uint64(position), np.uint64(use)):
        x += value * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def _quantile(points, draw):
    at = draw * (len(points) - 1)
    low = int(at)
    if low == len(points) - 1:
        return points[low]
    return points[low] + (at - low) * (points[low + 1] - points[low])


@compiled
def draw_draft(law, seed, request, position, depth, prefix_right):
    """The draft for `position`: (whether it is right, its confidence as float32).

    Args:
        depth: drafts in flight with it, from 1 on.
        prefix_right: whether all of those before it are right.
    """
    d = min(depth, len(law.theta)) - 1
    right = prefix_right and uniform(seed, request, position, HIT) < law.theta[d]
    draw = uniform(seed, request, position, CONFIDENCE)
    points = law.right[d] if right else law.wrong[d]
    return right, np.float32(_quantile(points, draw))
