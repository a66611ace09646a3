# SPDX-License-Identifier: Apache-2.0
"""The plain-torch kernels of the no-GPU path do what vLLM's Triton kernels do."""

import os
from types import SimpleNamespace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before vLLM's kernels are decorated

from vllm.v1.worker.gpu import input_batch  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402
from vllm.v1.worker.gpu.sample import logprob  # noqa: E402

from spexis_runtime.no_gpu import small_kernels  # noqa: E402

MAX_NUM_REQS, MAX_LEN, VOCAB, BLOCK_SIZES = 9, 60, 90, (4, 16)


class Step:
    """A step of random requests; `first_row` rows of the batch come before them."""

    def __init__(self, seed: int, num_reqs: int, first_row: int = 0):
        torch.manual_seed(seed)
        query_lens = torch.randint(1, 6, (first_row + num_reqs,))
        start_loc = torch.cat((torch.zeros(1), query_lens.cumsum(0))).int()
        self.query_start_loc = start_loc[first_row:]
        lens = query_lens[first_row:].int()
        self.idx_mapping = torch.randperm(MAX_NUM_REQS)[:num_reqs].int()
        slots = self.idx_mapping.long()
        self.num_computed = torch.randint(0, 40, (MAX_NUM_REQS,), dtype=torch.int32)
        self.seq_lens = torch.full((MAX_NUM_REQS,), 77, dtype=torch.int32)
        self.seq_lens[:num_reqs] = self.num_computed[slots] + lens
        # in the prompt, at its end, or past it
        self.prefill_len = torch.randint(0, 50, (MAX_NUM_REQS,), dtype=torch.int32)
        self.prefill_len[slots[::3]] = self.seq_lens[:num_reqs][::3]
        self.positions = torch.cat(
            [torch.zeros(int(start_loc[first_row]), dtype=torch.int64)]
            + [
                torch.arange(c, c + n)
                for c, n in zip(self.num_computed[slots], lens, strict=True)
            ]
        )
        self.cu_num_logits = torch.arange(num_reqs + 1, dtype=torch.int32)


def check_equal(original, replacement, *arguments) -> None:
    """Both return the same, and leave the same in the tensors that they were given."""
    assert original is not replacement, "replaced in this process: nothing to compare"
    results = []
    for function in (original, replacement):
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        returned = function(*given)
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        results.append([*(returned or ()), *tensors])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


STEPS = pytest.mark.parametrize("seed, num_reqs", [(0, 1), (1, 4), (2, 7), (3, 9)])


@STEPS
@pytest.mark.parametrize("first_row", [0, 3])
def test_prepare_pos_seq_lens(seed, num_reqs, first_row):
    step = Step(seed, num_reqs, first_row)
    check_equal(
        input_batch.prepare_pos_seq_lens,
        small_kernels.prepare_pos_seq_lens,
        step.idx_mapping,
        step.query_start_loc,
        step.num_computed,
        torch.full((80,), -7),
        torch.full_like(step.seq_lens, 5),
    )


@STEPS
def test_combine_sampled_and_draft_tokens(seed, num_reqs):
    step = Step(seed, num_reqs)
    check_equal(
        input_batch.combine_sampled_and_draft_tokens,
        small_kernels.combine_sampled_and_draft_tokens,
        torch.randint(0, VOCAB, (80,), dtype=torch.int32),
        step.idx_mapping,
        torch.randint(0, VOCAB, (MAX_NUM_REQS, 1)),
        step.query_start_loc,
        step.seq_lens,
        step.prefill_len,
        torch.zeros(MAX_NUM_REQS, 0, dtype=torch.int64),
        step.cu_num_logits,
        num_reqs,
    )


@STEPS
def test_get_num_sampled_and_rejected(seed, num_reqs):
    step = Step(seed, num_reqs)
    check_equal(
        input_batch.get_num_sampled_and_rejected,
        small_kernels.get_num_sampled_and_rejected,
        torch.ones(num_reqs, dtype=torch.int32),
        step.seq_lens,
        step.cu_num_logits,
        step.idx_mapping,
        step.prefill_len,
    )


