# SPDX-License-Identifier: Apache-2.0
"""Types of the commands' arguments, and how the commands end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from spexis_runtime.adapter import AdapterError
from spexis_runtime.train.prompts import TrainError


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the program with a line on what the user can put right, and on Ctrl-C."""
    try:
        yield
    except (AdapterError, TrainError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {value}")
    return value


def non_negative(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be in 0..1, got {value}")
    return value
