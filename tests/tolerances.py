# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances: result and dtype -> (atol, rtol) of a comparison."""

import torch

EXACT = {"atol": 0.0, "rtol": 0.0}
"""Tokens, masks, indices, counts, copied values."""

FP32_REDUCTION = {"atol": 1e-5, "rtol": 1e-5}
"""Sums, log-sum-exp and softmax accumulated in fp32, in another order."""

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
