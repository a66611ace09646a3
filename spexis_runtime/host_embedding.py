# SPDX-License-Identifier: Apache-2.0
"""The input embedding in host memory: it pays for stage 0's second LM head.

A step reads a few rows of it, the LM head all of its own (design section 5).
"""

import torch
from torch import nn
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor


def move_to_host(embedding: nn.Module) -> torch.Tensor:
    """Move `embedding.weight`, [vocab_size, hidden_size], out of the GPU's memory.

    The GPU goes on reading its rows where they are then, over the bus.

    Returns:
        The weight in pinned host memory, to be kept as long as the embedding is used.
    """
    weight = embedding.weight.data
    host = torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)
    embedding.weight.data = get_accelerator_view_from_cpu_tensor(host)
    return host
