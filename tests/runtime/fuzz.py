# SPDX-License-Identifier: Apache-2.0
"""Random rounds of requests, each a pure function of its seed, and how to play them.

No round asks for what vLLM refuses, or for what has no answer: where a grammar or
`allowed_token_ids` leaves few tokens, nothing else forbids those.
"""

import random
import string
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from small_models import END, VOCABULARY
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams

MAX_MODEL_LEN, MAX_NUM_SEQS = 160, 8
MAX_STEPS = 5000
MAX_WAIT = 45  # seconds for a step
EOS = VOCABULARY.index(END)
LOGPROBS = ("logprobs", "prompt_logprobs")
LETTERS = [VOCABULARY.index(char) for char in string.ascii_letters + string.digits]
OTHERS = [token for token in range(len(VOCABULARY)) if token not in [EOS, *LETTERS]]
FEATURES = {  # name -> share of the rounds
    "sampling": 0.7,
    "n": 0.5,
    "top_k": 0.4,
    "top_p": 0.4,
    "min_p": 0.2,
    "logprobs": 0.3,
    "prompt_logprobs": 0.2,
    "penalties": 0.4,
    "structured_outputs": 0.4,
    "allowed_token_ids": 0.4,
    "logit_bias": 0.6,
    "bad_words": 0.25,
    "stop_token_ids": 0.4,
    "min_tokens": 0.4,
    "stop": 0.6,
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["a", "bc", 7, None]},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
]
REGEXES = [r"[a-h]{3,9}", r"(xy|yx|\n)+z", r"[0-9]{2}-[0-9]{2}", r"é[xyz]*\."]


class Request(NamedTuple):
    prompt: list[int]
    options: dict[str, Any]  # of SamplingParams; plain values, to be printed

    def params(self) -> SamplingParams:
        options = dict(self.options)
        if grammar := options.pop("structured_outputs", None):
            options["structured_outputs"] = StructuredOutputsParams(**grammar)
        return SamplingParams(**options)


class Round(NamedTuple):
    """Steps are counted in those of the engine's front end that gave an output."""

    seed: int
    requests: list[Request]
    arrivals: dict[int, list[int]]  # step -> requests
    aborts: dict[int, int]  # request -> its age in steps
    resets: dict[int, bool]  # step of a `reset_prefix_cache` -> of running ones too
    theta: float | None  # how often the drafts are right; None: the adapter's own
    rows: dict[str, Any]  # row_budget or drop_ratio

    def to_compare_with(self) -> "Round":
        """The same requests, all at once and to their end, with all logprobs."""
        requests = [
            request._replace(
                options=request.options
                | {name: -1 for name in LOGPROBS if name in request.options}
            )
            for request in self.requests
        ]
        numbers = list(range(len(requests)))
        return self._replace(
            requests=requests, arrivals={0: numbers}, aborts={}, resets={}
        )

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {len(self.requests)} requests, theta {self.theta}, "
            f"rows {self.rows or 'all'}, aborts {self.aborts}, resets {self.resets}"
        )


@dataclass
class Played:
    """What a round gave: completions by request and number, as far as they got."""

    completions: dict[tuple[int, int], CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions.values())


