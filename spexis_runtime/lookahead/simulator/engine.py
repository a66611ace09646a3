# SPDX-License-Identifier: Apache-2.0
"""The engine's loop over a pipeline: vLLM's batch queue and the stages' clocks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from spexis_runtime.lookahead.admission import AdmissionPolicy, Requests
from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.jit import compiled
from spexis_runtime.lookahead.memory import NUM_BUCKETS
from spexis_runtime.lookahead.protocol import (
    DRAFT,
    NOTHING,
    absorb,
    choose,
    feed,
    make_draft,
    row_kind,
)
from spexis_runtime.lookahead.row_budget import RowBudget, choose_rows
from spexis_runtime.lookahead.simulator.host import schedule, update
from spexis_runtime.lookahead.simulator.state import (
    ACCEPTED_DRAFTS,
    BLOCK_STEPS,
    DRAFTS_AFTER_VALID,
    FED_ROWS,
    FLAGS,
    FREE_BLOCKS,
    IN_QUEUE,
    LAST_ROWS,
    NUM_ARRIVED,
    NUM_BUSY_STEPS,
    NUM_ENDED,
    NUM_LEAVING,
    NUM_PREEMPTED,
    NUM_RUNNING,
    NUM_STARTED,
    NUM_STEPS,
    OF_SLOT,
    PLACEHOLDER,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PRODUCED,
    RECOMPUTED_TOKENS,
    REFUSALS,
    ROWS,
    STAMP,
    VALID_ROWS,
    Sizes,
    State,
)
from spexis_runtime.lookahead.simulator.workload import Workload
from spexis_runtime.lookahead.step_times import StageTimes

MAX_QUIET = 50_000  # steps without a token, before it is taken to be stuck


@compiled
def _feed_rows(state, sizes, budget, law, seed, step, decoding, num_decoding):
    """Stage 0 chooses among the slots in `decoding` and feeds them; returns k."""
    count, slots = state.counts, state.slots
    if not sizes.speculative:
        for i in range(num_decoding):
            state.ring[step % len(state.ring_size), i, FLAGS] |= PRODUCED
        count[FED_ROWS] += num_decoding
        count[VALID_ROWS] += num_decoding
        return num_decoding
    chosen = choose_rows(budget, num_decoding, count[LAST_ROWS])
    if num_decoding:
        count[LAST_ROWS] = chosen
    k, drafts = abs(chosen), chosen > 0
    candidates = np.empty(num_decoding, dtype=np.int64)
    kinds = np.empty(sizes.max_num_seqs, dtype=np.int64)
    entry = np.empty(sizes.max_num_seqs, dtype=np.int64)
    found = 0
    for i in range(num_decoding):
        slot = decoding[i]
        # the host has counted this step's token already
        kinds[slot] = row_kind(slots, slot, slots[slot].computed)
        entry[slot] = i
        if kinds[slot] != NOTHING and (drafts or kinds[slot] != DRAFT):
            candidates[found] = slot
            found += 1
    for i in range(choose(slots, candidates, kinds, found, k)):
        slot = candidates[i]
        kind = kinds[slot]
        prefix_right, valid = feed(slots, slot, kind, step, drafts, law, seed)
        count[FED_ROWS] += 1
        if kind == DRAFT and prefix_right:
            count[DRAFTS_AFTER_VALID] += 1
            count[ACCEPTED_DRAFTS] += valid
        if valid:
            count[VALID_ROWS] += 1
            state.ring[step % len(state.ring_size), entry[slot], FLAGS] |= PRODUCED
    return k


@compiled
def _run_step(state, sizes, budget, law, seed):
    """What was scheduled goes through the stages; returns (k, prefill tokens, any)."""
    count, slots = state.counts, state.slots
    step = count[NUM_STEPS]
    ring = step % len(state.ring_size)
    if sizes.speculative and step >= sizes.num_stages:  # the result of N steps ago
        past = (step - sizes.num_stages) % len(state.ring_size)
        for i in range(state.ring_size[past]):
            slot = state.ring[past, i, OF_SLOT]
            alive = state.ring[past, i, STAMP] == slots[slot].stamp
            if alive and state.ring[past, i, FLAGS] & PRODUCED:
                absorb(slots, slot)
    entries, prefill_tokens = 0, 0
    decoding = np.empty(sizes.max_num_seqs, dtype=np.int64)
    for i in range(count[NUM_RUNNING]):  # decode rows first, in the ring too
        slot = state.running[i]
        if slots[slot].scheduled and slots[slot].computed >= slots[slot].prefill_len:
            decoding[entries] = slot
            state.ring[ring, entries, OF_SLOT] = slot
            state.ring[ring, entries, STAMP] = slots[slot].stamp
            state.ring[ring, entries, FLAGS] = PLACEHOLDER
            slots[slot].computed += slots[slot].scheduled
            slots[slot].placeholders += 1
            entries += 1
    num_decoding = entries
    k = _feed_rows(state, sizes, budget, law, seed, step, decoding, num_decoding)
    for i in range(count[NUM_RUNNING]):
        slot = state.running[i]
        if not slots[slot].scheduled or slots[slot].computed > slots[slot].prefill_len:
            continue
        if slots[slot].placeholders:
            continue  # decodes
        prefill_tokens += slots[slot].scheduled
        slots[slot].computed += slots[slot].scheduled
        state.ring[ring, entries, OF_SLOT] = slot
        state.ring[ring, entries, STAMP] = slots[slot].stamp
        state.ring[ring, entries, FLAGS] = 0
        slots[slot].head, slots[slot].last_fed = slots[slot].computed, step
        if slots[slot].computed == slots[slot].prefill_len:
            state.ring[ring, entries, FLAGS] = PLACEHOLDER | PRODUCED
            slots[slot].placeholders += 1
            count[VALID_ROWS] += 1
            if sizes.speculative and count[LAST_ROWS] >= 0:
                make_draft(slots, slot, True, law, seed)
        entries += 1
    if not sizes.speculative:
        for i in range(entries):
            if state.ring[ring, i, FLAGS] & PLACEHOLDER:
                slot = state.ring[ring, i, OF_SLOT]
                slots[slot].eligible = step + sizes.num_stages
    state.ring_size[ring] = entries
    count[NUM_STEPS] += 1
    count[ROWS] += k
    count[PREFILL_TOKENS] += prefill_tokens
    return k, prefill_tokens, entries > 0


@compiled
def _pass_stages(state, step, milliseconds):
    """Each stage takes `milliseconds`; stage 0 waits for the result of step - N."""
    num_stages, ring = len(state.stage_free), len(state.ring_size)
    done = state.clock[0]
    if step >= num_stages:
        done = max(done, state.ring_ms[(step - num_stages) % ring])
    for stage in range(num_stages):
        done = max(done, state.stage_free[stage]) + milliseconds
        state.stage_free[stage] = done
    state.ring_ms[step % ring] = done


@compiled
def run(
    state, sizes, workload, policy, budget, law, confusion, ms, requests, seed, steps
):
    """Run at most `steps` more steps; returns whether all requests have ended.

    Args:
        ms: ([rows] T with drafts, [rows] T without, [tokens] T of prefill), float64.
    """
    count = state.counts
    last_step = count[NUM_STEPS] + steps
    num_requests = len(workload.arrival_ms)
    while count[NUM_STEPS] < last_step:
        arrived = count[NUM_ARRIVED]
        while arrived < num_requests and workload.arrival_ms[arrived] <= state.clock[0]:
            arrived += 1
        count[NUM_ARRIVED] = arrived
        waiting = count[NUM_PREEMPTED] + arrived - count[NUM_STARTED]
        if count[NUM_RUNNING] + waiting + count[NUM_LEAVING] > 0:
            decode_ms = ms[0] if sizes.speculative else ms[1]
            schedule(
                state,
                sizes,
                workload,
                policy,
                requests,
                confusion,
                seed,
                (decode_ms, ms[2]),
            )
            step = count[NUM_STEPS]
            k, prefill_tokens, busy = _run_step(state, sizes, budget, law, seed)
            milliseconds = 0.0
            if busy:
                drafts = sizes.speculative and count[LAST_ROWS] >= 0
                milliseconds = (ms[0] if drafts else ms[1])[k] + ms[2][prefill_tokens]
                count[NUM_BUSY_STEPS] += 1
                count[BLOCK_STEPS] += sizes.num_blocks - count[FREE_BLOCKS]
            _pass_stages(state, step, milliseconds)
            count[IN_QUEUE] += 1
            waiting = count[NUM_PREEMPTED] + arrived - count[NUM_STARTED]
            more = count[NUM_RUNNING] + waiting > 0
            if count[IN_QUEUE] <= sizes.num_stages and (busy or more):
                continue
        elif count[IN_QUEUE] == 0:
            if arrived == num_requests:
                return True
            state.clock[0] = workload.arrival_ms[arrived]
            continue
        oldest = count[NUM_STEPS] - count[IN_QUEUE]
        ready = state.ring_ms[oldest % len(state.ring_ms)]
        state.clock[0] = max(state.clock[0], ready)
        update(state, sizes, workload, policy, oldest)
        count[IN_QUEUE] -= 1
    return False


class Rows(NamedTuple):
    """Of one kind of pipeline: whether it drafts, and with how many rows."""

    budget: RowBudget | None = None  # None: plain PP, vLLM's own rule
    law: DraftLaw = DraftLaw.uniform(0.0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the model runs on, and what vLLM is started with."""

    num_stages: int
    plain: StageTimes  # of a stage without drafts
    speculative: StageTimes  # with them
    num_blocks: int  # of KV memory
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 1 << 20

    def sizes(self, speculative: bool) -> Sizes:
        return Sizes(
            self.num_stages,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.num_blocks,
            self.block_size,
            speculative,
        )

    def check(self, workload: Workload) -> None:
        """Raise ValueError if a request does not fit even alone."""
        most = int((workload.prompt_tokens + workload.max_tokens).max())
        room = (self.num_blocks - 1) * self.block_size
        if most + self.num_stages + 1 > min(room, self.max_model_len):
            raise ValueError(
                f"a request of {most} tokens does not fit into {self.num_blocks} "
                f"blocks of {self.block_size} and max_model_len {self.max_model_len}"
            )


