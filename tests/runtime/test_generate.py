# SPDX-License-Identifier: Apache-2.0
"""The target's own text: what it is, how it is kept, how it goes on after a kill."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_models import CHAT_TEMPLATE, save_small_model
from small_texts import make_texts, one_thread, write_prompts  # noqa: F401
from tolerances import CHI_SQUARE_SIGMAS

from spexis_kernels import draft_head
from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.train import engines, generate
from spexis_runtime.train.engines import Request, TransformersEngine, VllmEngine
from spexis_runtime.train.generate import dialogues, encode, self_prompts
from spexis_runtime.train.prompts import Prompt, TrainError, prompts_hash, read_prompts
from spexis_runtime.train.target import Target, load_target
from spexis_runtime.train.texts import TextStore

TURNS = [["one"], ["two words", "and then"], ["a longer third prompt"], ["4", "5", "6"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return load_target(str(model))


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    return make_texts(
        model,
        tmp_path_factory.mktemp("texts") / "texts",
        TURNS,
        temperatures=(0.0, 0.7),
        top_logits=4,
    )


def test_each_token_is_the_targets_choice(target: Target, store: TextStore) -> None:
    """Greedy, or with the noise of the text's seed: what a prefix alone would give."""
    texts = list(store.texts())
    assert Counter(t.temperature for t in texts) == {0.0: 7, 0.7: 7}
    assert Counter(t.prompt for t in texts) == {0: 2, 1: 4, 2: 2, 3: 6}
    assert len({t.seed for t in texts}) == 14
    for text in texts:
        logits = target.model(torch.tensor([text.ids])).logits[0]
        rows = range(text.prompt_length - 1, len(text.ids) - 1)
        drawn = draft_head(
            logits[list(rows)],
            torch.eye(logits.shape[1]),
            temperature=torch.full((len(rows),), text.temperature),
            seed=torch.full((len(rows),), text.seed),
            position=torch.tensor(rows),
        )
        assert drawn.token.tolist() == text.response
        assert text.ended == (text.response[-1] == 0)
        assert text.ended or len(text.response) == 16
        assert text.labels is not None
        best = logits[list(rows)].log_softmax(-1).topk(4)
        assert torch.equal(text.labels.tokens.long(), best.indices)
        torch.testing.assert_close(
            text.labels.logprobs, best.values.half(), rtol=2e-3, atol=2e-3
        )


def test_a_turn_follows_the_answer_to_the_turn_before(
    target: Target, store: TextStore
) -> None:
    first, second, third = (
        t for t in store.texts() if t.prompt == 3 and not t.temperature
    )
    tokenizer = target.tokenizer
    said = [
        tokenizer.decode(t.response, skip_special_tokens=True) for t in (first, second)
    ]
    messages = ["4", said[0], "5", said[1], "6"]
    for text, length in ((first, 1), (second, 3), (third, 5)):
        assert text.ids[: text.prompt_length] == encode(tokenizer, messages[:length])


def test_sampling_follows_the_temperature(target: Target) -> None:
    ids = encode(target.tokenizer, ["one"])
    expected = (target.model(torch.tensor([ids])).logits[0, -1] / 0.8).softmax(-1)
    requests = [Request(ids, 0.8, seed) for seed in range(2000)]
    answers = TransformersEngine(target).generate(requests, 1, 0)
    counts = torch.bincount(
        torch.tensor([a.ids[0] for a in answers]), minlength=len(expected)
    )
    often = expected > 0.005
    assert often.sum() > 5
    expected = 2000 * expected[often]
    chi_square = ((counts[often] - expected) ** 2 / expected).sum()
    degrees = int(often.sum())
    assert chi_square < degrees + CHI_SQUARE_SIGMAS * (2 * degrees) ** 0.5


def test_small_batches_give_the_same(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(encode(target.tokenizer, t[:1]), 0.7 * (i % 2), i)
        for i, t in enumerate(TURNS)
    ]
    engine = TransformersEngine(target)
    whole = engine.generate(requests, 12, 0)
    monkeypatch.setattr(engines, "MAX_ROWS", 1)
    assert engine.generate(requests, 12, 0) == whole


def test_vllm_says_the_same(model: Path, target: Target) -> None:
    """The tokens, sampled ones too, the labels and the end."""
    requests = [
        Request(list(range(5 + i, 15 + 2 * i)), 0.7 * (i % 2), (i << 33) + 7)
        for i in range(6)
    ]
    engine = VllmEngine(
        str(model),
        64,
        4,
        dtype="float32",
        kv_cache_memory_bytes=16 << 20,
        gpu_memory_utilization=0.1,
    )
    found = engine.generate(requests, 12, 4)
    engine.close()
    expected = TransformersEngine(target).generate(requests, 12, 4)
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    assert any(answer.ids[-1] == 0 for answer in found)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.labels is not None and theirs.labels is not None
        assert torch.equal(ours.labels.tokens, theirs.labels.tokens)
        torch.testing.assert_close(
            ours.labels.logprobs, theirs.labels.logprobs, rtol=2e-3, atol=2e-3
        )


class Killed(BaseException):
    """Ends what runs as a kill would: nothing catches it."""


