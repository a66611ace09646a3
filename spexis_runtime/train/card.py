# SPDX-License-Identifier: Apache-2.0
"""Model cards of adapters and length predictors, from the reports of their training."""

from __future__ import annotations

from typing import Any


def adapter_card(report: dict[str, Any]) -> str:
    """README.md of an adapter; `report` is what training writes as JSON."""
    held_out = report["held_out"]
    accuracy = "No greedy text was held out, so its accuracy is not known."
    if held_out is not None:
        dropped = held_out["accuracy_after_dropping"]
        accuracy = f"""\
How often its draft is the token that the model says greedily, over
{held_out["num_tokens"]} tokens of {held_out["num_texts"]} texts that it was not trained
on (they served to calibrate its confidence), and without the least confident drafts:

| all drafts | without 15 % | without 30 % |
|---|---|---|
| {held_out["accuracy"]:.3f} | {dropped["0.15"]:.3f} | {dropped["0.3"]:.3f} |

`spexis eval adapter` measures it on other prompts."""
    return f"""\
---
license: apache-2.0
---
# {report["adapter"]}

An exit adapter for speculative parallelism: it drafts the next token of
{report["model"]} from the hidden states after layer {report["exit_layer"]}.

## Accuracy

{accuracy}

{_training(report)}"""


def length_card(report: dict[str, Any]) -> str:
    """README.md of a length predictor; `report` is what training writes as JSON."""
    rows = "\n".join(
        f"| {r['below']} | {_cell(r['precision'])} | {_cell(r['recall'])} "
        f"| {_cell(r['precision_at_recall_0.5'])} |"
        for r in report["held_out"]["thresholds"]
    )
    return f"""\
---
license: apache-2.0
---
# {report["predictor"]}

Tells from the hidden states after layer {report["exit_layer"]} of {report["model"]}
whether fewer than 4, 8, 16, 32 or 64 tokens of an answer are still to come.

## Accuracy

On texts that it was not trained on; the cutoffs were chosen on them.

| tokens left below | precision | recall | precision at recall 0.5 |
|---|---|---|---|
{rows}

{_training(report)}"""


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _training(report: dict[str, Any]) -> str:
    training, texts = report["training"], report["texts"]
    temperatures = ", ".join(f"{t:g}" for t in texts["temperatures"])
    return f"""\
## Training

| | |
|---|---|
| text | the model's own answers at temperature {temperatures} (0 is greedy) |
| prompts | {texts["num_prompts"]}, and {texts["num_self_prompts"]} of the model's own |
| answers | {training["num_texts"]}, {training["num_response_tokens"]} tokens \
({training["num_tokens"]} with prompts) |
| steps | {training["steps"]} in {training["epochs"]} epochs, \
{training["seconds"]:.0f} s |
| machine | {report["machine"]} |
| versions | {", ".join(f"{k} {v}" for k, v in report["versions"].items())} |
| date | {report["date"]} |

```
{report["command"]}
```

## Licence

Apache-2.0
"""
