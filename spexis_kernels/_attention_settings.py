# SPDX-License-Identifier: Apache-2.0
"""Launch settings of `merged_attention`: a pure function of shape, dtypes and device.

The batch is not among the arguments: it must not change any arithmetic. Only the table
of sm_90 comes from measurements (`bench/tune.py`); the others follow from the shared
memory of a multiprocessor.
"""

import functools
from typing import NamedTuple

import torch
import triton

MAX_PROGRAMS = 1024
"""Programs that share the decode rows at most: one counter each in the workspace."""


class Device(NamedTuple):
    """What of a device the settings depend on."""

    capability: tuple[int, int]
    num_sms: int


INTERPRETER = Device((0, 0), 3)
"""CPU tensors reach a kernel in Triton's interpreter only. Few programs, so that rows
are shared among them."""


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return Device(capability, properties.multi_processor_count)


class Settings(NamedTuple):
    """How `merged_attention` is launched."""

    block_m: int  # rows of a prefill tile: tokens times heads of a group
    block_n: int  # tokens a step of the loop over the context
    decode_m: int  # rows of a decode tile: heads of a group, padded
    unit_tiles: int  # tiles of block_n tokens that programs deal in, at least
    max_units: int  # such units of a decode row at most; longer rows have longer ones
    num_programs: int  # that share the decode rows
    mixed_programs: int  # the same, in a launch with prefill chunks
    num_warps: int
    num_stages: int  # tiles of K and V that a program has in flight, plus one


class _Table(NamedTuple):
    tile_bytes: int  # of K, or of V, in a step of the loop
    unit_tokens: int
    max_units: int
    programs_per_sm: int
    num_stages: int


_TABLES = {
    (8, 0): _Table(16384, 128, 16, 2, 2),  # 163 KB of shared memory
    (8, 9): _Table(8192, 128, 16, 2, 2),  # 99 KB
    (9, 0): _Table(16384, 128, 16, 2, 4),  # 227 KB
    (10, 0): _Table(16384, 128, 16, 2, 4),  # 227 KB
    (12, 0): _Table(8192, 128, 16, 2, 2),  # 99 KB
}


def _table(capability: tuple[int, int]) -> _Table:
    """Of the newest device known that is not newer; else of the oldest."""
    known = [key for key in _TABLES if key <= capability]
    return _TABLES[max(known, default=min(_TABLES))]


def attention_settings(
    num_kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: Device,
) -> Settings:
    """Settings for heads in groups of `group`, of `head_size` elements."""
    table = _table(device.capability)
    block_d = triton.next_power_of_2(head_size)
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        block_m, block_n = 16, 16
    else:
        block_m = 64
        row_bytes = block_d * cache_dtype.itemsize
        block_n = max(16, min(64, table.tile_bytes // row_bytes))
    per_sm = 1 if device == INTERPRETER else table.programs_per_sm
    return Settings(
        block_m=max(block_m, triton.next_power_of_2(group)),
        block_n=block_n,
        decode_m=max(16, triton.next_power_of_2(group)),
        unit_tiles=table.unit_tokens // block_n,
        max_units=table.max_units,
        num_programs=min(MAX_PROGRAMS, per_sm * device.num_sms),
        mixed_programs=device.num_sms,
        num_warps=8 if head_size > 128 or dtype == torch.float32 else 4,
        num_stages=table.num_stages,
    )
