# SPDX-License-Identifier: Apache-2.0
"""Prompt sets: a JSON Lines file, a JSON list, or the demo's own prompts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spexis_runtime.demo_prompts import DEMO_PROMPTS

DEMO = "demo"  # stands for DEMO_PROMPTS where a file is expected


class TrainError(ValueError):
    """Something that the user can put right; the message is one line."""


class Prompt(NamedTuple):
    turns: tuple[str, ...]  # of the user, in one dialogue
    source: str = ""
    category: str = ""


def read_prompts(path: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a set.

    `path` is "demo", or a .jsonl file with an object a line ("turns": [str, ...], and
    optionally "source" and "category"), or a .json file with a list of strings. Raises
    TrainError for a file that is missing, empty or not of this form.
    """
    if path == DEMO:
        return [Prompt((text,), source=DEMO) for text in DEMO_PROMPTS[:limit]]
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"cannot read the prompts {path}: {error}") from None
    if path.endswith(".json"):
        records = _parse(content, path)
        if not isinstance(records, list):
            raise TrainError(f"{path}: a .json file must hold a list of strings")
        prompts = [_from_string(r, f"{path}, item {i}") for i, r in enumerate(records)]
    else:
        prompts = [
            _from_record(_parse(line, where), where)
            for number, line in enumerate(content.split("\n"), 1)
            if line.strip()
            for where in (f"{path}, line {number}",)
        ]
    if not prompts:
        raise TrainError(f"{path} holds no prompts")
    return prompts[:limit]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TrainError(f"{where}: not valid JSON: {error}") from None


def _from_string(record: Any, where: str) -> Prompt:
    if not isinstance(record, str):
        raise TrainError(f"{where}: must be a string, got {record!r:.40}")
    return Prompt((record,))


def _from_record(record: Any, where: str) -> Prompt:
    turns = record.get("turns") if isinstance(record, dict) else None
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) for turn in turns)
    ):
        raise TrainError(f'{where}: must be an object with "turns": [str, ...]')
    return Prompt(tuple(turns), record.get("source", ""), record.get("category", ""))


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what `read_prompts` returned."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
