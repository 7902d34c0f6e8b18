"""The `epochsink` command."""

from __future__ import annotations

import typer

from epochsink.services import commands as services

app = typer.Typer(help="Exactly-once sinks for PySpark Structured Streaming.", no_args_is_help=True)
app.add_typer(services.app, name="services")


def main() -> None:
    """Run the command line; entry point of the distribution."""
    app()


if __name__ == "__main__":
    main()
