# SPDX-License-Identifier: Apache-2.0
"""The adapter format: what is written is what is read, and every refusal's line."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_adapters import CONFIGS, LLAMA, random_tensors

from spexis_runtime.adapter import (
    LM_HEAD,
    AdapterConfig,
    AdapterError,
    check_adapter_matches,
    expected_tensors,
    load_adapter_config,
    read_tensor_shapes,
    save_adapter,
)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", LLAMA, random_tensors(LLAMA))


def hf_config(config: AdapterConfig, **changes: object) -> SimpleNamespace:
    return SimpleNamespace(**(asdict(config) | changes))


def refused(line: str):
    """One line, and this one."""
    return pytest.raises(AdapterError, match=rf"\A[^\n]*{re.escape(line)}[^\n]*\Z")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("own_head", [False, True])
def test_round_trip(tmp_path: Path, config: AdapterConfig, own_head: bool) -> None:
    tensors = random_tensors(config, dtype=torch.bfloat16)
    if own_head:
        tensors[LM_HEAD] = torch.ones(config.vocab_size, config.hidden_size)
    path = save_adapter(tmp_path / "new" / "adapter", config, tensors)
    assert load_adapter_config(path) == config
    assert load_adapter_config(str(path)) == config
    assert read_tensor_shapes(path) == {n: tuple(t.shape) for n, t in tensors.items()}
    loaded = load_file(path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], t) for name, t in tensors.items())
    assert [p.name for p in path.parent.iterdir()] == ["adapter"]


def test_layout() -> None:
    llama = expected_tensors(CONFIGS["llama"])
    assert llama == {
        "initial_layernorm.weight": (32,),
        "mlp.weight": (32, 32),
        "mlp.bias": (32,),
        "layers.2.self_attn.q_proj.weight": (32, 32),
        "layers.2.self_attn.k_proj.weight": (16, 32),
        "layers.2.self_attn.v_proj.weight": (16, 32),
        "layers.2.self_attn.o_proj.weight": (32, 32),
        "layers.2.input_layernorm.weight": (32,),
        "layers.2.post_attention_layernorm.weight": (32,),
    }
    qwen2 = expected_tensors(CONFIGS["qwen2"])
    assert qwen2.items() - llama.items() == {
        ("layers.2.self_attn.q_proj.bias", (32,)),
        ("layers.2.self_attn.k_proj.bias", (16,)),
        ("layers.2.self_attn.v_proj.bias", (16,)),
    }
    qwen3 = expected_tensors(CONFIGS["qwen3"])
    assert "mlp.bias" not in qwen3
    assert qwen3["layers.2.self_attn.q_norm.weight"] == (16,)
    assert qwen3["layers.2.self_attn.k_norm.weight"] == (16,)
    assert qwen3["layers.2.self_attn.o_proj.weight"] == (32, 64)
    block = expected_tensors(CONFIGS["full_block"])
    assert block["initial_layernorm.weight"] == (96,)
    assert block["mlp.weight"] == (32, 96)
    assert block["norm.weight"] == (32,)
    for layer in ("layers.2.", "layers.3."):
        assert block[layer + "mlp.gate_proj.weight"] == (64, 32)
        assert block[layer + "mlp.up_proj.weight"] == (64, 32)
        assert block[layer + "mlp.down_proj.weight"] == (32, 64)
        assert block[layer + "self_attn.k_proj.weight"] == (16, 32)
    assert len(block) == 4 + 2 * 9


def test_missing_directory_and_files(tmp_path: Path, adapter: Path) -> None:
    with refused(f"adapter {tmp_path / 'none'} is not a directory"):
        load_adapter_config(tmp_path / "none")
    (adapter / "model.safetensors").rename(tmp_path / "weights")
    with refused(f"{adapter}: model.safetensors is missing"):
        load_adapter_config(adapter)
    (adapter / "config.json").unlink()
    with refused(f"adapter {adapter} has no config.json"):
        load_adapter_config(adapter)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"{", "config.json is not valid JSON: Expecting property name"),
        (b"\xff", "config.json is not valid JSON: 'utf-8' codec can't decode"),
        (b"[1]", "config.json must hold a JSON object, got [1]"),
        (b"{}", "config.json lacks architecture, calibration, depth, exit_layer,"),
    ],
)
def test_broken_config_file(adapter: Path, text: bytes, line: str) -> None:
    (adapter / "config.json").write_bytes(text)
    with refused(line):
        load_adapter_config(adapter)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dropout": 0.1}, "config.json has unknown keys: dropout"),
        ({"format_version": 1}, "adapter format_version must be one of 2, got 1"),
        (
            {"architecture": "mlp_only"},
            "adapter architecture must be one of attention_only, full_block, got",
        ),
        ({"depth": 2}, "adapter depth must be 1 for attention_only, got 2"),
        (
            {"intermediate_size": 64},
            "adapter intermediate_size must be 0 for attention_only, got 64",
        ),
        (
            {"architecture": "full_block", "intermediate_size": 65},
            "adapter intermediate_size must be a multiple of 64, got 65",
        ),
        (
            {"architecture": "full_block"},
            "adapter intermediate_size must be a multiple of 64, got 0",
        ),
        ({"feature_layers": 2}, "adapter feature_layers must be a list of int, got 2"),
        ({"feature_layers": [True]}, "feature_layers must be a list of int, got [True"),
        ({"feature_layers": []}, "feature_layers must rise from 0 or more to exit_la"),
        ({"feature_layers": [1]}, "must rise from 0 or more to exit_layer (2), got [1"),
        ({"feature_layers": [1, 1, 2]}, "feature_layers must rise from 0 or more to"),
        ({"feature_layers": [-1, 2]}, "feature_layers must rise from 0 or more to"),
        ({"calibration": [0.5]}, "calibration must be two or more numbers that rise"),
        ({"calibration": [0.5, 0.4]}, "calibration must be two or more numbers that"),
        ({"calibration": [0.5, 1.1]}, "calibration must be two or more numbers that"),
        ({"calibration": [0, 1]}, "calibration must be a list of float, got [0, 1]"),
        (
            {"model_type": "gpt2"},
            "adapter model_type must be one of llama, qwen2, qwen3, got 'gpt2'",
        ),
        ({"exit_layer": 0}, "adapter exit_layer must be > 0, got 0"),
        (
            {"exit_layer": 4},
            "adapter exit_layer must be in 1..3 for a model of 4 layers, got 4",
        ),
        ({"hidden_size": "32"}, "adapter hidden_size must be of type int, got '32'"),
        ({"vocab_size": True}, "adapter vocab_size must be of type int, got True"),
        ({"head_dim": None}, "adapter head_dim must be of type int, got None"),
        ({"rms_norm_eps": -1.0}, "adapter rms_norm_eps must be > 0, got -1.0"),
        ({"mlp_bias": 1}, "adapter mlp_bias must be of type bool, got 1"),
        (
            {"num_key_value_heads": 3},
            "adapter num_attention_heads must be a multiple of num_key_value_heads "
            "(3), got 4",
        ),
    ],
)
def test_bad_config_values(adapter: Path, change: dict, line: str) -> None:
    file = adapter / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with refused(line):
        load_adapter_config(adapter)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_truncated_weights(adapter: Path, size: int) -> None:
    file = adapter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with refused(f"{adapter}: model.safetensors is truncated: "):
        load_adapter_config(adapter)


@pytest.mark.parametrize(
    ("header", "line"),
    [
        (b"{oops", "has a damaged header: Expecting property name"),
        (b"[]", "has a damaged header: AttributeError"),
        (b'{"a": {"dtype": "F32"}}', "has a damaged header: KeyError('shape')"),
        (
            b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}',
            "a must be one of F32, F16, BF16, got I8",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]}}',
            "a of shape (2, 2) F32 cannot take 4 bytes",
        ),
    ],
)
def test_damaged_header(adapter: Path, header: bytes, line: str) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    (adapter / "model.safetensors").write_bytes(data)
    with refused(line):
        load_adapter_config(adapter)


def test_wrong_tensors(tmp_path: Path, adapter: Path) -> None:
    good = random_tensors(LLAMA)
    q = "layers.2.self_attn.q_proj.weight"
    cases = [
        ({q: None}, f"the weights lack {q}"),
        ({"mlp.weight": torch.ones(32, 31)}, "mlp.weight must be (32, 32), got (32,"),
        ({"extra": torch.ones(1)}, "the weights have unknown tensors: extra"),
        ({LM_HEAD: torch.ones(2, 2)}, f"{LM_HEAD} must be (96, 32), got (2, 2)"),
    ]
    for change, line in cases:
        tensors = {n: t for n, t in (good | change).items() if t is not None}
        with refused(line):
            save_adapter(tmp_path / "bad", LLAMA, tensors)
        assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
        save_file(tensors, adapter / "model.safetensors")
        with refused(f"{adapter}: {line}"):
            load_adapter_config(adapter)


def test_save_does_not_overwrite(adapter: Path) -> None:
    before = (adapter / "model.safetensors").read_bytes()
    with refused(f"{adapter} already exists"):
        save_adapter(adapter, LLAMA, random_tensors(LLAMA, seed=1))
    assert (adapter / "model.safetensors").read_bytes() == before


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["mlp.weight"] = tensors["mlp.weight"].to("meta")  # cannot be written
    with pytest.raises(NotImplementedError):
        save_adapter(tmp_path / "adapter", LLAMA, tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_matches_its_model(config: AdapterConfig) -> None:
    check_adapter_matches(config, hf_config(config))
    made = AdapterConfig.for_model(
        hf_config(config),
        config.exit_layer,
        mlp_bias=config.mlp_bias,
        depth=config.depth,
        intermediate_size=config.intermediate_size,
        feature_layers=config.feature_layers,
    )
    assert made == replace(config, calibration=())
    assert AdapterConfig.for_model(hf_config(config), 1).feature_layers == (1,)


def test_model_without_head_dim() -> None:
    model = hf_config(LLAMA)
    del model.head_dim
    check_adapter_matches(LLAMA, model)
    check_adapter_matches(LLAMA, hf_config(LLAMA, head_dim=None))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "qwen2"),
        ("hidden_size", 64),
        ("vocab_size", 97),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 16),
    ],
)
def test_other_model(name: str, value: object) -> None:
    line = f"{name} is {getattr(LLAMA, name)} in the adapter, {value} in the model"
    with refused(line):
        check_adapter_matches(LLAMA, hf_config(LLAMA, **{name: value}))


def test_for_model_refuses_layers_outside() -> None:
    for exit_layer in (0, 4):
        with refused("adapter exit_layer must be "):
            AdapterConfig.for_model(hf_config(LLAMA), exit_layer)
    with pytest.raises(AdapterError):
        replace(LLAMA, exit_layer=-1)


def test_import_is_light() -> None:
    code = (
        "import sys, spexis_runtime.adapter as a; "
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
