# SPDX-License-Identifier: Apache-2.0
"""verify and absorb: kernel = reference = a loop over Python numbers."""

import pytest
import torch
from pools import assert_same, clone, make_rows, random_pool, random_rows

from spexis_kernels import (
    INVALID_TOKEN,
    PAD_SLOT_ID,
    RequestPool,
    absorb,
    absorb_reference,
    verify,
    verify_reference,
)

# (num_slots, num_rows)
SHAPES = [
    pytest.param(1, 1, id="one_row"),
    pytest.param(7, 7, id="small"),
    pytest.param(63, 7, id="few_rows"),
    pytest.param(7, 63, id="mostly_padding"),
    pytest.param(131, 131, id="odd"),
    pytest.param(1024, 300, id="large"),
]


def verify_loop(pool: RequestPool, rows, sampled: list[int]) -> list[int]:
    """`verify` by its definition; updates `pool`."""
    out = []
    columns = (tensor.tolist() for tensor in rows[:4])
    for (slot, generation, position, token), y in zip(
        zip(*columns, strict=True), sampled, strict=True
    ):
        valid = (
            slot != PAD_SLOT_ID
            and generation == int(pool.generation[slot])
            and position == int(pool.known_len[slot]) - 1
            and token == int(pool.last_token[slot])
        )
        if valid:
            pool.known_len[slot] += 1
            pool.last_token[slot] = y
        out.append(y if valid else INVALID_TOKEN)
    return out


def absorb_loop(pool: RequestPool, rows, accepted: list[int]) -> None:
    """`absorb` by its definition; updates `pool`."""
    columns = (rows.slots.tolist(), rows.generations.tolist(), accepted)
    for slot, generation, y in zip(*columns, strict=True):
        if slot == PAD_SLOT_ID or y == INVALID_TOKEN:
            continue
        if generation != int(pool.generation[slot]):
            continue
        p, depth = int(pool.known_len[slot]), pool.fed.shape[1]
        pool.known_len[slot] = p + 1
        pool.last_token[slot] = y
        if not (int(pool.head[slot]) > p and int(pool.fed[slot, p % depth]) == y):
            pool.head[slot] = p
            pool.draft[slot] = INVALID_TOKEN


