# SPDX-License-Identifier: Apache-2.0
"""The embedding in host memory gives the same rows, in a CUDA graph too."""

import pytest
import torch
from torch.nn import functional

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_rows_come_from_the_host() -> None:
    from spexis_runtime.host_embedding import move_to_host

    embedding = torch.nn.Embedding(50_000, 512, device="cuda", dtype=torch.bfloat16)
    embedding.requires_grad_(False)
    tokens = torch.randint(0, 50_000, (300,), device="cuda")
    expected = functional.embedding(tokens, embedding.weight).clone()
    before = torch.cuda.memory_allocated()
    host = move_to_host(embedding)
    assert host.is_pinned()
    assert torch.cuda.memory_allocated() <= before - host.nbytes
    assert torch.equal(functional.embedding(tokens, embedding.weight), expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = functional.embedding(tokens, embedding.weight)
    tokens.add_(1).remainder_(50_000)
    graph.replay()
    assert torch.equal(rows.cpu(), host[tokens.cpu()])
