# SPDX-License-Identifier: Apache-2.0
"""Draw a plot an operation from the files of results, and print README's table.

python -m bench.kernels.plot bench/results/h200 --out docs
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.kernels.results import geometric_mean


def table(contents: dict[str, dict[str, Any]]) -> str:
    """One line an operation: speed against the best rival, and against the limit."""
    lines = [
        "| operation | cases | over the best rival: mean, least | of the limit, best |",
        "|---|---|---|---|",
    ]
    for operation, content in contents.items():
        ratios = [entry["ratio"] for entry in content["cases"]]
        best = max(entry["fraction_of_limit"] for entry in content["cases"])
        lines.append(
            f"| `{operation}` | {len(ratios)} | {geometric_mean(ratios):.2f}x, "
            f"{min(ratios):.2f}x | {best:.0%} |"
        )
    return "\n".join(lines)


def plot(content: dict[str, Any], path: Path) -> None:
    """Microseconds over the limit of each case, ours and the rivals'."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = content["cases"]
    names = ["ours", *sorted({name for case in cases for name in case["rivals"]})]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(cases)))
    for name in names:
        times = [case["ours_us"] if name == "ours" else case["rivals"].get(name)
                 for case in cases]  # fmt: skip
        points = [
            (us / case["limit_us"], i)
            for i, (us, case) in enumerate(zip(times, cases, strict=True))
            if us is not None
        ]
        axes.scatter(*zip(*points, strict=True), label=name, s=18)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), [case["case"] for case in cases], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time / limit of the machine")
    axes.set_title(f"{content['machine']}, {content['date']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", type=Path, help="folder that make bench-kernels wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the plots")
    arguments = parser.parse_args()
    contents = {}
    for path in sorted(arguments.results.glob("*.json")):
        content = json.loads(path.read_text())
        if content.get("cases") and "ours_us" in content["cases"][0]:
            contents[path.stem] = content
            plot(content, arguments.out / f"{path.stem}.png")
    print(table(contents))


if __name__ == "__main__":
    main()