@dataclass(frozen=True)
class Result:
    """What became of the requests. Times in ms, NaN where a run was cut short."""

    milliseconds: float
    steps: int  # of the pipeline, empty ones included
    busy_steps: int
    rows: int  # decode rows run, padding included
    fed_rows: int
    valid_rows: int  # last prefill chunks included
    drafts_after_valid: int  # draft rows whose prefix was right
    accepted_drafts: int  # of those, right themselves
    preemptions: int
    prefill_tokens: int
    recomputed_tokens: int  # of requests that were preempted, prompts included
    refusals: int  # steps in which the policy kept waiting who would have fitted
    kv_usage: float  # share of the blocks, mean over busy steps
    first_token_ms: np.ndarray = field(repr=False)  # [num_requests]
    end_ms: np.ndarray = field(repr=False)
    request_preemptions: np.ndarray = field(repr=False)
    output_tokens: np.ndarray = field(repr=False)
    arrival_ms: np.ndarray = field(repr=False)

    @property
    def theta(self) -> float:
        """Acceptance; 0 without drafts."""
        return self.accepted_drafts / max(self.drafts_after_valid, 1)

    @property
    def throughput(self) -> float:
        """Output tokens a second, from the first arrival to the last end."""
        return 1e3 * float(self.output_tokens.sum()) / self.milliseconds

    @property
    def ttft_ms(self) -> np.ndarray:
        """[num_requests] ms to the first token."""
        return self.first_token_ms - self.arrival_ms

    @property
    def normalised_latency_ms(self) -> np.ndarray:
        """[num_requests] ms from arrival to end, by output token (paper, section 7)."""
        return (self.end_ms - self.arrival_ms) / self.output_tokens

    def summary(self) -> dict[str, float]:
        """Figures for tables and JSON."""
        return dict(
            tokens_per_second=self.throughput,
            steps=self.steps,
            valid_rows_per_step=self.valid_rows / max(self.steps, 1),
            theta=self.theta,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            refusals=self.refusals,
            kv_usage=self.kv_usage,
            mean_normalised_latency_ms=float(self.normalised_latency_ms.mean()),
            ttft_p50_ms=float(np.percentile(self.ttft_ms, 50)),
            ttft_p99_ms=float(np.percentile(self.ttft_ms, 99)),
        )


