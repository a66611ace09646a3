# SPDX-License-Identifier: Apache-2.0
"""`spexis serve` and its real clients: one server, SmolLM2 over two stages.

What it answers is compared with transformers, decoding plainly in fp32.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import time
from importlib import util
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
import torch
import transformers
from processes import outlast, processes
from server import Server
from tolerances import LOGPROBS

from spexis_runtime import report
from spexis_runtime.demo import ADAPTER
from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.iteration_log import read_iterations
from spexis_runtime.tools.smollm2 import ensure_smollm2

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
PROMPTS = DEMO_PROMPTS[:6]
MAX_TOKENS = 12
NAME = "smollm2"
ACCEPTED = "spexis_accepted_drafts_total"


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    text: str


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def starting(tmp_path_factory, log_dir):
    server = Server(
        ensure_smollm2(dtype="float32"),
        tmp_path_factory.mktemp("server") / "output",
        *("--served-model-name", NAME, "--dtype", "float32"),
        *("--exit-model", ADAPTER, "--pipeline-parallel-size", 2),
        *("--max-model-len", 256, "--max-num-seqs", 16, "--log-dir", log_dir),
        *("--kv-cache-memory-bytes", 64 << 20, "--shutdown-timeout", 60),
    )
    yield server
    server.kill()


@pytest.fixture(scope="module")
def expected(starting) -> list[Answer]:
    """The plain answers to PROMPTS as chats; made while the server starts."""
    path = ensure_smollm2(dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            messages(prompt),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(
            **inputs,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        answers.append(Answer(token_ids.tolist(), chosen.tolist(), text))
    assert all(len(answer.token_ids) == MAX_TOKENS for answer in answers)
    return answers


@pytest.fixture(scope="module")
def server(starting, expected) -> Server:
    starting.wait_until_ready()
    return starting


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def chat(client, prompt: str, **options):
    settings = dict(model=NAME, temperature=0, max_tokens=MAX_TOKENS) | options
    return client.chat.completions.create(messages=messages(prompt), **settings)


@pytest.mark.works("spexis serve: the openai package, chat with logprobs", stages=[2])
def test_chat_with_logprobs(client, expected):
    for prompt, want in zip(PROMPTS[:2], expected, strict=False):
        choice = chat(client, prompt, logprobs=True, top_logprobs=2).choices[0]
        assert choice.message.content == want.text
        assert choice.finish_reason == "length"
        positions = choice.logprobs.content
        assert [p.logprob for p in positions] == pytest.approx(
            want.logprobs, abs=LOGPROBS["atol"], rel=LOGPROBS["rtol"]
        )
        assert [p.top_logprobs[0].token for p in positions] == [
            p.token for p in positions
        ]


@pytest.mark.works("spexis serve: the openai package, completions", stages=[2])
def test_completions_of_several_prompts(client, expected):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ensure_smollm2(dtype="float32")
    )
    prompts = [
        tokenizer.apply_chat_template(
            messages(prompt), tokenize=False, add_generation_prompt=True
        )
        for prompt in PROMPTS
    ]
    answer = client.completions.create(
        model=NAME, prompt=prompts, temperature=0, max_tokens=MAX_TOKENS, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == [a.text for a in expected]
    assert answer.usage.completion_tokens == MAX_TOKENS * len(PROMPTS)
    got = [logprob for c in answer.choices for logprob in c.logprobs.token_logprobs]
    want = [logprob for a in expected for logprob in a.logprobs]
    assert got == pytest.approx(want, abs=LOGPROBS["atol"], rel=LOGPROBS["rtol"])


@pytest.mark.works("spexis serve: the openai package, streaming", stages=[2])
def test_stream(client, expected):
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in chat(client, PROMPTS[0], stream=True)
    ]
    assert "".join(pieces) == expected[0].text
    assert sum(map(bool, pieces)) > MAX_TOKENS // 2


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.works("spexis serve: the openai package, structured output", stages=[2])
def test_structured_output(client):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    answer = chat(
        client,
        "Name a person, as JSON.",
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": schema},
    ).choices[0]
    assert answer.finish_reason == "stop"
    person = json.loads(answer.message.content)
    assert person.keys() == {"name"}
    assert len(person["name"]) <= 8
    for grammar, pattern in (
        ({"choice": ["purple", "yellow"]}, "purple|yellow"),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
    ):
        answer = chat(client, "Well?", extra_body={"structured_outputs": grammar})
        assert re.fullmatch(pattern, answer.choices[0].message.content)


@pytest.mark.works("spexis serve: the openai package, n", stages=[2])
def test_n_choices(client):
    def texts() -> list[str]:
        answer = chat(client, PROMPTS[2], n=3, temperature=1.0, seed=5)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


@pytest.mark.works("spexis serve: 64 streams at once", stages=[2])
def test_many_streams(server, expected):
    """More than run at a time; each with an end of its own."""

    async def stream(client: openai.AsyncOpenAI, number: int) -> str:
        pieces = await chat(
            client,
            PROMPTS[number % len(PROMPTS)],
            stream=True,
            max_tokens=2 + number % 4,
        )
        return "".join([p.choices[0].delta.content or "" async for p in pieces])

    async def all_of_them() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(stream(client, i) for i in range(64)))

    before = server.metrics()[ACCEPTED]
    texts = asyncio.run(all_of_them())
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ensure_smollm2(dtype="float32")
    )
    for i, text in enumerate(texts):
        token_ids = expected[i % len(PROMPTS)].token_ids[: 2 + i % 4]
        assert text == tokenizer.decode(token_ids)
    assert server.metrics()[ACCEPTED] > before, "nothing speculated"


@pytest.mark.works("spexis serve: a client that goes away in mid-stream", stages=[2])
def test_clients_that_go_away(server, client, log_dir):
    before = server.metrics()
    for number in range(3):
        stream = chat(client, PROMPTS[number], stream=True, max_tokens=200)
        pieces = iter(stream)
        for _ in range(number + 2):
            next(pieces)
        stream.close()
    deadline = time.monotonic() + 30
    while server.metrics()["vllm:num_requests_running"]:
        assert time.monotonic() < deadline, "still running"
        chat(client, "Hello!", max_tokens=1)  # vLLM tells its state after a step
    chat(client, "Hello!", max_tokens=1)
    tokens = "vllm:generation_tokens_total"
    assert server.metrics()[tokens] - before[tokens] < 3 * 200, "not aborted"
    deadline = time.monotonic() + 10
    while read_iterations(log_dir)[-1]["kv_blocks_used"]:
        assert time.monotonic() < deadline, "KV blocks are kept"
        time.sleep(0.1)


def post(body: object, path: str = "chat/completions") -> tuple[str, bytes]:
    return path, body if isinstance(body, bytes) else json.dumps(body).encode()


GOOD = {"model": NAME, "messages": messages("Hello!"), "max_tokens": 2}
MALFORMED = {
    "no JSON": (post(b"{"), 400),
    "not UTF-8": (post(b"\xff"), 400),
    "no messages": (post({"model": NAME}), 400),
    "another model": (post(GOOD | {"model": "other"}), 404),
    "max_tokens": (post(GOOD | {"max_tokens": -1}), 400),
    "temperature": (post(GOOD | {"temperature": -1}), 400),
    "n": (post(GOOD | {"n": 0}), 400),
    "logprobs": (post(GOOD | {"logprobs": True, "top_logprobs": 999}), 400),
    "too long": (post({"model": NAME, "prompt": "a " * 999}, "completions"), 400),
    "regex": (post(GOOD | {"structured_outputs": {"regex": "("}}), 400),
    "no such path": (post(GOOD, "nowhere"), 404),
}


@pytest.mark.works("spexis serve: malformed requests get 4xx", stages=[2])
def test_malformed_requests(server, client):
    got = {
        name: httpx.post(
            f"{server.url}/v1/{path}",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=60,
        ).status_code
        for name, ((path, body), _) in MALFORMED.items()
    }
    assert got == {name: status for name, (_, status) in MALFORMED.items()}
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    assert chat(client, "Hello!", max_tokens=1).choices


def test_the_example_of_a_client(server, expected):
    spec = util.spec_from_file_location("client", EXAMPLES / "client.py")
    example = util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = ["--url", server.url, "--max-tokens", str(MAX_TOKENS)]
    assert example.main([PROMPTS[1], *options]) == expected[1].text


@pytest.mark.works("spexis serve: `vllm bench serve` as load", stages=[2])
def test_vllm_bench_serve(server):
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    result = main(
        parser.parse_args(
            ["--base-url", server.url, "--model", NAME, "--ignore-eos"]
            + ["--tokenizer", str(ensure_smollm2(dtype="float32"))]
            + ["--dataset-name", "random", "--num-prompts", "8"]
            + ["--random-input-len", "16", "--random-output-len", "6"]
            + ["--max-concurrency", "4", "--disable-tqdm"]
        )
    )
    assert isinstance(parser, argparse.ArgumentParser)
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 6


@pytest.mark.works("spexis serve: Prometheus metrics of speculation", stages=[2])
def test_metrics_are_what_the_log_says(server, log_dir):
    deadline = time.monotonic() + 30
    while True:  # the last steps, empty ones, come after the answers
        lines, metrics = read_iterations(log_dir), server.metrics()
        if metrics["spexis_steps_total"] == len(lines) or time.monotonic() > deadline:
            break
    for name in ("normal_rows", "draft_rows", "drafts_after_valid", "accepted_drafts"):
        assert metrics[f"spexis_{name}_total"] == sum(line[name] for line in lines) > 0
    assert metrics["spexis_steps_total"] == len(lines)
    assert metrics["spexis_void_rows_total"] == sum(
        line["draft_rows"] - line["accepted_drafts"] for line in lines
    )
    busy = [line["step_milliseconds"] for line in lines if line["step_milliseconds"]]
    assert metrics["spexis_step_seconds_count"] == len(busy)
    assert metrics["spexis_step_seconds_sum"] == pytest.approx(sum(busy) / 1e3)
    assert metrics["spexis_row_budget"] == lines[-1]["row_budget"]
    for line in lines:
        ranked = line["drafts_by_confidence"]
        assert len(ranked) == line["drafts_after_valid"]
        assert ranked.count("1") == line["accepted_drafts"]
    page = report.page(lines, "a server's log")
    assert "confidence rank" in page
    assert "stage 1</text>" in page
    text = httpx.get(f"{server.url}/metrics").text
    labels = re.findall(r"^vllm:generation_tokens_total({.*})", text, re.MULTILINE)
    assert labels == re.findall(rf"^{ACCEPTED}({{.*}})", text, re.MULTILINE)


def test_the_dashboard_asks_for_metrics_that_exist(server):
    """And those that grow have grown."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    metrics, shown = server.metrics(), set()
    for panel in dashboard["panels"]:
        queries = " ".join(target["expr"] for target in panel["targets"])
        names = set(re.findall(r"(?:spexis_|vllm:)\w+", queries))
        assert names <= metrics.keys(), panel["title"]
        grows = [name for name in names if re.search("(total|bucket)$", name)]
        assert all(metrics[name] for name in grows), panel["title"]
        shown |= names
    (models,) = (
        v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"
    )
    assert re.search(r"label_values\((\w+),", models)[1] in metrics
    ours = {
        name for name in metrics if re.match(r"spexis_.*(total|budget|bucket)", name)
    }
    assert ours <= shown, "not on the dashboard"


@pytest.mark.works("spexis serve: a dead stage fails /health in seconds", stages=[2])
def test_a_killed_stage(server, client):
    """The last test: it ends the server."""
    started = processes(server.process.pid)
    stages = [pid for pid, command in started.items() if "RayWorkerProc" in command]
    assert len(stages) == 2
    assert server.healthy()
    stream = iter(chat(client, PROMPTS[3], stream=True, max_tokens=150))
    next(stream)
    os.kill(stages[0], signal.SIGKILL)
    begin = time.monotonic()
    while server.healthy():
        assert time.monotonic() - begin < 15, "still said to be healthy"
        time.sleep(0.1)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in stream:
            pass
    server.process.wait(timeout=60)
    assert not outlast(started)