def test_a_killed_generation_goes_on(
    model: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "SHARD_DIALOGUES", 2)
    options = dict(temperatures=(0.0, 0.7), seed=3)
    whole = make_texts(model, tmp_path / "whole", TURNS, **options)
    assert whole.num_shards == 4
    write_bytes, written = Path.write_bytes, []

    def killed(path: Path, data: bytes) -> int:
        write_bytes(path, data[: len(data) // 2])
        if len(written) == 2:
            raise Killed
        written.append(path)
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(Killed):
        make_texts(model, tmp_path / "cut", TURNS, **options)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(TrainError, match=r"cut lacks 2 of 4 shards: end its "):
        TextStore.open(tmp_path / "cut")
    first = tmp_path / "cut" / "shard-00000.safetensors"
    made = first.stat().st_mtime_ns
    again = make_texts(model, tmp_path / "cut", TURNS, **options)
    assert list(again.texts()) == list(whole.texts())
    assert first.stat().st_mtime_ns == made
    assert list(TextStore.open(tmp_path / "cut").texts()) == list(whole.texts())
    line = r"cut holds other texts: seed is 3, not 4\Z"
    with pytest.raises(TrainError, match=line):
        make_texts(model, tmp_path / "cut", TURNS, temperatures=(0.0, 0.7), seed=4)


def test_seeds_of_dialogues_differ() -> None:
    prompts = [Prompt(("a",)), Prompt(("b",))]
    one = dialogues(prompts, (0.0, 0.7, 0.7), 0)
    two = dialogues(prompts, (0.0, 0.7, 0.7), 1)
    assert len({d.seed for d in one + two}) == 12
    assert [d.number for d in one] == [0, 1] * 3


def test_self_prompts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "SELF_PROMPT_TOKENS", 24)
    engine = TransformersEngine(target)
    tokenizer = target.tokenizer
    with pytest.raises(TrainError, match="a chat template that opens a user's turn"):
        self_prompts(engine, tokenizer, target.ends, 3, 0)
    monkeypatch.setattr(tokenizer, "chat_template", "U:" + CHAT_TEMPLATE)
    found = self_prompts(engine, tokenizer, target.ends, 40, 0)
    assert 0 < len(found) <= 40 and len(set(found)) == len(found)
    start = tokenizer("U:")["input_ids"]
    answers = engine.generate(
        [Request(start, 1.0, (1 << 60) + i) for i in range(40)],
        generate.SELF_PROMPT_TOKENS,
        0,
    )
    said = {tokenizer.decode(a.ids[:-1]).strip() for a in answers if a.ids[-1] == 0}
    assert {p.turns[0] for p in found} == said - {""}


def test_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", TURNS)
    common = f"--model {model} --prompts {prompts} --limit 1 --max-new-tokens 4"
    into = f"{common} --out {tmp_path / 'texts'} --temperatures 0"
    generate.main(into.split())
    (text,) = TextStore.open(tmp_path / "texts").texts()
    printed = capsys.readouterr().out
    assert f"1 texts of {len(text.response)} tokens in {tmp_path}" in printed
    for words, line in (
        ("--max-new-tokens 5", "max_new_tokens is 4, not 5"),
        ("--max-prompt-tokens 1", "max_prompt_tokens is 2048, not 1"),
    ):
        with pytest.raises(SystemExit, match=rf"\Aerror: [^\n]*{line}\Z"):
            generate.main(f"{into} {words}".split())
    out = f"--out {tmp_path / 'none'}"
    with pytest.raises(SystemExit, match=r"\Aerror: every prompt is longer than 1"):
        generate.main(f"{common} {out} --max-prompt-tokens 1".split())
    other = tmp_path / "other"
    with pytest.raises(SystemExit, match=rf"\Aerror: model {other} has no config"):
        generate.main(f"--model {other} --prompts demo {out}".split())


def test_read_prompts(tmp_path: Path) -> None:
    assert [p.turns for p in read_prompts("demo", 2)] == [
        (t,) for t in DEMO_PROMPTS[:2]
    ]
    file = tmp_path / "p.json"
    file.write_text('["a", "b", "c"]')
    assert read_prompts(str(file), 2) == [Prompt(("a",)), Prompt(("b",))]
    lines = tmp_path / "p.jsonl"
    # A line separator inside a string does not end a line of JSON Lines.
    record = {"turns": ["x\u2028y", "z"], "source": "s", "category": "c"}
    lines.write_text(json.dumps(record, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_prompts(str(lines)) == [Prompt(("x\u2028y", "z"), "s", "c")]
    assert prompts_hash(read_prompts(str(lines))) != prompts_hash(read_prompts("demo"))


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.json", "{}", "a .json file must hold a list of strings"),
        ("p.json", '["a", 1]', "item 1: must be a string, got 1"),
        ("p.json", "[]", "holds no prompts"),
        ("p.jsonl", "", "holds no prompts"),
        ("p.jsonl", '{"turns": ["a"]}\n{', "line 2: not valid JSON: "),
        ("p.jsonl", '{"turns": []}', 'line 1: must be an object with "turns"'),
        ("p.jsonl", '{"turns": ["a", 1]}', 'line 1: must be an object with "turns"'),
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
