"""Find out which mutants of a family's deciding modules the simulation notices alone, without a server.

``python -m mutants.simulated kafka --seconds 20`` plays the family's scenes against each mutant, then fault plans,
until one is violated. `mutants.unseen` lists those that it cannot see, with the reason: they are not tried.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import epochsink
from mutants.mutant import Mutant
from mutants.run import FAMILIES
from mutants.unseen import UNSEEN

PACKAGE: Final = Path(epochsink.__file__).parent
DECIDING: Final = {
    "kafka": (
        *("applied_epochs", "commit", "committer", "fence", "leaders", "record_batch", "redo"),
        *("repair", "rows_in_log", "sweep", "topic_log", "transactions", "witness"),
    ),
    "elasticsearch": (
        *("applied_epochs", "apply", "bulk_body", "bulk_request", "changed_elsewhere", "committer", "connection"),
        *("dead_letter", "deduplicate", "errors", "index_settings", "letters", "pipelines", "target_index"),
    ),
    "postgres": (
        *("applied_epochs", "commit", "committable", "committer", "compared", "holder", "orphans", "place"),
        *("remnants", "repair", "sessions", "sink_table", "staging", "table", "table_identity", "vote"),
    ),
}
HEAVY: Final = (
    "pyarrow.compute",
    "numpy",
    "psycopg",
    "elasticsearch",
    "kafka",
    "confluent_kafka",
    "tenacity",
    "greenlet",
)
LETTERS: Final = {"kafka": ("K",), "elasticsearch": ("E", "F"), "postgres": ("P", "S", "T", "AB", "CD")}
"""The sinks of each family that are played in turn."""


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module of the package with another text."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = PACKAGE / mutant.file
        self._name = f"epochsink.{mutant.file.removesuffix('.py').replace('/', '.')}"
        self._text = self._path.read_text().replace(mutant.old, mutant.new)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Answer for that module."""
        del path, target
        return importlib.util.spec_from_file_location(name, self._path, loader=self) if name == self._name else None

    def create_module(self, spec: Any) -> None:
        """Take the usual kind."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the other text."""
        exec(compile(self._text, self._path, "exec"), vars(module))  # noqa: S102 - what a loader does


def variants(sinks: str) -> tuple[tuple[Any, Any], ...]:
    """Return what is played of one sink: variants, each with the faults that may strike it."""
    from simulation import plans  # noqa: PLC0415 - after the mutant is in place
    from simulation.driver import PRODUCTION, Variant  # noqa: PLC0415 - likewise
    from simulation.kafka_sink import KafkaLogSink  # noqa: PLC0415 - likewise
    from simulation.search_sink import RejectedRowsSink  # noqa: PLC0415 - likewise

    others = [*plans.MEDIUM, *plans.outside(sinks), *plans.backwards(sinks)]
    waiting = Variant(faults_wait=True)
    if sinks in LETTERS["elasticsearch"]:
        others += [("async", sinks, 5), ("async", sinks, 60), ("busy", sinks, 1), ("busy", sinks, 3)]
        letters = [*others, ("retry", sinks)]
        rejected = ((Variant(kinds={sinks: RejectedRowsSink}), letters),) if sinks == "E" else ()
        return ((PRODUCTION, others), (waiting, others), *rejected)
    if sinks in LETTERS["postgres"]:
        return ((PRODUCTION, others), (waiting, others))
    others += plans.HOLDER
    late = [fault for fault in plans.MEDIUM if fault[0] not in ("timeout", "rollback")]
    return (
        (PRODUCTION, others),
        (waiting, others),
        (Variant(kinds={sinks: KafkaLogSink}, kept=sinks), [*plans.MEDIUM, *plans.LOG, *plans.HOLDER]),
        # what a time-out takes away is nowhere else
        (Variant(spool=False), [fault for fault in late if fault[0] not in ("restore", "ledger")]),
    )


