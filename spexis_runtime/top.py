# SPDX-License-Identifier: Apache-2.0
"""`spexis top`: a live table of what an engine that writes a log is doing."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from spexis_runtime.iteration_log import last_iterations, newest_log
from spexis_runtime.report import summary


def view(log_dir: Path, count: int) -> Table:
    """The last `count` iterations of the newest log in `log_dir`."""
    log = newest_log(log_dir)
    table = Table(title=log.name if log else f"no log in {log_dir} yet", min_width=40)
    table.add_column(f"last {count} iterations")
    table.add_column("", justify="right")
    iterations = last_iterations(log_dir, count)
    for name, value in summary(iterations).items() if iterations else ():
        table.add_row(name, value)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis top",
        description="Show what an engine with this log_dir is doing, until Ctrl-C.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("log_dir", type=Path, help="the log_dir of an engine")
    parser.add_argument("--last", type=int, default=200, help="iterations to look at")
    parser.add_argument("--every", type=float, default=1.0, help="seconds")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    args = parser.parse_args(argv)
    if not args.log_dir.is_dir():
        parser.error(f"there is no directory {args.log_dir}")
    if args.last < 1:
        parser.error(f"--last must be at least 1, got {args.last}")
    if not args.every > 0:
        parser.error(f"--every must be > 0, got {args.every}")
    if args.once:
        Console().print(view(args.log_dir, args.last))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(view(args.log_dir, args.last), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(args.every)
            live.update(view(args.log_dir, args.last), refresh=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