def simulate(
    machine: Machine,
    workload: Workload,
    rows: Rows,
    policy: AdmissionPolicy,
    *,
    confusion: np.ndarray | None = None,
    seed: int = 0,
    progress: bool = False,
    steps_at_once: int = 20_000,
) -> Result:
    """Serve `workload` and say what became of it.

    Args:
        rows: plain PP, or drafts with their law and row budget.
        policy: of admission; its history is added to in place.
        confusion: [NUM_BUCKETS, NUM_BUCKETS] float64, P(predicted | true bucket) of the
            length predictor; None: it is always right.
        progress: show a bar.
    """
    machine.check(workload)
    sizes = machine.sizes(rows.budget is not None)
    seqs, tokens = machine.max_num_seqs, machine.max_num_batched_tokens
    plain, drafting = machine.plain, machine.speculative
    budget = rows.budget
    if budget is None:
        budget = RowBudget.of_table(np.arange(seqs + 1), drafting, plain)
    arguments: tuple[Any, ...] = (
        sizes,
        workload,
        policy,
        budget,
        rows.law,
        np.eye(NUM_BUCKETS) if confusion is None else confusion,
        (
            drafting.decode_table(seqs),
            plain.decode_table(seqs),
            plain.prefill_table(tokens),
        ),
        Requests.empty(seqs + 1),
        np.int64(seed),
        np.int64(steps_at_once),
    )
    state = State.initial(sizes, workload.num_requests)
    state.clock[0] = workload.arrival_ms[0]
    with tqdm(
        total=workload.num_requests, unit=" requests", disable=not progress
    ) as bar:
        done, valid_rows, last_valid = False, -1, 0
        while not done:
            done = run(state, *arguments)
            steps = int(state.counts[NUM_STEPS])
            if state.counts[VALID_ROWS] > valid_rows:
                valid_rows, last_valid = int(state.counts[VALID_ROWS]), steps
            elif not done and steps - last_valid > MAX_QUIET:
                raise RuntimeError(
                    f"no token in {steps - last_valid} steps: does the row budget "
                    "give rows?"
                )
            bar.update(int(state.counts[NUM_ENDED]) - bar.n)
    count = [int(value) for value in state.counts]
    return Result(
        milliseconds=float(state.requests.end_ms.max() - workload.arrival_ms[0]),
        steps=count[NUM_STEPS],
        busy_steps=count[NUM_BUSY_STEPS],
        rows=count[ROWS],
        fed_rows=count[FED_ROWS],
        valid_rows=count[VALID_ROWS],
        drafts_after_valid=count[DRAFTS_AFTER_VALID],
        accepted_drafts=count[ACCEPTED_DRAFTS],
        preemptions=count[PREEMPTIONS],
        prefill_tokens=count[PREFILL_TOKENS],
        recomputed_tokens=count[RECOMPUTED_TOKENS],
        refusals=count[REFUSALS],
        kv_usage=count[BLOCK_STEPS] / max(count[NUM_BUSY_STEPS], 1) / sizes.num_blocks,
        first_token_ms=state.requests.first_token_ms,
        end_ms=state.requests.end_ms,
        request_preemptions=state.requests.preemptions,
        output_tokens=workload.output_tokens,
        arrival_ms=workload.arrival_ms,
    )
