"""Writes which guards no recorded plan has reached into docs/explanation/request-faults.md.

    python -m request_faults.guards_page [--by-tests FILE]

Reached is what the records of all runs with ``--guards`` say. What reaches each of the others is in `KNOWN`: a test, or
why there is none. With ``--by-tests``, the tests that `request_faults.guards` has noted as a plugin of pytest are
entered there first.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proof.record import RECORDS, ROOT, kept
from request_faults.guards import guards, reached

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PAGE: Final = ROOT / "docs" / "explanation" / "request-faults.md"
KNOWN: Final = Path(__file__).with_name("guards.json")
BEGIN: Final = "<!-- written by request_faults.guards_page -->\n"
NOTHING: Final = "**nothing found**"
DEFENCE: Final = "a defence: no way to it is known"
OF_INPUT: Final = frozenset(
    {
        "ArrowInvalid",
        "AssertionError",
        "AttributeError",
        "ConfigurationError",
        "Mismatch",
        "NotImplementedError",
        "RowsRejected",
        "ValueError",
    }
)
"""Errors that refuse a configuration, a sink or a row: no fault at a request leads to them."""


def is_of_input(guard: str) -> bool:
    """Return whether a guard refuses what it is given, and not what a service or another driver has done."""
    return guard.rpartition(" ")[2].rpartition(".")[2] in OF_INPUT


def section(every: Iterable[str], records: Iterable[Mapping[str, Any]], known: Mapping[str, str]) -> str:
    """Return the text of the page about guards, ``every`` one of the code."""
    traced = [record for record in records if "guards" in record["figures"]]
    met = {guard for record in traced for guard in record["figures"]["guards"]}
    open_to_faults = sorted(guard for guard in every if not is_of_input(guard))
    missed = [guard for guard in open_to_faults if guard not in met]
    why = Counter(known.get(guard, NOTHING) for guard in missed)
    reached_else = len(missed) - why[NOTHING] - why[DEFENCE]
    plans = sum(record["figures"]["plans"] for record in traced)
    rows = "\n".join(f"| {_named(guard)} | {known.get(guard, NOTHING)} |" for guard in missed)
    return (
        f"The {plans:,} plans of {len(traced)} traced runs have reached {len(open_to_faults) - len(missed)} of the "
        f"{len(open_to_faults)} guards.\nOf the {len(missed)} others, something else is known to reach "
        f"{reached_else}, and {why[DEFENCE]} are defences to which no way is known.\nFor {why[NOTHING]} nothing was "
        "found that reaches them: nobody has seen these errors raised.\n\n"
        f"| guard | what reaches it |\n|---|---|\n{rows}\n"
    )


def _named(guard: str) -> str:
    file, function, raised = guard.split(" ", 2)
    return f"`{file}` {function}: `{raised.rpartition('.')[2]}`"


def with_tests(known: Mapping[str, str], by_tests: Mapping[str, str]) -> dict[str, str]:
    """Return what is known, with the tests that have reached guards in place of what was thought of them."""
    found = {}
    for guard, test in by_tests.items():
        file, _, name = test.partition("::")
        if name:
            found[guard] = f"`{Path(file).stem}::{name.rpartition('::')[2].partition('[')[0]}`"
    return dict(sorted({**known, **found}.items()))


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-tests", type=Path, help="a file of EPOCHSINK_GUARDS, of tests")
    parser.add_argument("--keep", type=Path, default=RECORDS, help="the folder of the records")
    given = parser.parse_args()
    every = {name for lines in guards().values() for name in lines.values()}
    known = json.loads(KNOWN.read_text())
    if given.by_tests:
        known = with_tests(known, reached(given.by_tests))
    known = {guard: what for guard, what in known.items() if guard in every}
    KNOWN.write_text(json.dumps(known, indent=0) + "\n")
    head, mark, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + mark + "\n" + section(every, kept(given.keep), known))


if __name__ == "__main__":
    main()