def histories(family: str, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield (case, variant) for ever: what strikes, and where rows are kept, change with each."""
    from simulation import plans  # noqa: PLC0415 - after the mutant is in place
    from simulation.explorer import Case, steps_of  # noqa: PLC0415 - likewise

    choose = random.Random(seed)
    steps = {sinks: steps_of(sinks, 0) for sinks in LETTERS[family]}
    for depth in itertools.cycle((1, 2, 2, 3)):
        for sinks in LETTERS[family]:
            for variant, some in variants(sinks):
                every = plans.by_kind(some)
                found = [
                    (choose.randint(1, steps[sinks] + 20), choose.choice(every[choose.choice(sorted(every))]))
                    for _ in range(depth)
                ]
                yield Case(tuple(sorted(found)), sinks, 0), variant


def scenes(family: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each scene of a family, and what is wrong with it."""
    from simulation import scene  # noqa: PLC0415 - after the mutant is in place
    from simulation.explorer import quiet  # noqa: PLC0415 - likewise

    for name in ("kafka_scenes", "postgres_scenes", "search_scenes"):
        importlib.import_module(f"simulation.{name}")
    with quiet():
        for letters, one in scene.SCENES[family]:
            yield f"{letters} {one.__name__}", scene.play(letters, one)


def noticed(family: str, seconds: float, seed: int) -> tuple[int, Any, list[str]]:
    """Return how many plans were played, and the last one with what it violates; nothing if none is violated."""
    from simulation.explorer import quiet  # noqa: PLC0415 - after the mutant is in place

    begun = time.process_time()
    with quiet():
        for count, (case, variant) in enumerate(histories(family, seed), 1):
            if violations := case.violations(variant):
                return count, (case, variant), violations
            if time.process_time() - begun > seconds:
                return count, None, []
    raise AssertionError("histories() never ends")


def judge(mutant: Mutant | None, family: str, seconds: float, seed: int) -> int:
    """Play against one mutant, in this process, and say how it went."""
    if mutant is not None:
        sys.meta_path.insert(0, Mutated(mutant))
    try:
        played = ((history, [wrong]) for history, wrong in scenes(family) if wrong)
        count, (history, violations) = 0, next(played, (None, list[str]()))
        if not violations and seconds:
            count, history, violations = noticed(family, seconds, seed)
    except Exception as failure:  # noqa: BLE001 - the mutant breaks the code in another way
        count, history, violations = 0, None, [repr(failure)]
    what = "the code as it is" if mutant is None else f"{mutant.file}: {mutant.harm}"
    sys.stdout.write(f"{'KILLED' if violations else 'ALIVE '} {count:5} {what}\n")
    if violations:
        sys.stdout.write(f"             {violations[0][:150]!r} {history or ''}\n")
    sys.stdout.flush()
    return 0 if violations else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the mutants of a family."""
    parser = argparse.ArgumentParser(prog="python -m mutants.simulated", description=__doc__)
    parser.add_argument("family", choices=sorted(DECIDING))
    parser.add_argument("--seconds", type=float, default=20.0, help="processor time for each mutant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="those whose file, text or harm contains this")
    asked = parser.parse_args(arguments)
    for name in HEAVY:
        # once, and not in each process that judges a mutant
        importlib.import_module(name)
    files = {f"{asked.family}/{name}.py" for name in DECIDING[asked.family]}
    found: list[Mutant | None] = [None]
    excluded = 0
    for each in FAMILIES[asked.family]:
        if each.file not in files or asked.only not in f"{each.file} {each}":
            continue
        if reason := UNSEEN.get((each.file, each.old), each.equivalent):
            excluded += 1
            sys.stdout.write(f"UNSEEN       {each.file}: {each.harm}\n             {reason}\n")
        else:
            found.append(each)
    sys.stdout.flush()
    alive = 0
    for mutant in found:
        child = os.fork()
        if not child:
            os._exit(judge(mutant, asked.family, asked.seconds, asked.seed))
        _, status = os.waitpid(child, 0)
        alive += bool(status) and mutant is not None
    tried = len(found) - 1
    sys.stdout.write(f"{tried - alive} of {tried} noticed, {excluded} cannot be seen\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
