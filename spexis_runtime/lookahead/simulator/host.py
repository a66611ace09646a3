# SPDX-License-Identifier: Apache-2.0
"""The host's part of a step: vLLM's scheduler with SpexisScheduler's rules.

Same order, same arithmetic: running requests first, in order of admission; where blocks
lack, who was admitted last is preempted; then the queue, unless somebody was preempted.
No prefix cache: a preempted request computes all of its tokens again.
"""

from spexis_runtime.lookahead.admission import HISTORY, LOOKAHEAD, VLLM, admits
from spexis_runtime.lookahead.draft_law import BUCKET, LENGTH, uniform
from spexis_runtime.lookahead.jit import compiled
from spexis_runtime.lookahead.length_history import record_length
from spexis_runtime.lookahead.protocol import admit
from spexis_runtime.lookahead.simulator.state import (
    FLAGS,
    FREE_BLOCKS,
    LAST_STAMP,
    NUM_ARRIVED,
    NUM_ENDED,
    NUM_FREE_SLOTS,
    NUM_LEAVING,
    NUM_PREEMPTED,
    NUM_RUNNING,
    NUM_STARTED,
    NUM_STEPS,
    OF_SLOT,
    PLACEHOLDER,
    PREEMPTIONS,
    PRODUCED,
    RECOMPUTED_TOKENS,
    REFUSALS,
    STAMP,
)


@compiled
def _leave(state, slot):
    """The request of `slot` gives its blocks back; the stages hear a step later."""
    state.counts[FREE_BLOCKS] += state.slots[slot].blocks
    state.slots[slot].stamp = 0
    state.leaving[state.counts[NUM_LEAVING]] = slot
    state.counts[NUM_LEAVING] += 1


@compiled
def _free_slots(state):
    """The stages free slots in the order of their requests' names."""
    count, leaving = state.counts, state.leaving
    for i in range(1, count[NUM_LEAVING]):
        slot, j = leaving[i], i
        while j and state.slots[leaving[j - 1]].request > state.slots[slot].request:
            leaving[j] = leaving[j - 1]
            j -= 1
        leaving[j] = slot
    for i in range(count[NUM_LEAVING]):
        state.free_slots[count[NUM_FREE_SLOTS]] = leaving[i]
        count[NUM_FREE_SLOTS] += 1
    count[NUM_LEAVING] = 0


@compiled
def _blocks_lacking(state, slot, num_tokens, block_size):
    """Blocks that `slot` needs for its first `num_tokens` tokens, and has not."""
    return max(
        0, (num_tokens + block_size - 1) // block_size - state.slots[slot].blocks
    )


@compiled
def _schedule_running(state, sizes, workload, budget):
    """Returns (tokens left of the budget, whether somebody was preempted)."""
    count = state.counts
    preempted = False
    i = 0
    while i < count[NUM_RUNNING] and budget > 0:
        slot = state.running[i]
        i += 1
        request = state.slots[slot].request
        computed, placeholders = (
            state.slots[slot].computed,
            state.slots[slot].placeholders,
        )
        last = workload.prompt_tokens[request] + workload.max_tokens[request]
        if placeholders > 0 and computed + 2 - placeholders >= last:
            continue  # a step in flight will surely end it
        if count[NUM_STEPS] < state.slots[slot].eligible:
            continue
        new = min(state.slots[slot].tokens + placeholders - computed, budget)
        new = min(new, sizes.max_model_len - computed - 1)
        if new <= 0:
            continue
        lacking = _blocks_lacking(state, slot, computed + new, sizes.block_size)
        while lacking > count[FREE_BLOCKS]:
            count[NUM_RUNNING] -= 1
            victim = state.running[count[NUM_RUNNING]]
            _leave(state, victim)
            preempted = True
            count[PREEMPTIONS] += 1
            state.requests[state.slots[victim].request].preemptions += 1
            state.preempted[count[NUM_PREEMPTED]] = state.slots[victim].request
            count[NUM_PREEMPTED] += 1
            if victim == slot:
                return budget, True
        count[FREE_BLOCKS] -= lacking
        state.slots[slot].blocks += lacking
        state.slots[slot].scheduled = new
        budget -= new
    return budget, preempted


@compiled
def _describe(requests, at, request, known, workload, generated, confusion, seed):
    """Write what the host knows of a request into entry `at` of `requests`."""
    requests.tokens[at] = known
    requests.generated[at] = generated
    requests.limit[at] = workload.max_tokens[request]
    requests.draw[at] = uniform(seed, request, 0, LENGTH)
    remaining = workload.output_tokens[request] - generated
    bucket = 0
    while bucket < len(confusion) - 1 and remaining >= 4 << bucket:
        bucket += 1
    draw = uniform(seed, request, generated, BUCKET)
    predicted = 0
    while predicted < len(confusion) - 1 and draw >= confusion[bucket, predicted]:
        draw -= confusion[bucket, predicted]
        predicted += 1
    requests.bucket[at] = predicted
    requests.age[at] = 0  # every token comes with a prediction


