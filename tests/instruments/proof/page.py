"""The page of all records: what the newest runs tried, what is open, what was found; one picture."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from epochsink_devkit.svg import WIDTH, Svg, letters
from proof.findings import CLASSES, FINDINGS, LIBRARY, UNEXPLAINED, finding_of
from proof.record import kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from proof.findings import Finding

TEMPLATE: Final = Path(__file__).with_name("template.md")
LEFT: Final = 190
RIGHT: Final = 290
LANE: Final = 42
BROKE_OFF: Final = "the run has broken off"
"""What a run says that came to no verdict: what it tried counts nowhere, and this is an anomaly."""


@dataclass(frozen=True)
class Kind:
    """A kind of run: what it tries, how a user runs it, and the names of two figures: what was tried, what struck."""

    title: str
    unit: str
    command: str
    tried: str
    struck: str = ""


KINDS: Final = {
    "simulation": Kind("[simulation](protocol.md)", "plans", "make prove ONLY=simulation", "plans", "struck"),
    "request faults": Kind(
        "[one fault at a request](request-faults.md)",
        "plans",
        "make prove ONLY=requests",
        "plans",
        "struck",
    ),
    "request fault pairs": Kind(
        "[two faults at requests](request-faults.md)",
        "plans",
        "make prove ONLY=pairs",
        "plans",
        "struck",
    ),
    "random kills": Kind("random kills, Spark and Kafka", "kills", "make prove ONLY=kills", "kills"),
    "random kills on Connect": Kind(
        "random kills on [Spark Connect](../how-to/spark-connect.md), all three sinks",
        "kills",
        "make prove ONLY=connect",
        "kills",
    ),
    "options": Kind("random kills, Spark and many options of the sinks", "kills", "make prove ONLY=options", "kills"),
    "options on Connect": Kind(
        "random kills on [Spark Connect](../how-to/spark-connect.md), many options of the sinks",
        "kills",
        "make prove ONLY=options ARGS=--connect",
        "kills",
    ),
    "soak": Kind("[soak](nemesis.md), a cluster of hosts, all three sinks", "faults", "make prove ONLY=soak", "faults"),
    "mutants": Kind("mutants of the source, and the tests", "mutants", "make prove ONLY=mutants", "tried", "killed"),
}
"""The kinds of runs, as the table lists them."""
NOTHING_OPEN: Final = "**Open: nothing.**"
_VERSIONS: Final = {
    "Spark": "pyspark",
    "Kafka": "Kafka",
    "PostgreSQL": "PostgreSQL",
    "Elasticsearch": "Elasticsearch",
}


@dataclass
class Sum:
    """All runs of one kind."""

    runs: int = 0
    broke_off: int = 0
    seconds: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    anomalies: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a run."""
        figures = record["figures"]
        self.anomalies += lines_of(record)
        self.open += opens(record)
        self.runs += 1
        if _has_broken_off(record):
            self.broke_off += 1
            return
        self.seconds += record["seconds"]
        self.figures.update({name: value for name, value in figures.items() if isinstance(value, int)})
        self.figures["rows"] += figures.get("source rows", 0)


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each anomaly of a run: the first of its text, in which the ends of lines may be escaped."""
    firsts = [one.splitlines()[0].partition("\\n")[0] for one in record["figures"]["anomalies"]]
    return [f"{record['what']}, seed {record['seed']}: {first}" for first in firsts]


def opens(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run's anomalies that no finding explains."""
    pairs = zip(lines_of(record), record["figures"]["anomalies"], strict=True)
    return [line for line, anomaly in pairs if finding_of(record, anomaly) is None]


