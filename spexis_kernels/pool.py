# SPDX-License-Identifier: Apache-2.0
"""The request pool: what a stage keeps per request slot, and the rows of a step.

Notation of design section 3, for one slot:

    [0, known_len) verified · [known_len, head) drafts in flight · head: next to feed

`head == known_len - 1` after a rollback or a result: the newest verified token is yet
to be fed. Tokens fed from `known_len` on are in a ring, `fed[slot, pos % depth]`.
"""

from typing import NamedTuple

import torch

from spexis_kernels.constants import INVALID_TOKEN


class RequestPool(NamedTuple):
    """State of `num_slots` request slots on a stage; every tensor is updated in place.

    The last stage uses only `known_len`, `last_token` and `generation`; stages between
    the first and the last use nothing.
    """

    known_len: torch.Tensor  # [num_slots] int32, verified tokens, prompt included
    last_token: torch.Tensor  # [num_slots] int32, the newest verified token
    generation: (
        torch.Tensor
    )  # [num_slots] int32, bumped whenever the slot changes owner
    head: torch.Tensor  # [num_slots] int32, next position to feed
    limit: torch.Tensor  # [num_slots] int32, a row may be fed iff head < limit; 0: none
    last_fed: torch.Tensor  # [num_slots] int32, step in which a row was last fed
    draft: torch.Tensor  # [num_slots] int32, token for position head, or INVALID_TOKEN
    draft_confidence: torch.Tensor  # [num_slots] float32, of that draft alone
    fed: torch.Tensor  # [num_slots, depth] int32, ring: token fed at a position
    fed_confidence: torch.Tensor  # [num_slots, depth] float32, ring: its confidence

    @classmethod
    def empty(
        cls, num_slots: int, depth: int, device: torch.device | str
    ) -> "RequestPool":
        """A pool without requests. `depth` >= drafts that one request has in flight."""
        i32 = dict(dtype=torch.int32, device=device)
        f32 = dict(dtype=torch.float32, device=device)
        return cls(
            known_len=torch.zeros(num_slots, **i32),
            last_token=torch.full((num_slots,), INVALID_TOKEN, **i32),
            generation=torch.zeros(num_slots, **i32),
            head=torch.zeros(num_slots, **i32),
            limit=torch.zeros(num_slots, **i32),
            last_fed=torch.full((num_slots,), -1, **i32),
            draft=torch.full((num_slots,), INVALID_TOKEN, **i32),
            draft_confidence=torch.zeros(num_slots, **f32),
            fed=torch.full((num_slots, depth), INVALID_TOKEN, **i32),
            fed_confidence=torch.zeros((num_slots, depth), **f32),
        )


class Rows(NamedTuple):
    """Rows of a step that may yield a token: one a request, padded to a fixed size."""

    slots: torch.Tensor  # [num_rows] int32, PAD_SLOT_ID where there is no row
    generations: torch.Tensor  # [num_rows] int32, the slot's generation when fed
    positions: torch.Tensor  # [num_rows] int32, position of the row's (last) token
    tokens: torch.Tensor  # [num_rows] int32, that token
    kinds: torch.Tensor  # [num_rows] int32, PAD, PREFILL, NORMAL or DRAFT
