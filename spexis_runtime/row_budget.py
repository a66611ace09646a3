# SPDX-License-Identifier: Apache-2.0
"""How many decode rows the next step feeds, and whether it drafts (`"auto"`)."""

from typing import NamedTuple


class RowChoice(NamedTuple):
    num_rows: int  # most decode rows that stage 0 feeds
    drafting: bool  # False: plain pipeline parallelism, the exit head is off


class RowBudget:
    """Feeds every request."""

    def choose(self, num_decodes: int) -> RowChoice:
        """For a step with `num_decodes` running requests that decode."""
        return RowChoice(num_decodes, drafting=True)
