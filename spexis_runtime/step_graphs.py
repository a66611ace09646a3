# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the small work around the model in a decode step.

vLLM captures the model; choosing rows, filling its inputs and drafting are some twenty
short launches more, which take the host longer than the device.
"""

from collections.abc import Callable, Hashable, Mapping

import torch
from vllm.distributed.parallel_state import graph_capture


class StepGraphs:
    """Functions of a step, captured by key; one that was not captured runs eagerly.

    A function reads and writes tensors that stay where they are, and returns nothing.
    """

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.memory: tuple[int, int] | None = None  # shared by all of them

    def capture(
        self,
        functions: Mapping[Hashable, Callable[[], None]],
        device: torch.device,
    ) -> None:
        """Run each function once, then record it under its key, in place of another.

        Call it when no request is running, on all tensor-parallel ranks alike.
        """
        if not functions:
            return
        if self.memory is None:
            self.memory = torch.cuda.graph_pool_handle()
        with graph_capture(device=device):
            for key, function in functions.items():
                function()  # compiles kernels
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, self.memory):
                    function()
                self.graphs[key] = graph

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        graph = self.graphs.get(key)
        if graph is None:
            function()
        else:
            graph.replay()
