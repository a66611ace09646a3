# SPDX-License-Identifier: Apache-2.0
"""Request pools and rows for the tests, and their exact comparison."""

from typing import NamedTuple

import torch
from tolerances import EXACT

from spexis_kernels import INVALID_TOKEN, NORMAL, PAD_SLOT_ID, RequestPool, Rows

VOCAB = 50


def random_pool(num_slots: int, depth: int, device: str) -> RequestPool:
    """Slots in every state: free, limited, in prefill, normal, drafted or not."""

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or (num_slots,), dtype=torch.int32)

    known_len = ints(1, 40)
    head = (known_len + ints(-1, depth + 1)).clamp(min=0)
    head[ints(0, 8) == 0] = 0  # a request whose prompt is not in yet
    limit = head + ints(-1, 5)
    limit[ints(0, 8) == 0] = 0
    draft = ints(0, VOCAB)
    draft[ints(0, 4) == 0] = INVALID_TOKEN
    # coarse values, so that ties occur
    pool = RequestPool(
        known_len=known_len,
        last_token=ints(0, VOCAB),
        generation=ints(0, 3),
        head=head,
        limit=limit,
        last_fed=ints(-1, 9),
        draft=draft,
        draft_confidence=ints(0, 5) / 4,
        fed=ints(0, VOCAB, num_slots, depth),
        fed_confidence=ints(0, 5, num_slots, depth) / 4,
    )
    return RequestPool(*(tensor.to(device) for tensor in pool))


def clone(pool: RequestPool) -> RequestPool:
    return RequestPool(*(tensor.clone() for tensor in pool))


def make_rows(
    device: str,
    slots: list[int],
    generations: list[int] | None = None,
    positions: list[int] | None = None,
    tokens: list[int] | None = None,
) -> Rows:
    """Rows from lists; what is left out is zero."""
    zeros = [0] * len(slots)
    kinds = [PAD_SLOT_ID if slot == PAD_SLOT_ID else NORMAL for slot in slots]
    columns = (slots, generations or zeros, positions or zeros, tokens or zeros, kinds)
    return Rows(*(torch.tensor(c, dtype=torch.int32, device=device) for c in columns))


def random_rows(pool: RequestPool, num_rows: int) -> Rows:
    """At most one row a slot, in random order, a third of them padding, some stale."""
    num_slots = len(pool.head)
    device = pool.head.device
    slots = torch.full((num_rows,), PAD_SLOT_ID, device=device)
    picked = torch.randperm(num_slots)[: max(1, 2 * num_rows // 3)]
    at = torch.randperm(num_rows)[: len(picked)]
    slots[at.to(device)] = picked[: len(at)].to(device)
    there = slots != PAD_SLOT_ID
    owner = slots.clamp(min=0)
    flip = [torch.randint(0, 4, (num_rows,)).to(device) == 0 for _ in range(3)]
    return Rows(
        slots=slots.int(),
        generations=pool.generation[owner] + flip[0].int(),
        positions=pool.known_len[owner] - 1 - flip[1].int(),
        tokens=torch.where(flip[2], 0, pool.last_token[owner]),
        kinds=torch.where(there, NORMAL, PAD_SLOT_ID).int(),
    )


def assert_same(actual: NamedTuple, expected: NamedTuple) -> None:
    """Every tensor equal to the bit (any NaN equals any other), dtypes too."""
    for field, want in expected._asdict().items():
        torch.testing.assert_close(
            getattr(actual, field),
            want,
            **EXACT,
            equal_nan=True,
            msg=lambda text, field=field: f"{field}: {text}",
        )
