# SPDX-License-Identifier: Apache-2.0
"""select_rows and store_drafts: kernel = reference = a loop over Python tuples."""

import math

import numpy as np
import pytest
import torch
from pools import assert_same, clone, make_rows, random_pool, random_rows

from spexis_kernels import (
    DRAFT,
    INVALID_TOKEN,
    NORMAL,
    PAD,
    PAD_SLOT_ID,
    RequestPool,
    Rows,
    select_rows,
    select_rows_reference,
    store_drafts,
    store_drafts_reference,
)
from spexis_kernels.dispatch import interpreted_kernels, use_kernel

# (num_slots, depth, num_rows)
SHAPES = [
    pytest.param(1, 1, 1, id="one_slot"),
    pytest.param(7, 2, 1, id="one_row"),
    pytest.param(7, 3, 4, id="small"),
    pytest.param(7, 1, 63, id="more_rows_than_slots"),
    pytest.param(63, 4, 63, id="as_many_rows_as_slots"),
    pytest.param(131, 6, 40, id="odd"),
    pytest.param(256, 4, 128, id="half"),
    pytest.param(1024, 4, 256, id="large"),
]


def expected_choice(pool: RequestPool, num_rows: int) -> list[tuple[int, int]]:
    """(slot, kind) in order of choice, by the definition, one slot at a time."""
    depth = pool.fed.shape[1]
    normal, drafts = [], []
    for slot in range(len(pool.head)):
        known_len, head = int(pool.known_len[slot]), int(pool.head[slot])
        if head >= int(pool.limit[slot]):
            continue
        if head == known_len - 1:
            normal.append((int(pool.last_fed[slot]), slot))
        elif (
            head >= known_len
            and head - known_len < depth
            and int(pool.draft[slot]) != INVALID_TOKEN
        ):
            path = np.float32(pool.draft_confidence[slot].cpu())
            for position in range(known_len, head):
                path *= np.float32(pool.fed_confidence[slot, position % depth].cpu())
            drafts.append((-path, slot))
    order = [(slot, NORMAL) for _, slot in sorted(normal)]
    order += [(slot, DRAFT) for _, slot in sorted(drafts)]
    return order[:num_rows]


@pytest.mark.parametrize("num_slots, depth, num_rows", SHAPES)
def test_matches_reference_and_definition(device, num_slots, depth, num_rows):
    pool = random_pool(num_slots, depth, device)
    want_rows, want_pool = select_rows_reference(pool, num_rows=num_rows, step=17)
    choice = expected_choice(pool, num_rows)
    rows = select_rows(pool, num_rows=num_rows, step=17)
    assert_same(rows, want_rows)
    assert_same(pool, want_pool)
    chosen = list(zip(rows.slots.tolist(), rows.kinds.tolist(), strict=True))
    assert chosen == choice + [(PAD_SLOT_ID, PAD)] * (num_rows - len(choice))


def test_all_states_occur_in_the_random_pool():
    """The comparison above takes every branch in its largest case."""
    pool = random_pool(1024, 4, "cpu")
    rows, _ = select_rows_reference(pool, num_rows=1024, step=0)
    kinds = set(rows.kinds.tolist())
    assert kinds == {NORMAL, DRAFT, PAD}
    in_flight = pool.head - pool.known_len
    assert set(range(-1, 5)) <= set(in_flight.tolist())
    assert bool((pool.head < pool.known_len - 1).any())


