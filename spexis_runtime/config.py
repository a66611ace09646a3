# SPDX-License-Identifier: Apache-2.0
"""The runtime's own settings, checked once; vLLM's `additional_config` carries them."""

import math
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

KEY = "spexis"
"""Key of the settings in `VllmConfig.additional_config`."""
METRICS = "spexis_metrics"
"""Key there by which `AsyncLLM` asks the scheduler for what its metrics show."""
PARTITION = "VLLM_PP_LAYER_PARTITION"
"""vLLM's environment variable for the number of layers of each stage."""


class SpexisConfigError(ValueError):
    """Settings that cannot be; the message is one line and says what would be right."""


@dataclass(frozen=True, kw_only=True)
class SpexisConfig:
    """Settings of a pipeline. Raises SpexisConfigError if they cannot be."""

    exit_model: str | None = None  # directory of the exit adapter; None: plain PP
    row_budget: int | Literal["auto"] = "auto"  # decode rows a step
    drop_ratio: float | None = None  # alpha of the paper, section 5.1
    admission: Literal["vllm", "history"] = "vllm"  # of waiting requests
    log_dir: str | None = None  # where the per-iteration log goes
    stages_per_gpu: int = 1  # more than one: for development and tests

    def __post_init__(self) -> None:
        budget, ratio = self.row_budget, self.drop_ratio
        if budget != "auto" and (type(budget) is not int or budget < 1):
            raise SpexisConfigError(
                f"row_budget must be 'auto' or an int of at least 1, got {budget!r}"
            )
        if ratio is not None and not (
            isinstance(ratio, int | float)
            and not isinstance(ratio, bool)
            and 0 <= ratio < 1
        ):
            raise SpexisConfigError(f"drop_ratio must be in [0, 1), got {ratio!r}")
        if ratio is not None and budget != "auto":
            raise SpexisConfigError(
                f"drop_ratio ({ratio}) and row_budget ({budget}) are two ways to say "
                "the same thing: give one of them"
            )
        if self.exit_model is None and (ratio is not None or budget != "auto"):
            given = "drop_ratio" if ratio is not None else "row_budget"
            raise SpexisConfigError(
                f"{given} needs exit_model: without drafts there is nothing to drop"
            )
        if self.admission not in ("vllm", "history"):
            raise SpexisConfigError(
                f"admission must be 'vllm' or 'history', got {self.admission!r}"
            )
        if self.admission != "vllm" and self.exit_model is None:
            raise SpexisConfigError(
                f"admission {self.admission!r} needs exit_model: plain pipeline "
                "parallelism admits by vLLM's own rule"
            )
        stages = self.stages_per_gpu
        if type(stages) is not int or stages < 1:
            raise SpexisConfigError(
                f"stages_per_gpu must be an int of at least 1, got {stages!r}"
            )

    @classmethod
    def from_additional_config(
        cls, additional_config: dict[str, Any]
    ) -> "SpexisConfig":
        """Parse `additional_config["spexis"]`; unknown keys are refused."""
        given = additional_config.get(KEY, {})
        unknown = sorted(given.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise SpexisConfigError(f"unknown spexis setting: {', '.join(unknown)}")
        return cls(**given)

    def to_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    def check_pipeline(self, pipeline_parallel_size: int, max_num_seqs: int) -> None:
        """Raise SpexisConfigError if the settings do not fit the pipeline."""
        if self.exit_model is None:
            return
        if pipeline_parallel_size < 2:
            raise SpexisConfigError(
                "exit_model needs pipeline_parallel_size >= 2, got "
                f"{pipeline_parallel_size}: one stage leaves nothing to speculate past"
            )
        if type(max_num_seqs) is not int or max_num_seqs < 1:
            raise SpexisConfigError(
                f"max_num_seqs must be an int of at least 1, got {max_num_seqs!r}"
            )
        least = math.ceil(max_num_seqs / pipeline_parallel_size)
        if self.row_budget != "auto" and self.row_budget < least:
            raise SpexisConfigError(
                f"row_budget must be at least max_num_seqs / pipeline_parallel_size = "
                f"ceil({max_num_seqs} / {pipeline_parallel_size}) = {least}, got "
                f"{self.row_budget}: fewer rows than plain pipeline parallelism runs"
            )

    @property
    def chooses_rows(self) -> bool:
        """Whether the scheduler chooses the decode rows of each step."""
        return self.row_budget == "auto" and self.drop_ratio is None

    def num_rows(self, num_decodes: int, pipeline_parallel_size: int) -> int:
        """Decode rows of a step with `num_decodes` requests that could be fed.

        With alpha = drop_ratio: ceil(B / (1 + alpha (N - 1))), the limit of the paper's
        equation (3). Not to be asked where `chooses_rows`.
        """
        if self.row_budget != "auto":
            return self.row_budget
        assert self.drop_ratio is not None
        stages = pipeline_parallel_size
        return math.ceil(num_decodes / (1 + self.drop_ratio * (stages - 1)))


def check_log_dir(log_dir: str | os.PathLike[str]) -> None:
    """Create `log_dir` if need be; raise SpexisConfigError if it cannot be written."""
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise SpexisConfigError(
            f"log_dir {str(log_dir)!r} cannot be created: {error.strerror}"
        ) from error
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise SpexisConfigError(f"log_dir {str(log_dir)!r} is not writable")


def layer_partition(num_hidden_layers: int, exit_layer: int, num_stages: int) -> str:
    """Layers of each stage, comma separated: `exit_layer`, then the rest split evenly.

    >>> layer_partition(30, 15, 2)
    '15,15'
    >>> layer_partition(30, 8, 4)
    '8,8,7,7'
    """
    rest, stages = num_hidden_layers - exit_layer, num_stages - 1
    if rest < stages:
        raise SpexisConfigError(
            f"exit_layer {exit_layer} of {num_hidden_layers} leaves {rest} layers for "
            f"{stages} more stages: at least one each is needed"
        )
    sizes = [rest // stages + (i < rest % stages) for i in range(stages)]
    return ",".join(map(str, [exit_layer, *sizes]))
