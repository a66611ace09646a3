# SPDX-License-Identifier: Apache-2.0
"""Read, check and write exit adapters. Imports neither vLLM nor torch."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 2
ARCHITECTURES = ("attention_only", "full_block")
MODEL_TYPES = ("llama", "qwen2", "qwen3")
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
LM_HEAD = "lm_head.weight"  # optional: the target's LM head where absent
INTERMEDIATE_MULTIPLE = 64  # so that tensor-parallel ranks can share it out

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# What must be equal in the adapter and in the model it is put on.
_GEOMETRY = (
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class AdapterError(ValueError):
    """An adapter that cannot be used; the message is one line and says why."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`config.json` of an adapter. Raises AdapterError for values that cannot be.

    Sizes are the target's, in elements; `exit_layer` counts the decoder layers that
    run before the adapter, 1 .. num_hidden_layers - 1. Of the adapter's own:

    - `depth`: its layers. An "attention_only" adapter has one, without an MLP.
    - `intermediate_size`: of the MLP of each layer; 0 where there is none.
    - `feature_layers`: its inputs, as counts of decoder layers in rising order: 0 is
      the token embedding. The last is `exit_layer`.
    - `calibration`: probability that a draft is right at a softmax probability of
      0, 1/n, ..., 1, linear in between; empty: the softmax probability itself.
    """

    format_version: int = FORMAT_VERSION
    architecture: str = ARCHITECTURES[0]
    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    exit_layer: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    mlp_bias: bool
    depth: int = 1
    intermediate_size: int = 0
    feature_layers: tuple[int, ...]
    calibration: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, str(field.type))
        for name, known in (
            ("format_version", (FORMAT_VERSION,)),
            ("architecture", ARCHITECTURES),
            ("model_type", MODEL_TYPES),
        ):
            if getattr(self, name) not in known:
                raise AdapterError(
                    f"adapter {name} must be one of {', '.join(map(str, known))}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise AdapterError(
                f"adapter num_attention_heads must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}), "
                f"got {self.num_attention_heads}"
            )
        if self.exit_layer >= self.num_hidden_layers:
            raise AdapterError(
                f"adapter exit_layer must be in 1..{self.num_hidden_layers - 1} for "
                f"a model of {self.num_hidden_layers} layers, got {self.exit_layer}"
            )
        self._check_architecture()
        self._check_lists()

    def _check_type(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        if kind.startswith("tuple"):
            element = kind.removeprefix("tuple[").removesuffix(", ...]")
            if not isinstance(value, list | tuple) or any(
                type(x).__name__ != element for x in value
            ):
                raise AdapterError(
                    f"adapter {name} must be a list of {element}, got {value!r}"
                )
            object.__setattr__(self, name, tuple(value))  # JSON has lists
            return
        # `kind` is the annotation's text; a bool does not pass for an int.
        if type(value).__name__ != kind:
            raise AdapterError(f"adapter {name} must be of type {kind}, got {value!r}")
        if kind in ("int", "float") and name != "intermediate_size" and not value > 0:
            raise AdapterError(f"adapter {name} must be > 0, got {value}")

    def _check_architecture(self) -> None:
        if self.architecture == "attention_only":
            for name, only in (("depth", 1), ("intermediate_size", 0)):
                if (value := getattr(self, name)) != only:
                    raise AdapterError(
                        f"adapter {name} must be {only} for attention_only, got {value}"
                    )
        elif self.intermediate_size <= 0 or (
            self.intermediate_size % INTERMEDIATE_MULTIPLE
        ):
            raise AdapterError(
                f"adapter intermediate_size must be a multiple of "
                f"{INTERMEDIATE_MULTIPLE}, got {self.intermediate_size}"
            )

    def _check_lists(self) -> None:
        layers = self.feature_layers
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or layers[0] < 0
            or layers[-1] != self.exit_layer
        ):
            raise AdapterError(
                f"adapter feature_layers must rise from 0 or more to exit_layer "
                f"({self.exit_layer}), got {list(layers)}"
            )
        values = self.calibration
        if values and (
            len(values) < 2
            or list(values) != sorted(values)
            or not 0 <= values[0] <= values[-1] <= 1
        ):
            raise AdapterError(
                f"adapter calibration must be two or more numbers that rise within "
                f"0..1, got {list(values)}"
            )

    @classmethod
    def for_model(
        cls,
        hf_config: Any,
        exit_layer: int,
        *,
        mlp_bias: bool = True,
        depth: int = 1,
        intermediate_size: int = 0,
        feature_layers: Sequence[int] = (),
    ) -> AdapterConfig:
        """The adapter that fits a model, given its Hugging Face config.

        With an `intermediate_size` it is a "full_block". Without `feature_layers` its
        one input are the states after `exit_layer` layers.

        Raises AdapterError for a model type or an exit layer that cannot be.
        """
        return cls(
            architecture=ARCHITECTURES[intermediate_size > 0],
            model_type=hf_config.model_type,
            hidden_size=hf_config.hidden_size,
            vocab_size=hf_config.vocab_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            exit_layer=exit_layer,
            num_attention_heads=hf_config.num_attention_heads,
            num_key_value_heads=hf_config.num_key_value_heads,
            head_dim=_head_dim(hf_config),
            rms_norm_eps=float(hf_config.rms_norm_eps),
            mlp_bias=mlp_bias,
            depth=depth,
            intermediate_size=intermediate_size,
            feature_layers=tuple(feature_layers) or (exit_layer,),
        )


def expected_tensors(config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the adapter must have.

    Beside these it may have `LM_HEAD`, [vocab_size, hidden_size].
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    inputs = hidden * len(config.feature_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "initial_layernorm.weight": (inputs,),  # one norm after the other
        "mlp.weight": (hidden, inputs),
    }
    if config.mlp_bias:
        shapes["mlp.bias"] = (hidden,)
    for number in range(config.exit_layer, config.exit_layer + config.depth):
        layer = f"layers.{number}."
        attn = layer + "self_attn."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            attn + "q_proj.weight": (q_rows, hidden),
            attn + "k_proj.weight": (kv_rows, hidden),
            attn + "v_proj.weight": (kv_rows, hidden),
            attn + "o_proj.weight": (hidden, q_rows),
        }
        if config.model_type == "qwen2":
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[f"{attn}{name}_proj.bias"] = (rows,)
        if config.model_type == "qwen3":
            shapes[attn + "q_norm.weight"] = (head_dim,)
            shapes[attn + "k_norm.weight"] = (head_dim,)
        if size := config.intermediate_size:
            shapes[layer + "mlp.gate_proj.weight"] = (size, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (size, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, size)
    if config.intermediate_size:
        shapes["norm.weight"] = (hidden,)
    return shapes


def load_adapter_config(path: str | os.PathLike[str]) -> AdapterConfig:
    """Config of the adapter in directory `path`, its weights file checked.

    Reads the header of the weights only. Raises AdapterError when a file is missing,
    broken, cut short, of another format, or has not exactly the expected tensors.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise AdapterError(f"adapter {directory} is not a directory")
    file = directory / CONFIG_FILE
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"adapter {directory} has no {CONFIG_FILE}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise AdapterError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise AdapterError(f"{file} must hold a JSON object, got {data!r}")
    names = {field.name for field in fields(AdapterConfig)}
    if missing := sorted(names - data.keys()):
        raise AdapterError(f"{file} lacks {', '.join(missing)}")
    if unknown := sorted(data.keys() - names):
        raise AdapterError(f"{file} has unknown keys: {', '.join(unknown)}")
    try:
        config = AdapterConfig(**data)
        _check_shapes(config, read_tensor_shapes(directory))
    except AdapterError as error:
        raise AdapterError(f"{directory}: {error}") from None
    return config


