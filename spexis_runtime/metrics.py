# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of speculation, beside vLLM's and with its labels.

The scheduler's figures of an iteration, those of the per-iteration log, travel to the
server's process in `SchedulerStats.kv_connector_stats`: the one of vLLM's statistics
that takes a dict, free as KV connectors cannot go with speculation.
"""

from typing import Any

from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine

PREFIX = "spexis_"
COUNTERS = {
    "steps": "Ticks of the pipeline, empty ones included.",
    "normal_rows": "Decode rows that fed a verified token.",
    "draft_rows": "Decode rows that fed a draft.",
    "drafts_after_valid": "Draft rows all of whose predecessors were right.",
    "accepted_drafts": "Draft rows that were right: acceptance is their share of "
    "spexis_drafts_after_valid.",
    "void_rows": "Draft rows whose token, or one before it, was wrong.",
    "valid_rows": "Rows that yielded a token, last rows of prompts included.",
}
STEP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 5.0),
)


class SpeculationProm(KVConnectorProm):
    """The metrics; vLLM hands it the iteration's figures and its own labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        for collector in list(REGISTRY._collector_to_names):  # of an engine before
            if getattr(collector, "_name", "").startswith(PREFIX):
                REGISTRY.unregister(collector)

        def metric(kind: Any, name: str, documentation: str, **options: Any) -> Any:
            return create_metric_per_engine(
                kind(
                    name=PREFIX + name,
                    documentation=documentation,
                    labelnames=labelnames,
                    **options,
                ),
                per_engine_labelvalues,
            )

        self.counters = {
            name: metric(self._counter_cls, name, text)
            for name, text in COUNTERS.items()
        }
        self.row_budget = metric(
            self._gauge_cls,
            "row_budget",
            "Decode rows that the newest step ran, padding included.",
            multiprocess_mode="mostrecent",
        )
        self.step_seconds = metric(
            self._histogram_cls,
            "step_seconds",
            "Time between the results of two steps, while the pipeline was busy.",
            buckets=STEP_SECONDS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        iteration = transfer_stats_data
        derived = dict(
            steps=1, void_rows=iteration["draft_rows"] - iteration["accepted_drafts"]
        )
        for name, counter in self.counters.items():
            counter[engine_idx].inc((iteration | derived)[name])
        self.row_budget[engine_idx].set(iteration["row_budget"])
        if iteration["step_milliseconds"] is not None:
            seconds = iteration["step_milliseconds"] / 1e3
            self.step_seconds[engine_idx].observe(seconds)


class PrometheusStatLogger(loggers.PrometheusStatLogger):
    """vLLM's, in whose place vLLM puts it; comes before its logger of lines."""

    _kv_connector_cls = SpeculationProm

    def record(
        self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any
    ) -> None:
        super().record(scheduler_stats, *args, **kwargs)
        if scheduler_stats is not None:  # which takes it for a KV connector's
            scheduler_stats.kv_connector_stats = None
