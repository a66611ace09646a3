# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine loop over a pipeline without a model, in this process.

Real: the engine core's loop, the scheduler, the KV cache manager, the stages' request
bookkeeping, the plan of a step, the pool operations, the way of results to the host.
Simulated: a toy model over one paged KV cache, and a drafter that is right at a given
rate. A KV cell's value depends on every cell before it, so reading a wrong, stale or
unwritten cell shows in the token sampled.

Stages are FIFO, so each sees the same KV at its step t whenever it runs: a step is run
at once on all of them, and what it yields is held back, N steps for stage 0 and as long
as the batch queue does for the host.
"""

import functools
import queue
import random
import tempfile
from collections import deque
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.states import RequestState

from spexis_kernels import absorb, store_drafts, verify
from spexis_kernels.constants import DRAFT, INVALID_TOKEN, PAD_SLOT_ID, PREFILL
from spexis_kernels.pool import RequestPool, Rows
from spexis_runtime import patches
from spexis_runtime.config import SpexisConfig
from spexis_runtime.draft_sampling import DraftSampling
from spexis_runtime.model_runner import SpexisModelRunner
from spexis_runtime.results import ROW_FIELDS, SpexisOutput, unpack_rows
from spexis_runtime.scheduler import SpexisScheduler
from spexis_runtime.step_plan import plan_step

patches.shim_streams()

BLOCK = 4  # tokens in a KV block
VOCAB = 50
STOP = 0  # the token that ends a request
MAX_MODEL_LEN = 48
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 16
UNWRITTEN = -1


# ---- the toy model -------------------------------------------------------------------
def kv_cell(token: int, before: list[int]) -> int:
    return hash((token, *before))


def kv_of(tokens: list[int]) -> list[int]:
    """What the cells of a prefix must hold."""
    cells: list[int] = []
    for token in tokens:
        cells.append(kv_cell(token, cells))
    return cells


def next_token(cells: list[int]) -> int:
    return hash(tuple(cells)) % VOCAB


def true_output(prompt: list[int], max_tokens: int) -> list[int]:
    cells, output = kv_of(prompt), []
    while len(output) < max_tokens and STOP not in output[-1:]:
        if len(cells) >= MAX_MODEL_LEN:
            break
        output.append(next_token(cells))
        cells.append(kv_cell(output[-1], cells))
    return output


# ---- the stages ----------------------------------------------------------------------
class HostRequestState(RequestState):
    def apply_staged_writes(self) -> None:
        """What vLLM stages for the device is not read here."""


class BlockTables:
    def __init__(self) -> None:
        self.of_slot: dict[int, list[int]] = {}

    def append_block_ids(
        self, slot: int, block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        old = [] if overwrite else self.of_slot[slot]
        self.of_slot[slot] = [*old, *block_ids[0]]


class Stage(SpexisModelRunner):
    """The runner's bookkeeping of requests and rows, without anything of a model."""

    def __init__(self, vllm_config: VllmConfig, *, is_first: bool):
        self.is_first_pp_rank, self.is_last_pp_rank = is_first, False  # no sampler
        self.spexis_config = SpexisConfig.from_additional_config(
            vllm_config.additional_config
        )
        self.num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self.max_num_reqs = MAX_NUM_SEQS
        self.device = torch.device("cpu")
        self.pool = RequestPool.empty(self.max_num_reqs, self.num_stages, "cpu")
        sizes = MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, 0, VOCAB
        self.req_states = HostRequestState(*sizes, self.device)
        self.block_tables = BlockTables()
        self.draft_sampling = DraftSampling(self.max_num_reqs, self.device)
        self.step = torch.zeros(1, dtype=torch.int32)
        self.sampler = self.encoder_cache = None
        self.pp_handler = self.prompt_logprobs_worker = None
        self.model_state, self.lora_state = MagicMock(), MagicMock()


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class ToyPipeline:
    """Takes the place of the executor: all stages, and the model."""

    def __init__(
        self, vllm_config: VllmConfig, num_blocks: int, theta: float, rng: random.Random
    ):
        self.first = Stage(vllm_config, is_first=True)
        self.last = Stage(vllm_config, is_first=False)
        self.theta, self.rng = theta, rng
        self.kv = [UNWRITTEN] * (num_blocks * BLOCK)
        self.nothing = Rows(*(int32([]) for _ in Rows._fields)), int32([])
        self.results = deque([self.nothing] * self.first.num_stages)  # to stage 0
        self.prefill_tokens: dict[str, list[int]] = {}  # request -> tokens at admission
        self.reads: dict[int, list[int]] = {}  # slot -> cells, in the step being run
        self.writes: dict[int, int] = {}  # cell -> slot
        self.output: SpexisOutput | None = None
        self.known_lens: deque[np.ndarray] = deque(maxlen=self.first.num_stages)
        # what has happened, for tests to assert that it has
        self.num_steps = self.accepted_drafts = self.rejected_drafts = 0
        self.requests_without_row = self.cached_tokens = 0
        self.num_drafts = self.right_depths = 0
        self.depths: np.ndarray = np.zeros(0)  # of the step's drafts with right prefix

    def execute_model(self, so: SchedulerOutput, non_block: bool) -> Future[Any]:
        assert non_block
        first, last = self.first, self.last
        self.num_steps += 1
        for stage in (first, last):
            stage.plan = plan_step(
                so, stage.req_states, stage.spexis_config, stage.num_stages
            )
        assert first.plan[:4] == last.plan[:4]
        absorb(first.pool, *self.results.popleft())
        self.results.append(self.nothing)
        for stage in (first, last):
            stage.finish_requests(so)
            stage.add_requests(so)
            stage.update_requests(so)
        assert first.check_integrity() == last.check_integrity(), "slots differ"
        self.empty_new_blocks(so)
        future: Future[Any] = Future()
        if first.plan.scheduler_output.total_num_scheduled_tokens:
            self.run(so)
            future.set_result(None)
        else:
            future.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return future

    def empty_new_blocks(self, so: SchedulerOutput) -> None:
        cached = so.scheduled_cached_reqs
        blocks = [ids[0] for ids in cached.new_block_ids if ids is not None]
        for new in so.scheduled_new_reqs:
            self.prefill_tokens[new.req_id] = list(new.prefill_token_ids)
            self.cached_tokens += new.num_computed_tokens
            blocks.append(new.block_ids[0][new.num_computed_tokens // BLOCK :])
        for block in [b for ids in blocks for b in ids]:
            self.kv[block * BLOCK : (block + 1) * BLOCK] = [UNWRITTEN] * BLOCK

    def run(self, so: SchedulerOutput) -> None:
        """Feed, run the toy model over the rows, draft, verify."""
        first, last, plan = self.first, self.last, self.first.plan
        row_block = torch.empty(ROW_FIELDS, plan.num_decode_rows).int()
        first.upload_limits()
        first.feed(row_block)
        decode, _ = unpack_rows(row_block)
        slot_of = first.req_states.req_id_to_index
        read: dict[int, list[int]] = {}  # slot -> KV that its row attends to
        self.reads, self.writes = {}, {}

        limits = {slot_of[i]: limit for i, limit in plan.decode_limits.items()}
        depths = (decode.positions - first.pool.known_len[decode.slots] + 1).numpy()
        columns = zip(*(column.tolist() for column in decode), strict=True)
        for slot, _, position, token, _ in columns:
            if slot != PAD_SLOT_ID:
                assert position < limits[slot], "fed at or beyond the host's limit"
                read[slot] = self.write(slot, position, [token])
        self.requests_without_row += len(limits) - len(read)
        for request_id, end in plan.prefill_ends.items():
            start = end - so.num_scheduled_tokens[request_id]
            tokens, slot = self.prefill_tokens[request_id], slot_of[request_id]
            assert end <= len(tokens), "prefill of tokens that the stages lack"
            read[slot] = self.write(slot, start, tokens[start:end])

        slots = [slot_of[i] for i in plan.prefill_ends]
        ends = int32(list(plan.prefill_ends.values()))
        prefill = Rows(
            slots=int32(slots),
            generations=first.pool.generation[slots],
            positions=ends - 1,
            tokens=int32(
                [self.prefill_tokens[i][e - 1] for i, e in plan.prefill_ends.items()]
            ),
            kinds=int32([PREFILL] * len(slots)),
        )
        first.pool.head[slots] = ends
        first.pool.last_fed[slots] = first.step
        rows = Rows(*map(torch.cat, zip(decode, prefill, strict=True)))
        cells = [read.get(slot, []) for slot in rows.slots.tolist()]
        self.draft(rows, cells)
        sampled = int32([next_token(row) for row in cells])
        accepted = verify(last.pool, rows, sampled)
        self.results[-1] = rows, accepted
        valid = (accepted[: len(decode.slots)] != INVALID_TOKEN).int()
        right_so_far = decode.positions == last.pool.known_len[decode.slots] - valid - 1
        self.depths = depths[(right_so_far & (decode.kinds == DRAFT)).numpy()]
        self.report(row_block, accepted)

    def write(self, slot: int, position: int, tokens: list[int]) -> list[int]:
        """Write the KV of `tokens` from `position` on; returns the prefix's KV."""
        table = self.first.block_tables.of_slot[slot]
        end = position + len(tokens)
        assert end <= len(table) * BLOCK, "fed past the blocks"
        cells = [block * BLOCK + i for block in table for i in range(BLOCK)][:end]
        for cell, token in zip(cells[position:], tokens, strict=True):
            before = [self.kv[c] for c in cells[:position]]
            self.kv[cell] = kv_cell(token, before)
            self.writes[cell] = slot
            position += 1
        self.reads[slot] = cells
        return [self.kv[cell] for cell in cells]

    def check_reads(self) -> None:
        """No row reads what another row of its step writes, maybe at the same time."""
        for slot, cells in self.reads.items():
            writers = {self.writes.get(cell, slot) for cell in cells}
            assert writers == {slot}, "KV read in the step that writes it"

    def draft(self, rows: Rows, cells: list[list[int]]) -> None:
        """The exit head: right with rate theta, and more confident when right."""
        if not self.first.plan.drafting:
            return
        rng, tokens, confidence = self.rng, [], []
        for row in cells:
            hit = rng.random() < self.theta
            wrong = next_token(row) + rng.randrange(1, VOCAB)
            tokens.append(next_token(row) if hit else wrong % VOCAB)
            confidence.append(rng.uniform(*((0.5, 1.0) if hit else (0.0, 0.8))))
        store_drafts(self.first.pool, rows, int32(tokens), torch.tensor(confidence))

    def report(self, row_block: torch.Tensor, accepted: torch.Tensor) -> None:
        plan, slot_of = self.first.plan, self.first.req_states.req_id_to_index
        req_ids = list(plan.scheduler_output.num_scheduled_tokens)
        stream = torch.cuda.current_stream()
        sampled = accepted.clamp(min=0).long().unsqueeze(1)
        output = AsyncOutput(
            ModelRunnerOutput(req_ids, {}),
            SamplerOutput(sampled, None, None, None),
            (accepted != INVALID_TOKEN).int(),
            stream,
            stream,
        )
        decode_requests = {slot_of[i]: i for i in plan.decode_limits}
        self.output = SpexisOutput(
            output,
            row_block,
            self.last.pool.known_len,
            decode_requests,
            self.known_lens,
        )

    def sample_tokens(self, grammar_output: None, non_block: bool) -> Future[Any]:
        future: Future[Any] = Future()
        assert self.output is not None
        output = self.output.get_output()
        counts, drafts = output.spexis_row_counts, output.spexis_drafts
        assert len(drafts.right) == counts.drafts_after_valid
        assert drafts.right.sum() == counts.accepted_drafts
        # as `draft` makes them
        assert (drafts.confidence[drafts.right] >= 0.5).all()
        assert (drafts.confidence[~drafts.right] < 0.8).all()
        self.num_drafts += len(drafts.depth)
        self.right_depths += int((drafts.depth == self.depths).sum())
        self.accepted_drafts += counts.accepted_drafts
        self.rejected_drafts += counts.drafts_after_valid - counts.accepted_drafts
        future.set_result(output)
        return future


# ---- the engine ----------------------------------------------------------------------
@functools.cache
def make_config(num_stages: int) -> VllmConfig:
    """vLLM's config for a pipeline over a model of which only the config exists."""
    with tempfile.TemporaryDirectory() as model:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=VOCAB,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=4,
        ).save_pretrained(model)
        return EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            pipeline_parallel_size=num_stages,
            distributed_executor_backend="mp",
            async_scheduling=True,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            block_size=BLOCK,
            enable_prefix_caching=True,
        ).create_engine_config()


