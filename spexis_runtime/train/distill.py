# SPDX-License-Identifier: Apache-2.0
"""What an exit adapter learns from a batch: the target's next tokens, hard and soft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from spexis_runtime.train.batches import StateSource, collate
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.target import Target
from spexis_runtime.train.texts import Labels, Text

LOGITS_ROWS = 4096


def distillation_loss(
    draft: torch.Tensor, target: torch.Tensor, soft_weight: float
) -> torch.Tensor:
    """Cross-entropy to the target's distribution and to its first choice, weighted.

    Both are float32 logits [tokens, vocab_size]; the mean over the tokens. Up to a
    constant the soft part is the KL divergence.
    """
    logprobs = draft.log_softmax(-1)
    hard = F.nll_loss(logprobs, target.argmax(-1))
    soft = -(target.softmax(-1) * logprobs).sum(-1).mean()
    return (1 - soft_weight) * hard + soft_weight * soft


def recorded_loss(
    draft: torch.Tensor, labels: Labels, soft_weight: float
) -> torch.Tensor:
    """`distillation_loss` with the target's recorded best tokens, [tokens, k].

    Their probabilities count as all there are.
    """
    logprobs = draft.log_softmax(-1).gather(-1, labels.tokens.long())
    wanted = labels.logprobs.float().softmax(-1) * soft_weight
    wanted[:, 0] += 1 - soft_weight
    return -(wanted * logprobs).sum(-1).mean()


class AdapterStep:
    """`loop.BatchStep` of an adapter whose float32 weights see bf16 products on a GPU.

    Labels are those of the texts where the target is its first layers only, else the
    target's own logits.
    """

    def __init__(
        self,
        target: Target,
        adapter: ExitAdapter,
        batches: Sequence[Sequence[Text]],
        states: StateSource,
        soft_weight: float,
    ):
        self.target, self.adapter, self.batches = target, adapter, batches
        self.states, self.soft_weight = states, soft_weight

    def __call__(self, number: int, share: float) -> torch.Tensor:
        batch = collate(self.batches[number])
        device = self.target.device
        drafts = batch.drafts.to(device)
        states = self.states(number, batch)
        cuda = device.type == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
            x = self.adapter(states.features, states.cos, states.sin)[drafts]
        # The logits are by far the largest tensors: make and drop them part by part.
        leaf = x.detach().requires_grad_()
        sums = torch.zeros(2, device=device)
        for rows, wanted in self._labels(batch.labels(), states.final, drafts):
            drafted = self.adapter.logits(leaf[rows], self.target.lm_head)
            part = drafted.shape[0] / len(leaf)
            if isinstance(wanted, Labels):
                loss = recorded_loss(drafted, wanted, self.soft_weight) * part
                first = wanted.tokens[:, 0]
            else:
                loss = distillation_loss(drafted, wanted, self.soft_weight) * part
                first = wanted.argmax(-1)
            (loss * share).backward()
            hits = (drafted.detach().argmax(-1) == first).sum() / len(leaf)
            sums += torch.stack((loss.detach(), hits))
        x.backward(leaf.grad)
        return sums

    def _labels(
        self, labels: Labels | None, final: torch.Tensor | None, drafts: torch.Tensor
    ):
        """Parts of the tokens: (slice, target's logits or recorded labels)."""
        if final is not None:
            final = final[drafts]
            for start in range(0, len(final), LOGITS_ROWS):
                rows = slice(start, start + LOGITS_ROWS)
                yield rows, (final[rows] @ self.target.lm_head.T).float()
            return
        assert labels is not None
        labels = Labels(*(t.to(drafts.device) for t in labels))
        for start in range(0, len(labels.tokens), LOGITS_ROWS):
            rows = slice(start, start + LOGITS_ROWS)
            yield rows, Labels(labels.tokens[rows], labels.logprobs[rows])
