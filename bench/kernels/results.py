# SPDX-License-Identifier: Apache-2.0
"""Files of results, one an operation, written after every case so that a run resumes.

    {"machine", "versions", "date", "command", "cases": [
        {"case", "ours_us", "rivals": {name: us}, "best_rival", "ratio", "limit_us",
         "fraction_of_limit"}]}

ratio = time of the best rival / ours; fraction_of_limit = limit_us / ours_us.
"""

import json
import math
from pathlib import Path
from typing import Any


def record(
    case: str, ours_us: float, rivals: dict[str, float], limit_us: float
) -> dict[str, Any]:
    """The entry of a case."""
    best = min(rivals, key=lambda name: rivals[name])
    return {
        "case": case,
        "ours_us": round(ours_us, 2),
        "rivals": {name: round(us, 2) for name, us in rivals.items()},
        "best_rival": best,
        "ratio": round(rivals[best] / ours_us, 4),
        "limit_us": round(limit_us, 2),
        "fraction_of_limit": round(limit_us / ours_us, 4),
    }


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


class Results:
    """The file of one operation."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.content = {**header, "cases": []}
        if path.exists():
            old = json.loads(path.read_text())
            for key in ("machine", "versions"):  # or ratios would mix two machines
                if old[key] != header[key]:
                    raise ValueError(
                        f"{path} has results of {key} {old[key]}, this is "
                        f"{header[key]}: move it away, or write elsewhere"
                    )
            self.content = old

    def done(self, case: str) -> bool:
        return any(entry["case"] == case for entry in self.content["cases"])

    def add(self, entry: dict[str, Any]) -> None:
        self.content["cases"].append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_suffix(".tmp")
        whole.write_text(json.dumps(self.content, indent=1) + "\n")
        whole.replace(self.path)  # a run that is killed leaves the last whole file
