# SPDX-License-Identifier: Apache-2.0
"""What every report of a training or an evaluation says of where it comes from."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from spexis_runtime.train.loop import Step
from spexis_runtime.train.texts import Text

# arguments that say nothing where texts are there
OF_GENERATION = {
    "limit",
    "max_prompt_tokens",
    "max_new_tokens",
    "temperatures",
    "self_prompts",
    "top_logits",
}


def training_report(history: list[Step], texts: list[Text]) -> dict[str, Any]:
    last = [s for s in history if s.epoch == history[-1].epoch]
    return {
        "num_texts": len(texts),
        "num_tokens": sum(len(t.ids) for t in texts),
        "num_response_tokens": sum(len(t.response) for t in texts),
        "epochs": history[-1].epoch + 1,
        "steps": len(history),
        "seconds": history[-1].seconds,
        "last_epoch_loss": round(sum(s.loss for s in last) / len(last), 4),
        "last_epoch_hits": round(sum(s.hits for s in last) / len(last), 4),
    }


def command(name: str, args: argparse.Namespace) -> str:
    """The command without its folders, so that it reads the same everywhere."""
    words = [name]
    for key, value in vars(args).items():
        if args.texts is not None and key in OF_GENERATION:
            continue
        values = value if isinstance(value, list) else [value]
        shown = [Path(v).name if isinstance(v, str | Path) else str(v) for v in values]
        if key == "exit":  # a fraction is no path
            shown = [value]
        if value is not None and shown:
            words.append(f"--{key.replace('_', '-')} {' '.join(shown)}")
    return " ".join(words)


def origin(device: torch.device) -> dict[str, Any]:
    """Where and when a report comes from."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": torch.cuda.get_device_name(device) if cuda else "CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
