# SPDX-License-Identifier: Apache-2.0
"""What ships is trained on prompts that no evaluation has, and is small enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.train import overlap, smollm2
from bench.train.overlap import overlapping
from bench.train.own_prompts import questions, summaries, translations
from spexis_runtime.train.prompts import Prompt

LONG = " ".join(f"word{i}" for i in range(30))


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        (("Who wrote Faust?",), True),
        (("who  wrote: FAUST",), True),  # case and punctuation do not count
        (("Who wrote Faust, and when?",), False),
        (("something else", "Who wrote Faust?"), True),
        ((" ".join(LONG.split()[9:21]),), True),
        (("Before: " + " ".join(LONG.split()[9:21]) + " after",), True),
        (("x " + " ".join(LONG.split()[9:20]) + " y",), False),  # eleven words
    ],
)
def test_overlap(turns: tuple[str, ...], found: bool) -> None:
    others = [Prompt(("Who wrote Faust?",)), Prompt(("Summarize this:", LONG))]
    assert overlapping([Prompt(("unlike",)), Prompt(turns)], others) == [1] * found


def test_overlap_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", "Who wrote Faust?"), ("b", "Who else?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": [text]}) + "\n")
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert overlap.main([a, b]) == 0
    assert "0 of 1 prompts overlap" in capsys.readouterr().out
    assert overlap.main([a, a]) == 1
    assert "prompt 0: Who wrote Faust?" in capsys.readouterr().out


def test_own_prompts_are_many_and_the_same_each_time() -> None:
    for make, number in ((translations, 1200), (questions, 500)):
        prompts = make(number)
        assert prompts == make(number)
        assert len({p.turns for p in prompts}) == number
        assert not any("{" in p.turns[0] or "|" in p.turns[0] for p in prompts)
    assert translations(9, seed=1) != translations(9)
    passage = "A long passage. " * 50
    (summary,) = summaries(
        [Prompt((f"Question?\n{passage}\nAnswer:",)), Prompt(("a",))]
    )
    assert summary.turns == (f"Summarize: {passage.strip()}",)


def test_overlapping_prompts_are_left_out(tmp_path: Path) -> None:
    for name, texts in (
        ("train_prompts", ["mine", "theirs"]),
        ("spec_bench_question", ["theirs", questions(1)[0].turns[0]]),
    ):
        lines = [json.dumps({"turns": [text]}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    smollm2.write_prompts(tmp_path, tmp_path)

    def kept(name: str) -> set[str]:
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["turns"][0] for line in lines}

    assert kept("collected") == {"mine"}
    own = smollm2.NUM_TRANSLATIONS + smollm2.NUM_QUESTIONS
    assert len(kept("prompts")) == own  # "mine", and a question the fewer
    assert "theirs" not in kept("prompts")
    assert questions(1)[0].turns[0] not in kept("prompts")


def test_what_ships_is_small_enough() -> None:
    from transformers import LlamaConfig

    from spexis_runtime.adapter import AdapterConfig, expected_tensors
    from spexis_runtime.adapter.length import LengthConfig, length_tensors
    from spexis_runtime.train.adapter import feature_layers

    def numbers(shapes: dict[str, tuple[int, ...]]) -> int:
        total = 0
        for shape in shapes.values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total

    model = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    total = 0
    for exit_layer, (features, _) in smollm2.ADAPTERS.items():
        adapter = AdapterConfig.for_model(
            model,
            exit_layer,
            intermediate_size=int(smollm2.BLOCK.split()[-1]),
            feature_layers=feature_layers(features, exit_layer),
        )
        weights = numbers(expected_tensors(adapter))
        assert weights < 1.5 * layer  # a multiplication a weight
        length = LengthConfig.for_model(model, exit_layer, (256, 64))
        total += 2 * (weights + numbers(length_tensors(length)))
    assert 15_000_000 < total < smollm2.MAX_WEIGHT_BYTES
