# SPDX-License-Identifier: Apache-2.0
"""Training and measuring exit adapters, on tiny random models."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from small_models import save_small_model
from torch import nn

from spexis_runtime.adapter import (
    AdapterConfig,
    expected_tensors,
    load_adapter_config,
    save_adapter,
)
from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.train import adapter as train_cli
from spexis_runtime.train import evaluate as evaluate_cli
from spexis_runtime.train.batches import make_batches, target_states
from spexis_runtime.train.evaluate import agreement
from spexis_runtime.train.generate import Target, Text, encode, generate, load_target
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.prompts import Prompt, TrainError, read_prompts

MODEL_TYPES = ("llama", "qwen2", "qwen3")
PROMPTS = [Prompt(text) for text in ("one", "two words", "a longer third prompt", "4")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_small_model(root / name, name) for name in MODEL_TYPES}


@pytest.fixture(scope="module")
def target(models: dict[str, Path]) -> Target:
    return load_target(str(models["llama"]))


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"turns": [f"prompt {i}", "next"], "source": f"s{i % 2}"} for i in range(8)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_module_computes_what_the_format_says(
    models: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    target = load_target(str(models[model_type]))
    config = AdapterConfig.for_model(target.model.config, 2)
    adapter = ExitAdapter.from_target(config, target.model)
    shapes = {name: tuple(t.shape) for name, t in adapter.state_dict().items()}
    assert shapes == expected_tensors(config)

    ids = torch.randint(1, 200, (2, 9))
    states = target_states(target, ids, 2)
    with torch.no_grad():
        adapter.mlp.weight.normal_(std=0.2)
        adapter.mlp.bias.normal_()
        # The same steps from transformers' own modules.
        last, norm = target.model.model.layers[-1], target.model.model.norm
        attention = adapter.layers["2"].self_attn
        attention.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        hidden = states.hidden
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
        x = hidden * scale @ adapter.mlp.weight.T + adapter.mlp.bias
        attended, _ = last.self_attn(
            hidden_states=last.input_layernorm(x),
            position_embeddings=(states.cos, states.sin),
            attention_mask=None,
        )
        expected = norm(x + attended)
        torch.testing.assert_close(
            adapter(hidden, states.cos, states.sin), expected, rtol=1e-5, atol=1e-5
        )
    path = save_adapter(tmp_path / "adapter", config, adapter.state_dict())
    loaded = ExitAdapter.load(path)
    assert torch.equal(
        loaded(states.hidden, states.cos, states.sin),
        adapter(states.hidden, states.cos, states.sin),
    )


def test_own_lm_head(target: Target, tmp_path: Path) -> None:
    config = AdapterConfig.for_model(target.model.config, 1)
    adapter = ExitAdapter(config, own_lm_head=True)
    loaded = ExitAdapter.load(
        save_adapter(tmp_path / "adapter", config, adapter.state_dict())
    )
    x = torch.randn(3, config.hidden_size)
    target_head = target.model.lm_head.weight
    assert torch.equal(loaded.logits(x, target_head), x @ adapter.lm_head.weight.T)
    plain = ExitAdapter(config)
    assert torch.equal(plain.logits(x, target_head), x @ target_head.T)


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_states_are_those_between_the_layers(target: Target, exit_layer: int) -> None:
    ids = torch.randint(1, 200, (1, 7))
    seen = []
    handle = target.model.model.layers[exit_layer].register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    logits = target.model(ids).logits
    handle.remove()
    padded = torch.cat((ids, torch.zeros(1, 3, dtype=torch.long)), dim=1)
    states = target_states(target, padded, exit_layer)
    torch.testing.assert_close(states.hidden[:, :7], seen[0], rtol=1e-5, atol=1e-5)
    ours = states.final[:, :7] @ target.model.lm_head.weight.T
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-4)


def test_greedy_text_is_the_models_own(target: Target) -> None:
    """Batches of unequal prompts give what each prompt gives alone, step by step."""
    texts = generate(target, encode(target, PROMPTS, 64), 12)
    assert sorted(t.prompt_length for t in texts) == [2, 4, 10, 22]
    for text in texts:
        ids = text.ids[: text.prompt_length]
        while len(ids) < text.prompt_length + 12 and (
            len(ids) == text.prompt_length or ids[-1] != 0
        ):
            ids = [*ids, int(target.model(torch.tensor([ids])).logits[0, -1].argmax())]
        assert text.ids == ids


def test_responses_stop_after_the_end_token(target: Target) -> None:
    torch.manual_seed(0)
    prompts = encode(target, [Prompt(str(i)) for i in range(32)], 64)
    texts = generate(target, prompts, 24, temperature=3.0)
    responses = [text.ids[text.prompt_length :] for text in texts]
    ended = [r for r in responses if len(r) < 24]
    assert ended and all(r[-1] == 0 and 0 not in r[:-1] for r in ended)


def test_sampling_follows_the_temperature(target: Target) -> None:
    (prompt,) = encode(target, PROMPTS[:1], 64)
    logits = target.model(torch.tensor([prompt.ids])).logits[0, -1]
    expected = (logits / 0.8).softmax(-1)
    torch.manual_seed(0)
    texts = generate(target, [prompt] * 1000, 1, temperature=0.8)
    counts = torch.bincount(
        torch.tensor([t.ids[-1] for t in texts]), minlength=len(expected)
    )
    often = expected > 0.005
    sigma = (1000 * expected * (1 - expected)).sqrt()
    assert ((counts - 1000 * expected).abs() < 5 * sigma)[often].all()


def test_encode(target: Target) -> None:
    assert [t.prompt_length for t in encode(target, PROMPTS, 10)] == [4, 10, 2]
    with pytest.raises(TrainError, match=r"\Aevery prompt is longer than 1 tokens"):
        encode(target, PROMPTS, 1)
    template, target.tokenizer.chat_template = target.tokenizer.chat_template, None
    try:
        assert [t.prompt_length for t in encode(target, PROMPTS, 10)] == [3, 9, 1]
    finally:
        target.tokenizer.chat_template = template


def test_batches_cover_every_response_token_once() -> None:
    texts = [Text(list(range(1, n + 6)), n, "") for n in (3, 9, 1, 7, 4)]
    batches = make_batches(texts, 20)
    assert all(b.ids.numel() <= 20 for b in batches) and len(batches) > 1
    wanted = sorted(token for t in texts for token in t.ids[t.prompt_length :])
    found = [b.ids.roll(-1, dims=1)[b.drafts].tolist() for b in batches]
    assert sorted(sum(found, [])) == wanted


def test_agreement_counts_hits(target: Target) -> None:
    config = AdapterConfig.for_model(target.model.config, 2)
    torch.manual_seed(1)
    adapter = ExitAdapter.from_target(config, target.model)
    nn.init.normal_(adapter.layers["2"].self_attn.o_proj.weight, std=0.1)
    texts = generate(target, encode(target, PROMPTS, 64), 12)
    texts = [t._replace(category=str(i % 2)) for i, t in enumerate(texts)]
    head = target.model.lm_head.weight
    hits: list[tuple[float, bool, bool, str]] = []
    for text in texts:
        for position in range(text.prompt_length, len(text.ids)):
            ids = torch.tensor([text.ids[:position]])
            states = target_states(target, ids, 2)
            with torch.no_grad():
                x = adapter(states.hidden, states.cos, states.sin)[0, -1]
                bare = target.model.model.norm(states.hidden[0, -1]) @ head.T
            probability, choice = (x @ head.T).softmax(-1).max(-1)
            truth = text.ids[position]
            hits.append(
                (
                    float(probability),
                    int(choice) == truth,
                    int(bare.argmax()) == truth,
                    text.category,
                )
            )
    result = agreement(target, adapter, texts)
    half = sorted(hits, reverse=True)[: (len(hits) + 1) // 2]

    def share(found: list[bool]) -> float:
        return pytest.approx(sum(found) / len(found), abs=6e-5)

    assert 0 < sum(hit for _, hit, _, _ in hits) < len(hits)
    assert result["num_tokens"] == len(hits)
    assert result["top1"] == share([hit for _, hit, _, _ in hits])
    assert result["top1_confident_half"] == share([hit for _, hit, _, _ in half])
    assert result["top1_no_adapter"] == share([bare for _, _, bare, _ in hits])
    for category in ("0", "1"):
        of_category = [hit for _, hit, _, c in hits if c == category]
        assert result["by_category"][category] == share(of_category)


def test_training_from_the_command_line(
    models: dict[str, Path],
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "runs" / "adapter"
    command = (
        f"--model {models['llama']} --exit-layer 2 --prompts {prompts_file} --out {out}"
        f" --max-new-tokens 24 --epochs 20 --batch-tokens 300 --evaluate {prompts_file}"
    )
    train_cli.main(command.split())
    names = {p.name for p in out.parent.iterdir()}
    assert names == {"adapter", "adapter.csv", "adapter.json"}
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }

    with (tmp_path / "runs" / "adapter.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    losses = [float(row["loss"]) for row in rows]
    per_epoch = len(losses) // 20
    assert sum(losses[-per_epoch:]) < 0.7 * sum(losses[:per_epoch])
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))

    report = json.loads((tmp_path / "runs" / "adapter.json").read_text())
    assert report["training"]["num_prompts"] == 8
    assert report["training"]["num_texts"] == 16
    assert report["training"]["steps"] == len(rows)
    assert report["training"]["prompts_by_source"] == {"s0": 4, "s1": 4}
    (result,) = report["evaluation"]
    assert result["top1"] > result["top1_no_adapter"]
    card = (out / "README.md").read_text()
    assert "apache-2.0" in card and f"| {result['top1']:.3f} |" in card
    assert str(tmp_path) not in card and str(models["llama"].parent) not in card

    capsys.readouterr()
    evaluate_cli.main(
        f"--model {models['llama']} --adapter {out} --prompts {prompts_file} "
        f"--out {tmp_path / 'eval.json'}".split()
    )
    printed = capsys.readouterr().out
    assert json.loads(printed) == result
    assert (tmp_path / "eval.json").read_text() == printed
    assert load_adapter_config(out).exit_layer == 2


def test_loss_in_chunks_is_the_loss(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = generate(target, encode(target, PROMPTS, 64), 12)
    results = []
    for rows in (10_000, 7):
        monkeypatch.setattr(train_cli, "LOGITS_ROWS", rows)
        config = AdapterConfig.for_model(target.model.config, 2)
        adapter = ExitAdapter.from_target(config, target.model)
        history = train_cli.train(
            target,
            adapter,
            texts,
            epochs=5,
            peak_rate=1e-3,
            batch_tokens=1000,
            seed=0,
            log=tmp_path / "log.csv",
        )
        results.append(([s.loss for s in history], adapter.state_dict()))
    (losses, weights), (chunk_losses, chunk_weights) = results
    assert chunk_losses == pytest.approx(losses, abs=2e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(chunk_weights[name], weight, rtol=1e-3, atol=1e-4)


def test_learning_rate() -> None:
    rates = [train_cli.learning_rate(i, 1000, i / 1000, 2.0) for i in range(1001)]
    assert rates[0] == pytest.approx(0.02)
    assert max(rates) == pytest.approx(2.0, rel=0.03) and rates.index(max(rates)) == 99
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[99:], rates[100:], strict=False))
    # Cut short by time: the end of the cosine comes with the deadline.
    assert train_cli.learning_rate(300, 1000, 1.0, 2.0) == pytest.approx(0.1)


def test_training_ends_in_time(
    models: dict[str, Path], prompts_file: Path, tmp_path: Path
) -> None:
    command = (
        f"--model {models['llama']} --exit-layer 1 --prompts {prompts_file} --limit 2"
        f" --out {tmp_path / 'adapter'} --max-new-tokens 2 --minutes 1e-6 --evaluate"
    )
    train_cli.main(command.split())
    report = json.loads((tmp_path / "adapter.json").read_text())
    assert (report["training"]["steps"], report["training"]["epochs"]) == (1, 1)
    assert report["evaluation"] == []
    assert load_adapter_config(tmp_path / "adapter").exit_layer == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"--exit-layer": "4"}, "adapter exit_layer must be in 1..3 for a model of 4"),
        ({"--exit-layer": "0"}, "adapter exit_layer must be > 0, got 0"),
        ({"--model": "{tmp}/none"}, "model {tmp}/none has no config.json"),
        ({"--prompts": "{tmp}/none"}, "cannot read the prompts {tmp}/none: "),
        ({"--prompts": "{tmp}/empty.jsonl"}, "{tmp}/empty.jsonl holds no prompts"),
        ({"--evaluate": "{tmp}/none"}, "cannot read the prompts {tmp}/none: "),
        (
            {"--max-prompt-tokens": "1"},
            "every prompt is longer than 1 tokens, or empty",
        ),
        ({"--out": "{tmp}"}, "{tmp} already exists"),
    ],
)
def test_bad_inputs(
    models: dict[str, Path],
    prompts_file: Path,
    tmp_path: Path,
    changes: dict[str, str],
    line: str,
) -> None:
    (tmp_path / "empty.jsonl").touch()
    options = {
        "--model": str(models["llama"]),
        "--exit-layer": "2",
        "--prompts": str(prompts_file),
        "--out": str(tmp_path / "out"),
    }
    options |= {name: value.format(tmp=tmp_path) for name, value in changes.items()}
    pattern = rf"\Aerror: {re.escape(line.format(tmp=tmp_path))}[^\n]*\Z"
    with pytest.raises(SystemExit, match=pattern):
        train_cli.main([word for option in options.items() for word in option])
    assert [p.name for p in tmp_path.iterdir()] == ["empty.jsonl"]


def test_evaluation_refuses_another_models_adapter(
    models: dict[str, Path], prompts_file: Path, tmp_path: Path, target: Target
) -> None:
    config = AdapterConfig.for_model(target.model.config, 2)
    path = save_adapter(tmp_path / "adapter", config, ExitAdapter(config).state_dict())
    command = f"--model {models['qwen3']} --adapter {path} --prompts {prompts_file}"
    line = "model_type is llama in the adapter, qwen3 in the model"
    with pytest.raises(SystemExit, match=rf"\Aerror: the adapter [^\n]*{line}\Z"):
        evaluate_cli.main(command.split())


def test_read_prompts(tmp_path: Path) -> None:
    assert [p.text for p in read_prompts("demo", 2)] == list(DEMO_PROMPTS[:2])
    file = tmp_path / "p.json"
    file.write_text('["a", "b", "c"]')
    assert read_prompts(str(file), 2) == [Prompt("a"), Prompt("b")]
    lines = tmp_path / "p.jsonl"
    # A line separator inside a string does not end a line of JSON Lines.
    record = {"turns": ["x\u2028y", "z"], "source": "s", "category": "c"}
    lines.write_text(json.dumps(record, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_prompts(str(lines)) == [Prompt("x\u2028y", "s", "c")]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.json", "{}", "a .json file must hold a list of strings"),
        ("p.json", '["a", 1]', "item 1: must be a string, got 1"),
        ("p.json", "[]", "holds no prompts"),
        ("p.jsonl", '{"turns": ["a"]}\n{', "line 2: not valid JSON: "),
        ("p.jsonl", '{"turns": []}', 'line 1: must be an object with "turns"'),
        ("p.jsonl", "[1]", 'line 1: must be an object with "turns"'),
        ("p.jsonl", b"\xff", "cannot read the prompts "),
    ],
)
def test_broken_prompts(
    tmp_path: Path, name: str, content: str | bytes, line: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainError, match=rf"\A[^\n]*{re.escape(line)}[^\n]*\Z"):
        read_prompts(str(file))


def test_demo_prompts_are_varied_and_short() -> None:
    assert len(DEMO_PROMPTS) == len(set(DEMO_PROMPTS)) == 12
    assert all(10 < len(prompt) < 100 for prompt in DEMO_PROMPTS)
