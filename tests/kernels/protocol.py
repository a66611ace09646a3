# SPDX-License-Identifier: Apache-2.0
"""A toy pipeline around the package's own pool operations, to test the protocol.

Everything but `absorb`, `select_rows`, `store_drafts` and `verify` is simulated: a toy
language model, stages that run at their own speeds, a paged KV cache on each, a drafter
that is right at a given rate, and a host that schedules, preempts and hears late. A KV
cell holds (token, content) where content depends on every cell before it, so reading a
wrong, stale or freed cell shows in all that follows.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import torch

from spexis_kernels import (
    DRAFT,
    INVALID_TOKEN,
    PAD_SLOT_ID,
    PREFILL,
    RequestPool,
    Rows,
    absorb,
    select_rows,
    store_drafts,
    verify,
)

BLOCK = 4  # tokens in a KV block
VOCAB = 50
MAX_PROMPT, MAX_NEW = 9, 14
FREED = (INVALID_TOKEN, None)

Cell = tuple[int, int | None]


def true_next(tokens: list[int]) -> int:
    """The target model: the next token is a function of the whole prefix."""
    state = 12345
    for token in tokens:
        state = (state * 1_000_003 + token + 17) & 0xFFFFFFFF
    return (state >> 7) % VOCAB


def kv_cell(token: int, before: list[Cell]) -> Cell:
    return token, hash((token, tuple(content for _, content in before)))


def kv_of(tokens: list[int]) -> list[Cell]:
    """What the cells of a prefix must hold."""
    cells: list[Cell] = []
    for token in tokens:
        cells.append(kv_cell(token, cells))
    return cells


@dataclass
class Request:
    """What the host knows of a request; it lags behind the device."""

    tokens: list[int]
    prompt_len: int
    max_tokens: int
    slot: int = PAD_SLOT_ID
    generation: int = 0
    blocks: list[int] = field(default_factory=list)
    prefilled: int = 0  # tokens sent in prefill chunks since admission
    prefill_len: int = 0  # tokens known at admission
    done: bool = False
    aborted: bool = False

    @property
    def running(self) -> bool:
        return self.slot != PAD_SLOT_ID


@dataclass
class Work:
    """One row's tokens on their way through the stages."""

    row: int  # index in the step's Rows
    position: int  # of the first token
    tokens: list[int]
    table: list[int]
    read: list[list[Cell]] = field(default_factory=list)  # by stage, own cells included

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    def cell(self, position: int) -> int:
        return self.table[position // BLOCK] * BLOCK + position % BLOCK


@dataclass
class Step:
    """What travels from stage to stage; removals come before admissions before rows."""

    removed: list[list[int]]  # blocks freed
    admitted: list[tuple[int, int, list[int]]]  # slot, generation, known tokens
    rows: Rows
    work: list[Work]


class Pipeline:
    eos = 0

    def __init__(
        self,
        rng: random.Random,
        *,
        stages: int,
        slots: int,
        blocks: int,
        lag: int,
        theta: float,
        device: str = "cpu",
    ):
        self.rng, self.stages, self.lag, self.theta = rng, stages, lag, theta
        self.device, self.depth = device, max(1, stages - 1)
        self.first = RequestPool.empty(slots, self.depth, device)
        self.last = RequestPool.empty(slots, 1, device)
        self.kv = [[FREED] * (blocks * BLOCK) for _ in range(stages)]
        self.queues: list[deque[Step]] = [deque() for _ in range(stages)]
        nothing = (Rows(*(self.int32([]) for _ in Rows._fields)), self.int32([]))
        self.results = deque([nothing] * stages)  # to stage 0, one a step
        self.inbox: deque[tuple[int, list[tuple[int, int, int]]]] = (
            deque()
        )  # to the host
        self.in_flight = stages + 1 + lag  # steps the host has not heard of
        self.free_blocks, self.free_slots = deque(range(blocks)), deque(range(slots))
        self.blocks, self.slots = blocks, slots
        self.generations = [0] * slots
        self.requests: list[Request] = []
        self.owner: dict[tuple[int, int], Request] = {}  # slot, generation
        self.truth: dict[tuple[int, int], list[int]] = {}  # on the last stage
        self.steps = self.preemptions = self.late = 0
        self.drafts_accepted = self.void = 0

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # ---- host ----------------------------------------------------------------------
    def submit(self, prompt_len: int, max_tokens: int) -> None:
        prompt = [self.rng.randrange(1, VOCAB) for _ in range(prompt_len)]
        self.requests.append(Request(prompt, prompt_len, max_tokens))

    def abort(self, request: Request) -> None:
        """Takes effect with the next step, like everything the host does."""
        request.aborted = True

    def reserve(self, request: Request, length: int) -> bool:
        need = max(0, -(-length // BLOCK) - len(request.blocks))
        if need > len(self.free_blocks):
            return False
        request.blocks += [self.free_blocks.popleft() for _ in range(need)]
        return True

    def release(self, request: Request, removed: list[list[int]]) -> None:
        """Blocks and slot are reusable at once, in the same step."""
        removed.append(request.blocks)
        self.free_blocks.extend(request.blocks)
        self.free_slots.appendleft(request.slot)
        self.first.limit[request.slot] = 0
        request.blocks, request.slot = [], PAD_SLOT_ID

    def hear(self, removed: list[list[int]]) -> None:
        while self.inbox and self.inbox[0][0] <= self.steps:
            for slot, generation, token in self.inbox.popleft()[1]:
                r = self.owner[slot, generation]
                if (r.slot, r.generation) != (slot, generation):
                    self.late += 1
                    continue  # finished, aborted or preempted meanwhile
                r.tokens.append(token)
                if token == self.eos or len(r.tokens) - r.prompt_len >= r.max_tokens:
                    r.done = True
                    self.release(r, removed)

    def schedule(self) -> Step:
        """Free, make room for the running, preempting if there is none, admit."""
        removed: list[list[int]] = []
        admitted = []
        self.hear(removed)
        for r in self.requests:
            if r.aborted and not r.done:
                r.done = True
                if r.running:
                    self.release(r, removed)
        for r in self.requests:
            # the device may feed a position a step beyond what the host has heard of
            while r.running and not self.reserve(r, len(r.tokens) + self.in_flight):
                victim = self.rng.choice([v for v in self.requests if v.running])
                self.preemptions += 1
                self.release(victim, removed)
        for r in self.requests:
            waiting = not (r.running or r.done) and self.rng.random() < 0.7
            length = len(r.tokens) + self.in_flight
            if waiting and self.free_slots and self.reserve(r, length):
                r.slot = self.free_slots.popleft()
                self.generations[r.slot] += 1
                r.generation = self.generations[r.slot]
                r.prefilled, r.prefill_len = 0, len(r.tokens)
                self.owner[r.slot, r.generation] = r
                admitted.append((r.slot, r.generation, list(r.tokens)))
        return Step(removed, admitted, *self.prefill())

    def prefill(self) -> tuple[Rows, list[Work]]:
        """Chunks of known tokens, chosen by the host; decode rows only after them."""
        work, columns = [], []
        for r in self.requests:
            left = r.prefill_len - r.prefilled
            if r.running and left and self.rng.random() < 0.7:
                chunk = self.rng.randint(1, left)
                tokens = r.tokens[r.prefilled : r.prefilled + chunk]
                work.append(Work(len(work), r.prefilled, tokens, list(r.blocks)))
                r.prefilled += chunk
                last = r.prefilled - 1
                columns.append((r.slot, r.generation, last, tokens[-1], PREFILL))
        by_field = zip(*columns, strict=True) if columns else [()] * len(Rows._fields)
        return Rows(*(self.int32(list(column)) for column in by_field)), work

    # ---- stage 0 -------------------------------------------------------------------
    def admit(self, pool: RequestPool, step: Step) -> None:
        for slot, generation, tokens in step.admitted:
            pool.generation[slot] = generation
            pool.known_len[slot], pool.last_token[slot] = len(tokens), tokens[-1]
            pool.head[slot] = pool.limit[slot] = 0
            pool.draft[slot] = INVALID_TOKEN
            pool.last_fed[slot] = -1

    def absorb(self, rows: Rows, accepted: torch.Tensor) -> None:
        absorb(self.first, rows, accepted)

    def select(self, budget: int) -> Rows:
        return select_rows(self.first, num_rows=budget, step=self.steps)

    def step(self, budget: int) -> Rows:
        """Stage 0 takes a step, waiting for later stages only as far as it must."""
        while not self.results:
            self.run_stage(self.rng.choice(self.busy()))
        step = self.schedule()
        self.admit(self.first, step)
        self.absorb(*self.results.popleft())
        prefilled = step.rows.slots.long()
        self.first.head[prefilled] = step.rows.positions + 1
        self.first.last_fed[prefilled] = self.steps
        selected = self.select(budget)
        for i, slot in enumerate(selected.slots.tolist()):
            if slot != PAD_SLOT_ID:
                r = self.owner[slot, int(selected.generations[i])]
                position, token = int(selected.positions[i]), int(selected.tokens[i])
                assert position < int(self.first.limit[slot]), "fed past the limit"
                assert position < len(r.blocks) * BLOCK, "fed past the reserved blocks"
                row = len(step.rows.slots) + i
                step.work.append(Work(row, position, [token], list(r.blocks)))
        step.rows = Rows(*map(torch.cat, zip(step.rows, selected, strict=True)))
        for r in self.requests:
            if r.running and r.prefilled == r.prefill_len:
                self.first.limit[r.slot] = len(r.tokens) + self.in_flight
        self.steps += 1
        self.queues[0].append(step)
        self.run_stage(0)
        return selected

    def draft(self, step: Step) -> None:
        """The exit head: right with rate theta, and more confident when right."""
        tokens, confidence = [0] * len(step.rows.slots), [0.0] * len(step.rows.slots)
        for work in step.work:
            hit = self.rng.random() < self.theta
            prefix = [token for token, _ in work.read[0]]
            tokens[work.row] = true_next(prefix) if hit else self.rng.randrange(VOCAB)
            confidence[work.row] = self.rng.uniform(*((0.5, 1) if hit else (0, 0.8)))
        store_drafts(
            self.first,
            step.rows,
            self.int32(tokens),
            torch.tensor(confidence, device=self.device),
        )

    # ---- stages --------------------------------------------------------------------
    def busy(self) -> list[int]:
        return [stage for stage in range(1, self.stages) if self.queues[stage]]

    def run_stage(self, stage: int) -> None:
        """A stage takes its next step: free, write KV, read KV, pass on."""
        step, kv = self.queues[stage].popleft(), self.kv[stage]
        for blocks in step.removed:
            for block in blocks:
                kv[block * BLOCK : (block + 1) * BLOCK] = [FREED] * BLOCK
        for work in step.work:
            for position, token in enumerate(work.tokens, work.position):
                before = [kv[work.cell(p)] for p in range(position)]
                kv[work.cell(position)] = kv_cell(token, before)
            work.read.append([kv[work.cell(p)] for p in range(work.end)])
        if stage == 0:
            self.draft(step)
        if stage + 1 < self.stages:
            self.queues[stage + 1].append(step)
        else:
            self.finish(step)

    def verify(self, rows: Rows, sampled: torch.Tensor) -> torch.Tensor:
        return verify(self.last, rows, sampled)

    def finish(self, step: Step) -> None:
        """The last stage samples from what it read, verifies and reports."""
        self.admit(self.last, step)
        for slot, generation, tokens in step.admitted:
            self.truth[slot, generation] = list(tokens)
        sampled = [0] * len(step.rows.slots)
        for work in step.work:
            sampled[work.row] = true_next([token for token, _ in work.read[-1]])
        accepted = self.verify(step.rows, self.int32(sampled))
        report = []
        for work in step.work:
            slot, generation = (int(t[work.row]) for t in step.rows[:2])
            true, y = self.truth[slot, generation], int(accepted[work.row])
            fits = [token for token, _ in work.read[0]] == true[: work.end]
            if fits:
                right = kv_of(true[: work.end])
                assert all(read == right for read in work.read), "KV of a valid row"
            newest = work.end == len(true)
            assert (y != INVALID_TOKEN) == (fits and newest), "verdict on a row"
            self.void += not fits
            if y != INVALID_TOKEN:
                self.drafts_accepted += int(step.rows.kinds[work.row]) == DRAFT
                true.append(y)
                report.append((slot, generation, y))
        self.results.append((step.rows, accepted))
        due = max(self.steps + self.lag, self.inbox[-1][0] if self.inbox else 0)
        self.inbox.append((due, report))

    # ---- what must hold ------------------------------------------------------------
    def check_integrity(self) -> None:
        running = [r for r in self.requests if r.running]
        blocks = [*self.free_blocks, *(b for r in running for b in r.blocks)]
        assert sorted(blocks) == list(range(self.blocks)), "blocks leaked"
        slots = [*self.free_slots, *(r.slot for r in running)]
        assert sorted(slots) == list(range(self.slots)), "slots leaked"
        for r in running:
            head, known = (
                int(self.first.head[r.slot]),
                int(self.first.known_len[r.slot]),
            )
            if r.prefilled == r.prefill_len and head:
                assert known - 1 <= head <= known + self.depth, "head"
                assert head <= len(r.blocks) * BLOCK, "head past the reserved blocks"

    def drain(self) -> None:
        """Serve whatever is left; every request finishes, in a bounded time."""
        tokens = sum(r.max_tokens + r.prompt_len for r in self.requests)
        last = self.steps + 100 + 5 * tokens * self.stages
        while not all(r.done for r in self.requests):
            assert self.steps < last, "no progress"
            self.step(self.rng.randint(1, self.slots))
            while self.busy() and self.rng.random() < 0.5:
                self.run_stage(self.rng.choice(self.busy()))
        self.check_integrity()
        assert len(self.free_blocks) == self.blocks, "blocks leaked"
        for r in self.requests:
            self.check_output(r)

    def check_output(self, r: Request) -> None:
        want = r.tokens[: r.prompt_len]
        while len(want) < len(r.tokens):
            want.append(true_next(want))
        assert r.tokens == want, "wrong output"
        new = r.tokens[r.prompt_len :]
        assert self.eos not in new[:-1], "fed past the end"
        if not r.aborted:
            assert new[-1] == self.eos or len(new) == r.max_tokens, "incomplete"
