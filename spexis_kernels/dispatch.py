# SPDX-License-Identifier: Apache-2.0
"""Which implementation a public function runs: decided by the device of its tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreted = False


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Tests only: launch the kernels on CPU tensors, under Triton's interpreter.

    Raises RuntimeError unless TRITON_INTERPRET=1 was set (before triton was imported).
    """
    global _interpreted
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "interpreted_kernels() needs TRITON_INTERPRET=1, it is not set"
        )
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


def use_kernel(tensor: torch.Tensor) -> bool:
    """True: launch the Triton kernel. False: run the plain-torch reference."""
    return tensor.is_cuda or _interpreted
