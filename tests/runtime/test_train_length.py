# SPDX-License-Identifier: Apache-2.0
"""Length predictors: format, labels, calibration, cutoffs, and both commands."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import save_small_model
from small_texts import make_texts, one_thread  # noqa: F401
from tolerances import FP32_REDUCTION

from spexis_runtime.adapter import AdapterError
from spexis_runtime.adapter.length import (
    LengthConfig,
    check_length_matches,
    length_tensors,
    load_length_config,
    save_length_predictor,
)
from spexis_runtime.length_predictor import LengthPredictor
from spexis_runtime.train import evaluate_length
from spexis_runtime.train import length as train_length
from spexis_runtime.train.batches import StateSource, make_batches, target_states
from spexis_runtime.train.generate import tokenizer_hash
from spexis_runtime.train.lengths import (
    LengthStep,
    Predictions,
    choose_cutoff,
    collect_lengths,
    fit_sigmoid,
    length_metrics,
    remaining_truth,
)
from spexis_runtime.train.target import Target, load_target
from spexis_runtime.train.texts import Text, TextStore

MODEL = SimpleNamespace(
    model_type="llama", hidden_size=32, num_hidden_layers=4, rms_norm_eps=1e-5
)
CONFIG = LengthConfig.for_model(MODEL, 2, (16, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return load_target(str(model), 2)


@pytest.fixture(scope="module")
def store(target: Target, tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    """Answers that count down to their ends; of some the end was cut off."""
    settings = dict(
        vocab_size=257,
        num_shards=1,
        num_prompts=80,
        num_self_prompts=0,
        temperatures=[0.0],
        top_logits=0,
        tokenizer=tokenizer_hash(target.tokenizer),
    )
    out = tmp_path_factory.mktemp("texts") / "texts"
    store = TextStore.create(out, settings)
    random = np.random.default_rng(0)
    texts = []
    for number in range(80):
        length = int(random.integers(5, 90))
        response = [150 + left for left in range(length, 0, -1)]
        cut = int(random.integers(0, 4)) == 0
        ids = [*random.integers(1, 100, 3).tolist(), *response[: -3 if cut else None]]
        texts.append(Text(ids, 3, number, ended=not cut))
    store.write_shard(0, texts)
    return store


# ---- format -----------------------------------------------------------------------
def test_round_trip(tmp_path: Path) -> None:
    predictor = LengthPredictor(CONFIG)
    tensors = predictor.state_dict()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes == length_tensors(CONFIG)
    path = save_length_predictor(tmp_path / "p", CONFIG, tensors)
    assert load_length_config(path) == CONFIG
    loaded = LengthPredictor.load(path)
    hidden = torch.randn(3, 32)
    assert torch.equal(loaded(hidden), predictor(hidden))
    with pytest.raises(AdapterError, match="p already exists"):
        save_length_predictor(path, CONFIG, tensors)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format_version": 2}, "format_version must be one of 1, got 2"),
        ({"kind": "adapter"}, "kind must be one of length_predictor, got 'adapter'"),
        ({"model_type": "gpt2"}, "model_type must be one of llama, qwen2, qwen3, got"),
        ({"exit_layer": 4}, "exit_layer must be in 1..3, got 4"),
        ({"exit_layer": 0}, "exit_layer must be > 0, got 0"),
        ({"inner_sizes": [8]}, "inner_sizes must be two sizes, got [8]"),
        ({"inner_sizes": [8, 0]}, "inner_sizes must be two sizes, got [8, 0]"),
        ({"thresholds": [4, 4]}, "thresholds must rise from 1 or more, got [4, 4]"),
        ({"thresholds": []}, "thresholds must rise from 1 or more, got []"),
        ({"cutoffs": [0.5]}, "cutoffs must be 5 numbers, got [0.5]"),
        ({"scales": "x"}, "scales must be a list of float, got 'x'"),
        ({"offsets": [0, 0, 0, 0, 0]}, "offsets must be a list of float, got [0"),
        ({"inner_sizes": [16, 9]}, "layers.1.weight must be (9, 16), got (8, 16)"),
        ({"more": 1}, "has unknown keys: more"),
    ],
)
def test_bad_config_values(tmp_path: Path, change: dict, line: str) -> None:
    tensors = LengthPredictor(CONFIG).state_dict()
    path = save_length_predictor(tmp_path / "p", CONFIG, tensors)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(AdapterError, match=rf"\A[^\n]*{re.escape(line)}[^\n]*\Z"):
        load_length_config(path)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="length predictor .*none is not a direct"):
        load_length_config(tmp_path / "none")
    check_length_matches(CONFIG, MODEL)
    for name, value in (("model_type", "qwen2"), ("hidden_size", 64)):
        other = SimpleNamespace(**(vars(MODEL) | {name: value}))
        line = f"{name} is {getattr(CONFIG, name)} in the predictor, {value} in the mod"
        with pytest.raises(AdapterError, match=line):
            check_length_matches(CONFIG, other)
    tensors = LengthPredictor(CONFIG).state_dict()
    del tensors["layers.1.bias"]
    with pytest.raises(AdapterError, match=r"the weights lack layers.1.bias\Z"):
        save_length_predictor(tmp_path / "p", CONFIG, tensors)
    assert not (tmp_path / "p").exists()


def test_module_computes_what_the_format_says() -> None:
    config = replace(CONFIG, scales=(2.0,) * 5, offsets=(0.5, 0.0, 0.0, 0.0, -1.0))
    predictor = LengthPredictor(config)
    hidden = 30 * torch.randn(4, 32)
    x = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    w = predictor.state_dict()
    for i in range(3):
        x = x @ w[f"layers.{i}.weight"].T + w[f"layers.{i}.bias"]
        if i < 2:
            x = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    torch.testing.assert_close(predictor(hidden), x, **FP32_REDUCTION)
    expected = 1 / (1 + torch.exp(-(2 * x + torch.tensor(config.offsets))))
    torch.testing.assert_close(
        predictor.probabilities(hidden), expected, **FP32_REDUCTION
    )


# ---- labels -----------------------------------------------------------------------
def test_what_is_left_after_each_token() -> None:
    ended = remaining_truth(Text([9] * 3 + [1] * 5, 3), (2, 4))
    assert ended.below.tolist() == [
        [False, False],  # in front of the first of five tokens
        [False, False],
        [False, True],
        [False, True],
        [True, True],
    ]
    assert ended.known.all()
    cut = remaining_truth(Text([9] * 3 + [1] * 5, 3, ended=False), (2, 4))
    assert not cut.below.any()
    assert cut.known.tolist() == (~ended.below).tolist()


def test_the_loss_counts_what_is_known(target: Target, store: TextStore) -> None:
    texts = list(store.texts())[:12]
    assert {t.ended for t in texts} == {True, False}
    predictor = LengthPredictor(CONFIG)
    batches = make_batches(texts, 100_000)
    step = LengthStep(target, predictor, batches, StateSource(target, (2,)))
    loss, hits = step(0, 0.5).tolist()
    losses, right = [], []
    for text in texts:
        states = target_states(target, torch.tensor([text.ids]), (2,))
        rows = slice(text.prompt_length - 1, len(text.ids) - 1)
        logits = predictor(states.features[0, rows])
        for row, z in enumerate(logits):
            left = len(text.response) - row
            for threshold, value in zip(CONFIG.thresholds, z, strict=True):
                if text.ended or left >= threshold:
                    truth = torch.tensor(float(left < threshold))
                    losses.append(F.binary_cross_entropy_with_logits(value, truth))
                    right.append(bool(value > 0) == bool(truth))
    mean = torch.stack(losses).mean()
    assert loss == pytest.approx(mean.item(), rel=1e-4)
    assert hits == pytest.approx(sum(right) / len(right), abs=1e-4)
    expected = torch.autograd.grad(0.5 * mean, list(predictor.parameters()))
    for p, gradient in zip(predictor.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-5)


# ---- calibration and cutoffs -------------------------------------------------------
def test_sigmoid_is_fitted() -> None:
    random = np.random.default_rng(0)
    z = random.normal(size=50_000) * 2
    truth = random.uniform(size=len(z)) < 1 / (1 + np.exp(-(0.6 * z - 1)))
    assert fit_sigmoid(z, truth) == pytest.approx((0.6, -1.0), abs=0.05)
    # outcomes of one kind alone: the probabilities stay finite
    scale, offset = fit_sigmoid(np.zeros(10), np.ones(10))
    assert scale == pytest.approx(1) and 0 < offset < 5
    assert fit_sigmoid(np.zeros(0), np.zeros(0)) == (1.0, 0.0)


def test_cutoffs_are_the_lowest_that_are_precise() -> None:
    score = np.linspace(1, 0, 101)
    truth = np.ones(101, dtype=bool)
    truth[40:] = False
    assert choose_cutoff(score, truth, 0.8) == pytest.approx(0.51)  # 40 of 50
    assert choose_cutoff(score, truth, 1.0) == pytest.approx(0.61)
    assert choose_cutoff(score, ~truth, 0.9) > 1  # there is none
    # 19 right ones at the top are too few to trust
    few = np.zeros(101, dtype=bool)
    few[:19] = True
    assert choose_cutoff(score, few, 1.0) > 1
    assert choose_cutoff(np.full(101, 0.5), truth, 0.3) == 0.5
    assert choose_cutoff(np.full(101, 0.5), truth, 0.5) > 1


def test_metrics_leave_out_what_is_unknown() -> None:
    config = replace(CONFIG, cutoffs=(0.5, 0.5, 0.5, 0.5, 2.0))
    logits = np.array([[2.0], [-1], [3], [-2]]).repeat(5, axis=1).astype(np.float32)
    below = np.array([[1], [1], [0], [0]], dtype=bool).repeat(5, axis=1)
    known = np.ones_like(below)
    known[2, 0] = False
    result = length_metrics(Predictions(logits, below, known), LengthPredictor(config))
    first, second, *_, last = result["thresholds"]
    assert (first["tokens"], first["precision"], first["recall"]) == (3, 1.0, 0.5)
    assert (second["tokens"], second["precision"], second["recall"]) == (4, 0.5, 0.5)
    assert (last["precision"], last["recall"]) == (None, 0.0)
    assert first["precision_at_recall_0.5"] == 1.0
    assert second["precision_at_recall_0.5"] == pytest.approx(2 / 3, abs=1e-4)
    p = 1 / (1 + np.exp(-np.array([2.0, -1, -2])))
    error = (1 - p[0] + 1 - p[1] + p[2]) / 3
    assert first["ece"] == pytest.approx(error, abs=1e-4)


def test_commands(
    model: Path,
    target: Target,
    store: TextStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "p"
    command = (
        f"--model {model} --exit 1/2 --texts {store.path} --out {out} --epochs 40"
        " --inner-sizes 16 8 --batch-tokens 2000 --learning-rate 0.01 --precision 0.8"
    )
    train_length.main(command.split())
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"p", "p.csv", "p.json"}
    with (tmp_path / "p.csv").open() as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert losses[-1] < 0.5 * losses[0]
    report = json.loads((tmp_path / "p.json").read_text())
    held_out = report["held_out"]["thresholds"]
    # cutoffs are chosen on the held-out text: where there is one it is precise
    assert [r["below"] for r in held_out] == [4, 8, 16, 32, 64]
    precise = [r["precision"] for r in held_out if r["precision"] is not None]
    assert precise and all(p >= 0.8 for p in precise)
    assert "| tokens left below |" in (out / "README.md").read_text()

    evaluate = f"--model {model} --predictor {out} --texts {store.path}"
    evaluate_length.main(f"{evaluate} --out {tmp_path / 'e'}".split())
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())["results"]["all"]
    loaded = LengthPredictor.load(out)
    texts = list(store.texts())
    assert result == length_metrics(collect_lengths(target, loaded, texts), loaded)
    assert f"{result['thresholds'][2]['precision']}" in printed
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")

    other = save_small_model(tmp_path / "other", "qwen3")
    line = "model_type is llama in the predictor, qwen3 in the model"
    with pytest.raises(SystemExit, match=rf"\Aerror: the length [^\n]*{line}\Z"):
        evaluate_length.main(
            f"--model {other} --predictor {out} --texts {store.path}".split()
        )


def test_cut_answers_alone_are_refused(model: Path, tmp_path: Path) -> None:
    store = make_texts(model, tmp_path / "texts", [["a"]] * 20)
    if all(text.ended for text in store.texts()):
        pytest.fail("the model's greedy answers were meant to be cut")
    command = f"--model {model} --exit 2 --texts {store.path} --out {tmp_path / 'p'}"
    line = "no answer that came to its end was held out of .*texts: give more prompts"
    with pytest.raises(SystemExit, match=rf"\Aerror: {line}"):
        train_length.main(command.split())
