# SPDX-License-Identifier: Apache-2.0
"""draft_head: kernel = reference; sampling by chi-square; shards by exact equality."""

import math

import pytest
import torch
from tolerances import CHI_SQUARE_SIGMAS, FP32_REDUCTION, logit_rounding

from spexis_kernels import (
    DraftHead,
    combine_draft_heads,
    combine_draft_heads_reference,
    draft_head,
    draft_head_io_bytes,
    draft_head_reference,
    draft_head_workspace,
)
from spexis_kernels.draft_head import _settings
from spexis_kernels.gumbel import gumbel_noise_reference

# (rows, vocab_size, hidden_size)
SHAPES = [
    pytest.param(1, 1, 16, id="one_token"),
    pytest.param(1, 131, 63, id="one_row"),
    pytest.param(7, 1000, 131, id="odd"),
    pytest.param(63, 128, 64, id="one_tile"),
    pytest.param(131, 257, 96, id="many_rows"),
    pytest.param(300, 200, 32, id="two_row_tiles"),
]
REAL_SHAPES = [
    pytest.param(128256, 8192, id="llama-3.3-70b"),
    pytest.param(151936, 5120, id="qwen3-32b"),
    pytest.param(49152, 576, id="smollm2-135m"),
]
# the interpreter multiplies bf16 as if its bits were integers
INTERPRETED_DTYPES = [torch.float32, torch.float16]


def operands(rows, vocab_size, hidden_size, dtype, device):
    """Logits of about unit variance."""
    hidden = torch.randn(rows, hidden_size, device=device).to(dtype)
    weight = torch.randn(vocab_size, hidden_size, device=device).to(dtype)
    return hidden, weight * hidden_size**-0.5


def sampling(rows, device):
    """Every third row greedy; seeds over all 64 bits, positions beyond 32."""
    temperature = 0.3 + torch.rand(rows)
    temperature[::3] = 0.0
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,))
    position = torch.randint(0, 2**33, (rows,))
    names = ("temperature", "seed", "position")
    tensors = (temperature, seed, position)
    return {name: t.to(device) for name, t in zip(names, tensors, strict=True)}


def scores(hidden, weight, temperature=None, seed=None, position=None, vocab_start=0):
    """[rows, vocab_size] logits / T and logits / T + noise, accumulated in fp32."""
    logits = hidden.float() @ weight.float().T
    if temperature is None:
        return logits, logits
    token = vocab_start + torch.arange(len(weight), device=weight.device)
    noise = gumbel_noise_reference(seed[:, None], position[:, None], token)
    sampled = (temperature > 0)[:, None]
    logits = logits / temperature[:, None].where(sampled, 1.0)
    return logits, logits + noise.where(sampled, 0.0)


def stack(heads: list[DraftHead]) -> DraftHead:
    return DraftHead(*map(torch.stack, zip(*heads, strict=True)))


def check(head: DraftHead, hidden, weight, vocab_start=0, max_ties=0, **sampling):
    """`head` is right for these operands.

    A token may differ from the fp32 reference's only if its score is within rounding of
    the reference's best, and in no more than `max_ties` rows; confidence, log-sum-exp
    and score must be those of the token returned.
    """
    logits, score = scores(hidden, weight, vocab_start=vocab_start, **sampling)
    entry = (head.token.long() - vocab_start)[:, None]
    assert bool(((entry >= 0) & (entry < len(weight))).all())
    gap = score.max(dim=1).values - score.gather(1, entry)[:, 0]
    differs = entry[:, 0] != score.argmax(dim=1)
    scale = float(score.abs().max())
    rounding = logit_rounding(hidden.shape[1], scale)
    assert not bool((gap > rounding).any()), f"largest gap {float(gap.max())}"
    assert int(differs.sum()) <= max_ties, f"{int(differs.sum())} near ties"

    log_sum_exp = logits.logsumexp(dim=1)
    confidence = (logits.gather(1, entry)[:, 0] - log_sum_exp).exp()
    tolerance = {"rtol": FP32_REDUCTION["rtol"], "atol": rounding}
    close = torch.testing.assert_close
    close(head.log_sum_exp, log_sum_exp, **tolerance)
    close(head.confidence, confidence, **tolerance)
    close(head.score, score.gather(1, entry)[:, 0], **tolerance)


@pytest.mark.parametrize("rows, vocab_size, hidden_size", SHAPES)
@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_matches_reference(device, rows, vocab_size, hidden_size, dtype, sampled):
    hidden, weight = operands(rows, vocab_size, hidden_size, dtype, device)
    kwargs = sampling(rows, device) if sampled else {}
    head = draft_head(hidden, weight, vocab_start=70, **kwargs)
    check(head, hidden, weight, vocab_start=70, **kwargs)
    reference = draft_head_reference(hidden, weight, vocab_start=70, **kwargs)
    assert torch.equal(head.token, reference.token)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_strided_operands(device, sampled):
    wide_hidden, wide_weight = operands(7, 300, 80, torch.float32, device)
    hidden, weight = wide_hidden[:, 3:70], wide_weight[:, 3:70]
    kwargs = sampling(7, device) if sampled else {}
    head = draft_head(hidden, weight, **kwargs)
    dense = draft_head(hidden.contiguous(), weight.contiguous(), **kwargs)
    check(head, hidden, weight, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(head, dense, strict=True))


