# SPDX-License-Identifier: Apache-2.0
"""The protocol (docs/design.md, section 3) in numbers: no tokens, only right or wrong.

What `select_rows`, `absorb`, `store_drafts` and `verify` of spexis_kernels do to one
request slot, for models of the engine. Rows are verified as they are fed: stages are
FIFO, so what the last one will say of a row is settled by then.
"""

import numpy as np

from spexis_runtime.lookahead.draft_law import draw_draft
from spexis_runtime.lookahead.jit import compiled

NOTHING, NORMAL, DRAFT = 0, 1, 2


MAX_STAGES = 16

SLOT: np.dtype = np.dtype(
    [
        ("request", np.int64),
        ("stamp", np.int64),  # new at every admission, 0 once the request has left
        # the host's
        ("tokens", np.int64),  # known
        ("computed", np.int64),
        ("placeholders", np.int64),
        ("blocks", np.int64),
        ("prefill_len", np.int64),  # tokens known at admission
        ("eligible", np.int64),  # the first step that may schedule it
        ("scheduled", np.int64),  # tokens in this step
        # stage 0's, as in RequestPool
        ("known", np.int64),  # verified tokens as far as absorbed
        ("head", np.int64),  # next position to feed
        ("last_fed", np.int64),  # step
        ("has_draft", np.bool_),
        ("draft_right", np.bool_),  # it and all before it
        ("draft_confidence", np.float32),
        ("fed_right", np.uint8, (MAX_STAGES,)),  # a ring by position
        ("fed_confidence", np.float32, (MAX_STAGES,)),
    ]
)
"""A request slot; arrays of it are updated in place."""


def empty_slots(num_slots: int) -> np.recarray:
    return np.zeros(num_slots, dtype=SLOT).view(np.recarray)


@compiled
def admit(slots, slot, request, known):
    """`request` gets the slot, with `known` tokens of which none is computed."""
    slots[slot].request, slots[slot].known, slots[slot].head = request, known, 0
    slots[slot].has_draft = False


@compiled
def absorb(slots, slot):
    """A row of the slot was valid: append its token, rewind what was wrong."""
    position = slots[slot].known
    stays = slots[slot].head > position and slots[slot].fed_right[position % MAX_STAGES]
    slots[slot].known = position + 1
    if not stays:
        slots[slot].head = position
        slots[slot].has_draft = False


@compiled
def row_kind(slots, slot, limit):
    """What the slot could feed next at a position below `limit`."""
    head, known = slots[slot].head, slots[slot].known
    if head >= limit:
        return NOTHING
    if head == known - 1:
        return NORMAL
    if head >= known and head - known < MAX_STAGES and slots[slot].has_draft:
        return DRAFT
    return NOTHING


@compiled
def path_confidence(slots, slot):
    """Product of the confidences of the slot's draft and of those in flight."""
    path = slots[slot].draft_confidence
    for position in range(slots[slot].known, slots[slot].head):
        path = np.float32(path * slots[slot].fed_confidence[position % MAX_STAGES])
    return path


@compiled
def make_draft(slots, slot, prefix_right, law, seed):
    """The exit head drafts for position `head`."""
    head = slots[slot].head
    depth = head - slots[slot].known + 1
    right, confidence = draw_draft(
        law, seed, slots[slot].request, head, depth, prefix_right
    )
    slots[slot].has_draft = True
    slots[slot].draft_right, slots[slot].draft_confidence = right, confidence


@compiled
def feed(slots, slot, kind, step, drafts, law, seed):
    """Feed the slot's row, and draft after it if `drafts`.

    Returns:
        (whether all drafts before it were right, whether the row is valid).
    """
    head = slots[slot].head
    prefix_right = valid = True
    if kind == DRAFT:
        if head > slots[slot].known:
            prefix_right = slots[slot].fed_right[(head - 1) % MAX_STAGES]
        valid = slots[slot].draft_right
        slots[slot].fed_right[head % MAX_STAGES] = valid
        slots[slot].fed_confidence[head % MAX_STAGES] = slots[slot].draft_confidence
    slots[slot].head = head + 1
    slots[slot].last_fed = step
    slots[slot].has_draft = False
    if drafts:
        make_draft(slots, slot, valid, law, seed)
    return prefix_right, valid


@compiled
def choose(slots, candidates, kinds, count, num_rows):
    """Order `candidates` so that the first ones are the rows of the step.

    Normal rows first, longest-waiting first, then drafts by path confidence, ties by
    slot, as in `select_rows`.

    Args:
        candidates: [>= count] int64, slots that have a row; sorted in place.
        kinds: [num_slots] int64, NORMAL or DRAFT, by slot.

    Returns:
        How many of them are rows: at most `num_rows`.
    """
    if count <= num_rows:
        return count
    keys = np.empty(count)
    for i in range(count):
        slot = candidates[i]
        if kinds[slot] == NORMAL:
            keys[i] = slots[slot].last_fed - 2.0**50  # before all drafts, and exact
        else:
            keys[i] = -path_confidence(slots, slot)
    gap = count // 2
    while gap:  # Shell's sort
        for i in range(gap, count):
            key, slot, j = keys[i], candidates[i], i
            while j >= gap and (
                keys[j - gap] > key
                or (keys[j - gap] == key and candidates[j - gap] > slot)
            ):
                keys[j], candidates[j] = keys[j - gap], candidates[j - gap]
                j -= gap
            keys[j], candidates[j] = key, slot
        gap //= 2
    return num_rows
