# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances: result and dtype -> (atol, rtol) of a comparison."""

import torch

EXACT = {"atol": 0.0, "rtol": 0.0}
"""Tokens, masks, indices, counts, copied values."""

FP32_REDUCTION = {"atol": 1e-5, "rtol": 1e-5}
"""Sums, log-sum-exp and softmax accumulated in fp32, in another order."""

ATTENTION_CEILING = {"atol": 1.5e-2, "rtol": 1e-2}
"""Attention in fp16 or bf16, on top of flash_attention_bound."""

FP8_CEILING = {"atol": 1.5e-1, "rtol": 0.0}
"""Attention over an fp8 cache against the same over one in bf16."""

LOGPROBS = {"atol": 1e-4, "rtol": 1e-4}
"""Log-probabilities after some layers in fp32, in batches of another shape."""

CHI_SQUARE_SIGMAS = 10.0
"""Sampled tokens: chi-square of d degrees of freedom stays below d + 10 sqrt(2 d)."""


def logit_rounding(hidden_size: int, scale: float) -> float:
    """Largest fp32 logit gap that counts as a tie between two orders of summation.

    Products of bf16 and fp16 values are exact in fp32, so that only additions round: a
    sum of `hidden_size` terms, partial sums below `scale`, each addition off by half a
    unit in the last place at most, the errors adding up like a random walk; six sigma.
    """
    ulp = torch.finfo(torch.float32).eps * scale
    return 6 * 0.5 * ulp * hidden_size**0.5


def one_ulp(dtype: torch.dtype) -> dict[str, float]:
    """Values computed in fp32 and rounded once: the last place may differ."""
    return {"atol": FP32_REDUCTION["atol"], "rtol": torch.finfo(dtype).eps}


def flash_attention_bound(truth: torch.Tensor, low_precision: torch.Tensor) -> float:
    """Largest error allowed to attention in the dtype of `low_precision`.

    `truth` is computed in fp32, `low_precision` from inputs of, and rounded to, the
    low-precision dtype: twice its error, plus the rounding of adding and taking off 0.3
    (flash-attention's rule).
    """
    shifted = low_precision + 0.3 - 0.3
    rounding = (shifted - low_precision).abs().max().item()
    return 2 * ((low_precision.float() - truth).abs().max().item() + rounding)
