# SPDX-License-Identifier: Apache-2.0
"""Compiled functions of this package, cached on disk until any of its sources changes.

Numba's own cache looks at the file of the function it compiles, not at those of the
functions that this one calls: after a change there it would run the old code.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_PACKAGE = Path(__file__).parent


def _cache_dir() -> Path:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return _PACKAGE / "__pycache__" / f"numba-{digest.hexdigest()[:16]}"


_CACHE_DIR = _cache_dir()
_CAN_CACHE = os.access(_PACKAGE, os.W_OK)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit`: compiled at the first call, or read from the cache.

    The plain Python function stays at `.py_func`.
    """
    if not _CAN_CACHE:
        return numba.njit(nogil=True)(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_CACHE_DIR)
    try:
        return numba.njit(cache=True, nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before
