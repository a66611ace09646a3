# SPDX-License-Identifier: Apache-2.0
"""Texts of the small models of `small_models`, made in a second or two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from spexis_runtime.train.engines import TransformersEngine
from spexis_runtime.train.generate import generate_texts
from spexis_runtime.train.prompts import read_prompts
from spexis_runtime.train.target import load_target
from spexis_runtime.train.texts import TextStore


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs far more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_prompts(path: Path, turns: Sequence[Sequence[str]]) -> Path:
    lines = [{"turns": list(t), "category": f"c{i % 2}"} for i, t in enumerate(turns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_texts(
    model: Path, out: Path, turns: Sequence[Sequence[str]], **options: object
) -> TextStore:
    prompts = write_prompts(out.with_name(out.name + ".jsonl"), turns)
    return generate_texts(
        str(model),
        read_prompts(str(prompts)),
        out,
        max_new_tokens=16,
        engine=TransformersEngine(load_target(str(model))),
        **options,  # type: ignore[arg-type]
    )
