"""`epochsink report`: the newest epochs of a query on one HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Annotated

import typer

from epochsink.cli.console import AsJson, answering
from epochsink.cli.options import AnySinks, Checkpoint, SpoolPlace, opened, typed_options
from epochsink.cli.status import Status, read_status
from epochsink_devkit import page

app = typer.Typer(add_completion=False)


@app.command()
def report(
    checkpoint: Checkpoint,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("epochsink-report.html"),
    spool: SpoolPlace = None,
    sinks: AnySinks = None,
    as_json: AsJson = False,
) -> None:
    """Draw the newest epochs of a query on one HTML page: rows, and how long each step took.

    Reads only. The ledger has the receipts of the newest 64 epochs or so.
    """
    with answering(as_json=as_json) as answer:
        with opened(checkpoint, sinks, spool) as (place, given):
            status = read_status(place, given, typed_options(sinks, spool))
        output.write_text(page_of(status))
        answer.values.update({"headline": status.headline, "page": str(output)})
        answer.say(f"wrote {output}")


def page_of(status: Status) -> str:
    """Return a status as an HTML page: its headline, the newest done epochs as a picture and a table, the advice."""
    done = [epoch.receipt for epoch in status.epochs if epoch.receipt is not None]
    sections = [
        page.epochs_in_time(done) if done else ("No epoch is done yet", ""),
        ("What to do", "".join(f"<p>{escape(line)}</p>" for line in status.advice)),
    ]
    if status.stopped is not None:
        sections.append(("The last failure", f"<p>{escape(status.stopped.failure)} ({status.stopped.stamp})</p>"))
    if (failed := status.failed_start) is not None:
        sections.append(("A failed start", f"<p>{escape(failed.failure)} ({failed.stamp})</p>"))
    sections.append(("Each epoch", page.epochs_table(done)))
    return page.document(f"epochsink: {status.checkpoint}", status.headline, sections)
