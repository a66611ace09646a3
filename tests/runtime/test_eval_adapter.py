# SPDX-License-Identifier: Apache-2.0
"""Measuring exit adapters: the figures are those that counting by hand gives."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import save_small_model
from small_texts import make_texts, one_thread, write_prompts  # noqa: F401

from spexis_kernels import draft_head
from spexis_runtime.adapter import AdapterConfig, save_adapter
from spexis_runtime.exit_head import calibrated
from spexis_runtime.train import evaluate
from spexis_runtime.train.batches import target_states
from spexis_runtime.train.drafts import TextDrafts, collect_drafts
from spexis_runtime.train.metrics import (
    by_depth,
    calibrate,
    draft_metrics,
    expected_calibration_error,
    fit_calibration,
    isotonic,
    precision_at_recall,
    precision_recall,
    reliability,
)
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.target import Target, load_target
from spexis_runtime.train.texts import TextStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return load_target(str(model))


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    turns = [["one"], ["two words"], ["a longer third prompt"], ["4"]]
    out = tmp_path_factory.mktemp("texts") / "texts"
    return make_texts(model, out, turns, temperatures=(0.0, 0.7))


@pytest.fixture(scope="module")
def adapter(target: Target) -> ExitAdapter:
    config = AdapterConfig.for_model(target.model.config, 2, feature_layers=(1, 2))
    last, norm = target.model.model.layers[-1], target.norm
    adapter = ExitAdapter.from_target(config, last, norm)
    torch.manual_seed(1)
    torch.nn.init.normal_(adapter.layers["2"].self_attn.o_proj.weight, std=0.2)
    return adapter


def test_drafts_are_those_of_each_prefix(
    target: Target, store: TextStore, adapter: ExitAdapter
) -> None:
    texts = list(store.texts())
    expected: dict[float, list[tuple[bool, float]]] = defaultdict(list)
    for text in texts:
        for position in range(text.prompt_length, len(text.ids)):
            prefix = torch.tensor([text.ids[:position]])
            states = target_states(target, prefix, (1, 2))
            with torch.no_grad():
                x = adapter(states.features, states.cos, states.sin)[0, -1:]
            drafted = draft_head(
                x,
                target.lm_head,
                temperature=torch.tensor([text.temperature]),
                seed=torch.tensor([text.seed]),
                position=torch.tensor([position - 1]),
            )
            hit = int(drafted.token) == text.ids[position]
            expected[text.temperature].append((hit, float(drafted.confidence)))
    for temperature, rows in expected.items():
        own = [t for t in texts if t.temperature == temperature]
        drafts = collect_drafts(target, adapter, own)
        hits, confidence = zip(*rows, strict=True)
        assert 0 < sum(hits) < len(hits)
        assert drafts.hits.tolist() == list(hits)
        np.testing.assert_allclose(drafts.confidence, confidence, rtol=1e-3, atol=1e-5)
        lengths = [len(t.response) for t in own]
        assert drafts.text.tolist() == np.repeat(range(len(own)), lengths).tolist()


def counted() -> TextDrafts:
    return TextDrafts(
        np.array([1, 1, 1, 0, 1, 1, 0, 1, 1, 1], dtype=bool),
        np.array([0.9, 0.8, 0.5, 0.2, 0.7, 0.3, 0.6, 0.95, 0.4, 0.1], dtype=np.float32),
        np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 1]),
        ["math_reasoning", "coding"],
    )


def test_draft_metrics() -> None:
    result = draft_metrics(counted())
    assert (result["num_tokens"], result["num_texts"]) == (10, 2)
    assert result["accuracy"] == 0.8
    assert result["by_task"] == {"Math": round(5 / 6, 4), "Mult": 0.75}
    # without .1 and .2 (round(8.5) = 8 are left), without .3 as well, without five
    dropped = {"0.15": 0.875, "0.3": round(6 / 7, 4), "0.5": 0.8}
    assert result["accuracy_after_dropping"] == dropped
    assert result["by_confidence_rank"] == [1, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    other = draft_metrics(counted()._replace(categories=["qa", "mine"]))
    assert other["by_task"] == {"mine": 0.75, "qa": round(5 / 6, 4)}


def test_depth_goes_on_from_right_drafts_of_one_text() -> None:
    # after a right one: 1 1 0 | 1, 1 1; after two right ones: 1 0, 1
    assert by_depth(counted()) == [0.8, round(5 / 6, 4), round(2 / 3, 4)]
    wrong = counted()._replace(hits=np.zeros(10, dtype=bool))
    assert by_depth(wrong) == [0, None, None]


def test_reliability_and_its_error() -> None:
    confidence = np.array([0.05, 0.06, 0.1, 0.5, 1.0])
    hits = np.array([0, 1, 1, 0, 1])
    bins = reliability(confidence, hits)
    assert [n for _, _, n in bins] == [2, 1, 1, 1]
    assert bins[0][:2] == (pytest.approx(0.055), 0.5)
    error = (2 * 0.445 + 0.9 + 0.5 + 0.0) / 5
    assert expected_calibration_error(bins) == pytest.approx(error)


def test_calibration_mends_an_overconfident_head() -> None:
    random = np.random.default_rng(0)
    confidence = random.uniform(size=40_000).astype(np.float32)
    hits = random.uniform(size=40_000) < 0.8 * confidence**2
    learnt, seen = slice(0, 20_000), slice(20_000, None)
    values = fit_calibration(confidence[learnt], hits[learnt])
    assert list(values) == sorted(values) and 0 <= values[0] <= values[-1] <= 1
    before = expected_calibration_error(reliability(confidence[seen], hits[seen]))
    mended = calibrate(confidence, values)
    after = expected_calibration_error(reliability(mended[seen], hits[seen]))
    assert before > 0.2 and after < 0.015
    ours = calibrated(torch.from_numpy(confidence), torch.tensor(values))
    np.testing.assert_allclose(ours.numpy(), mended, atol=1e-6)


def test_calibration_of_few_drafts_stays_near_the_softmax() -> None:
    values = fit_calibration(np.array([0.5], np.float32), np.array([True]))
    knots = np.linspace(0, 1, len(values))
    assert np.abs(np.array(values) - knots).max() <= 0.25 + 1e-4


def test_isotonic() -> None:
    values = isotonic(np.array([1.0, 3, 2, 2, 5, 4]), np.array([1.0, 2, 1, 1, 1, 3]))
    assert values.tolist() == [1, 2.5, 2.5, 2.5, 4.25, 4.25]


def test_precision_and_recall() -> None:
    truth = np.array([1, 1, 0, 1, 0], dtype=bool)
    score = np.array([0.9, 0.5, 0.5, 0.4, 0.1])
    assert precision_recall(score > 0.45, truth) == (round(2 / 3, 4), round(2 / 3, 4))
    assert precision_recall(score > 1, truth) == (None, 0.0)
    assert precision_recall(score > 0.45, ~truth & truth) == (0.0, None)
    assert precision_at_recall(score, truth, 0.3) == 1.0
    # equal scores cannot be told apart, and the next cutoff is better
    assert precision_at_recall(score, truth, 0.5) == 0.75
    assert precision_at_recall(score, truth & ~truth, 0.5) is None


def test_command(
    model: Path,
    target: Target,
    store: TextStore,
    adapter: ExitAdapter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = save_adapter(tmp_path / "a", adapter.config, adapter.state_dict())
    common = f"--model {model} --adapter {path}"
    evaluate.main(f"{common} --texts {store.path} --out {tmp_path / 'e'}".split())
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["results"].keys() == {"greedy", "T=0.7"}
    for name, result in report["results"].items():
        temperature = {"greedy": 0.0, "T=0.7": 0.7}[name]
        own = [t for t in store.texts() if t.temperature == temperature]
        drafts = collect_drafts(target, adapter, own)
        assert result == draft_metrics(drafts)
        assert f"{name}, 4 texts, {result['num_tokens']} tokens" in printed
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in (tmp_path / "e.json").read_text()

    prompts = write_prompts(tmp_path / "p.jsonl", [["one"]])
    evaluate.main(f"{common} --prompts {prompts} --max-new-tokens 4".split())
    assert "T=0.7, 1 texts, " in capsys.readouterr().out

    other = save_small_model(tmp_path / "other", "qwen3")
    line = "model_type is llama in the adapter, qwen3 in the model"
    with pytest.raises(SystemExit, match=rf"\Aerror: the adapter [^\n]*{line}\Z"):
        evaluate.main(f"--model {other} --adapter {path} --texts {store.path}".split())