@pytest.mark.parametrize("num_slots, num_rows", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_verify_matches_reference_and_definition(device, num_slots, num_rows, dtype):
    pool = random_pool(num_slots, 4, device)
    rows = random_rows(pool, num_rows)
    sampled = torch.randint(0, 50, (num_rows,), dtype=dtype).to(device)
    want, want_pool = verify_reference(pool, rows, sampled)
    loop_pool = clone(pool)
    assert verify_loop(loop_pool, rows, sampled.tolist()) == want.tolist()
    assert_same(want_pool, loop_pool)
    out = verify(pool, rows, sampled)
    assert out.dtype == torch.int32
    assert torch.equal(out, want)
    assert_same(pool, want_pool)


@pytest.mark.parametrize("num_slots, num_rows", SHAPES)
@pytest.mark.parametrize("depth", [1, 4])
def test_absorb_matches_reference_and_definition(device, num_slots, num_rows, depth):
    pool = random_pool(num_slots, depth, device)
    rows = random_rows(pool, num_rows)
    slot = rows.slots.clamp(min=0).long()
    ring = (pool.known_len[slot] % depth).long()
    outcome = torch.randint(0, 3, (num_rows,)).to(device)
    accepted = torch.where(outcome == 0, INVALID_TOKEN, pool.fed[slot, ring])
    accepted[outcome == 1] = 49 - accepted[outcome == 1]
    want = absorb_reference(pool, rows, accepted)
    loop_pool = clone(pool)
    absorb_loop(loop_pool, rows, accepted.tolist())
    assert_same(want, loop_pool)
    absorb(pool, rows, accepted)
    assert_same(pool, want)


def verified_pool(num_slots: int, device: str) -> RequestPool:
    """Slot i knows 10 + i tokens, the newest of which is 100 + i."""
    pool = RequestPool.empty(num_slots, 2, device)
    pool.known_len.copy_(torch.arange(10, 10 + num_slots))
    pool.last_token.copy_(torch.arange(100, 100 + num_slots))
    pool.generation.fill_(5)
    return pool


@pytest.mark.parametrize(
    "rejected",
    [
        pytest.param(set(), id="all_kept"),
        pytest.param(set(range(7)), id="none_kept"),
        pytest.param({0}, id="first_rejected"),
        pytest.param({6}, id="last_rejected"),
    ],
)
@pytest.mark.parametrize("cause", ["position", "token", "generation", "padding"])
def test_verify_rejections(device, rejected, cause):
    pool = verified_pool(7, device)
    slots, generations = list(range(7)), [5] * 7
    positions, tokens = list(range(9, 16)), list(range(100, 107))
    for i in rejected:
        if cause == "position":
            positions[i] += 1
        elif cause == "token":
            tokens[i] += 1
        elif cause == "generation":
            generations[i] -= 1
        else:
            slots[i] = PAD_SLOT_ID
    rows = make_rows(device, slots, generations, positions, tokens)
    sampled = torch.arange(200, 207, device=device)
    out = torch.full((7,), 99, dtype=torch.int32, device=device)
    assert verify(pool, rows, sampled, out=out) is out
    kept = [i not in rejected for i in range(7)]
    assert out.tolist() == [200 + i if kept[i] else INVALID_TOKEN for i in range(7)]
    assert pool.known_len.tolist() == [10 + i + kept[i] for i in range(7)]
    assert pool.last_token.tolist() == [(200 if kept[i] else 100) + i for i in range(7)]


def test_absorb_outcomes(device):
    """One slot for each case of design section 3, point 1; p = known_len = 4."""
    pool = RequestPool.empty(6, 3, device)
    pool.known_len.fill_(4)
    pool.last_token.fill_(40)
    pool.generation.fill_(1)
    pool.draft.fill_(33)
    pool.draft_confidence.fill_(0.5)
    pool.fed.fill_(77)
    pool.fed_confidence.fill_(0.25)
    # right draft · wrong draft · nothing fed · old generation · no result · no row
    pool.head.copy_(torch.tensor([6, 6, 4, 6, 6, 6]))
    pool.generation[3] = 2
    rows = make_rows(device, [0, 1, PAD_SLOT_ID, 2, 3, 4], [1] * 6)
    accepted = [77, 78, 50, 77, 77, INVALID_TOKEN]
    before = clone(pool)
    absorb(pool, rows, torch.tensor(accepted, dtype=torch.int32, device=device))

    assert pool.known_len.tolist() == [5, 5, 5, 4, 4, 4]
    assert pool.last_token.tolist() == [77, 78, 77, 40, 40, 40]
    assert pool.head.tolist() == [6, 4, 4, 6, 6, 6]
    assert pool.draft.tolist() == [33, INVALID_TOKEN, INVALID_TOKEN, 33, 33, 33]
    for field in ("generation", "limit", "last_fed", "draft_confidence", "fed"):
        assert torch.equal(getattr(pool, field), getattr(before, field)), field
    assert torch.equal(pool.fed_confidence, before.fed_confidence)


@pytest.mark.parametrize("slots", [[], [PAD_SLOT_ID], [PAD_SLOT_ID] * 131])
def test_without_rows_nothing_changes(device, slots):
    pool = random_pool(7, 2, device)
    before = clone(pool)
    rows = make_rows(device, slots)
    tokens = torch.ones(len(slots), dtype=torch.int32, device=device)
    assert verify(pool, rows, tokens).tolist() == [INVALID_TOKEN] * len(slots)
    absorb(pool, rows, tokens)
    assert_same(pool, before)


def test_references_do_not_mutate():
    pool = random_pool(63, 4, "cpu")
    rows = random_rows(pool, 63)
    tokens = torch.randint(0, 50, (63,), dtype=torch.int32)
    pool_before, rows_before = clone(pool), type(rows)(*(t.clone() for t in rows))
    accepted, verified = verify_reference(pool, rows, tokens)
    absorbed = absorb_reference(pool, rows, accepted)
    assert not torch.equal(verified.known_len, pool.known_len)
    assert not torch.equal(absorbed.head, pool.head)
    assert_same(pool, pool_before)
    assert_same(rows, rows_before)


def test_cpu_tensors_take_the_reference():
    pool = random_pool(63, 4, "cpu")
    rows = random_rows(pool, 63)
    tokens = torch.randint(0, 50, (63,))
    want, want_pool = verify_reference(pool, rows, tokens)
    accepted = verify(pool, rows, tokens)
    assert torch.equal(accepted, want)
    assert_same(pool, want_pool)
    want_pool = absorb_reference(pool, rows, accepted)
    absorb(pool, rows, accepted)
    assert_same(pool, want_pool)


def test_bad_arguments_are_named(device):
    pool = random_pool(7, 2, device)
    rows = make_rows(device, [0, 1])
    with pytest.raises(ValueError, match="sampled_tokens must be .* int32 or int64"):
        verify(pool, rows, torch.zeros(2, device=device))
    strided = torch.zeros(2, 3, dtype=torch.int32, device=device)[:, 0]
    with pytest.raises(ValueError, match=r"accepted must be a contiguous \[2\] int32"):
        absorb(pool, rows, strided)
    short = rows._replace(tokens=rows.tokens[:1])
    with pytest.raises(ValueError, match=r"rows\.tokens must be .* got \(1,\)"):
        absorb(pool, short, rows.tokens)