def test_rows_and_state_of_chosen_slots(device):
    """A worked example: slots 0 normal, 1 drafted behind one in flight, 2 left out."""
    pool = RequestPool.empty(3, 2, device)
    for slot, (known_len, head) in enumerate([(5, 4), (5, 6), (5, 5)]):
        pool.known_len[slot], pool.head[slot] = known_len, head
        pool.last_token[slot], pool.draft[slot] = 10 + slot, 20 + slot
        pool.generation[slot] = 3 + slot
    pool.limit.fill_(9)
    pool.draft_confidence.copy_(torch.tensor([0.1, 0.5, 0.25]))
    pool.fed_confidence[1] = torch.tensor([0.0, 0.75])  # position 5 is in flight
    before = clone(pool)
    rows = select_rows(pool, num_rows=2, step=7)

    assert rows.slots.tolist() == [0, 1]
    assert rows.kinds.tolist() == [NORMAL, DRAFT]  # 0.5 * 0.75 > 0.25
    assert rows.generations.tolist() == [3, 4]
    assert rows.positions.tolist() == [4, 6]
    assert rows.tokens.tolist() == [10, 21]
    assert pool.head.tolist() == [5, 7, 5]
    assert pool.last_fed.tolist() == [7, 7, -1]
    assert pool.draft.tolist() == [INVALID_TOKEN, INVALID_TOKEN, 22]
    assert pool.fed[1].tolist() == [21, INVALID_TOKEN]  # 6 % 2 == 0
    assert pool.fed_confidence[1].tolist() == [0.5, 0.75]
    untouched = ("known_len", "last_token", "generation", "limit", "draft_confidence")
    for field in untouched:
        assert torch.equal(getattr(pool, field), getattr(before, field)), field


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_no_candidates(device, num_rows):
    pool = random_pool(7, 2, device)
    pool.limit.copy_(pool.head)
    before = clone(pool)
    rows = select_rows(pool, num_rows=num_rows, step=1)
    assert rows.slots.tolist() == [PAD_SLOT_ID] * num_rows
    assert rows.kinds.tolist() == [PAD] * num_rows
    assert rows.tokens.tolist() == [INVALID_TOKEN] * num_rows
    assert rows.generations.tolist() == rows.positions.tolist() == [0] * num_rows
    assert_same(pool, before)


def test_ties_go_to_the_lower_slot(device):
    pool = RequestPool.empty(63, 2, device)
    pool.known_len.fill_(3)
    pool.head.fill_(3)
    pool.head[::2] = 2
    pool.limit.fill_(9)
    pool.draft.fill_(1)
    rows = select_rows(pool, num_rows=63, step=1)
    assert rows.slots.tolist() == [*range(0, 63, 2), *range(1, 63, 2)]


