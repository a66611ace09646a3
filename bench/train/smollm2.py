# SPDX-License-Identifier: Apache-2.0
"""Make and measure what ships for SmolLM2-135M-Instruct, on one GPU.

    python -m bench.train.smollm2 --data DIR --out DIR [--minutes 8.5] [--ablation]
        [--parts NAME ...]

DIR has train_prompts.jsonl, heldout_prompts.jsonl and spec_bench_question.jsonl. Parts
that are done are not done again, and a part that would not end within `--minutes` is
not begun: give the same command again until it says that all is done. `--parts` does
those whose names begin so, that two trainings may share a GPU that one does not fill.
Into OUT come texts, adapters, length predictors and `results/`, what goes to
bench/results. Training prompts that overlap Spec-Bench's are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.train.overlap import overlapping
from bench.train.own_prompts import questions, summaries, translations
from spexis_runtime.train import adapter, evaluate, evaluate_length, length
from spexis_runtime.train.engines import Engine, make_engine
from spexis_runtime.train.generate import generate_texts
from spexis_runtime.train.prompts import read_prompts, write_text

NAME = "smollm2-135m-instruct"
MAX_WEIGHT_BYTES = 16_000_000  # of all that ships
MAX_MODEL_LEN = 2048 + 1024  # of prompt and answer
ENGINE: dict[str, Any] = dict(  # of vLLM, which starts sooner without a compiler
    gpu_memory_utilization=0.25,
    compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
)
NUM_TRANSLATIONS, NUM_QUESTIONS, NUM_SELF_PROMPTS = 1200, 1500, 6000
ADAPTERS = {  # exit layer: inputs, minutes of training
    15: ("5,10,15", 4.5),
    8: ("2,5,8", 4.5),
}
BLOCK = "--intermediate-size 1088"
LENGTH_MINUTES = 0.6
ABLATION_MINUTES = 0.6
ABLATION = {  # what is added to the paper's adapter at layer 15, one thing or all
    "attention_only": "",
    "hard_labels": "--soft-weight 0",
    "soft_labels": "--soft-weight 1",
    "features": "--features 5,10,15",
    "embedding": "--features 0,15",
    "full_block": BLOCK,
    "full_block_features": f"{BLOCK} --features 5,10,15",
    "two_layers": "--intermediate-size 384 --depth 2 --features 7,15",
    "collected_prompts_only": f"{BLOCK} --texts {{out}}/texts-collected",
}


class Part(NamedTuple):
    minutes: float  # estimated
    done: Path  # exists afterwards
    run: Callable[[], None]


def write_prompts(data: Path, out: Path) -> None:
    """OUT/prompts.jsonl: those collected, and our own, without overlaps."""
    collected = read_prompts(str(data / "train_prompts.jsonl"))
    own = [
        *translations(NUM_TRANSLATIONS),
        *questions(NUM_QUESTIONS),
        *summaries(collected),
    ]
    spec_bench = read_prompts(str(data / "spec_bench_question.jsonl"))
    for name, prompts in (("collected", collected), ("prompts", collected + own)):
        drop = set(overlapping(prompts, spec_bench))
        kept = [p for i, p in enumerate(prompts) if i not in drop]
        print(f"{name}: {len(kept)} prompts, {len(drop)} overlap Spec-Bench's: dropped")
        lines = [json.dumps(prompt._asdict()) + "\n" for prompt in kept]
        write_text(out / f"{name}.jsonl", "".join(lines))


def run(main: Callable[[list[str]], None], line: str) -> Callable[[], None]:
    return lambda: main(line.split())


class Texts:
    """The generations, by one engine: vLLM takes a minute to start."""

    def __init__(self, model: Path, out: Path, data: Path, small: float):
        self.model, self.out, self.data, self.small = str(model), out, data, small
        self.engine: Engine | None = None

    def parts(self, ablation: bool) -> dict[str, Part]:
        spec_bench = self.data / "spec_bench_question.jsonl"
        heldout = self.data / "heldout_prompts.jsonl"
        prompts = Part(
            0.2, self.out / "prompts.jsonl", lambda: write_prompts(self.data, self.out)
        )
        train = dict(max_new_tokens=320, max_prompt_tokens=1536)
        parts = {
            "prompts": prompts,
            "train": self.part(
                3.5,
                "train",
                self.out / "prompts.jsonl",
                num_self_prompts=int(NUM_SELF_PROMPTS * self.small),
                **train,
            ),
            "spec_bench": self.part(0.15, "spec_bench", spec_bench, max_new_tokens=128),
        }
        if ablation:
            collected = self.out / "collected.jsonl"
            return parts | {"collected": self.part(2, "collected", collected, **train)}
        return parts | {
            "heldout": self.part(0.15, "heldout", heldout, max_new_tokens=128),
            # answers to their ends, to measure lengths by
            "spec_bench_long": self.part(
                0.3, "spec_bench_long", spec_bench, max_new_tokens=1024
            ),
            "heldout_long": self.part(
                0.3, "heldout_long", heldout, max_new_tokens=1024
            ),
        }

    def part(self, minutes: float, name: str, prompts: Path, **options: int) -> Part:
        folder = self.out / f"texts-{name}"

        def made() -> None:
            limit = None if self.small == 1 else int(200 * self.small)
            options["max_new_tokens"] = int(options["max_new_tokens"] * self.small)
            self.engine = self.engine or make_engine(
                self.model, MAX_MODEL_LEN, 0, **ENGINE
            )
            generate_texts(
                self.model,
                read_prompts(str(prompts), limit),
                folder,
                temperatures=(0.0, 0.7),
                engine=self.engine,
                **options,
            )
            (folder / ".done").touch()

        return Part(minutes, folder / ".done", made)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def trainings(model: Path, out: Path, small: float) -> dict[str, Part]:
    parts = {}
    common = f"--model {model} --texts {out}/texts-train"
    for layer, (features, minutes) in ADAPTERS.items():
        path = out / f"{NAME}-layer{layer}"
        parts[f"adapter {layer}"] = Part(
            minutes + 0.5,
            path,
            run(
                adapter.main,
                f"{common} --exit {layer} --features {features} {BLOCK} --out {path} "
                f"--minutes {minutes * small} --epochs 30",
            ),
        )
    for layer in ADAPTERS:
        path = out / f"{NAME}-layer{layer}-length"
        parts[f"length {layer}"] = Part(
            LENGTH_MINUTES + 0.3,
            path,
            run(
                length.main,
                f"{common} --exit {layer} --out {path} --epochs 20 "
                f"--minutes {LENGTH_MINUTES * small}",
            ),
        )
    return parts


def evaluations(model: Path, out: Path) -> dict[str, Part]:
    parts = {}
    for layer in ADAPTERS:
        name = f"{NAME}-layer{layer}"
        for kind, main, directory, suffix in (
            ("adapter", evaluate.main, f"--adapter {out / name}", ""),
            (
                "length",
                evaluate_length.main,
                f"--predictor {out / name}-length",
                "_long",
            ),
        ):
            for prompts in ("spec_bench", "heldout"):
                target = out / "measured" / f"{kind}_{name}_{prompts}"
                line = f"--model {model} {directory} --out {target}"
                parts[f"eval {kind} {layer} {prompts}"] = Part(
                    0.25,
                    target.with_suffix(".json"),
                    run(main, f"{line} --texts {out}/texts-{prompts}{suffix}"),
                )
        parts[f"results {layer}"] = Part(
            0.1, out / "results" / f"length_{name}.json", _results(out, name)
        )
    return parts


def _results(out: Path, name: str) -> Callable[[], None]:
    """One file a trained thing: its training, and what was measured."""

    def collect() -> None:
        for kind, trained in (("adapter", name), ("length", f"{name}-length")):
            report = json.loads((out / f"{trained}.json").read_text())
            for prompts in ("spec_bench", "heldout"):
                stem = f"{kind}_{name}_{prompts}"
                measured = json.loads((out / "measured" / f"{stem}.json").read_text())
                report[prompts] = measured
                picture = out / "results" / f"{stem}.png"
                picture.parent.mkdir(exist_ok=True)
                shutil.copy(out / "measured" / picture.name, picture)
            text = json.dumps(report, indent=2) + "\n"
            write_text(out / "results" / f"{kind}_{name}.json", text)

    return collect


def ablations(model: Path, out: Path, small: float) -> dict[str, Part]:
    """Short trainings alike but for one thing each, measured on Spec-Bench."""
    parts = {}
    for name, options in ABLATION.items():
        path = out / "ablation" / name
        texts_ = "" if "--texts" in options else f"--texts {out}/texts-train"
        measured = out / "results" / "ablation" / f"{name}.json"

        def both(name=name, options=options, path=path, texts_=texts_) -> None:
            if not path.exists():
                line = f"--model {model} --exit 15 {texts_} --out {path} --epochs 30"
                line += f" --minutes {ABLATION_MINUTES * small} "
                adapter.main((line + options.format(out=out)).split())
            line = f"--model {model} --adapter {path} --texts {out}/texts-spec_bench"
            evaluate.main(f"{line} --out {out}/results/ablation/{name}".split())

        parts[f"ablation {name}"] = Part(ABLATION_MINUTES + 0.5, measured, both)
    return parts


def weight_bytes(out: Path) -> int:
    return sum(
        path.stat().st_size for path in out.glob(f"{NAME}-layer*/model.safetensors")
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train.smollm2", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="directory of the three prompt sets")
    add("--out", type=Path, required=True, help="what is made")
    add("--model", type=Path, help="SmolLM2's directory, if it is there")
    add("--minutes", type=float, default=8.5, help="begin nothing that ends later")
    add("--parts", nargs="+", default=[""], help="those whose names begin so")
    add("--ablation", action="store_true", help="what helps, instead of what ships")
    add("--small", type=float, default=1.0, help="a share, to try the plumbing")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    model = args.model
    if model is None:
        from spexis_runtime.tools.smollm2 import ensure_smollm2

        model = ensure_smollm2()
    texts = Texts(model, args.out, args.data, args.small)
    if args.ablation:
        others = ablations(model, args.out, args.small)
    else:
        others = trainings(model, args.out, args.small) | evaluations(model, args.out)

    def in_time(parts: dict[str, Part]) -> bool:
        for name, part in parts.items():
            if part.done.exists() or not name.startswith(tuple(args.parts)):
                continue
            passed = (time.perf_counter() - start) / 60
            minutes = part.minutes * args.small
            if passed + minutes > args.minutes:
                print(f"{name} takes about {minutes:.1f} min: give the command again")
                return False
            print(f"[{passed:.1f} min] {name}, about {minutes:.1f} min", flush=True)
            part.run()
        return True

    try:
        made = in_time(texts.parts(args.ablation))
    finally:
        texts.close()  # its memory is needed
    if not made or not in_time(others):
        return 1
    if not args.ablation and (size := weight_bytes(args.out)) > MAX_WEIGHT_BYTES:
        print(f"error: the weights take {size} bytes, {MAX_WEIGHT_BYTES} are allowed")
        return 1
    print(f"done; results in {args.out / 'results'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
