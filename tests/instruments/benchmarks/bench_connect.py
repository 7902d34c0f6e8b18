"""`make bench ONLY=connect`: an epoch on Spark Connect against one on a classic session, with few rows and with many.

Each turn runs both, one after the other, into a table of PostgreSQL. A ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from bench_epoch import Side
from epoch_worker import Request
from measure import console

import epochsink
from epochsink_devkit.services import LocalPostgres

if TYPE_CHECKING:
    from epoch_worker import Answer

EPOCHS = {1_000: (40, 8), 1_000_000: (4, 2)}
"""How many epochs of a turn count, and how many before them do not."""
AIM = 1.15
FIGURES = {"": "milliseconds", "-processor": "processor_milliseconds"}


def main() -> None:
    """Measure, and print the ratios as the last lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=EPOCHS, choices=EPOCHS, help="rows of an epoch")
    parser.add_argument("--turns", type=int, default=5, help="turns over both (default: %(default)s)")
    said = parser.parse_args()
    own, lines = Path(epochsink.__file__).parents[1], []
    with LocalPostgres() as server, psycopg.connect(server.dsn, autocommit=True) as connection:
        tables = map("bench{}".format, count())
        # no jars: it reads no topic
        with closing(Side(own, of_spark=[""])) as classic, closing(Side(own, of_spark=["", "connect"])) as connect:
            for rows in said.rows:
                epochs, skipped = EPOCHS[rows]
                sides = {"classic": classic, "connect": connect}
                found: dict[str, list[Answer]] = {name: [] for name in sides}
                for turn in range(said.turns):
                    # neither is always the first
                    for name in list(sides)[:: 1 if turn % 2 else -1]:
                        # of its own: what is recorded and not decided as a query stops stays prepared, with its lock
                        table = next(tables)
                        connection.execute(f"CREATE TABLE {table} (id bigint, payload text)".encode())
                        sink = {"Postgres": {"dsn": server.dsn, "table": table}}
                        found[name].append(sides[name].run(Request(rows, epochs, sink, skipped=skipped)))
                    console.print(f"{rows:,} rows, turn {turn + 1}: " + ", ".join(map(_shown, found.items())))
                lines += [_ratio(rows, found, *figure) for figure in FIGURES.items()]
    for line in lines:
        console.print(line, highlight=False)


def _shown(found: tuple[str, list[Answer]]) -> str:
    name, answers = found
    last = answers[-1]
    return f"{name} {last.milliseconds:.0f} ms, processor {last.processor_milliseconds:.0f} ms"


def _ratio(rows: int, found: dict[str, list[Answer]], label: str, figure: str) -> str:
    pairs = zip(found["connect"], found["classic"], strict=True)
    ratios = [getattr(connect, figure) / getattr(classic, figure) for connect, classic in pairs]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"RATIO connect-vs-classic-{rows}{label} {statistics.median(ratios):.2f} ({spread}; aim {AIM})"


if __name__ == "__main__":
    main()
