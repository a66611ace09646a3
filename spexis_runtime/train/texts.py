# SPDX-License-Identifier: Apache-2.0
"""The target's own text in a directory: generated once, read by every training.

    texts.json              what it was made from and how
    shard-00000.safetensors its texts, a part at a time; a shard is there whole or not

so that an interrupted generation goes on where it was. Tensors of a shard, of n texts
with t tokens in all, r of them in responses:

    ids [t], lengths [n], prompt_lengths [n], prompts [n], seeds [n], temperatures [n],
    ended [n], categories [n] (index into the metadata's list), and with recorded logits
    label_tokens [r, k], label_logprobs [r, k]
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save

from spexis_runtime.train.prompts import TrainError, write_text

SETTINGS_FILE = "texts.json"
FORMAT_VERSION = 1


class Labels(NamedTuple):
    """The target's most likely tokens in front of each token of a response."""

    tokens: torch.Tensor  # [response_length, k] int32, best first
    logprobs: torch.Tensor  # [response_length, k] float16, at temperature 1


class Text(NamedTuple):
    ids: list[int]  # prompt, then response (with its end token, if it came to one)
    prompt_length: int
    prompt: int = 0  # its number: texts of one dialogue share it
    category: str = ""
    seed: int = 0  # of the noise that the response was drawn with
    temperature: float = 0.0  # 0: greedy
    ended: bool = True  # False: cut at the token limit
    labels: Labels | None = None

    @property
    def response(self) -> list[int]:
        return self.ids[self.prompt_length :]


class TextStore:
    """A directory of texts. `settings` is the content of its `texts.json`."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings

    @classmethod
    def open(cls, path: Path) -> TextStore:
        """An existing one, complete. Raises TrainError where it is not."""
        store = cls(path, _read_settings(path))
        if missing := store.missing_shards():
            raise TrainError(
                f"{path} lacks {len(missing)} of {store.num_shards} shards: end its "
                "generation first, the same command goes on"
            )
        return store

    @classmethod
    def create(cls, path: Path, settings: dict[str, Any]) -> TextStore:
        """A new one, or the one that is there, if it was made with `settings`.

        Raises TrainError where it was made with others.
        """
        settings = json.loads(json.dumps({"format_version": FORMAT_VERSION} | settings))
        if path.exists():
            found = _read_settings(path)
            for name in settings.keys() | found.keys():
                if found.get(name) != settings.get(name):
                    raise TrainError(
                        f"{path} holds other texts: {name} is {found.get(name)!r}, "
                        f"not {settings.get(name)!r}"
                    )
        else:
            write_text(path / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        return cls(path, settings)

    @property
    def identity(self) -> str:
        """Differs from that of texts which were made in another way."""
        content = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        return self.settings["num_shards"]

    def shard_file(self, index: int) -> Path:
        return self.path / f"shard-{index:05d}.safetensors"

    def missing_shards(self) -> list[int]:
        return [i for i in range(self.num_shards) if not self.shard_file(i).exists()]

    def write_shard(self, index: int, texts: Sequence[Text]) -> None:
        categories = sorted({text.category for text in texts})
        wide = self.settings["vocab_size"] > 1 << 16
        tensors = {
            "ids": torch.tensor(list(chain.from_iterable(t.ids for t in texts))).to(
                torch.int32 if wide else torch.uint16
            ),
            "lengths": torch.tensor([len(t.ids) for t in texts], dtype=torch.int32),
            "prompt_lengths": torch.tensor(
                [t.prompt_length for t in texts], dtype=torch.int32
            ),
            "prompts": torch.tensor([t.prompt for t in texts], dtype=torch.int32),
            "seeds": torch.tensor([t.seed for t in texts], dtype=torch.int64),
            "temperatures": torch.tensor(
                [t.temperature for t in texts], dtype=torch.float64
            ),
            "ended": torch.tensor([t.ended for t in texts], dtype=torch.bool),
            "categories": torch.tensor(
                [categories.index(t.category) for t in texts], dtype=torch.int32
            ),
        }
        labels = [t.labels for t in texts if t.labels is not None]
        if labels:
            tensors["label_tokens"] = torch.cat([x.tokens for x in labels])
            tensors["label_logprobs"] = torch.cat([x.logprobs for x in labels])
        save_tensors(
            self.shard_file(index), tensors, {"categories": json.dumps(categories)}
        )

    def texts(self) -> Iterator[Text]:
        """Those of all shards, in their order."""
        for index in range(self.num_shards):
            yield from self._read_shard(index)

    def _read_shard(self, index: int) -> Iterator[Text]:
        with safe_open(self.shard_file(index), framework="pt") as file:
            categories = json.loads(file.metadata()["categories"])
            names = set(file.keys())
            column = {name: file.get_tensor(name) for name in names}
        ids = column["ids"].to(torch.int32).split(column["lengths"].tolist())
        response_lengths = (column["lengths"] - column["prompt_lengths"]).tolist()
        labels: Sequence[Labels | None] = [None] * len(ids)
        if "label_tokens" in names:
            labels = [
                Labels(*pair)
                for pair in zip(
                    column["label_tokens"].split(response_lengths),
                    column["label_logprobs"].split(response_lengths),
                    strict=True,
                )
            ]
        for row, own in enumerate(ids):
            yield Text(
                own.tolist(),
                int(column["prompt_lengths"][row]),
                int(column["prompts"][row]),
                categories[int(column["categories"][row])],
                int(column["seeds"][row]),
                float(column["temperatures"][row]),
                bool(column["ended"][row]),
                labels[row],
            )


def save_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file as a whole; an old one of that name goes.

    Raises OSError, of a full disk say, and the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # not save_file: it does not report every failed write
        scratch.write_bytes(
            save({k: t.contiguous() for k, t in tensors.items()}, metadata)
        )
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads((path / SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        raise TrainError(
            f"{path} is no directory of texts: no {SETTINGS_FILE}"
        ) from None
    if settings.get("format_version") != FORMAT_VERSION:
        raise TrainError(
            f"{path} is of another format: {settings.get('format_version')}, "
            f"expected {FORMAT_VERSION}"
        )
    return settings