# ---- a round from its seed ----------------------------------------------------------
def make_round(seed: int, num_stages: int) -> Round:
    rng = random.Random(seed)
    requests = make_requests(rng)
    arrivals: dict[int, list[int]] = {}
    order = list(range(len(requests)))
    rng.shuffle(order)
    for i in order:
        late = rng.random() < 0.5
        arrivals.setdefault(rng.randint(1, 60) if late else 0, []).append(i)
    abort_rate = rng.choice([0, 0.1, 0.4])
    aborts = {
        i: rng.choice([0, rng.randint(1, 8), rng.randint(5, 60)])
        for i in order
        if rng.random() < abort_rate
    }
    resets = {rng.randint(1, 80): rng.random() < 0.7 for _ in range(rng.randint(0, 4))}
    return Round(
        seed,
        requests,
        arrivals,
        aborts,
        resets if rng.random() < 0.5 else {},
        theta=rng.choice([None, 0.0, 0.3, 0.6, 0.9, 1.0]),
        rows=rng.choice(
            [
                {},
                {"row_budget": rng.randint(-(-MAX_NUM_SEQS // num_stages), 8)},
                {"drop_ratio": rng.choice([0.1, 0.5, 0.9])},
            ]
        ),
    )


def make_requests(rng: random.Random) -> list[Request]:
    """8 to 40 requests, a third of them with a common prefix or the same prompt.

    A round has some of the features only: what two of them do to each other is not
    hidden by a third, and some take most of a step's time in Triton's interpreter.
    """
    features = [name for name, rate in FEATURES.items() if rng.random() < rate]
    shared = rng.choices(LETTERS, k=MAX_MODEL_LEN // 2)
    requests: list[Request] = []
    for _ in range(rng.randint(8, 40)):
        longest = MAX_MODEL_LEN - 1
        length = rng.choice(
            [1, rng.randint(2, 50), rng.randint(2, 50), rng.randint(16, 18)]
            + [rng.randint(longest - 20, longest)] * (rng.random() < 0.3)
        )
        prompt = rng.choices(LETTERS, k=length)
        if rng.random() < 0.3:
            cut = min(rng.choice([15, 16, 17, 31, 32, 33, 64, 80]), length)
            prompt = shared[:cut] + prompt[cut:]
        elif requests and rng.random() < 0.1:
            prompt = rng.choice(requests).prompt
        options = make_options(rng, features)
        if "min_tokens" in options:  # vLLM 0.26 waits for ever for those past the room
            room = MAX_MODEL_LEN - len(prompt)
            options["min_tokens"] = min(options["min_tokens"], room)
        requests.append(Request(prompt, options))
    return requests


def make_options(rng: random.Random, features: list[str]) -> dict[str, Any]:
    """A random subset of what a request may ask for."""
    asked = {name for name in features if rng.random() < 0.5}
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, rng.randint(2, 12), rng.randint(10, 60)]),
        "temperature": 0.0,
        "ignore_eos": rng.random() < 0.6,
        "detokenize": rng.random() < 0.7 or "stop" in asked,
    }
    if "sampling" in asked:
        options |= _sampling(rng, asked)
    if "logprobs" in asked:
        options["logprobs"] = rng.randint(0, 5)
    if "prompt_logprobs" in asked and rng.random() < 0.4:
        options["prompt_logprobs"] = rng.randint(0, 3)
    if "penalties" in asked:
        options |= _penalties(rng)
    letters = rng.sample(string.ascii_lowercase, k=rng.randint(4, 10))
    if "structured_outputs" in asked:
        options["structured_outputs"] = _grammar(rng, letters)
        options["ignore_eos"] = False
    else:
        options |= _bounds_on_tokens(rng, letters, asked)
    if "stop" in asked:  # strings of more than one letter span tokens
        options["stop"] = [
            "".join(rng.choices(letters, k=rng.choice([1, 2, 2, 3])))
            for _ in range(rng.randint(1, 3))
        ]
        options["include_stop_str_in_output"] = rng.random() < 0.5
    return options


def _penalties(rng: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": rng.choice([0.0, -1.5, 0.7, 2.0]),
        "frequency_penalty": rng.choice([0.0, -0.8, 0.5, 1.9]),
        "repetition_penalty": rng.choice([1.0, 0.7, 1.2, 2.5]),
    }


def _sampling(rng: random.Random, asked: set[str]) -> dict[str, Any]:
    """With a seed: without one there is nothing to compare with."""
    options: dict[str, Any] = {
        "temperature": round(rng.uniform(0.2, 1.6), 2),
        "seed": rng.randrange(1 << 40),
    }
    if "n" in asked:
        options["n"] = rng.choice([2, 3])
    if "top_k" in asked:
        options["top_k"] = rng.choice([1, 2, 7, 40])
    if "top_p" in asked:
        options["top_p"] = round(rng.uniform(0.1, 0.99), 2)
    if "min_p" in asked:
        options["min_p"] = round(rng.uniform(0.01, 0.5), 2)
    return options


def _grammar(rng: random.Random, letters: list[str]) -> dict[str, Any]:
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(3)]
    return rng.choice(
        [
            {"choice": words[: rng.randint(1, 3)]},
            {"regex": rng.choice(REGEXES)},
            {"json": rng.choice(SCHEMAS)},
        ]
    )


def _bounds_on_tokens(
    rng: random.Random, letters: list[str], asked: set[str]
) -> dict[str, Any]:
    """What bans tokens or ends at one; the first two letters stay free."""
    ids = [VOCABULARY.index(letter) for letter in letters]
    options: dict[str, Any] = {}
    if "allowed_token_ids" in asked:
        options["allowed_token_ids"] = ids + [EOS] * (rng.random() < 0.3)
    elif "logit_bias" in asked:  # likely enough for stop strings to come up
        bias = {token: round(rng.uniform(2, 7), 1) for token in ids}
        if rng.random() < 0.3:
            bias[EOS] = 5.0
        options["logit_bias"] = bias | {rng.choice(OTHERS): -100.0}
    if "bad_words" in asked:
        options["bad_words"] = [letters[2], letters[0] + letters[1], letters[3] * 3]
    if "stop_token_ids" in asked:
        options["stop_token_ids"] = ids[2:4] + rng.sample(OTHERS, k=4)
    if "min_tokens" in asked:
        options["min_tokens"] = rng.randint(1, 12)
        options["max_tokens"] = rng.randint(12, 40)
    return options


# ---- playing it ---------------------------------------------------------------------
def play(llm: Any, round_: Round) -> Played:
    engine, result = llm.llm_engine, Played()
    arrivals, aborts = dict(round_.arrivals), dict(round_.aborts)
    resets, arrived = dict(round_.resets), dict[int, int]()
    for step in range(MAX_STEPS):
        for i in arrivals.pop(step, []):
            request = round_.requests[i]
            engine.add_request(str(i), request.prompt, request.params())
            arrived[i] = step
        if step in resets:
            engine.reset_prefix_cache(reset_running_requests=resets[step])
        for i, age in list(aborts.items()):
            if i in arrived and step - arrived[i] >= age:
                del aborts[i]
                if str(i) in engine.output_processor.external_req_ids:  # not at its end
                    engine.abort_request([str(i)])
                    result.aborted.add(i)
        if not arrivals and not engine.has_unfinished_requests():
            return result
        if engine.has_unfinished_requests():
            wait_for_output(engine)
            outputs = engine.step()
        else:
            outputs = []
        for output in outputs:
            i = int(output.request_id)
            for completion in output.outputs:
                completion.token_ids = list(completion.token_ids)
                result.completions[i, completion.index] = completion
            if output.prompt_logprobs is not None:
                result.prompt_logprobs[i] = output.prompt_logprobs
    raise AssertionError(f"no end after {MAX_STEPS} steps; arrived: {arrived}")


def wait_for_output(engine: Any) -> None:
    """vLLM's own wait has no end."""
    queue, deadline = engine.engine_core.outputs_queue, time.monotonic() + MAX_WAIT
    while queue.empty():
        assert time.monotonic() < deadline, f"no output for {MAX_WAIT} s"
        time.sleep(0.001)
