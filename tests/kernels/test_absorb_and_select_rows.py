# SPDX-License-Identifier: Apache-2.0
"""absorb_and_select_rows: one launch = two launches = the reference."""

import pytest
import torch
from pools import assert_same, clone, random_pool, random_rows

from spexis_kernels import (
    INVALID_TOKEN,
    Rows,
    absorb,
    absorb_and_select_rows,
    absorb_and_select_rows_reference,
    select_rows,
)

# (num_slots, rows absorbed, rows chosen, depth)
SHAPES = [
    pytest.param(1, 1, 1, 1, id="one"),
    pytest.param(7, 0, 7, 2, id="nothing_absorbed"),
    pytest.param(7, 7, 0, 2, id="nothing_chosen"),
    pytest.param(63, 131, 7, 4, id="mostly_padding"),
    pytest.param(131, 63, 300, 2, id="more_rows_than_slots"),
    pytest.param(1024, 256, 256, 3, id="large"),
]


def random_step(pool, num_rows: int, depth: int) -> tuple[Rows, torch.Tensor]:
    """Rows of an older step and what they append: nothing, what was fed, another."""
    rows = random_rows(pool, num_rows)
    slot = rows.slots.clamp(min=0).long()
    accepted = pool.fed[slot, (pool.known_len[slot] % depth).long()]
    outcome = torch.randint(0, 3, (num_rows,)).to(accepted.device)
    accepted = torch.where(outcome == 0, INVALID_TOKEN, accepted)
    accepted[outcome == 1] = 49 - accepted[outcome == 1]
    return rows, accepted


@pytest.mark.parametrize("num_slots, num_absorbed, num_rows, depth", SHAPES)
@pytest.mark.parametrize("step_on_device", [False, True])
def test_same_as_both(device, num_slots, num_absorbed, num_rows, depth, step_on_device):
    pool = random_pool(num_slots, depth, device)
    absorbed, accepted = random_step(pool, num_absorbed, depth)
    step = torch.tensor([9], dtype=torch.int32, device=device) if step_on_device else 9
    options = {"num_rows": num_rows, "step": step}
    want, want_pool = absorb_and_select_rows_reference(
        pool, absorbed, accepted, **options
    )
    both = clone(pool)
    absorb(both, absorbed, accepted)
    assert_same(select_rows(both, **options), want)
    assert_same(both, want_pool)
    rows = absorb_and_select_rows(pool, absorbed, accepted, **options)
    assert_same(rows, want)
    assert_same(pool, want_pool)


def test_what_was_absorbed_is_chosen_at_once(device):
    """A draft that turned out wrong: its slot feeds the new token as a normal row."""
    pool = random_pool(1, 2, device)
    for name, value in {"known_len": 5, "head": 6, "limit": 9, "generation": 1}.items():
        getattr(pool, name).fill_(value)
    pool.fed[0, 1] = 7  # at position 5
    absorbed = random_rows(pool, 1)
    absorbed.slots.fill_(0)
    absorbed.generations.fill_(1)
    accepted = torch.tensor([8], dtype=torch.int32, device=device)
    rows = absorb_and_select_rows(pool, absorbed, accepted, num_rows=1, step=3)
    assert rows.positions.tolist() == [5] and rows.tokens.tolist() == [8]
    assert pool.known_len.tolist() == [6] and pool.head.tolist() == [6]


def test_cpu_tensors_take_the_reference():
    pool = random_pool(63, 2, "cpu")
    absorbed, accepted = random_step(pool, 40, 2)
    want, want_pool = absorb_and_select_rows_reference(
        pool, absorbed, accepted, num_rows=31, step=4
    )
    rows = absorb_and_select_rows(pool, absorbed, accepted, num_rows=31, step=4)
    assert_same(rows, want)
    assert_same(pool, want_pool)


def test_bad_arguments_are_named(device):
    pool = random_pool(7, 2, device)
    absorbed, accepted = random_step(pool, 3, 2)
    with pytest.raises(ValueError, match=r"accepted must be a contiguous \[3\] int32"):
        absorb_and_select_rows(pool, absorbed, accepted[:2], num_rows=1, step=0)
    with pytest.raises(ValueError, match="num_rows must be >= 0, got -1"):
        absorb_and_select_rows(pool, absorbed, accepted, num_rows=-1, step=0)
