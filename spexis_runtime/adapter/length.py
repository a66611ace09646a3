# SPDX-License-Identifier: Apache-2.0
"""A length predictor's files: how few tokens of an answer are still to come.

The paper's (section 6), from the residual stream h after `exit_layer` layers:

    x           = gelu(layers.0(h / rms(h)))
    x           = gelu(layers.1(x))
    z           = layers.2(x)                       one for each threshold
    probability = sigmoid(scale * z + offset)       that fewer tokens are left

Fewer than `thresholds[i]` tokens are predicted to follow the row's own token where
probability i is at least `cutoffs[i]`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spexis_runtime.adapter.config import MODEL_TYPES
from spexis_runtime.adapter.files import (
    AdapterError,
    check_shapes,
    check_types,
    read_config,
    read_tensor_shapes,
    write_directory,
)

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
KIND = "length_predictor"
THRESHOLDS = (4, 8, 16, 32, 64)
_GEOMETRY = ("model_type", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """`config.json` of a predictor. Raises AdapterError for values that cannot be.

    `inner_sizes` are the outputs of the first two linear layers; `cutoffs`, `scales`
    and `offsets` belong to the thresholds.
    """

    format_version: int = FORMAT_VERSION
    kind: str = KIND
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    exit_layer: int
    rms_norm_eps: float
    inner_sizes: tuple[int, ...]
    thresholds: tuple[int, ...] = THRESHOLDS
    cutoffs: tuple[float, ...]
    scales: tuple[float, ...]
    offsets: tuple[float, ...]

    def __post_init__(self) -> None:
        check_types(self, "length predictor")
        for name, known in (
            ("format_version", (FORMAT_VERSION,)),
            ("kind", (KIND,)),
            ("model_type", MODEL_TYPES),
        ):
            if (value := getattr(self, name)) not in known:
                raise AdapterError(
                    f"length predictor {name} must be one of "
                    f"{', '.join(map(str, known))}, got {value!r}"
                )
        if self.exit_layer >= self.num_hidden_layers:
            raise AdapterError(
                f"length predictor exit_layer must be in "
                f"1..{self.num_hidden_layers - 1}, got {self.exit_layer}"
            )
        if len(self.inner_sizes) != 2 or min(self.inner_sizes) < 1:
            raise AdapterError(
                f"length predictor inner_sizes must be two sizes, "
                f"got {list(self.inner_sizes)}"
            )
        rising = list(self.thresholds) == sorted(set(self.thresholds))
        if not rising or not self.thresholds or self.thresholds[0] < 1:
            raise AdapterError(
                f"length predictor thresholds must rise from 1 or more, "
                f"got {list(self.thresholds)}"
            )
        for name in ("cutoffs", "scales", "offsets"):
            if len(values := getattr(self, name)) != len(self.thresholds):
                raise AdapterError(
                    f"length predictor {name} must be {len(self.thresholds)} numbers, "
                    f"got {list(values)}"
                )

    @classmethod
    def for_model(
        cls, hf_config: Any, exit_layer: int, inner_sizes: tuple[int, int]
    ) -> LengthConfig:
        """Of an untrained predictor: cutoffs of 0.5, probabilities as they come."""
        number = len(THRESHOLDS)
        return cls(
            model_type=hf_config.model_type,
            hidden_size=hf_config.hidden_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            exit_layer=exit_layer,
            rms_norm_eps=float(hf_config.rms_norm_eps),
            inner_sizes=inner_sizes,
            cutoffs=(0.5,) * number,
            scales=(1.0,) * number,
            offsets=(0.0,) * number,
        )


def length_tensors(config: LengthConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a predictor."""
    sizes = (config.hidden_size, *config.inner_sizes, len(config.thresholds))
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes[f"layers.{i}.weight"] = (sizes[i + 1], sizes[i])
        shapes[f"layers.{i}.bias"] = (sizes[i + 1],)
    return shapes


def load_length_config(path: str | os.PathLike[str]) -> LengthConfig:
    """Config of the predictor in directory `path`, its weights file checked.

    Reads the header of the weights only. Raises AdapterError as `load_adapter_config`.
    """
    directory = Path(path)
    config = read_config(directory, LengthConfig, "length predictor")
    try:
        check_shapes(length_tensors(config), read_tensor_shapes(directory))
    except AdapterError as error:
        raise AdapterError(f"{directory}: {error}") from None
    return config


def check_length_matches(config: LengthConfig, hf_config: Any) -> None:
    """Raise AdapterError unless the predictor was made for such a model."""
    for name in _GEOMETRY:
        if (ours := getattr(config, name)) != (theirs := getattr(hf_config, name)):
            raise AdapterError(
                f"the length predictor does not fit this model: {name} is {ours} in "
                f"the predictor, {theirs} in the model"
            )


def save_length_predictor(
    path: str | os.PathLike[str],
    config: LengthConfig,
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Write a predictor to the new directory `path`, all of it or nothing.

    Raises AdapterError when `path` exists or the tensors are not the expected ones.
    """
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    check_shapes(length_tensors(config), shapes)
    return write_directory(Path(path), config, tensors)
