# SPDX-License-Identifier: Apache-2.0
"""The benchmark of `merged_attention` in stock vLLM, on a model that a CPU can run."""

import json

import pytest
from transformers import LlamaConfig

from bench.e2e import drop_in
from bench.e2e.shapes import SHAPES, Shape

TINY = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


def test_each_case_is_written_and_none_measured_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", Shape("tiny shape", TINY))
    for name, tokens in {"PROMPT": 40, "DECODE": 8, "WARM_UP": 2}.items():
        monkeypatch.setattr(drop_in, f"{name}_TOKENS", tokens)
    monkeypatch.setattr(drop_in, "ROUNDS", 1)
    options = ["--out", str(tmp_path), "--shapes", "tiny", "--requests", "3"]
    drop_in.main(options)
    drop_in.main([*options, "--ways", "greedy_head"])
    report = json.loads((tmp_path / "drop_in.json").read_text())
    assert report.keys() == {"command", "machine", "date", "versions", "cases"}
    [case] = report["cases"]
    assert (case["shape"], case["requests"]) == ("tiny shape", 3)
    [default], [ours], [head] = (case[way] for way in drop_in.WAYS)
    assert case["ratio"] == pytest.approx(ours / default, abs=1e-3)
    assert case["greedy_head_ratio"] == pytest.approx(head / default, abs=1e-3)
    assert case["engines"]["ours"]["attention"] == "CUSTOM"

    capsys.readouterr()
    monkeypatch.setattr(drop_in, "engine", lambda *_: pytest.fail("measured again"))
    drop_in.main([*options, "--ways", *drop_in.WAYS])
    assert json.loads((tmp_path / "drop_in.json").read_text()) == report


def test_the_cache_holds_all_requests_at_their_longest():
    """Of Qwen3-32B: 64 layers of 8 heads, K and V, of 128 bf16 elements."""
    config = SHAPES["qwen3-32b"].config
    bytes_per_token = 64 * 2 * 8 * 128 * 2
    room = drop_in.kv_cache_bytes(config, 256) // bytes_per_token
    longest = drop_in.PROMPT_TOKENS + drop_in.DECODE_TOKENS
    assert 256 * longest <= room < 257 * (longest + drop_in.BLOCK_SIZE)


def test_prompts_share_no_prefix():
    prompts = [
        tuple(prompt["prompt_token_ids"][: drop_in.BLOCK_SIZE])
        for start in range(12)
        for prompt in drop_in.prompts_of(256, start)
    ]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--shapes", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_refused_in_one_line(options, line, tmp_path, capsys):
    with pytest.raises(SystemExit):
        drop_in.main(["--out", str(tmp_path), *options])
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_refused_where_the_backend_would_not_be_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        drop_in, "entry_points", lambda group: type("Points", (), {"names": set()})
    )
    with pytest.raises(SystemExit):
        drop_in.main(["--out", str(tmp_path)])
    assert "python setup.py -q egg_info" in capsys.readouterr().err
