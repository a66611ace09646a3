# SPDX-License-Identifier: Apache-2.0
"""The model card of a trained adapter, from the report of its training."""

from __future__ import annotations

from typing import Any


def model_card(name: str, report: dict[str, Any]) -> str:
    """README.md of adapter `name`; `report` is what training writes as JSON."""
    training = report["training"]
    sources = ", ".join(
        f"{source or 'unnamed'} ({count})"
        for source, count in sorted(training["prompts_by_source"].items())
    )
    return f"""\
---
license: apache-2.0
---
# {name}

An exit adapter for speculative parallelism: it drafts the next token of
{report["model"]} from the hidden states after layer {report["exit_layer"]}.

## Accuracy

How often the adapter's first choice is the token that the model generates greedily,
over all tokens of the answers. *Confident half*: the half of the tokens that it gives
the higher probability. *No adapter*: the model's last norm and LM head put straight
on the same hidden states.

| prompts | number | tokens | top-1 | confident half | no adapter |
|---|---|---|---|---|---|
{_rows(report["evaluation"])}

## Training

| | |
|---|---|
| text | the model's own answers, greedy and sampled |
| prompts | {training["prompts"]}: {training["num_prompts"]} used, \
{training["num_too_long"]} too long |
| prompts read, by source | {sources} |
| answers | {training["num_texts"]}, {training["num_response_tokens"]} tokens \
({training["num_tokens"]} with prompts) |
| steps | {training["steps"]} in {training["epochs"]} epochs, \
{training["train_s"]} s after {training["generate_s"]} s of generation |
| machine | {report["machine"]} |
| versions | {", ".join(f"{k} {v}" for k, v in report["versions"].items())} |
| date | {report["date"]} |

```
{report["command"]}
```

## Licence

Apache-2.0
"""


def _rows(evaluation: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"| {e['prompts']} | {e['num_prompts']} | {e['num_tokens']} | {e['top1']:.3f} "
        f"| {e['top1_confident_half']:.3f} | {e['top1_no_adapter']:.3f} |"
        for e in evaluation
    )
