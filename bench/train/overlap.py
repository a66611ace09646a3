# SPDX-License-Identifier: Apache-2.0
"""Do training prompts repeat those of an evaluation?

    python -m bench.train.overlap TRAINING.jsonl EVALUATION.jsonl

Prints the prompts that share a turn, or twelve words in a row, and fails if any do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from spexis_runtime.train.prompts import Prompt, read_prompts

WORDS = 12


def overlapping(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[int]:
    """Numbers of the `prompts` that share a turn or `WORDS` words in a row with one.

    Case and punctuation do not count.
    """
    known = {run for prompt in others for run in _runs(prompt)}
    return [i for i, p in enumerate(prompts) if not known.isdisjoint(_runs(p))]


def _runs(prompt: Prompt) -> Iterator[tuple[str, ...]]:
    """Runs of `WORDS` words of each turn; of a shorter turn, all of it."""
    for turn in prompt.turns:
        words = re.findall(r"\w+", turn.lower())
        for start in range(max(1, len(words) - WORDS + 1)):
            yield tuple(words[start : start + WORDS])


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print(__doc__)
        return 2
    prompts = read_prompts(argv[0])
    found = overlapping(prompts, read_prompts(argv[1]))
    for number in found:
        print(f"{argv[0]}, prompt {number}: {prompts[number].turns[0]:.60}")
    print(f"{len(found)} of {len(prompts)} prompts overlap")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