@compiled
def _may_start(
    state, sizes, workload, policy, requests, confusion, seed, request, tokens, ms
):
    """Ask the policy; `ms` are the tables of decode and prefill times."""
    if policy.rule == VLLM:
        return True
    count = state.counts
    running = count[NUM_RUNNING]
    for i in range(running):
        slot = state.running[i]
        other = state.slots[slot].request
        known = state.slots[slot].tokens
        _describe(
            requests,
            i,
            other,
            known,
            workload,
            state.requests[other].generated,
            confusion,
            seed,
        )
    _describe(
        requests,
        running,
        request,
        tokens,
        workload,
        state.requests[request].generated,
        confusion,
        seed,
    )
    decode = ms[0][min(running + 1, len(ms[0]) - 1)]
    pdr = 1 + ms[1][min(tokens, len(ms[1]) - 1)] / decode
    capacity = sizes.num_blocks * sizes.block_size
    return admits(policy, requests, running + 1, capacity, sizes.block_size, pdr)


@compiled
def _start(state, sizes, request, tokens, new):
    """Admit the head of the queue with its first `new` tokens."""
    count = state.counts
    count[NUM_FREE_SLOTS] -= 1
    slot = state.free_slots[count[NUM_FREE_SLOTS]]
    if state.requests[request].preemptions:
        count[NUM_PREEMPTED] -= 1
        count[RECOMPUTED_TOKENS] += tokens
    else:
        count[NUM_STARTED] += 1
    count[LAST_STAMP] += 1
    state.slots[slot].stamp = count[LAST_STAMP]
    state.slots[slot].request = request
    state.slots[slot].tokens = state.slots[slot].prefill_len = tokens
    state.slots[slot].computed = state.slots[slot].placeholders = state.slots[
        slot
    ].eligible = 0
    state.slots[slot].blocks = (new + sizes.block_size - 1) // sizes.block_size
    count[FREE_BLOCKS] -= state.slots[slot].blocks
    state.slots[slot].scheduled = new
    admit(state.slots, slot, request, tokens)
    state.running[count[NUM_RUNNING]] = slot
    count[NUM_RUNNING] += 1


@compiled
def schedule(state, sizes, workload, policy, requests, confusion, seed, ms):
    """Fill `scheduled`, the tokens of each running slot in this step.

    Args:
        policy: AdmissionPolicy; requests: Requests to describe the running ones in.
        confusion: [buckets, buckets], P(predicted | true) of the length predictor.
        ms: decode and prefill times, [max_num_seqs + 1] and [... + 1] float64.
    """
    count = state.counts
    for i in range(count[NUM_RUNNING]):
        state.slots[state.running[i]].scheduled = 0
    budget, preempted = _schedule_running(
        state, sizes, workload, sizes.max_num_batched_tokens
    )
    _free_slots(state)
    if preempted:
        return
    while budget > 0 and count[NUM_RUNNING] < sizes.max_num_seqs:
        if count[NUM_PREEMPTED]:
            request = state.preempted[count[NUM_PREEMPTED] - 1]
        elif count[NUM_STARTED] < count[NUM_ARRIVED]:
            request = count[NUM_STARTED]
        else:
            break
        tokens = workload.prompt_tokens[request] + state.requests[request].generated
        whole = (tokens + sizes.block_size - 1) // sizes.block_size
        if whole > count[FREE_BLOCKS]:
            break
        if not _may_start(
            state,
            sizes,
            workload,
            policy,
            requests,
            confusion,
            seed,
            request,
            tokens,
            ms,
        ):
            count[REFUSALS] += 1
            break
        new = min(tokens, budget)
        _start(state, sizes, request, tokens, new)
        budget -= new


@compiled
def update(state, sizes, workload, policy, step):
    """Take in the result of `step`."""
    count = state.counts
    ring = step % len(state.ring_size)
    ended = False
    for i in range(state.ring_size[ring]):
        slot = state.ring[ring, i, OF_SLOT]
        if state.ring[ring, i, STAMP] != state.slots[slot].stamp:
            continue
        flags = state.ring[ring, i, FLAGS]
        if not flags & PLACEHOLDER:
            continue
        if not sizes.speculative and not flags & PRODUCED:
            continue
        state.slots[slot].placeholders -= 1
        if not flags & PRODUCED:
            state.slots[slot].computed -= 1
            continue
        request = state.slots[slot].request
        state.slots[slot].tokens += 1
        state.requests[request].generated += 1
        if state.requests[request].generated == 1:
            state.requests[request].first_token_ms = state.ring_ms[ring]
        if state.requests[request].generated == workload.output_tokens[request]:
            state.requests[request].end_ms = state.ring_ms[ring]
            count[NUM_ENDED] += 1
            _leave(state, slot)
            ended = True
            if policy.rule == HISTORY or policy.rule == LOOKAHEAD:
                record_length(policy.history, workload.output_tokens[request])
    if ended:
        left = 0
        for i in range(count[NUM_RUNNING]):
            slot = state.running[i]
            if state.slots[slot].stamp:
                state.running[left] = slot
                left += 1
        count[NUM_RUNNING] = left
