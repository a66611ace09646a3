# SPDX-License-Identifier: Apache-2.0
"""Training exit adapters, on tiny random models."""

from __future__ import annotations

import csv
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import save_small_model
from small_texts import make_texts, one_thread, write_prompts  # noqa: F401
from tolerances import FP32_REDUCTION, LOGPROBS

from spexis_runtime.adapter import (
    AdapterConfig,
    expected_tensors,
    load_adapter_config,
    save_adapter,
)
from spexis_runtime.train import adapter as train_cli
from spexis_runtime.train import distill
from spexis_runtime.train.adapter import exit_layer, feature_layers, split
from spexis_runtime.train.batches import (
    StateSource,
    collate,
    make_batches,
    target_states,
)
from spexis_runtime.train.distill import AdapterStep, distillation_loss, recorded_loss
from spexis_runtime.train.estimate import (
    Memory,
    check_disk,
    check_memory,
    estimate_memory,
)
from spexis_runtime.train.loop import Plan, fit, learning_rate
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.prompts import TrainError
from spexis_runtime.train.target import Target, load_target
from spexis_runtime.train.texts import Labels, Text, TextStore

MODEL_TYPES = ("llama", "qwen2", "qwen3")
BLOCK = dict(depth=2, intermediate_size=64, feature_layers=(0, 1, 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_small_model(root / name, name) for name in MODEL_TYPES}


@pytest.fixture(scope="module")
def target(models: dict[str, Path]) -> Target:
    return load_target(str(models["llama"]))


@pytest.fixture(scope="module")
def store(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Texts with labels recorded."""
    turns = [[f"prompt {i}"] for i in range(24)]
    out = tmp_path_factory.mktemp("texts") / "texts"
    return make_texts(models["llama"], out, turns, top_logits=8)


@pytest.fixture(scope="module")
def texts(store: TextStore) -> list[Text]:
    return [text._replace(labels=None) for text in store.texts()]


def new_adapter(target: Target, **options: Any) -> ExitAdapter:
    config = AdapterConfig.for_model(target.model.config, 2, **options)
    torch.manual_seed(0)
    return ExitAdapter.from_target(config, target.model.model.layers[-1], target.norm)


@pytest.mark.parametrize("options", [{}, BLOCK], ids=["attention_only", "full_block"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_module_computes_what_the_format_says(
    models: dict[str, Path], tmp_path: Path, model_type: str, options: dict
) -> None:
    target = load_target(str(models[model_type]))
    adapter = new_adapter(target, **options)
    config = adapter.config
    shapes = {name: tuple(t.shape) for name, t in adapter.state_dict().items()}
    assert shapes == expected_tensors(config)

    ids = torch.randint(1, 200, (2, 9))
    states = target_states(target, ids, config.feature_layers)
    backbone = target.model.model
    last, norm = backbone.layers[-1], backbone.norm

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            * weight
        )

    with torch.no_grad():
        for name, weight in adapter.named_parameters():
            scale = 0.1 if "norm" in name else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn_like(weight) * scale + ("norm" in name))
        # The same steps from transformers' own modules.
        x = torch.cat(
            [
                normed(h, weight)
                for h, weight in zip(
                    states.features.split(32, dim=-1),
                    adapter.initial_layernorm.weight.split(32),
                    strict=True,
                )
            ],
            dim=-1,
        )
        x = x @ adapter.mlp.weight.T + adapter.mlp.bias
        for layer in adapter.layers.values():
            last.self_attn.load_state_dict(layer.self_attn.state_dict())
            attended, _ = last.self_attn(
                hidden_states=normed(x, layer.input_layernorm.weight),
                position_embeddings=(states.cos, states.sin),
                attention_mask=None,
            )
            x = x + attended
            y = normed(x, layer.post_attention_layernorm.weight)
            if options:
                last.mlp.load_state_dict(layer.mlp.state_dict())
                x = x + last.mlp(y)
        expected = normed(x, adapter.norm.weight) if options else y
        torch.testing.assert_close(
            adapter(states.features, states.cos, states.sin), expected, **LOGPROBS
        )
    path = save_adapter(tmp_path / "adapter", config, adapter.state_dict())
    loaded = ExitAdapter.load(path)
    assert torch.equal(
        loaded(states.features, states.cos, states.sin),
        adapter(states.features, states.cos, states.sin),
    )


@pytest.mark.parametrize("options", [{}, BLOCK], ids=["attention_only", "full_block"])
def test_training_starts_from_the_exit_layers_states(target, options) -> None:
    adapter = new_adapter(target, **options)
    states = target_states(target, torch.randint(1, 200, (1, 9)), (0, 1, 2))
    exit_states = states.features[..., -32:]
    scale = torch.rsqrt(exit_states.square().mean(-1, keepdim=True) + 1e-6)
    width = 32 * len(adapter.config.feature_layers)
    with torch.no_grad():
        found = adapter(states.features[..., -width:], states.cos, states.sin)
    torch.testing.assert_close(found, target.norm(exit_states * scale), **LOGPROBS)


def test_own_lm_head(target: Target, tmp_path: Path) -> None:
    config = AdapterConfig.for_model(target.model.config, 1)
    adapter = ExitAdapter(config, own_lm_head=True)
    loaded = ExitAdapter.load(
        save_adapter(tmp_path / "adapter", config, adapter.state_dict())
    )
    x = torch.randn(3, config.hidden_size)
    assert torch.equal(loaded.logits(x, target.lm_head), x @ adapter.lm_head.weight.T)
    plain = ExitAdapter(config)
    assert torch.equal(plain.logits(x, target.lm_head), x @ target.lm_head.T)


@pytest.mark.parametrize("num_layers", [None, 3])
def test_states_are_those_between_the_layers(
    models: dict[str, Path], target: Target, num_layers: int | None
) -> None:
    ids = torch.randint(1, 200, (1, 7))
    out = target.model(ids, output_hidden_states=True)
    part = load_target(str(models["llama"]), num_layers)
    padded = torch.cat((ids, torch.zeros(1, 3, dtype=torch.long)), dim=1)
    states = target_states(part, padded, (0, 1, 3))
    expected = torch.cat([out.hidden_states[i] for i in (0, 1, 3)], dim=-1)
    torch.testing.assert_close(states.features[:, :7], expected, **FP32_REDUCTION)
    if num_layers is None:
        assert states.final is not None
        ours = states.final[:, :7] @ target.lm_head.T
        torch.testing.assert_close(ours, out.logits, **LOGPROBS)
    else:
        assert states.final is None
        assert len(part.model.model.layers) == num_layers
        assert torch.equal(part.norm.weight, target.norm.weight)


def test_batches_cover_every_response_token_once() -> None:
    texts = [Text(list(range(1, n + 6)), n) for n in (3, 9, 1, 7, 4)]
    texts.append(Text([1, 2, 3], 3))  # no response
    batches = [collate(group) for group in make_batches(texts, 20)]
    assert all(b.ids.numel() <= 20 for b in batches) and len(batches) > 1
    wanted = sorted(token for t in texts for token in t.response)
    found = [b.ids.roll(-1, dims=1)[b.drafts].tolist() for b in batches]
    assert sorted(sum(found, [])) == wanted
    assert make_batches(texts, 20, seed=0) == make_batches(texts, 20, seed=0)


def test_cached_states_are_the_states(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [collate(group) for group in make_batches(texts, 200)]
    fresh = [StateSource(target, (1, 2))(i, b) for i, b in enumerate(batches)]
    cached = StateSource(target, (1, 2), tmp_path / "cache", "texts a")
    first = [cached(i, batch) for i, batch in enumerate(batches)]
    assert len(list((tmp_path / "cache").glob("batch-*"))) == len(batches) > 2
    for layers, name in (((2,), "texts a"), ((1, 2), "texts b")):
        with pytest.raises(TrainError, match="cache holds states of something else"):
            StateSource(target, layers, tmp_path / "cache", name)
    monkeypatch.delattr("spexis_runtime.train.batches.target_states")
    for one, two, three in zip(
        fresh, first, (cached(i, b) for i, b in enumerate(batches)), strict=True
    ):
        for a, b, c in zip(one, two, three, strict=True):
            assert torch.equal(a, b) and torch.equal(b, c)


def test_losses_are_divergence_and_cross_entropy() -> None:
    draft = torch.randn(5, 11, requires_grad=True)
    wanted = 2 * torch.randn(5, 11)
    divergence = F.kl_div(
        draft.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    entropy = -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1)
    hard = F.cross_entropy(draft, wanted.argmax(-1))
    expected = 0.7 * hard + 0.3 * (divergence + entropy).mean()
    loss = distillation_loss(draft, wanted, 0.3)
    torch.testing.assert_close(loss, expected, **FP32_REDUCTION)
    best = wanted.log_softmax(-1).topk(11)
    labels = Labels(best.indices.int(), best.values)
    recorded = recorded_loss(draft, labels, 0.3)
    torch.testing.assert_close(recorded, expected, **FP32_REDUCTION)
    torch.testing.assert_close(
        recorded_loss(draft, Labels(*(t[:, :1] for t in labels)), 0.3),
        hard,
        **FP32_REDUCTION,
    )


def gradients(step: Callable, adapter: ExitAdapter, numbers: list[int]) -> Any:
    adapter.zero_grad()
    sums = [step(n, 1 / len(numbers)) for n in numbers]
    return sums, [p.grad.clone() for p in adapter.parameters() if p.grad is not None]


def test_parts_of_the_logits_and_recorded_labels_give_the_gradient(
    models: dict[str, Path],
    target: Target,
    store: TextStore,
    texts: list[Text],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the whole model, part by part, and from its first layers and labels."""
    adapter = new_adapter(target)
    for p in adapter.parameters():  # some gradients are zero at the start
        torch.nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.1)
    labelled = list(store.texts())
    part = load_target(str(models["llama"]), 2)
    results = []
    for rows, whose, group, soft in (
        (10_000, target, texts, 0.5),
        (7, target, texts, 0.5),
        (7, target, texts, 0.0),
        (7, part, labelled, 0.0),
        (10_000, part, labelled, 0.0),
    ):
        monkeypatch.setattr(distill, "LOGITS_ROWS", rows)
        batches = make_batches(group, 10_000)
        step = AdapterStep(whose, adapter, batches, StateSource(whose, (2,)), soft)
        assert len(batches) == 1
        results.append(gradients(step, adapter, [0]))
    for i, j in ((0, 1), (2, 3), (2, 4)):
        torch.testing.assert_close(results[i], results[j], **LOGPROBS)
    assert not torch.allclose(results[0][0][0], results[2][0][0], atol=1e-3)


class Killed(BaseException):
    """Ends what runs as a kill would: nothing catches it."""


def run_fit(target, texts, folder: Path, **options: Any) -> tuple[list, ExitAdapter]:
    adapter = new_adapter(target)
    batches = make_batches(texts, 150)
    step = AdapterStep(target, adapter, batches, StateSource(target, (2,)), 0.5)
    plan = Plan(epochs=5, peak_rate=3e-3, accumulate=2, checkpoint_steps=4)
    kill_at = options.pop("kill_at", None)
    calls = []

    def batch_step(number: int, share: float) -> torch.Tensor:
        calls.append(number)
        if len(calls) == kill_at:
            raise Killed
        return step(number, share)

    history = fit(
        adapter,
        len(batches),
        batch_step,
        plan._replace(**options),
        log=folder / "log.csv",
        checkpoint=folder / "checkpoint",
        settings={"a": 1},
    )
    return history, adapter


def test_a_killed_training_ends_as_if_it_was_not(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    history, adapter = run_fit(target, texts, tmp_path / "whole")
    assert [s.epoch for s in history] == sorted(s.epoch for s in history)
    assert len(history) > 10 and history[-1].epoch == 4
    with pytest.raises(Killed):
        run_fit(target, texts, tmp_path / "cut", kill_at=2 * 10)
    again, resumed = run_fit(target, texts, tmp_path / "cut")
    without_time = [s[:-1] for s in history]
    assert [s[:-1] for s in again] == without_time
    for name, weight in adapter.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    with (tmp_path / "cut" / "log.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows] == list(range(len(history)))
    assert [float(row["loss"]) for row in rows] == [s.loss for s in history]
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    # at its end there is nothing left to do
    assert run_fit(target, texts, tmp_path / "cut", kill_at=1)[0] == again


def test_every_batch_is_seen_once_an_epoch(tmp_path: Path) -> None:
    module = torch.nn.Linear(1, 1)
    seen = []

    def step(number: int, share: float) -> torch.Tensor:
        seen.append((number, share))
        (module(torch.ones(1)) * share).sum().backward()
        return torch.tensor([1.0, 0.5])

    history = fit(
        module,
        5,
        step,
        Plan(epochs=2, peak_rate=0.1, accumulate=2),
        log=tmp_path / "log.csv",
        checkpoint=tmp_path / "checkpoint",
        settings={},
    )
    numbers = [n for n, _ in seen]
    assert sorted(numbers[:5]) == sorted(numbers[5:]) == list(range(5))
    assert numbers[:5] != numbers[5:]
    assert [share for _, share in seen] == [0.5, 0.5, 0.5, 0.5, 1.0] * 2
    assert [(s.loss, s.hits, s.epoch) for s in history] == [(1.0, 0.5, 0)] * 3 + [
        (1.0, 0.5, 1)
    ] * 3


def test_accumulated_batches_are_their_mean(target: Target, texts: list[Text]) -> None:
    adapter = new_adapter(target)
    torch.nn.init.normal_(adapter.layers["2"].self_attn.o_proj.weight, std=0.1)
    batches = make_batches(texts, 150)
    step = AdapterStep(target, adapter, batches, StateSource(target, (2,)), 0.5)
    _, both = gradients(step, adapter, [0, 1])
    _, one = gradients(step, adapter, [0])
    _, two = gradients(step, adapter, [1])
    for a, b, mean in zip(one, two, both, strict=True):
        torch.testing.assert_close((a + b) / 2, mean, **FP32_REDUCTION)


def test_learning_rate() -> None:
    rates = [learning_rate(i, 1000, i / 1000, 2.0) for i in range(1001)]
    assert rates[0] == pytest.approx(0.02)
    assert max(rates) == pytest.approx(2.0, rel=0.03) and rates.index(max(rates)) == 99
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[99:], rates[100:], strict=False))
    # Cut short by time: the end of the cosine comes with the deadline.
    assert learning_rate(300, 1000, 1.0, 2.0) == pytest.approx(0.1)


def test_training_ends_in_time(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    history, _ = run_fit(target, texts, tmp_path, seconds=1e-6)
    assert len(history) == 1


def test_a_full_disk_leaves_the_last_checkpoint(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run_fit(target, texts, tmp_path, kill_at=2 * 5)
    checkpoint = (tmp_path / "checkpoint").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(checkpoint) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run_fit(target, texts, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "checkpoint").read_bytes() == checkpoint
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint", "log.csv"}


def test_memory_is_that_of_the_weights(target: Target, texts: list[Text]) -> None:
    batches = make_batches(texts, 200)
    adapter = new_adapter(target)
    memory = estimate_memory(target, adapter, batches, 1, logits=True)
    assert memory.target == sum(4 * p.numel() for p in target.model.parameters())
    assert memory.training == 16 * sum(p.numel() for p in adapter.parameters())
    tokens = max(collate(b).ids.numel() for b in batches)
    assert memory.states == tokens * (2 * 64 + 25 * 32) * 4
    assert memory.logits == 6 * tokens * 257 * 4
    alone = estimate_memory(target, adapter, batches, 1, logits=False)
    assert alone == memory._replace(logits=0)


def test_a_training_that_does_not_fit_is_refused() -> None:
    class Gpu:
        type = "cuda"

    def fits(size: int) -> None:
        check_memory(Memory(size, 0, 0, 0), Gpu())  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        properties = SimpleNamespace(total_memory=8 << 30)
        patched.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        fits(8 << 30)
        line = "the training needs about 9.0 GiB, the GPU has 8.0: give --batch-tokens"
        with pytest.raises(TrainError, match=line):
            fits(9 << 30)


def test_a_cache_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    check_disk(tmp_path / "cache", 1, "the cache")
    line = r"\Athe cache takes 1048576.0 GiB, .*cache has "
    with pytest.raises(TrainError, match=line):
        check_disk(tmp_path / "cache", 1 << 50, "the cache")


def test_exit_and_features() -> None:
    assert [exit_layer(t, 30) for t in ("1/2", "15", "1/4", "0.5")] == [15, 15, 7, 15]
    for text in ("half", "1/0"):
        with pytest.raises(TrainError, match="--exit must be a layer or a fraction"):
            exit_layer(text, 30)
    assert feature_layers(None, 15) == (15,)
    assert feature_layers("0,7,15", 15) == (0, 7, 15)
    with pytest.raises(TrainError, match="--features must be like 0,7,15, got 0-15"):
        feature_layers("0-15", 15)


def test_held_out_texts_share_no_prompt() -> None:
    texts = [Text([1, 2], 1, prompt=i % 45) for i in range(90)]
    learnt, held_out = split(texts)
    assert {t.prompt for t in held_out} == {19, 39} and len(held_out) == 4
    assert len(learnt) == 86 and not {t.prompt for t in learnt} & {19, 39}


def test_training_from_the_command_line(
    models: dict[str, Path], store: TextStore, tmp_path: Path
) -> None:
    """From the first layers alone, as the texts have labels."""
    out = tmp_path / "runs" / "adapter"
    model = tmp_path / "half"
    model.mkdir()
    for file in models["llama"].iterdir():
        (model / file.name).symlink_to(file)
    command = (
        f"--model {model} --exit 1/2 --texts {store.path} --out {out} --features 1,2"
        f" --epochs 12 --batch-tokens 200 --intermediate-size 64 --soft-weight 0.25"
    )
    train_cli.main(command.split())
    names = {p.name for p in out.parent.iterdir()}
    assert names == {"adapter", "adapter.csv", "adapter.json"}
    config = load_adapter_config(out)
    assert (config.exit_layer, config.feature_layers) == (2, (1, 2))
    assert len(config.calibration) > 2
    with (tmp_path / "runs" / "adapter.csv").open() as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    per_epoch = len(losses) // 12
    assert sum(losses[-per_epoch:]) < 0.8 * sum(losses[:per_epoch])
    report = json.loads((tmp_path / "runs" / "adapter.json").read_text())
    assert report["training"]["steps"] == len(losses)
    assert report["training"]["num_texts"] == 23
    assert report["held_out"]["num_texts"] == 1
    card = (out / "README.md").read_text()
    assert f"| {report['held_out']['accuracy']:.3f} |" in card
    assert str(tmp_path) not in card and str(store.path.parent) not in card
    assert "--exit 1/2" in card


def test_prompts_are_answered_before(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [["a"], ["b"]])
    command = (
        f"--model {models['llama']} --exit 1 --prompts {prompts} --epochs 1"
        f" --max-new-tokens 4 --temperatures 0 --out {tmp_path / 'a'}"
    )
    train_cli.main(command.split())
    assert len(list(TextStore.open(tmp_path / "a.texts").texts())) == 2
    assert load_adapter_config(tmp_path / "a").calibration == ()
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.delattr("spexis_runtime.train.generate.make_engine")
    train_cli.main(command.split())  # from the texts that are there
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"--exit": "4"}, "adapter exit_layer must be in 1..3 for a model of 4"),
        ({"--exit": "0"}, "adapter exit_layer must be > 0, got 0"),
        ({"--exit": "half"}, "--exit must be a layer or a fraction, got half"),
        ({"--features": "2,1"}, "adapter feature_layers must rise from 0 or more to"),
        ({"--intermediate-size": "63"}, "adapter intermediate_size must be a multiple"),
        ({"--model": "{tmp}/none"}, "model {tmp}/none has no config.json"),
        ({"--texts": "{tmp}/none"}, "{tmp}/none is no directory of texts: no texts.js"),
        ({"--texts": "{tmp}/words"}, "{tmp}/words are of a model of 300 tokens, "),
        ({"--texts": "{tmp}/other"}, "{tmp}/other was written with another tokenizer"),
        ({"--cache": "/proc/none"}, "[Errno 2] No such file or directory: '/proc/none"),
        ({"--out": "{tmp}"}, "{tmp} already exists"),
    ],
)
def test_bad_inputs(
    models: dict[str, Path],
    store: TextStore,
    tmp_path: Path,
    changes: dict[str, str],
    line: str,
) -> None:
    for name, setting in (("words", "vocab_size"), ("other", "tokenizer")):
        (tmp_path / name).mkdir()
        for file in store.path.iterdir():
            (tmp_path / name / file.name).symlink_to(file)
        (tmp_path / name / "texts.json").unlink()
        changed = store.settings | {setting: 300}
        (tmp_path / name / "texts.json").write_text(json.dumps(changed))
    options = {
        "--model": str(models["llama"]),
        "--exit": "2",
        "--texts": str(store.path),
        "--out": str(tmp_path / "out"),
    }
    options |= {name: value.format(tmp=tmp_path) for name, value in changes.items()}
    pattern = rf"\Aerror: {re.escape(line.format(tmp=tmp_path))}[^\n]*\Z"
    with pytest.raises(SystemExit, match=pattern):
        train_cli.main([word for option in options.items() for word in option])
    assert {p.name for p in tmp_path.iterdir()} == {"words", "other"}


def test_a_checkpoint_of_other_settings_is_refused(
    models: dict[str, Path], store: TextStore, tmp_path: Path, monkeypatch: Any
) -> None:
    command = (
        f"--model {models['llama']} --exit 2 --texts {store.path} --epochs 1"
        f" --out {tmp_path / 'a'}"
    )

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(train_cli, "save_adapter", killed)
        with pytest.raises(Killed):
            train_cli.main(command.split())
    line = r"learning_rate is 0.002, not 0.1; delete it, or choose another --out\Z"
    with pytest.raises(SystemExit, match=rf"\Aerror: [^\n]*{line}"):
        train_cli.main([*command.split(), "--learning-rate", "0.1"])
    train_cli.main(command.split())
    assert load_adapter_config(tmp_path / "a").exit_layer == 2
