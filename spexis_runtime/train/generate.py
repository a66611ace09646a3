# SPDX-License-Identifier: Apache-2.0
"""Let the target answer prompts, once; `train` and `eval` read the texts again.

    spexis generate --model DIR --prompts FILE --out TEXTS
        [--temperatures 0 0.7] [--self-prompts N] [--top-logits K]

Each dialogue of the prompts is carried on turn by turn with the target's own answers,
at each temperature; each answer becomes a text. The same command after a kill goes on
with the next shard.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from spexis_runtime.train.arguments import (
    count,
    errors_in_one_line,
    natural,
    non_negative,
)
from spexis_runtime.train.engines import Engine, Request, make_engine
from spexis_runtime.train.prompts import (
    DEMO,
    Prompt,
    TrainError,
    prompts_hash,
    read_prompts,
    write_text,
)
from spexis_runtime.train.target import (
    Target,
    end_tokens,
    load_config,
    load_tokenizer,
)
from spexis_runtime.train.texts import Text, TextStore

SHARD_DIALOGUES = 8192  # their later turns are few: many together fill batches
SELF_PROMPTS_FILE = "self_prompts.jsonl"
SELF_PROMPT_TOKENS = 96
SELF_PROMPT_SEEDS = 1 << 60  # beyond those of dialogues
_MARK = "\x00"


class Dialogue(NamedTuple):
    prompt: Prompt
    temperature: float
    seed: int
    number: int  # of the prompt


def dialogues(
    prompts: Sequence[Prompt], temperatures: Sequence[float], seed: int
) -> list[Dialogue]:
    """Each prompt at each temperature; a seed of its own for each."""
    return [
        Dialogue(prompt, temperature, (seed << 32) + i * len(prompts) + j, j)
        for i, temperature in enumerate(temperatures)
        for j, prompt in enumerate(prompts)
    ]


def encode(tokenizer: Any, messages: Sequence[str]) -> list[int]:
    """Token ids of a dialogue, the user's turn first and last, ready for an answer."""
    if not tokenizer.chat_template:
        return tokenizer("\n".join(messages))["input_ids"]
    return tokenizer.apply_chat_template(
        [
            {"role": ("user", "assistant")[i % 2], "content": message}
            for i, message in enumerate(messages)
        ],
        add_generation_prompt=True,
        return_dict=False,
    )


def answer(
    engine: Engine,
    tokenizer: Any,
    ends: frozenset[int],
    batch: Sequence[Dialogue],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    top_logits: int = 0,
) -> list[Text]:
    """A text for each turn of each dialogue whose prompt is not too long, or empty.

    A dialogue ends at the first turn that is too long.
    """
    texts: list[Text] = []
    going = [(dialogue, list(dialogue.prompt.turns[:1])) for dialogue in batch]
    turn = 0
    while going:
        encoded = [(d, m, encode(tokenizer, m)) for d, m in going]
        encoded = [x for x in encoded if 0 < len(x[2]) <= max_prompt_tokens]
        # a seed of 64 bits: turn, then the dialogue's
        requests = [
            Request(ids, d.temperature, (turn << 48) + d.seed) for d, _, ids in encoded
        ]
        answers = engine.generate(requests, max_new_tokens, top_logits)
        turn += 1
        going = []
        for (d, messages, ids), request, found in zip(
            encoded, requests, answers, strict=True
        ):
            ended = found.ids[-1] in ends
            texts.append(
                Text(
                    ids + found.ids,
                    len(ids),
                    d.number,
                    d.prompt.category,
                    request.seed,
                    d.temperature,
                    ended,
                    found.labels,
                )
            )
            if turn < len(d.prompt.turns):
                said = tokenizer.decode(found.ids, skip_special_tokens=True)
                going.append((d, [*messages, said, d.prompt.turns[turn]]))
    return texts


def self_prompts(
    engine: Engine, tokenizer: Any, ends: frozenset[int], number: int, seed: int
) -> list[Prompt]:
    """Prompts that the target itself says where a user's turn is expected.

    Raises TrainError for a model without a chat template.
    """
    if not tokenizer.chat_template:
        raise TrainError("self-prompts need a model with a chat template")
    around = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False
    )
    start = tokenizer(around.split(_MARK)[0], add_special_tokens=False)["input_ids"]
    if not start:
        raise TrainError("self-prompts need a chat template that opens a user's turn")
    requests = [
        Request(start, 1.0, SELF_PROMPT_SEEDS + (seed << 32) + i) for i in range(number)
    ]
    answers = engine.generate(requests, SELF_PROMPT_TOKENS, 0)
    said = [
        tokenizer.decode(a.ids, skip_special_tokens=True).strip()
        for a in answers
        if a.ids[-1] in ends
    ]
    return [Prompt((text,), "self", "self") for text in dict.fromkeys(said) if text]