def read_tensor_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in the adapter directory `path`, by file header.

    Raises AdapterError for a missing, damaged or truncated file and for element types
    other than float32, float16 and bfloat16.
    """
    file = Path(path) / WEIGHTS_FILE
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size:
                raise AdapterError(f"{WEIGHTS_FILE} is truncated: {size} bytes")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise AdapterError(f"{WEIGHTS_FILE} is missing") from None
    except ValueError as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{WEIGHTS_FILE} has a damaged header: {error}") from None
    shapes = {}
    end = 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _ELEMENT_BYTES:
                raise AdapterError(
                    f"{WEIGHTS_FILE}: {name} must be one of "
                    f"{', '.join(_ELEMENT_BYTES)}, got {entry['dtype']}"
                )
            shape = tuple(entry["shape"])
            first, last = entry["data_offsets"]
            if last - first != math.prod(shape) * _ELEMENT_BYTES[entry["dtype"]]:
                raise AdapterError(
                    f"{WEIGHTS_FILE}: {name} of shape {shape} {entry['dtype']} "
                    f"cannot take {last - first} bytes"
                )
            shapes[name] = shape
            end = max(end, last)
    except (AttributeError, KeyError, TypeError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} has a damaged header: {error!r}") from None
    if size != 8 + length + end:
        raise AdapterError(
            f"{WEIGHTS_FILE} is truncated: {size} bytes, its header says "
            f"{8 + length + end}"
        )
    return shapes


def check_adapter_matches(config: AdapterConfig, hf_config: Any) -> None:
    """Raise AdapterError unless the adapter was made for such a model.

    Compares model type, hidden size, vocabulary, number of layers and heads with the
    model's Hugging Face config. (`exit_layer` fits the number of layers by itself.)
    """
    for name in _GEOMETRY:
        ours = getattr(config, name)
        theirs = (
            _head_dim(hf_config) if name == "head_dim" else getattr(hf_config, name)
        )
        if ours != theirs:
            raise AdapterError(
                f"the adapter does not fit this model: {name} is {ours} in the "
                f"adapter, {theirs} in the model"
            )


def save_adapter(
    path: str | os.PathLike[str],
    config: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Write an adapter to the new directory `path`, all of it or nothing.

    Raises AdapterError when `path` exists or the tensors are not the expected ones.
    """
    from safetensors.torch import save

    directory = Path(path)
    if directory.exists():
        raise AdapterError(f"{directory} already exists")
    _check_shapes(config, {name: tuple(t.shape) for name, t in tensors.items()})
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory.parent))
    try:
        scratch.chmod(0o755)  # mkdtemp's 0700 would hide it from other users
        # not save_file: it does not report every failed write
        data = save(
            {name: t.detach().contiguous() for name, t in tensors.items()},
            metadata={"format": "pt"},
        )
        (scratch / WEIGHTS_FILE).write_bytes(data)
        (scratch / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n")
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _head_dim(hf_config: Any) -> int:
    # Older Llama and Qwen2 configs leave head_dim out.
    return (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )


def _check_shapes(config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = expected_tensors(config)
    if missing := sorted(expected.keys() - shapes.keys()):
        raise AdapterError(f"the weights lack {', '.join(missing)}")
    if LM_HEAD in shapes:
        expected[LM_HEAD] = (config.vocab_size, config.hidden_size)
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise AdapterError(f"the weights have unknown tensors: {', '.join(unknown)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise AdapterError(f"{name} must be {shape}, got {shapes[name]}")
