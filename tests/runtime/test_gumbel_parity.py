# SPDX-License-Identifier: Apache-2.0
"""The draft head draws the very tokens that vLLM's sampler draws from equal logits."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before vLLM's kernels are decorated

pytest.importorskip("vllm")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402
from vllm.v1.worker.gpu.sample import gumbel  # noqa: E402

from spexis_kernels import draft_head  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 2500  # more than two of vLLM's blocks


def interpreted_log1p(x: tl.tensor) -> tl.tensor:
    return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)


@pytest.mark.parametrize("logit_scale", [0.0, 1.0, 5.0])
def test_same_tokens_as_the_sampler(monkeypatch, logit_scale):
    if DEVICE == "cpu":  # the interpreter has no libdevice
        libdevice = SimpleNamespace(log1p=interpreted_log1p)
        monkeypatch.setattr(gumbel, "tldevice", libdevice)
    torch.manual_seed(0)
    rows = 24
    logits = logit_scale * torch.randn(rows, VOCAB, device=DEVICE)
    temperature = 0.3 + torch.rand(rows, device=DEVICE)
    temperature[::5] = 0.0
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), device=DEVICE)
    position = torch.randint(0, 100_000, (rows,), device=DEVICE)
    drawn = gumbel.gumbel_sample(
        logits,
        torch.arange(rows, dtype=torch.int32, device=DEVICE),
        temperature,
        seed,
        position,
        apply_temperature=True,
    )
    ours = draft_head(
        logits,
        torch.eye(VOCAB, device=DEVICE),
        temperature=temperature,
        seed=seed,
        position=position,
    )
    assert ours.token.tolist() == drawn.tolist()
    assert ours.token.unique().numel() > rows // 2  # drawn, not constant