def generate_texts(
    model: str,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    max_prompt_tokens: int = 2048,
    max_new_tokens: int = 256,
    num_self_prompts: int = 0,
    top_logits: int = 0,
    seed: int = 0,
    engine: Engine | None = None,
) -> TextStore:
    """The texts in directory `out`, made as far as they are not there.

    By `engine`, or else by one that is made and closed.

    Raises TrainError where `out` holds texts made from something else, or where every
    prompt is too long.
    """
    hf_config, tokenizer = load_config(model), load_tokenizer(model)
    total = (len(prompts) + num_self_prompts) * len(temperatures)
    store = TextStore.create(
        out,
        {
            "model": Path(model).name,
            "vocab_size": hf_config.vocab_size,
            "tokenizer": tokenizer_hash(tokenizer),
            "prompts": prompts_hash(prompts),
            "num_prompts": len(prompts),
            "num_self_prompts": num_self_prompts,
            "temperatures": list(temperatures),
            "max_prompt_tokens": max_prompt_tokens,
            "max_new_tokens": max_new_tokens,
            "top_logits": top_logits,
            "seed": seed,
            "num_shards": -(-total // SHARD_DIALOGUES),
        },
    )
    if not store.missing_shards():
        return store
    if engine is not None:
        _write_missing(store, engine, model, tokenizer, prompts)
        return store
    own_engine = make_engine(model, max_prompt_tokens + max_new_tokens, top_logits)
    try:
        _write_missing(store, own_engine, model, tokenizer, prompts)
    finally:
        own_engine.close()
    return store


def _write_missing(
    store: TextStore,
    engine: Engine,
    model: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
) -> None:
    settings, ends = store.settings, end_tokens(model, tokenizer)
    seed, number = settings["seed"], settings["num_self_prompts"]
    every = list(prompts)
    if number:
        file = store.path / SELF_PROMPTS_FILE
        if not file.exists():
            own = self_prompts(engine, tokenizer, ends, number, seed)
            lines = [json.dumps(p._asdict()) + "\n" for p in own]
            write_text(file, "".join(lines))
        every += read_prompts(str(file)) if file.stat().st_size else []
    queue = dialogues(every, settings["temperatures"], seed)
    missing = store.missing_shards()
    with tqdm(total=len(missing), desc="generate", unit="shard") as bar:
        for index in missing:
            # every num_shards-th: shards alike, so that the bar tells the time
            texts = answer(
                engine,
                tokenizer,
                ends,
                queue[index :: store.num_shards],
                max_prompt_tokens=settings["max_prompt_tokens"],
                max_new_tokens=settings["max_new_tokens"],
                top_logits=settings["top_logits"],
            )
            if not texts:
                limit = settings["max_prompt_tokens"]
                raise TrainError(
                    f"every prompt is longer than {limit} tokens, or empty"
                )
            store.write_shard(index, texts)
            bar.update()


def tokenizer_hash(tokenizer: Any) -> str:
    """Differs where the same text may become other tokens."""
    sample = "Spexis 0123456789: Ünïcödé, tabs\\tand\\nlines; def f(x): return x**2"
    return f"{len(tokenizer)}:{tokenizer(sample)['input_ids']}"


def check_tokenizer(target: Target, store: TextStore) -> None:
    if tokenizer_hash(target.tokenizer) != store.settings["tokenizer"]:
        raise TrainError(f"{store.path} was written with another tokenizer")


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-prompt-tokens", type=count, default=2048, help="leave out longer ones")
    add("--max-new-tokens", type=count, default=256, help="length of the answers")
    add(
        "--temperatures",
        type=non_negative,
        nargs="+",
        default=[0.0, 0.7],
        help="an answer at each; 0 is greedy",
    )
    add("--self-prompts", type=natural, default=0, help="prompts of its own, too")
    add("--top-logits", type=natural, default=0, help="labels to record at each token")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis generate",
        description="Let a model answer prompts, once, for training and evaluation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory")
    add("--prompts", required=True, help=f'.jsonl or .json file, or "{DEMO}"')
    add("--limit", type=count, help="use the first prompts only")
    add("--out", type=Path, required=True, help="directory of the texts")
    add("--seed", type=natural, default=0, help="of the sampling")
    add_generation_arguments(parser)
    args = parser.parse_args(argv)
    with errors_in_one_line():
        store = generate_texts(
            args.model,
            read_prompts(args.prompts, args.limit),
            args.out,
            temperatures=args.temperatures,
            max_prompt_tokens=args.max_prompt_tokens,
            max_new_tokens=args.max_new_tokens,
            num_self_prompts=args.self_prompts,
            top_logits=args.top_logits,
            seed=args.seed,
        )
    texts = list(store.texts())
    tokens = sum(len(text.response) for text in texts)
    print(f"{len(texts)} texts of {tokens} tokens in {args.out}")


if __name__ == "__main__":
    main()
