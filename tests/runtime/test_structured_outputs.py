# SPDX-License-Identifier: Apache-2.0
"""Grammar bitmasks reach the rows of their requests, wherever these sit."""

import os
from types import SimpleNamespace

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before vLLM's kernel is decorated

from spexis_kernels.constants import PAD_SLOT_ID  # noqa: E402
from spexis_runtime import patches  # noqa: E402
from spexis_runtime.no_gpu.small_kernels import apply_grammar_bitmask  # noqa: E402

patches.shim_streams()

from spexis_runtime.structured_outputs import AnonymousRowsGrammar  # noqa: E402

VOCAB = 20_001  # three of vLLM's blocks, and a word that is not full
SLOTS = {"a": 4, "b": 1, "c": 0, "d": 6}  # request -> slot
ROWS = ["c", "a", "pad", "b", "no grammar"]  # d has no row


def test_rows_get_the_mask_of_the_slot_in_them():
    rng = np.random.default_rng(0)
    with_grammar = ["a", "b", "c", "d"]
    words = -(-VOCAB // 32)
    masks = rng.integers(-(2**31), 2**31, (len(with_grammar), words), dtype=np.int32)
    slots = [SLOTS.get(name, 2) if name != "pad" else PAD_SLOT_ID for name in ROWS]
    grammar = AnonymousRowsGrammar(
        lambda: torch.tensor(slots, dtype=torch.int32),
        SLOTS,
        max_num_reqs=8,
        device=torch.device("cpu"),
    )
    logits = torch.randn(len(ROWS), VOCAB)
    got = logits.clone()
    grammar.apply_grammar_bitmask(got, SimpleNamespace(), with_grammar, masks)

    want = logits.clone()
    known = SimpleNamespace(req_ids=ROWS)
    of_rows = [with_grammar.index(name) for name in ("a", "b", "c")]
    apply_grammar_bitmask(grammar, want, known, ["a", "b", "c"], masks[of_rows])
    rows = [i for i, name in enumerate(ROWS) if name != "pad"]
    assert torch.equal(got[rows], want[rows])
    assert torch.equal(got[-1], logits[-1])
    for row, name in ((0, "c"), (1, "a"), (3, "b")):
        for token in range(0, VOCAB, 97):
            word = int(masks[with_grammar.index(name), token // 32])
            allowed = word >> (token % 32) & 1
            assert bool(got[row, token].isneginf()) == (not allowed)


def test_nothing_changes_without_grammars():
    logits = torch.randn(3, 40)
    grammar = AnonymousRowsGrammar(
        lambda: torch.zeros(3, dtype=torch.int32),
        {},
        max_num_reqs=8,
        device=torch.device("cpu"),
    )
    before = logits.clone()
    none = np.zeros((0, 2), dtype=np.int32)
    grammar.apply_grammar_bitmask(logits, SimpleNamespace(), [], none)
    assert torch.equal(logits, before)