class ToyEngine(EngineCore):
    """vLLM's engine core over a ToyPipeline: its loop, its scheduler, no processes."""

    def __init__(
        self,
        num_stages: int,
        *,
        scheduler_cls: type[SpexisScheduler] = SpexisScheduler,
        num_blocks: int = 200,
        theta: float = 1.0,
        row_budget: int | str = "auto",
        admission: str = "vllm",
        log_dir: str | None = None,
        seed: int = 0,
    ):
        config = self.vllm_config = make_config(num_stages)
        config.additional_config = SpexisConfig(
            exit_model="toy",
            row_budget=row_budget,
            admission=admission,
            log_dir=log_dir,
        ).to_additional_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32
        )
        kv_cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
        self.scheduler: SpexisScheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        manager = self.scheduler.structured_output_manager
        manager.should_advance = lambda request: False
        self.pipeline = self.model_executor = ToyPipeline(
            config, num_blocks, theta, random.Random(seed)
        )
        self.batch_queue_size = config.max_concurrent_batches
        self.batch_queue = deque(maxlen=self.batch_queue_size)
        self.is_ec_consumer, self.is_pooling_model, self.log_stats = True, False, False
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}  # as the user gets them
        self.live: set[str] = set()
        self.num_steps = 0

    def submit(
        self, prompt: list[int], max_tokens: int, grammar: bool = False, **params: Any
    ) -> str:
        request_id = f"request-{len(self.requests)}"
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP], **params),
            None,
            block_hasher=self.hasher,
        )
        if grammar:  # one that allows everything
            request.structured_output_request = MagicMock()
        self.requests[request_id], self.outputs[request_id] = request, []
        self.live.add(request_id)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str, *, in_flight: bool) -> None:
        """At once, or while the next result is waited for."""
        self.live.discard(request_id)
        if in_flight:
            self.aborts_queue.put([request_id])
        else:
            self.abort_requests([request_id])

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)

    def step(self) -> dict[str, list[int]]:
        """One round of vLLM's loop; returns the new tokens by request."""
        outputs, _ = self.step_with_batch_queue()
        self.num_steps += 1
        new = {}
        for output in (o for eco in (outputs or {}).values() for o in eco.outputs):
            new[output.request_id] = output.new_token_ids
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.live.discard(output.request_id)
        return new

    def expected(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        return true_output(list(request.prompt_token_ids), request.max_tokens)
