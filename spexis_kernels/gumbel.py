# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise that depends on (seed, position, token id) alone.

Design section 3, point 7: draft head and target add the same noise to their logits, so
that both tend to sample the same token. This is the noise of vLLM 0.26's V2 sampler
(its fp32 mode); the argmax of logits / T + noise is a sample of softmax(logits / T):

    key   = philox(seed, position)             first of its four 32-bit words
    u     = uniform(philox(key, token id))     31 bits, at least 2**-31
    noise = -log(-log1p(-u))

The noise is independent of tiling. `position` is that of the row's own token, which the
sampled token follows. Equal to vLLM's up to the rounding of log1p.
"""

import torch
import triton
import triton.language as tl

_SMALLEST_DRAW = 4.6566127342e-10  # 2**-31, the step of triton's fp32 uniform numbers
_SMALLEST_DRAW_CONSTEXPR = tl.constexpr(_SMALLEST_DRAW)


@triton.jit
def gumbel_noise(
    seed,  # [..., 1] int64
    position,  # [..., 1] int32 or int64
    token,  # [..., n] int32
):
    """Noise of each token, float32; the arguments are broadcast."""
    key = tl.randint(seed, position)
    u = tl.maximum(tl.rand(key, token), _SMALLEST_DRAW_CONSTEXPR)
    # log1p(-u): the error of rounding 1 - u cancels in the quotient
    rest = 1.0 - u
    log1p = tl.where(rest == 1.0, -u, tl.log(rest) * (u / (1.0 - rest)))
    return -tl.log(-log1p)


def gumbel_noise_reference(
    seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """`gumbel_noise` in plain torch; int64 arguments, broadcast; returns float32."""
    key = _philox_reference(seed, position)
    draw = _philox_reference(key, token)
    draw = torch.where(draw < 1 << 31, draw, (1 << 32) - 1 - draw)
    u = (draw.float() * _SMALLEST_DRAW).clamp(min=_SMALLEST_DRAW)
    return -(-torch.log1p(-u)).log()


def _philox_reference(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """First 32-bit word of Philox4x32-10 for a 64-bit key and counter, as int64."""
    low = 0xFFFFFFFF
    k0, k1 = key & low, key >> 32 & low
    c0, c1 = counter & low, counter >> 32 & low
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        # wraps beyond 2**63, but the bits are those of the unsigned product
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product2 >> 32 & low) ^ c1 ^ k0,
            product2 & low,
            (product0 >> 32 & low) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0
