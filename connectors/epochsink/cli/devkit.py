"""The verbs of the devkit, which the library does not import: its package is loaded when such a verb is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer

from epochsink.cli.console import AsJson, Verbs, answering
from epochsink.errors import ConfigurationError

PACKAGE: Final = "epochsink_devkit"
EXTRAS: Final = {"demo": "demo", "report": "services", "services": "services"}
"""Each verb, a module of `epochsink_devkit.cli` with its ``app``, and the extra that has what it needs."""


class AllVerbs(Verbs):
    """The library's verbs and those of the devkit."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, as the help lists them."""
        return [*super().list_commands(ctx), *EXTRAS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb; one of the devkit that cannot be loaded says what to install when it runs."""
        return _load(cmd_name) if cmd_name in EXTRAS else super().get_command(ctx, cmd_name)


def _load(verb: str) -> Any:
    try:
        app = import_module(f"{PACKAGE}.cli.{verb}").app
    except ModuleNotFoundError as absent:
        app = _refusal(verb, str(absent.name))
    command = typer.main.get_command(app)
    command.name = verb
    return command


def _refusal(verb: str, missing: str) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    # whatever verb and option follows: what is said is what to install
    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refuse(*, as_json: AsJson = False) -> None:
        with answering(as_json=as_json):
            package = missing.partition(".")[0]
            raise ConfigurationError(
                f"epochsink {verb} needs the {'package' if package == PACKAGE else 'module'} {missing}",
                hint=f'pip install "epochsink[{EXTRAS[verb]}]"',
            )

    refuse.__doc__ = f"Needs the extra '{EXTRAS[verb]}'."
    return app
