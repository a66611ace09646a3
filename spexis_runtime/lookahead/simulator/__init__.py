# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulator of the engine, built on the policies that run in it."""

from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.simulator.engine import Machine, Result, Rows, simulate
from spexis_runtime.lookahead.simulator.workload import Workload

__all__ = ["DraftLaw", "Machine", "Result", "Rows", "Workload", "simulate"]