def newest(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest run of each kind, and of each target if its plans are those of one."""
    found = {(one["what"], str(one["seed"]).partition(" of ")[2]): one for one in records}
    return sorted(found.values(), key=lambda one: list(KINDS).index(one["what"]))


def _has_broken_off(record: Mapping[str, Any]) -> bool:
    return any(one.startswith(BROKE_OFF) for one in record["figures"]["anomalies"])


def write_page(folder: Path) -> Path:
    """Write the page and its picture beside the folder of the records."""
    records = kept(folder)
    page = folder.with_suffix(".md")
    page.write_text(text(records))
    folder.with_suffix(".svg").write_text(picture(sums(records)))
    (folder / "anomalies.txt").write_text(raw(records))
    (folder / "badges.svg").write_text(badges(sums(records)))
    return page


def badges(found: Mapping[str, Sum]) -> str:
    """Draw what the records add up to as a row of badges; the first one is red if something is open."""
    still_open = sum(len(one.open) for one in found.values())
    shown = [("anomalies open", f"{still_open}", "red" if still_open else "green")]
    for kind, label in (
        ("simulation", "simulated plans"),
        ("request faults", "request faults"),
        ("soak", "soak faults"),
    ):
        if kind in found:
            shown.append((label, f"{found[kind].figures[KINDS[kind].tried]:,}", "blue"))
    svg = Svg()
    left = 0.0
    for label, value, colour in shown:
        middle = left + letters(label) + 12
        right = middle + letters(value) + 12
        svg.box(left, 0, middle - left, 24, class_="grey part")
        svg.box(middle, 0, right - middle, 24, class_=f"{colour} part")
        svg.text(left + 6, 17, label)
        svg.text(middle + 6, 17, value)
        left = right + 10
    return svg.document(24, ", ".join(f"{label}: {value}" for label, value, _ in shown))


def raw(records: Iterable[Mapping[str, Any]]) -> str:
    """Return all anomalies, a line each."""
    return "".join(f"{line}\n" for one in records for line in lines_of(one))


def sums(records: Iterable[Mapping[str, Any]]) -> dict[str, Sum]:
    """Add runs up, by kind."""
    found = {kind: Sum() for kind in KINDS}
    for record in records:
        found[record["what"]].add(record)
    return {kind: one for kind, one in found.items() if one.runs}


def text(records: list[dict[str, Any]]) -> str:
    """Return the page."""
    found = sums(records)
    still_open = [line for one in found.values() for line in one.open]
    return TEMPLATE.read_text().format(
        newest="\n".join(map(_newest, newest(records))),
        open="\n".join(["**Open:**", "", *(f"- {line}" for line in still_open)]) if still_open else NOTHING_OPEN,
        tried=_tried(found, records),
        unexplained=_unexplained(records),
        rows="\n".join(f"| {' | '.join(_row(kind, one))} |" for kind, one in found.items()),
        classes="\n".join(_classes(records)),
        findings="\n".join(_findings(records)),
        soaks=_soaks([one for one in records if one["what"] == "soak"]),
        records="\n".join(map(_record, records)),
    )


def _tried(found: Mapping[str, Sum], records: list[dict[str, Any]]) -> str:
    """Return in a sentence what all runs have tried and found."""
    tried = sum(one.figures[KINDS[kind].tried] for kind, one in found.items())
    anomalies = sum(len(one.anomalies) for one in found.values())
    faults = sum(one.of == LIBRARY for one, *_ in _by_finding(records))
    return (
        f"{len(records)} runs have tried {tried:,} plans, kills, faults and mutants, and found {anomalies} anomalies. "
        f"[Their causes](#what-was-found): {faults} were faults of epochsink, and are mended."
    )


def _newest(record: Mapping[str, Any]) -> str:
    about, figures = KINDS[record["what"]], record["figures"]
    _, _, target = str(record["seed"]).partition(" of ")
    tried = "broke off" if _has_broken_off(record) else f"{figures[about.tried]:,} {about.unit}"
    struck = f"{figures[about.struck]:,}" if about.struck else ""
    title = f"{about.title}: {target}" if target else about.title
    wrong = len(figures["anomalies"])
    anomalies = f"{wrong}, {len(opens(record))} open" if wrong else "none"
    # what answers first: on a phone, only the first columns are seen
    cells = [title, tried, struck, anomalies, record["began"][:10], f"`{record['commit'][:7]}`"]
    return f"| {' | '.join(cells)} |"


def _by_finding(records: list[dict[str, Any]]) -> Iterator[tuple[Finding, Mapping[str, Any], int]]:
    """Yield each finding with its run, and how many anomalies it explains."""
    for one in FINDINGS:
        for record in records:
            explained = [line for line in record["figures"]["anomalies"] if finding_of(record, line) is one]
            if explained:
                yield one, record, len(explained)


def _unexplained(records: list[dict[str, Any]]) -> str:
    found = [
        f"{one.cause} ({record['began'][:10]})" for one, record, _ in _by_finding(records) if one.of == UNEXPLAINED
    ]
    return "\n".join(f"\n**Not explained:** {one}" for one in found)


def _classes(records: list[dict[str, Any]]) -> Iterator[str]:
    for name, meaning in CLASSES.items():
        counts = [count for one, _, count in _by_finding(records) if one.of == name]
        yield f"| {name} | {len(counts)} | {sum(counts)} | {meaning} |"


def _findings(records: list[dict[str, Any]]) -> Iterator[str]:
    for name in CLASSES:
        for one, record, _ in _by_finding(records):
            if one.of == name:
                tests = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in one.tests)
                by = f"{record['what']}, seed {record['seed']}"
                yield f"| {name} | {record['began'][:10]} | {by} | {one.cause} | {tests} |"


def _row(kind: str, one: Sum) -> list[str]:
    about, figures = KINDS[kind], one.figures
    struck = f"{figures[about.struck]:,}" if about.struck else ""
    beside = [f"{figures[name]:,}" if figures[name] else "" for name in ("rows", "reads")]
    tried = f"{figures[about.tried]:,} {about.unit}"
    hours = f"{one.seconds / 3600:.1f}"
    runs = f"{one.runs}, {one.broke_off} broke off" if one.broke_off else str(one.runs)
    return [about.title, f"`{about.command}`", runs, hours, tried, struck, *beside, str(len(one.anomalies))]


def _record(record: Mapping[str, Any]) -> str:
    about, figures, of = KINDS[record["what"]], record["figures"], record["versions"]
    versions = ", ".join(f"{name} {of[client]}" for name, client in _VERSIONS.items())
    tried = "broke off" if _has_broken_off(record) else f"{figures[about.tried]:,} {about.unit}"
    cells = [record["began"][:16].replace("T", " "), record["what"], record["seed"], record["commit"], versions]
    return f"| {' | '.join(map(str, [*cells, tried, len(figures['anomalies'])]))} |"


def _soaks(records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    about = (
        "The next epoch must come within 30 s of each healing. A later one fails the run; it is counted here, and is "
        "not among the anomalies. The minutes are those of the whole run, with its start and its final reads."
    )
    return "\n".join(["\n## Soaks\n", f"{about}\n", *map(_soak, records)]) + "\n"


def _soak(record: Mapping[str, Any]) -> str:
    figures = record["figures"]
    late = len(figures["later than 30 s"])
    stuck = sum(one.startswith("stuck:") for one in figures["anomalies"])
    loads = figures["load at the healings"] or [0, 0]
    return (
        f"- Seed {record['seed']}, {record['began'][:10]}: {figures['faults']} faults in "
        f"{record['seconds'] / 60:.0f} minutes, {figures['canaries']} canaries, {figures['drivers']} drivers, "
        f"{figures['epochs']} epochs, {figures['healings']} healings.{_aside(figures)} The slowest took "
        f"{figures['longest progress after healing, s']} s until the next epoch, at a load of {figures['load then']}; "
        f"{late} took more than 30 s, and {stuck} more had no epoch within the limit. "
        f"The load was {loads[0]} to {loads[1]} on {record['machine']}."
    )


def _aside(figures: Mapping[str, Any]) -> str:
    """Return what newer soaks have besides."""
    if "dead letters" not in figures:
        return ""
    again = figures["epochs applied again by a repair"]
    return f" {figures['dead letters']:,} dead letters; PostgreSQL was set back, and {again} epochs applied again."


def _short(number: int) -> str:
    for unit, of_it in (("M", 10**6), ("k", 10**3)):
        if number >= of_it:
            return f"{number // of_it}{unit}"
    return str(number)


def picture(found: Mapping[str, Sum]) -> str:
    """Draw a bar for each kind, on a scale of powers of ten, with what struck within what was tried."""
    drawing = Svg()
    tried = {kind: one.figures[KINDS[kind].tried] for kind, one in found.items()}
    powers = math.ceil(math.log10(max([10, *tried.values()])))
    still_open = sum(len(one.open) for one in found.values())
    title = f"{sum(tried.values()):,} plans, kills and faults: {still_open or 'nothing'} open"
    drawing.text(16, 30, title, class_="title")
    drawing.text(16, 52, "all runs together, on a scale of powers of ten; full colour: what struck", class_="weak")
    top = 76
    bottom = top + LANE * len(found)

    def x(number: int) -> float:
        return LEFT + math.log10(max(number, 1)) / powers * (WIDTH - LEFT - RIGHT)

    for power in range(powers + 1):
        drawing.line(x(10**power), top - 8, x(10**power), bottom, class_="grid")
        drawing.text(x(10**power), bottom + 18, _short(10**power), text_anchor="middle", class_="small weak")
    for place, (kind, one) in enumerate(found.items()):
        about, y = KINDS[kind], top + LANE * place
        drawing.text(LEFT - 12, y + 18, kind, text_anchor="end")
        width = max(x(tried[kind]) - LEFT, 1)
        drawing.box(LEFT, y, width, 26, class_="blue part" if about.struck else "blue")
        said = f"{tried[kind]:,} {about.unit}"
        if about.struck:
            struck = one.figures[about.struck]
            drawing.box(LEFT, y + 7, max(x(struck) - LEFT, 1), 12, class_="blue")
            said += f", {struck:,} {about.struck}"
        right = WIDTH - RIGHT + 12
        drawing.text(right, y + 11, said)
        said = f"{len(one.anomalies)} anomalies, {len(one.open) or 'none'} open" if one.anomalies else "no anomaly"
        drawing.text(right, y + 28, said, class_="small red" if one.open else "small green")
    return drawing.document(bottom + 34, title)
