# SPDX-License-Identifier: Apache-2.0
"""Sweep launch settings of a kernel over cases, on a GPU.

    python -m bench.tune merged_attention --set num_stages=3,4 max_units=8,16 \
        --cases "64/8 x 8 x" "mixed" --out tune.json

Every combination of the values given replaces those fields of the operation's settings,
and is compared with no change. Prints microseconds, best first by geometric mean over
the cases, and writes them as JSON. Cases are chosen by parts of their names.
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.kernels.cases import CASES, Case
from bench.kernels.results import geometric_mean

# operation -> the module that makes its settings, and the function in it
SETTINGS = {
    "merged_attention": ("spexis_kernels.merged_attention", "attention_settings"),
    "merged_attention_fused": ("spexis_kernels.merged_attention", "attention_settings"),
    "merged_attention_chunks": (
        "spexis_kernels.merged_attention",
        "attention_settings",
    ),
    "merged_attention_fp8": ("spexis_kernels.merged_attention", "attention_settings"),
    "draft_head": ("spexis_kernels.draft_head", "_settings"),
}


def combinations(sets: list[str]) -> list[dict[str, int]]:
    """Of ["a=1,2", "b=3"]: {}, {a: 1, b: 3}, {a: 2, b: 3}."""
    names = [entry.split("=")[0] for entry in sets]
    values = [map(int, entry.split("=")[1].split(",")) for entry in sets]
    changes = [
        dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)
    ]
    return [{}, *(change for change in changes if change)]


def chosen_cases(operation: str, parts: list[str]) -> list[Case]:
    """Those whose name has one of the parts; all without any."""
    return [
        case
        for case in CASES[operation]
        if not parts or any(part in case.name for part in parts)
    ]


@contextmanager
def changed_settings(operation: str, change: dict[str, int]) -> Iterator[None]:
    """The operation's settings with these fields replaced."""
    module_name, function = SETTINGS[operation]
    module = importlib.import_module(module_name)
    original = getattr(module, function)

    def settings(*arguments: Any) -> Any:
        return original(*arguments)._replace(**change)

    with mock.patch.object(module, function, settings):
        yield


def ranked(times: list[tuple[dict[str, int], list[float]]]) -> list[dict[str, Any]]:
    """Entries by geometric mean of time over that without a change, best first."""
    base = times[0][1]
    entries = [
        {
            "change": change,
            "us": [round(us, 2) for us in measured],
            "time_over_default": round(
                geometric_mean([a / b for a, b in zip(measured, base, strict=True)]), 4
            ),
        }
        for change, measured in times
    ]
    return sorted(entries, key=lambda entry: entry["time_over_default"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operation", choices=SETTINGS)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=A,B")
    parser.add_argument("--cases", nargs="+", default=[], metavar="PART")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # tolerances
    from bench import gpu
    from bench.kernels.bench_kernels import build

    cases = chosen_cases(arguments.operation, arguments.cases)
    if not cases:
        parser.error(f"no case of {arguments.operation} has {arguments.cases}")
    times: list[tuple[dict[str, int], list[float]]] = [
        (change, []) for change in combinations(arguments.set)
    ]
    for case in cases:
        for change, measured in times:
            with changed_settings(arguments.operation, change):
                work = build(case)
                if work.wrong:
                    raise SystemExit(f"{case.name} with {change}: {work.wrong}")
                measured.append(gpu.compare({"ours": work.ours})["ours"])
                print(f"{case.name}: {measured[-1]:.2f} us with {change}", flush=True)
                del work
    entries = ranked(times)
    result = {
        **gpu.header(" ".join(["python -m bench.tune", *sys.argv[1:]])),
        "operation": arguments.operation,
        "names": [case.name for case in cases],
        "entries": entries,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for entry in entries:
        print(f"{entry['time_over_default']:.3f}  {entry['change']}  {entry['us']}")


if __name__ == "__main__":
    main()
