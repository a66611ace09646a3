# SPDX-License-Identifier: Apache-2.0
"""A case that is ready to be measured."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.gpu import Launch


class Work(NamedTuple):
    """Launches of ours and of the rivals, over rotated inputs each."""

    ours: Sequence[Launch]
    rivals: dict[str, Sequence[Launch]]
    io_bytes: int  # that have to move; 0: a launch is the limit
    wrong: str = ""  # what the check of the results found; "": they are right
    flop: float = 0.0  # of matrix products in bf16
