# SPDX-License-Identifier: Apache-2.0
"""The length predictor in plain torch, for training and use (paper, section 5.2)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from spexis_runtime.adapter.files import WEIGHTS_FILE
from spexis_runtime.adapter.length import LengthConfig, load_length_config


class LengthPredictor(nn.Module):
    """Three linear layers, two GELUs, a sigmoid for each threshold."""

    def __init__(self, config: LengthConfig) -> None:
        super().__init__()
        self.config = config
        first, second = config.inner_sizes
        self.layers = nn.ModuleList(
            [
                nn.Linear(config.hidden_size, first),
                nn.Linear(first, second),
                nn.Linear(second, len(config.thresholds)),
            ]
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., thresholds] float32, before the calibration.

        `hidden` [..., hidden_size]: hidden + residual after `exit_layer` layers.
        """
        first, second, third = self.layers
        x = hidden.float()
        x = x * torch.rsqrt(
            x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        )
        x = F.gelu(first(x.to(first.weight.dtype)))
        return third(F.gelu(second(x))).float()

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., thresholds] float32: that fewer tokens follow the row's own token."""
        logits = self(hidden)
        scales = logits.new_tensor(self.config.scales)
        return torch.sigmoid(logits * scales + logits.new_tensor(self.config.offsets))

    @classmethod
    def load(cls, path: str | Path) -> LengthPredictor:
        """The predictor in directory `path`, in the element type that it is stored in.

        Raises AdapterError where `load_length_config` does.
        """
        from safetensors.torch import load_file

        predictor = cls(load_length_config(path))
        predictor.load_state_dict(load_file(Path(path) / WEIGHTS_FILE), assign=True)
        return predictor.requires_grad_(False).eval()
