# SPDX-License-Identifier: Apache-2.0
"""The paper's cost model of steady decoding: equations (1) to (4) and Table 1.

    PP  (B/N) / T_pp(B/N)      TP        B / T_tp(B)
    SP  B_eff / T_sp(B)        SP_alpha  B_eff,alpha / T_sp(B_alpha)

B sequences decode, all of them resident in KV memory, over N stages; T is the time of
one stage's step in milliseconds, by rows. TP inside stages, and so the products of the
three, come in by T alone: it is measured with as many ranks a stage.

The numbers are long-run means. Those of equation (2) are the protocol's own at any
theta, the acceptance of drafts whose prefix is right. Equation (4) is the paper's
approximation; `row_budget.valid_share` is the protocol's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from spexis_runtime.lookahead.step_times import StageTimes, StepTimes

Milliseconds = Callable[[float], float]
"""Time of a stage's step by its rows."""


def effective_batch(batch: float, num_stages: int, theta: float) -> float:
    """Verified tokens a step of full SP: B / (N - theta (N - 1)), equation (2).

    >>> effective_batch(64, 2, 0.5)
    42.666666666666664
    """
    return batch / (num_stages - theta * (num_stages - 1))


def selective_rows(batch: float, num_stages: int, alpha: float) -> float:
    """Rows of a step that drops alpha of the drafts: B / (1 + alpha (N - 1)), (3)."""
    return batch / (1 + alpha * (num_stages - 1))


def selective_effective_batch(
    batch: float, num_stages: int, theta: float, alpha: float
) -> float:
    """Verified tokens a step of SP_alpha, equation (4).

    Args:
        theta: acceptance of the drafts that are kept, Theta_alpha.
    """
    rows = selective_rows(batch, num_stages, alpha)
    return alpha * rows + effective_batch((1 - alpha) * rows, num_stages, theta)


def pp_throughput(batch: float, num_stages: int, stage_ms: Milliseconds) -> float:
    """Tokens a second of pipeline parallelism with N micro-batches (Table 1)."""
    return 1e3 * (batch / num_stages) / stage_ms(batch / num_stages)


def tp_throughput(batch: float, step_ms: Milliseconds) -> float:
    """Tokens a second of tensor parallelism alone (Table 1)."""
    return 1e3 * batch / step_ms(batch)


def sp_throughput(
    batch: float,
    num_stages: int,
    stage_ms: Milliseconds,
    theta: float,
    alpha: float = 0.0,
) -> float:
    """Tokens a second of speculative parallelism, SP_alpha if alpha > 0 (Table 1)."""
    rows = selective_rows(batch, num_stages, alpha)
    return (
        1e3
        * selective_effective_batch(batch, num_stages, theta, alpha)
        / stage_ms(rows)
    )


@dataclass(frozen=True)
class Layout:
    """How a model is spread: N stages of so many ranks, with drafts or without."""

    pipeline_parallel_size: int
    tensor_parallel_size: int = 1
    speculative: bool = False
    alpha: float = 0.0

    @property
    def num_gpus(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    def stage_times(self, times: StepTimes) -> StageTimes:
        return times.stage(
            self.pipeline_parallel_size,
            self.tensor_parallel_size,
            speculative=self.speculative,
        )

    def throughput(self, batch: float, theta: float, times: StepTimes) -> float:
        """Tokens a second with `batch` sequences; StepTimesError without its times."""
        num_stages, stage_ms = (
            self.pipeline_parallel_size,
            self.stage_times(times).decode_ms,
        )
        if self.speculative:
            return sp_throughput(batch, num_stages, stage_ms, theta, self.alpha)
        return pp_throughput(batch, num_stages, stage_ms)