def test_unchosen_drafts_are_candidates_again(device):
    pool = RequestPool.empty(4, 2, device)
    pool.known_len.fill_(3)
    pool.head.fill_(3)
    pool.limit.fill_(9)
    pool.draft.fill_(1)
    pool.draft_confidence.copy_(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    order = [select_rows(pool, num_rows=1, step=t).slots.item() for t in range(5)]
    assert order == [1, 3, 2, 0, PAD_SLOT_ID]


def test_longest_waiting_normal_row_goes_first(device):
    pool = RequestPool.empty(3, 1, device)
    pool.known_len.fill_(1)
    pool.limit.fill_(9)
    served = []
    for step in range(6):
        slot = select_rows(pool, num_rows=1, step=step).slots.item()
        served.append(slot)
        pool.known_len[slot] += 1  # verified at once
    assert served == [0, 1, 2, 0, 1, 2]


def test_extreme_confidences_keep_the_order_total(device):
    values = [0.0, -0.0, 1e-45, 1.0, math.inf, math.nan, 1.0, math.nan]
    pool = RequestPool.empty(len(values), 2, device)
    pool.known_len.fill_(3)
    pool.head.fill_(3)
    pool.limit.fill_(9)
    pool.draft.fill_(1)
    pool.draft_confidence.copy_(torch.tensor(values))
    rows = select_rows(pool, num_rows=len(values), step=1)
    assert sorted(rows.slots.tolist()) == list(range(len(values)))
    assert rows.slots.tolist()[2:7] == [4, 3, 6, 2, 0]


def test_step_on_the_device_and_out(device):
    pool = random_pool(63, 3, device)
    other = clone(pool)
    out = Rows(*(torch.full((9,), 99, dtype=torch.int32, device=device),) * 5)
    out = Rows(*(tensor.clone() for tensor in out))
    step = torch.tensor([41], dtype=torch.int32, device=device)
    rows = select_rows(pool, num_rows=9, step=step, out=out)
    assert all(a is b for a, b in zip(rows, out, strict=True))
    assert_same(out, select_rows(other, num_rows=9, step=41))
    assert_same(pool, other)


def test_bad_arguments_are_named(device):
    pool = random_pool(7, 2, device)
    with pytest.raises(ValueError, match="num_rows must be >= 0, got -1"):
        select_rows(pool, num_rows=-1, step=0)
    with pytest.raises(ValueError, match=r"step must be a contiguous \[1\] int32"):
        select_rows(pool, num_rows=1, step=torch.zeros(1, device=device))
    table = torch.zeros(4, 5, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out\.slots must be a contiguous \[4\]"):
        select_rows(pool, num_rows=4, step=0, out=Rows(*table.unbind(1)))
    rows = make_rows(device, [0, 1])
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"confidence must be .* float32, got \(3,\)"):
        store_drafts(pool, rows, tokens, torch.zeros(3, device=device))


@pytest.mark.parametrize("num_slots, num_rows", [(1, 1), (7, 63), (63, 7), (1024, 131)])
def test_store_drafts_matches_reference(device, num_slots, num_rows):
    pool = random_pool(num_slots, 4, device)
    rows = random_rows(pool, num_rows)
    tokens = torch.randint(0, 99, (num_rows,), dtype=torch.int32, device=device)
    confidence = torch.rand(num_rows, device=device)
    rows = rows._replace(
        positions=pool.head[rows.slots.clamp(min=0)] - 1 + (rows.tokens == 0)
    )
    want = store_drafts_reference(pool, rows, tokens, confidence)
    store_drafts(pool, rows, tokens, confidence)
    assert_same(pool, want)


def test_store_drafts_keeps_only_current_newest_rows(device):
    pool = RequestPool.empty(5, 2, device)
    pool.known_len.copy_(torch.tensor([4, 4, 4, 4, 4]))
    pool.head.copy_(torch.tensor([4, 5, 4, 4, 3]))
    pool.generation.fill_(2)
    # kept · kept (a draft row) · older generation · head has moved · chunk stops short
    rows = make_rows(
        device,
        slots=[0, 1, PAD_SLOT_ID, 2, 3, 4],
        generations=[2, 2, 2, 1, 2, 2],
        positions=[3, 4, 3, 3, 2, 2],
    )
    tokens = torch.arange(30, 36, dtype=torch.int32, device=device)
    confidence = torch.linspace(0.1, 0.6, 6, device=device)
    store_drafts(pool, rows, tokens, confidence)
    assert pool.draft.tolist() == [30, 31] + [INVALID_TOKEN] * 3
    assert torch.equal(pool.draft_confidence[:2], confidence[:2])
    assert pool.draft_confidence[2:].tolist() == [0.0] * 3


def test_store_drafts_without_rows(device):
    pool = random_pool(7, 2, device)
    before = clone(pool)
    none = torch.empty(0, device=device)
    store_drafts(pool, make_rows(device, []), none.int(), none)
    store_drafts(
        pool,
        make_rows(device, [PAD_SLOT_ID] * 3),
        torch.ones(3, dtype=torch.int32, device=device),
        torch.ones(3, device=device),
    )
    assert_same(pool, before)


def test_cpu_tensors_take_the_reference():
    """Outside interpreted_kernels(): same results, in place, without a launch."""
    assert not use_kernel(torch.empty(1))
    pool = random_pool(131, 4, "cpu")
    want_rows, want_pool = select_rows_reference(pool, num_rows=50, step=3)
    assert_same(select_rows(pool, num_rows=50, step=3), want_rows)
    assert_same(pool, want_pool)


def test_interpreted_kernels_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), interpreted_kernels():
        pass
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with interpreted_kernels():
        assert use_kernel(torch.empty(1))
    assert not use_kernel(torch.empty(1))