def test_no_rows(device):
    hidden, weight = operands(0, 131, 64, torch.float32, device)
    head = draft_head(hidden, weight)
    assert [tuple(tensor.shape) for tensor in head] == [(0,)] * 4


def test_workspace_and_out_are_used(device):
    hidden, weight = operands(7, 300, 64, torch.float32, device)
    workspace = draft_head_workspace(hidden, weight)
    out = DraftHead(*(torch.full_like(tensor[0], 77) for tensor in workspace))
    head = draft_head(hidden, weight, workspace=workspace, out=out)
    assert all(a is b for a, b in zip(head, out, strict=True))
    check(out, hidden, weight)
    tiles = combine_draft_heads(workspace)
    assert all(torch.equal(a, b) for a, b in zip(tiles, out, strict=True))


def test_ties_go_to_the_lowest_token(device):
    """Equal columns within a tile, in other tiles, and in other shards."""
    hidden, weight = operands(7, 64, 32, torch.float32, device)
    repeated = weight.repeat(6, 1)
    head = draft_head(hidden, repeated)
    assert torch.equal(head.token, (hidden @ weight.T).argmax(dim=1).int())
    shards = [draft_head(hidden, weight, vocab_start=64 * i) for i in (2, 0, 1)]
    combined = combine_draft_heads(stack(shards))
    assert torch.equal(combined.token, head.token)
    zero = draft_head(hidden, torch.zeros_like(repeated), vocab_start=9)
    assert zero.token.tolist() == [9] * 7
    torch.testing.assert_close(
        zero.confidence, torch.full_like(zero.confidence, 1 / 384), **FP32_REDUCTION
    )


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_rows_that_are_not_finite_still_draft_a_token(device, sampled):
    hidden, weight = operands(4, 300, 32, torch.float32, device)
    weight[200] = math.nan  # one logit of each row
    hidden[1] = math.nan
    kwargs = sampling(4, device) if sampled else {}
    for function in (draft_head, draft_head_reference):
        head = function(hidden, weight, vocab_start=5, **kwargs)
        assert head.token[1] == 5
        assert head.confidence[1] == 0.0
        assert head.log_sum_exp[1] == -math.inf
        others = torch.tensor([0, 2, 3], device=device)
        kept = torch.cat([weight[:200], weight[201:]])
        assert 205 not in head.token.tolist()
        torch.testing.assert_close(
            head.log_sum_exp[others],
            draft_head_reference(hidden, kept, **kwargs).log_sum_exp[others],
            **FP32_REDUCTION,
        )


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_shards_combine_exactly_in_any_order(device, num_shards, sampled):
    hidden, weight = operands(63, 331, 64, torch.float32, device)
    kwargs = sampling(63, device) if sampled else {}
    whole = draft_head(hidden, weight, **kwargs)
    starts = [331 * i // num_shards for i in range(num_shards + 1)]
    shards = [
        draft_head(hidden, weight[a:b], vocab_start=a, **kwargs)
        for a, b in zip(starts, starts[1:], strict=False)
    ]
    stacked = stack(shards)
    combined = combine_draft_heads(stacked)
    assert torch.equal(combined.token, whole.token)
    torch.testing.assert_close(combined, whole, **FP32_REDUCTION)
    torch.testing.assert_close(
        combined, combine_draft_heads_reference(stacked), **FP32_REDUCTION
    )
    for function in (combine_draft_heads, combine_draft_heads_reference):
        expected = function(stacked)
        for order in (torch.arange(num_shards).flip(0), torch.randperm(num_shards)):
            moved = DraftHead(*(tensor[order.to(device)] for tensor in stacked))
            for got, want in zip(function(moved), expected, strict=True):
                assert torch.equal(got, want)


def chi_square(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom of draws against softmax(logits)."""
    expected = logits.double().softmax(0) * len(tokens)
    assert float(expected.min()) >= 5
    counts = torch.bincount(tokens.long(), minlength=len(logits)).double()
    return float(((counts - expected) ** 2 / expected).sum()), len(logits) - 1


@pytest.mark.parametrize(
    "temperature, vary", [(0.7, "seed"), (1.0, "position"), (2.0, "seed")]
)
def test_samples_follow_the_softmax(device, temperature, vary):
    draws = 1024
    hidden = torch.ones(1, 16, device=device)
    weight = torch.linspace(-1, 1, 8, device=device)[:, None].repeat(1, 16) / 16
    many = torch.arange(draws, device=device)
    one = torch.full_like(many, 12345)
    head = draft_head(
        hidden.expand(draws, -1),
        weight,
        temperature=torch.full((draws,), temperature, device=device),
        seed=many if vary == "seed" else one,
        position=many if vary == "position" else one,
    )
    logits = (hidden @ weight.T)[0] / temperature
    statistic, degrees = chi_square(head.token.cpu(), logits.cpu())
    bound = degrees + CHI_SQUARE_SIGMAS * math.sqrt(2 * degrees)
    assert statistic < bound
    statistic, _ = chi_square(head.token.cpu(), logits.cpu().flip(0))
    assert statistic > bound  # draws of another distribution would show


def test_noise_depends_on_seed_position_and_token_alone(device):
    """The same row alone, in a batch, and by shards draws the same token."""
    hidden, weight = operands(40, 700, 32, torch.float32, device)
    kwargs = sampling(40, device)
    batch = draft_head(hidden, weight, **kwargs)
    for row in (1, 38):
        one = {name: tensor[row : row + 1] for name, tensor in kwargs.items()}
        alone = draft_head(hidden[row : row + 1], weight, **one)
        assert alone.token[0] == batch.token[row]
        torch.testing.assert_close(alone.score[0], batch.score[row], **FP32_REDUCTION)
    short = {**kwargs, "position": kwargs["position"] % 2**31}
    narrow = {**short, "position": short["position"].int()}
    assert torch.equal(
        draft_head(hidden, weight, **short).token,
        draft_head(hidden, weight, **narrow).token,
    )


def test_cpu_tensors_take_the_reference():
    hidden, weight = operands(7, 300, 64, torch.bfloat16, "cpu")
    kwargs = sampling(7, "cpu")
    head = draft_head(hidden, weight, **kwargs)
    want = draft_head_reference(hidden, weight, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(head, want, strict=True))
    check(head, hidden, weight, **kwargs)


def test_bad_arguments_are_named(device):
    hidden, weight = operands(7, 300, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"hidden_states must be \[rows, 64\]"):
        draft_head(hidden[:, :63], weight)
    with pytest.raises(ValueError, match="hidden_states must be .* torch.float32"):
        draft_head(hidden.half(), weight)
    with pytest.raises(ValueError, match="weight must be .* contiguous rows"):
        draft_head(hidden, weight.T.contiguous().T)
    with pytest.raises(ValueError, match="temperature needs seed and position"):
        draft_head(hidden, weight, temperature=torch.ones(7, device=device))
    kwargs = sampling(7, device)
    with pytest.raises(ValueError, match=r"seed must be a contiguous \[7\] int64"):
        draft_head(hidden, weight, **{**kwargs, "seed": kwargs["seed"].int()})
    with pytest.raises(ValueError, match=r"workspace\.token must be contiguous"):
        workspace = draft_head_workspace(hidden[:3], weight)
        draft_head(hidden, weight, workspace=workspace)
    with pytest.raises(ValueError, match="num_parts >= 1"):
        combine_draft_heads(draft_head(hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_settings_fit_one_pass_and_shared_memory(dtype):
    for rows in range(1, 600):
        settings = _settings(rows, dtype)
        assert settings.block_m >= min(rows, 128)
        tiles = (settings.block_v + settings.block_m) * settings.block_k
        assert tiles * dtype.itemsize * settings.num_stages <= 200 * 1024


def test_io_bytes_counts_the_weight_once():
    bf16 = draft_head_io_bytes(256, 128256, 8192, torch.bfloat16)
    assert bf16 == 2 * 128256 * 8192 + 2 * 256 * 8192 + 16 * 256


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size, hidden_size", REAL_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_shapes(vocab_size, hidden_size, dtype):
    hidden, weight = operands(256, vocab_size, hidden_size, dtype, "cuda")
    kwargs = sampling(256, "cuda")
    for rows in (1, 16, 64, 128, 256):
        check(draft_head(hidden[:rows], weight), hidden[:rows], weight, max_ties=2)
        some = {name: tensor[:rows] for name, tensor in kwargs.items()}
        head = draft_head(hidden[:rows], weight, **some)
        check(head, hidden[:rows], weight, max_ties=2, **some)


@pytest.mark.gpu
def test_out_and_workspace_leave_nothing_to_allocate():
    hidden, weight = operands(64, 49152, 576, torch.bfloat16, "cuda")
    kwargs = sampling(64, "cuda")
    workspace = draft_head_workspace(hidden, weight)
    out = draft_head(hidden, weight, workspace=workspace, **kwargs)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    draft_head(hidden, weight, workspace=workspace, out=out, **kwargs)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_head(hidden, weight, workspace=workspace, out=out, **kwargs)
    for tensor in out:
        tensor.zero_()
    graph.replay()
    check(out, hidden, weight, **kwargs)
