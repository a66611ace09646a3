# SPDX-License-Identifier: Apache-2.0
"""docs/features.md, made from the markers `works` and `refuses` of the tests.

    python tests/feature_table.py            writes it
    python tests/feature_table.py --check    says whether it is up to date

A marker names features; without names it stands for the test's parameter `feature`.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "features.md"
STATUS = {"works": "works", "refuses": "refused before start"}
HEAD = """# Features of vLLM under speculation

Made from the tests by `python tests/feature_table.py`. What works gives the tokens of
plain vLLM, compared in fp32 on a machine without a GPU; what is refused is refused in
one line. N is the number of stages; empty: a test of the host alone.
`make fuzz` mixes what can be mixed, at random.

| feature | with `exit_model` | N | test |
|---|---|---|---|
"""


class Tested(NamedTuple):
    feature: str
    status: str


class Collector:
    """Pytest plug-in: which test shows which feature, with which numbers of stages."""

    def __init__(self) -> None:
        self.tests: dict[Tested, set[str]] = defaultdict(set)
        self.stages: dict[Tested, set[int]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            for marker in item.iter_markers():
                if marker.name not in STATUS:
                    continue
                for feature in marker.args or (params["feature"],):
                    tested = Tested(feature, STATUS[marker.name])
                    self.tests[tested].add(item.nodeid.partition("[")[0])
                    self.stages[tested] |= set(marker.kwargs.get("stages", ()))
                    if "num_stages" in params:
                        self.stages[tested].add(params["num_stages"])


def render() -> str:
    """The file's text, from a collection of all tests."""
    collector = Collector()
    options = ["--collect-only", "-qq", f"--rootdir={ROOT}"]
    code = pytest.main([*options, str(ROOT / "tests")], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {code!r}")
    lines = []
    order = list(STATUS.values())  # what works first, else in the order of the tests
    for tested in sorted(collector.tests, key=lambda t: order.index(t.status)):
        tests = ", ".join(f"`{test}`" for test in sorted(collector.tests[tested]))
        stages = ", ".join(map(str, sorted(collector.stages[tested])))
        lines.append(f"| {tested.feature} | {tested.status} | {stages} | {tests} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    text = render()
    if sys.argv[1:] == ["--check"]:
        if not TABLE.exists() or text != TABLE.read_text():
            sys.exit(f"{TABLE} is not what the tests say: run python {__file__}")
    else:
        TABLE.write_text(text)
        print(f"wrote {TABLE}: {len(text.splitlines()) - len(HEAD.splitlines())} rows")
