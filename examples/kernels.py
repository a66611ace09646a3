# SPDX-License-Identifier: Apache-2.0
"""The kernels alone, without vLLM: speculative parallelism in a loop of plain PyTorch.

    python examples/kernels.py

A toy model, whose next token follows from the one before, decodes over a pipeline of
some stages. Stage 0 drafts with a noisy copy of it. The tokens are those of decoding
one by one; right drafts fill the steps that would wait for the last stage. Needs torch,
triton and numpy; with a GPU the Triton kernels run, else their references.
"""

import argparse
from collections import deque

import torch

from spexis_kernels import (
    INVALID_TOKEN,
    RequestPool,
    absorb,
    draft_head,
    select_rows,
    store_drafts,
    verify,
)

VOCAB_SIZE, HIDDEN_SIZE = 512, 64


class ToyModel:
    """hidden = embedding[token]; the next token is the argmax of hidden @ head.T."""

    def __init__(self, noise: float, device: str):
        generator = torch.Generator().manual_seed(0)
        shape = (VOCAB_SIZE, HIDDEN_SIZE)
        self.embedding = torch.randn(shape, generator=generator).to(device)
        self.lm_head = torch.randn(shape, generator=generator).to(device)
        # what stage 0 knows of the hidden states at the end
        error = torch.randn(shape, generator=generator).to(device)
        self.early = self.embedding + noise * error

    def next_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.embedding[tokens] @ self.lm_head.T).argmax(-1).int()


def plain(model: ToyModel, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """[num_requests, length]: each token after the one before is known."""
    tokens = [prompts]
    for _ in range(length - 1):
        tokens.append(model.next_tokens(tokens[-1]))
    return torch.stack(tokens, dim=1)


def speculative(
    model: ToyModel, prompts: torch.Tensor, length: int, num_stages: int
) -> tuple[torch.Tensor, int]:
    """The same tokens, and how many steps of the pipeline they took."""
    num_requests = len(prompts)
    tokens = prompts.new_full((num_requests, length), INVALID_TOKEN)
    tokens[:, 0] = prompts
    # what the first and the last stage keep for each request
    first, last = (
        RequestPool.empty(num_requests, num_stages, prompts.device) for _ in range(2)
    )
    for pool in (first, last):
        pool.known_len.fill_(1)
        pool.last_token.copy_(prompts)
        pool.limit.fill_(length - 1)  # the token at the last position is not fed
    in_flight: deque = deque([None] * num_stages)
    steps = 0
    while (tokens == INVALID_TOKEN).any():
        result = in_flight.popleft()
        if result is not None:
            absorb(first, *result)  # the step of `num_stages` steps ago
        rows = select_rows(first, num_rows=num_requests, step=steps)
        fed = rows.tokens.clamp(min=0).long()  # padding feeds anything
        drafts = draft_head(model.early[fed], model.lm_head)
        store_drafts(first, rows, drafts.token, drafts.confidence)

        # the other stages; they see the steps in the same order
        accepted = verify(last, rows, model.next_tokens(fed))
        valid = accepted != INVALID_TOKEN
        slots = rows.slots[valid].long()
        tokens[slots, rows.positions[valid].long() + 1] = accepted[valid]
        in_flight.append((rows, accepted))
        steps += 1
    return tokens, steps


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a request")
    parser.add_argument("--noise", type=float, default=0.1, help="of the drafts")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ToyModel(args.noise, device)
    prompts = torch.arange(args.requests, dtype=torch.int32, device=device)
    want = plain(model, prompts, args.length)
    got, steps = speculative(model, prompts, args.length, args.stages)
    assert torch.equal(got, want), "speculation changed a token"
    per_token = steps / (args.length - 1)
    print(f"{got.numel()} tokens, all equal to plain decoding")
    print(
        f"{per_token:.2f} steps a token; without speculation {args.stages}, "
        "with right drafts alone 1"
    )
    return per_token


if __name__ == "__main__":
    main()
