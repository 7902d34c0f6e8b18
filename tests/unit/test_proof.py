"""What the proof's runs have found adds up, nothing of it is hidden, and its programs start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from harness import WORKLOAD
from part_targets import Findings, PartTargets

from proof import page
from proof.findings import FINDINGS, finding_of
from proof.record import RECORDS, ROOT, Record, kept
from proof.run import ROUNDS
from request_faults import guards_page
from request_faults.guards import guards

if TYPE_CHECKING:
    from collections.abc import Sequence

TESTS = Path(__file__).parents[1]


def start(command: Sequence[str], **settings: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(TESTS / folder) for folder in ("", "support", "instruments", "instruments/benchmarks"))
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_runs_add_up_and_an_anomaly_stays_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "proof"
    for seed, plans, found in ((1, 1000, []), (2, 500, ["LOST K"])):
        Record("simulation", seed).keep(folder, {"plans": plans, "struck": plans // 10, "anomalies": found})
    text = page.write_page(folder).read_text()
    assert "| 2 | 0.0 | 1,500 plans | 150 |" in text
    assert "**Open:**\n\n- simulation, seed 2: LOST K\n" in text
    assert (folder / "anomalies.txt").read_text() == "simulation, seed 2: LOST K\n"
    drawn = " ".join(ET.parse(folder.with_suffix(".svg")).getroot().itertext())  # noqa: S314 - our own
    assert "1,500 plans, 150 struck" in drawn
    assert "1 anomalies, 1 open" in drawn
    assert "faults: 1 open" in drawn
    badges = ET.parse(folder / "badges.svg").getroot()  # noqa: S314 - our own
    assert badges.attrib["aria-label"] == "anomalies open: 1, simulated plans: 1,500"


def test_the_page_is_what_the_records_say() -> None:
    assert RECORDS.with_suffix(".md").read_text() == page.text(kept(RECORDS))
    assert RECORDS.with_suffix(".svg").read_text() == page.picture(page.sums(kept(RECORDS)))
    assert (RECORDS / "anomalies.txt").read_text() == page.raw(kept(RECORDS))
    assert (RECORDS / "badges.svg").read_text() == page.badges(page.sums(kept(RECORDS)))


def test_each_finding_explains_anomalies_of_a_record_and_names_tests_that_exist() -> None:
    explained = {finding_of(record, one) for record in kept(RECORDS) for one in record["figures"]["anomalies"]}
    assert set(FINDINGS) <= explained
    for test in (test for one in FINDINGS for test in one.tests):
        file, _, name = test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(), test


def test_a_finding_explains_no_anomaly_of_a_later_run_with_the_same_seed() -> None:
    record = {"what": "simulation", "seed": 24, "commit": "of today", "figures": {"anomalies": ["LOST E"]}}
    assert page.opens(record) == ["simulation, seed 24: LOST E"]


def test_the_head_of_the_page_has_the_newest_run_of_each_kind(tmp_path: Path) -> None:
    for began, (what, seed) in enumerate([("simulation", 1), ("request faults", "0/1 of kafka"), ("simulation", 2)]):
        record = {"what": what, "seed": seed, "began": f"2026-11-2{began}T00:00:00", "figures": {"anomalies": []}}
        (tmp_path / f"{began}.json").write_text(json.dumps(record))
    assert [one["seed"] for one in page.newest(kept(tmp_path))] == [2, "0/1 of kafka"]


def test_no_page_quotes_a_run_that_a_newer_one_of_its_kind_has_followed() -> None:
    """But for the page of all runs: what one run has tried stands nowhere once another has tried it on later code."""
    records = kept(RECORDS)
    newest = page.newest(records)
    followed = [(one["figures"], page.KINDS[one["what"]]) for one in records if one not in newest]
    said = {f"{figures[about.tried]:,} {about.unit}" for figures, about in followed if figures[about.tried]}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    quoting = {one.name: said & {*re.findall(r"[\d,]+ \w+", one.read_text())} for one in pages if one.stem != "proof"}
    assert {name: quoted for name, quoted in quoting.items() if quoted} == {}


def test_the_guards_that_no_plan_reaches_are_those_of_no_record(tmp_path: Path) -> None:
    reached, tested, missed, of_input = (
        f"kafka/commit.py one {error}" for error in ("WentBack", "self._lost", "errors.unseen", "ConfigurationError")
    )
    for seed, more in ((1, {"guards": [reached]}), (2, {"guards": [reached]}), (3, {})):
        Record("request faults", seed).keep(tmp_path, {"plans": 50, "struck": 50, "anomalies": [], **more})
    known = guards_page.with_tests({}, {tested: "tests/unit/test_a.py::test_b[c]", reached: ""})
    text = guards_page.section([reached, tested, missed, of_input], kept(tmp_path), known)
    assert "The 100 plans of 2 traced runs have reached 1 of the 3 guards." in text
    assert "Of the 2 others, something else is known to reach 1, and 0 are defences to which no way is known." in text
    assert text.splitlines()[-2:] == [
        "| `kafka/commit.py` one: `unseen` | **nothing found** |",
        "| `kafka/commit.py` one: `_lost` | `test_a::test_b` |",
    ]


def test_the_list_of_guards_names_those_of_the_code() -> None:
    every = {name for lines in guards().values() for name in lines.values()}
    assert {"protocol/ledger.py Ledger.take _of_other_query", "kafka/fence.py Fence._refuse_newer WentBack"} <= every


def test_the_page_of_guards_is_what_the_code_and_the_records_say() -> None:
    every = {name for lines in guards().values() for name in lines.values()}
    _, _, written = guards_page.PAGE.read_text().partition(guards_page.BEGIN)
    known = json.loads(guards_page.KNOWN.read_text())
    again = "write it again: python -m request_faults.guards_page"
    assert written == "\n" + guards_page.section(every, kept(RECORDS), known), again


def test_a_run_that_broke_off_counts_nowhere_but_among_the_anomalies(tmp_path: Path) -> None:
    soak = {"later than 30 s": [], "load at the healings": [], "load then": 0, "canaries": 0, "drivers": 0, "epochs": 0}
    soak |= {"healings": 0, "longest progress after healing, s": 0}
    for seed, found in ((1, []), (2, [f"{page.BROKE_OFF}: OSError()"])):
        Record("soak", seed).keep(tmp_path, {**soak, "faults": 100, "source rows": 7, "anomalies": found})
    text = page.text(kept(tmp_path))
    assert "| 2, 1 broke off | 0.0 | 100 faults |  | 7 |  | 1 |" in text
    assert "- soak, seed 2: the run has broken off: OSError()" in text
    assert " | broke off | 1 |" in text


def test_a_short_round_of_the_simulation_leaves_a_record_and_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "proof"
    run = start(["proof.run", "--only=simulation", "--minutes=0.03", "--seed=7", f"--keep={folder}", "--", "--sinks=P"])
    told, _ = run.communicate()
    assert run.returncode == 0, told
    (record,) = kept(folder)
    assert record["figures"]["plans"] > 0
    assert record["seed"] == 7
    assert folder.with_suffix(".md").exists()


class Held(PartTargets):
    """Targets that hold exactly the source, without servers."""

    def __init__(self, ends: dict[int, int]) -> None:
        source = WORKLOAD.source(ends).to_pylist()
        self.held: list[str] = []
        self.rows = Counter((row["src_part"], row["src_off"]) for row in source)
        self.letters = Counter({place: 1 for place in self.rows if place[1] % 7 == 3})
        newest = {row["key"]: row for row in source if row["src_off"] % 7 != 3}
        self.stored = {key: (row["src_part"], row["src_off"]) for key, row in newest.items() if row["op"] == "U"}
        versions: dict[int, list[tuple[int, int]]] = {}
        for row in source:
            versions.setdefault(row["key"], []).append((row["src_off"], row["kver"]))
        self.sums = {
            key: (len(each), sum(off for off, _ in each), max(kver for _, kver in each))
            for key, each in versions.items()
        }

    def appended(self) -> dict[str, Counter[tuple[int, int]]]:
        return {"wide": self.rows}

    def without_key(self) -> dict[str, Counter[tuple[int, int]]]:
        return {"letters": self.letters}

    def keyed(self) -> dict[str, dict[int, tuple[int, int]]]:
        return {"newest": self.stored}

    def counts(self) -> dict[int, tuple[int, int, int]]:
        return self.sums

    def held_back(self) -> list[str]:
        return self.held


def test_the_options_runner_names_what_is_wrong() -> None:
    """Once for each kind: readers held back, a row lost, one doubled, an older row of a key, a sum added twice."""
    ends = {0: 90, 1: 70}
    exact = Findings(Counter())
    exact.final(Held(ends), ends)
    assert exact.shown == []

    held, found = Held(ends), Findings(Counter())
    held.held = ["partition 0 of wide: last stable offset 7, high watermark 8"]
    del held.rows[0, 7]
    held.rows[1, 3] += 1
    del held.letters[1, 3]
    key = next(iter(held.stored))
    held.stored[key] = (held.stored[key][0], 0)
    rows, total, latest = held.sums[key]
    held.sums[key] = (2 * rows, 2 * total, latest)
    found.final(held, ends)
    assert found.shown == [
        "readers are held back: partition 0 of wide: last stable offset 7, high watermark 8",
        "1 other in counts",
        "1 lost in letters",
        "1 other in newest",
        "1 doubled in wide",
        "1 lost in wide",
    ]


def test_every_program_of_the_proof_starts() -> None:
    """Each reads its arguments, which takes all its imports."""
    started = []
    for make in ROUNDS.values():
        one = make(1, 1, "records")
        ask = ["--collect-only"] if one.command[0] == "pytest" else ["--help"]
        started.append((one, start([*one.command, *ask], **one.environment)))
    for one, run in started:
        told, _ = run.communicate()
        assert run.returncode == 0, f"{one.command}: {told}"
