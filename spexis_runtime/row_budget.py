# SPDX-License-Identifier: Apache-2.0
"""`row_budget="auto"`: how many decode rows each step feeds, and whether it drafts.

The policy is `lookahead.row_budget`; here it gets the step times that the stages were
measured with at start, and a running estimate of how good the drafts are.
"""

import threading
from typing import Any, NamedTuple, Protocol

import numpy as np

from spexis_runtime.iteration_log import DraftOutcomes
from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.row_budget import RowBudget, choose_rows
from spexis_runtime.lookahead.step_times import StageTimes
from spexis_runtime.step_profile import StepProfile

PRIOR_THETA = 0.6  # of drafts before any was seen
KEPT = 4096  # newest drafts of a depth that the estimate is from
ENOUGH = 256  # drafts of a depth that replace the prior
QUANTILES = np.linspace(0, 1, 17)
PROBE_EVERY, PROBE_STEPS = (
    2048,
    64,
)  # of plain steps, so many draft: have they improved?


class RowChoice(NamedTuple):
    num_rows: int  # most decode rows that stage 0 feeds
    drafting: bool  # False: plain pipeline parallelism, the exit head is off


class Policy(Protocol):
    def choose(self, num_decodes: int) -> RowChoice:
        """For a step with `num_decodes` running requests that decode."""

    def observe(self, drafts: DraftOutcomes) -> None:
        """Learn from what became of a step's drafts."""


class AllRows:
    """Feeds every request: where no step times are known, as without a GPU."""

    def choose(self, num_decodes: int) -> RowChoice:
        return RowChoice(num_decodes, drafting=True)

    def observe(self, drafts: DraftOutcomes) -> None:
        pass


class DraftStatistics:
    """The newest drafts, by depth: how confident they were, and whether right."""

    def __init__(self, num_stages: int):
        self.confidence: np.ndarray = np.zeros((num_stages - 1, KEPT))
        self.right: np.ndarray = np.zeros((num_stages - 1, KEPT), dtype=bool)
        self.count: np.ndarray = np.zeros(num_stages - 1, dtype=np.int64)

    def add(self, drafts: DraftOutcomes) -> None:
        for d in range(len(self.count)):
            of_depth = drafts.depth == d + 1
            confidence = drafts.confidence[of_depth]
            at = (self.count[d] + np.arange(len(confidence))) % KEPT
            self.confidence[d, at] = confidence
            self.right[d, at] = drafts.right[of_depth]
            self.count[d] += len(confidence)

    def law(self) -> DraftLaw:
        """Their joint law; at a depth with few drafts that of the depth before."""
        prior = DraftLaw.uniform(PRIOR_THETA)
        theta = PRIOR_THETA
        right, wrong = _quantiles(prior.right), _quantiles(prior.wrong)
        depths: list[tuple[float, np.ndarray, np.ndarray]] = []
        for d, count in enumerate(np.minimum(self.count, KEPT)):
            confidence, hit = self.confidence[d, :count], self.right[d, :count]
            if count >= ENOUGH and 0 < hit.sum() < count:
                theta = float(hit.mean())
                right = np.quantile(confidence[hit], QUANTILES)
                wrong = np.quantile(confidence[~hit], QUANTILES)
            depths.append((theta, right, wrong))
        return DraftLaw(*map(np.array, zip(*depths, strict=True)))


def _quantiles(points: np.ndarray) -> Any:
    """[1, points] at even distances -> [len(QUANTILES)]."""
    return np.interp(QUANTILES, np.linspace(0, 1, points.shape[1]), points[0])


class AutoRows:
    """The k, or plain pipeline parallelism, that promises most tokens a second."""

    def __init__(self, profile: StepProfile, num_stages: int, max_num_seqs: int):
        self.drafting = StageTimes(profile.rows, profile.drafting_ms)
        self.plain = StageTimes(profile.rows, profile.plain_ms)
        self.num_stages, self.max_num_seqs = num_stages, max_num_seqs
        self.statistics = DraftStatistics(num_stages)
        self.refresh_at = ENOUGH  # drafts
        self.refreshing: threading.Thread | None = None
        self.last: int = 0  # what `choose_rows` returned
        self.plain_steps = 0  # since the last with drafts
        self.refresh()

    def refresh(self) -> None:
        """Take the newest law of the drafts; a second's work the first time."""
        self.budget = RowBudget.auto(
            self.statistics.law(),
            self.num_stages,
            self.max_num_seqs,
            self.drafting,
            self.plain,
        )

    def observe(self, drafts: DraftOutcomes) -> None:
        self.statistics.add(drafts)
        idle = self.refreshing is None or not self.refreshing.is_alive()
        if self.statistics.count[0] >= self.refresh_at and idle:
            seen = int(self.statistics.count[0])
            self.refresh_at = seen + min(self.refresh_at, KEPT)
            self.refreshing = threading.Thread(target=self.refresh, daemon=True)
            self.refreshing.start()

    def choose(self, num_decodes: int) -> RowChoice:
        self.last = int(choose_rows(self.budget, num_decodes, self.last))
        if self.last >= 0:
            self.plain_steps = 0
            return RowChoice(self.last, drafting=True)
        self.plain_steps = (self.plain_steps + 1) % (PROBE_EVERY + PROBE_STEPS)
        if self.plain_steps >= PROBE_EVERY:
            return RowChoice(num_decodes, drafting=True)
        return RowChoice(-self.last, drafting=False)
