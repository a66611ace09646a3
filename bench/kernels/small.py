# SPDX-License-Identifier: Apache-2.0
"""`draft_head` and the kernels on the request pool, and what they are compared with."""

from typing import Any

import torch

from bench.gpu import Launch
from bench.kernels.cases import HeadCase, PoolCase
from bench.kernels.work import Work
from spexis_kernels import (
    DRAFT,
    RequestPool,
    Rows,
    absorb,
    absorb_and_select_rows,
    draft_head,
    draft_head_io_bytes,
    draft_head_reference,
    draft_head_workspace,
    select_rows,
    verify,
)

ON_GPU: dict[str, Any] = {"device": "cuda"}


def build_head(case: HeadCase) -> Work:
    torch.manual_seed(0)
    bf16 = {"dtype": torch.bfloat16, **ON_GPU}
    weight = torch.randn(case.vocab_size, case.hidden_size, **bf16)
    weight *= case.hidden_size**-0.5
    hidden = torch.randn(case.rows, case.hidden_size, **bf16)
    greedy: dict[str, Any] = {"workspace": draft_head_workspace(hidden, weight)}
    greedy["out"] = draft_head(hidden, weight)
    sampling = {
        "temperature": torch.full((case.rows,), 0.7, **ON_GPU),
        "seed": torch.arange(case.rows, **ON_GPU),
        "position": torch.arange(case.rows, **ON_GPU),
    }
    logits = torch.empty(case.rows, case.vocab_size, **bf16)

    def gemm() -> None:
        torch.mm(hidden, weight.T, out=logits)

    def chain() -> tuple[torch.Tensor, ...]:
        scores = (hidden @ weight.T).float()
        best, token = scores.max(dim=-1)
        log_sum_exp = scores.logsumexp(dim=-1)
        return token, (best - log_sum_exp).exp(), log_sum_exp

    head = draft_head(hidden, weight)
    expected = draft_head_reference(hidden, weight)
    # near ties: bf16 operands, fp32 sums in another order
    gap = (head.score - expected.score).abs().max().item()
    rivals: dict[str, list[Launch]] = {
        "cublas_gemm_alone": [gemm],
        "torch_eager": [chain],
        "torch_compile": [torch.compile(chain, mode="max-autotune-no-cudagraphs")],
    }
    launch = greedy | (sampling if case.sampled else {})
    if case.sampled:
        rivals = {"ours_greedy": [lambda: draft_head(hidden, weight, **greedy)]}
    return Work(
        [lambda: draft_head(hidden, weight, **launch)],
        rivals,
        io_bytes=draft_head_io_bytes(
            case.rows, case.vocab_size, case.hidden_size, torch.bfloat16
        ),
        wrong="" if gap <= 1e-3 else f"scores differ by {gap}",
        flop=2.0 * case.rows * case.vocab_size * case.hidden_size,
    )


def build_pool(case: PoolCase) -> Work:
    """A pool with two stages: half of the slots have a draft, the rest a normal row."""
    pool = RequestPool.empty(case.slots, 2, "cuda")
    index = torch.arange(case.slots, dtype=torch.int32, **ON_GPU)
    pool.known_len.fill_(100)
    pool.last_token.copy_(index)
    pool.limit.fill_(1 << 30)
    pool.head.copy_(99 + index % 2)
    pool.draft.copy_(index)
    pool.draft_confidence.copy_(torch.rand(case.slots, **ON_GPU))
    empty = {"dtype": torch.int32, **ON_GPU}
    out = Rows(*(torch.empty(case.slots, **empty) for _ in Rows._fields))
    rows = Rows(index, index * 0, index * 0 + 99, index, index * 0 + DRAFT)
    if case.operation == "verify":
        accepted = torch.empty(case.slots, **empty)
        return Work(
            [lambda: verify(pool, rows, index, out=accepted)],
            {"empty_launch": [lambda: accepted.add_(1)]},
            io_bytes=0,
        )
    before = RequestPool(*(tensor.clone() for tensor in pool))
    options: dict[str, Any] = {"num_rows": case.slots, "step": 5, "out": out}

    def two() -> None:
        absorb(pool, rows, index)
        select_rows(pool, **options)

    def one() -> None:
        absorb_and_select_rows(pool, rows, index, **options)

    states = []
    for function in (two, one):
        for tensor, old in zip(pool, before, strict=True):
            tensor.copy_(old)
        function()
        states.append([tensor.clone() for tensor in (*pool, *out)])
    same = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    return Work(
        [one],
        {"absorb, select_rows": [two]},
        io_bytes=0,
        wrong="" if same else "one launch and two differ",
    )