@STEPS
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("query_start_loc", [True, False])
def test_post_update(seed, num_reqs, counts, query_start_loc):
    step = Step(seed, num_reqs)
    idx_mapping = step.idx_mapping.clone()
    idx_mapping[1::3] = -1
    check_equal(
        input_batch.post_update,
        small_kernels.post_update,
        idx_mapping,
        step.num_computed,
        torch.randint(0, VOCAB, (MAX_NUM_REQS, 1)),
        torch.randint(0, 3, (MAX_NUM_REQS, VOCAB), dtype=torch.int32)
        if counts
        else None,
        torch.randint(0, VOCAB, (num_reqs, 1)),
        torch.randint(0, 2, (num_reqs,), dtype=torch.int32),
        torch.randint(0, 2, (num_reqs,), dtype=torch.int32),
        step.query_start_loc if query_start_loc else None,
        torch.randint(0, VOCAB, (MAX_NUM_REQS, MAX_LEN), dtype=torch.int32),
        torch.randint(1, MAX_LEN - 1, (MAX_NUM_REQS,), dtype=torch.int32),
    )


def block_tables() -> SimpleNamespace:
    """What the two methods use of a `BlockTables` of two groups."""
    tables = [
        torch.randint(0, 500, (MAX_NUM_REQS, MAX_LEN // size + 1), dtype=torch.int32)
        for size in BLOCK_SIZES
    ]
    gathered = [torch.full_like(table, 7) for table in tables]
    pointers = [
        torch.tensor([t.data_ptr() for t in some], dtype=torch.uint64)
        for some in (tables, gathered)
    ]
    return SimpleNamespace(
        cp_size=1,
        cp_rank=0,
        cp_interleave=1,
        num_kv_cache_groups=len(BLOCK_SIZES),
        kernel_block_sizes=BLOCK_SIZES,
        block_tables=[SimpleNamespace(gpu=table) for table in tables],
        block_table_ptrs=pointers[0],
        block_table_strides=torch.tensor([t.stride(0) for t in tables]),
        block_sizes_tensor=torch.tensor(BLOCK_SIZES, dtype=torch.int32),
        num_blocks=SimpleNamespace(
            gpu=torch.tensor(
                [[t.shape[1]] * MAX_NUM_REQS for t in tables], dtype=torch.int32
            )
        ),
        input_block_tables=gathered,
        input_block_table_ptrs=pointers[1],
        slot_mappings=torch.full((len(BLOCK_SIZES), 80), 7),
    )


@STEPS
def test_gather_block_tables(seed, num_reqs):
    step, tables = Step(seed, num_reqs), block_tables()
    original = BlockTables.gather_block_tables
    assert original is not small_kernels.gather_block_tables
    args = tables, step.idx_mapping, min(num_reqs + 2, MAX_NUM_REQS)
    want = [t.clone() for t in original(*args)]
    left = [t.clone() for t in tables.input_block_tables]
    for table in tables.input_block_tables:
        table.fill_(7)
    got = small_kernels.gather_block_tables(*args)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    both = zip(left, tables.input_block_tables, strict=True)
    assert all(torch.equal(a, b) for a, b in both)


@STEPS
def test_compute_slot_mappings(seed, num_reqs):
    step, tables = Step(seed, num_reqs), block_tables()
    original = BlockTables.compute_slot_mappings
    assert original is not small_kernels.compute_slot_mappings
    positions = torch.cat((step.positions, torch.full((5,), 10**6)))
    args = tables, step.idx_mapping, step.query_start_loc, positions, 60
    want = original(*args).clone()
    whole = tables.slot_mappings.clone()
    tables.slot_mappings.fill_(7)
    assert torch.equal(small_kernels.compute_slot_mappings(*args), want)
    assert torch.equal(tables.slot_mappings, whole)


def test_compute_token_logprobs():
    torch.manual_seed(0)
    logits = 5 * torch.randn(6, 2500)
    logits[2, 7:] = -torch.inf
    token_ids = torch.randint(0, 2500, (6, 4), dtype=torch.int32)
    original = logprob.compute_token_logprobs
    assert original is not small_kernels.compute_token_logprobs
    torch.testing.assert_close(
        small_kernels.compute_token_logprobs(logits, token_ids),
        original(logits, token_ids),
    )
