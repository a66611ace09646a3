# SPDX-License-Identifier: Apache-2.0
"""A directory of `config.json` and `model.safetensors`: read, checked, written."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
Config = TypeVar("Config")

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterError(ValueError):
    """An adapter that cannot be used; the message is one line and says why."""


def check_types(config: Any, what: str, zero: tuple[str, ...] = ()) -> None:
    """Raise AdapterError unless the fields of a frozen dataclass are of their types.

    `int`, `float`, `str`, `bool` or a tuple of one of these, for which a list becomes a
    tuple. Numbers must be above 0, but for the names in `zero`.
    """
    for field in fields(config):
        name, kind, value = field.name, str(field.type), getattr(config, field.name)
        if kind.startswith("tuple"):
            element = kind.removeprefix("tuple[").removesuffix(", ...]")
            if not isinstance(value, list | tuple) or any(
                type(x).__name__ != element for x in value
            ):
                raise AdapterError(
                    f"{what} {name} must be a list of {element}, got {value!r}"
                )
            object.__setattr__(config, name, tuple(value))  # JSON has lists
        # `kind` is the annotation's text; a bool does not pass for an int.
        elif type(value).__name__ != kind:
            raise AdapterError(f"{what} {name} must be of type {kind}, got {value!r}")
        elif kind in ("int", "float") and name not in zero and not value > 0:
            raise AdapterError(f"{what} {name} must be > 0, got {value}")


def read_config(directory: Path, kind: type[Config], what: str) -> Config:
    """`config.json` as the dataclass `kind`. Raises AdapterError where it is none."""
    if not directory.is_dir():
        raise AdapterError(f"{what} {directory} is not a directory")
    file = directory / CONFIG_FILE
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{what} {directory} has no {CONFIG_FILE}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise AdapterError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise AdapterError(f"{file} must hold a JSON object, got {data!r}")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if missing := sorted(names - data.keys()):
        raise AdapterError(f"{file} lacks {', '.join(missing)}")
    if unknown := sorted(data.keys() - names):
        raise AdapterError(f"{file} has unknown keys: {', '.join(unknown)}")
    try:
        return kind(**data)
    except AdapterError as error:
        raise AdapterError(f"{directory}: {error}") from None


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


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise AdapterError unless `shapes` has exactly the expected names and shapes."""
    if missing := sorted(expected.keys() - shapes.keys()):
        raise AdapterError(f"the weights lack {', '.join(missing)}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise AdapterError(f"the weights have unknown tensors: {', '.join(unknown)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise AdapterError(f"{name} must be {shape}, got {shapes[name]}")


def write_directory(
    directory: Path, config: Any, tensors: Mapping[str, torch.Tensor]
) -> Path:
    """Write the new `directory`, all of it or nothing.

    Raises AdapterError when it exists.
    """
    from safetensors.torch import save

    if directory.exists():
        raise AdapterError(f"{directory} already exists")
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
