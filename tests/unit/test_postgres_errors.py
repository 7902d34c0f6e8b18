"""What an error of the server means, and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import psycopg
import pytest
from psycopg import errors

from epochsink.postgres.errors import RULES, describe, failure, is_author


class Said(psycopg.DatabaseError):
    """An error of a server that speaks German."""

    sqlstate = "45000"

    def __init__(self, source_function: str, source_file: str, context: str) -> None:
        super().__init__("Karte 4111 ist gesperrt")
        names = ("message_detail", "constraint_name", "column_name", "table_name")
        self._said = SimpleNamespace(
            message_primary="Karte 4111 ist gesperrt",
            source_function=source_function,
            source_file=source_file,
            context=context,
            **dict.fromkeys(names),
        )

    @property
    def diag(self) -> psycopg.errors.Diagnostic:
        return self._said  # type: ignore[return-value]


@pytest.mark.parametrize(
    "error",
    [
        Said("exec_stmt_raise", "pl_exec.c", "PL/pgSQL-Funktion pruefe() Zeile 3 bei RAISE"),
        Said("exec_stmt_assert", "pl_exec.c", "fonction PL/pgSQL verifie(), ligne 3 à ASSERT"),
        Said("PLy_elog_impl", "plpy_elog.c", "PL/Python-Funktion »pruefe«"),
        Said("whatever", "other.c", "fonction PL/Rust « verifie »"),
    ],
)
def test_the_text_of_a_function_s_author_is_hidden_in_every_language(error: Said) -> None:
    assert is_author(error)
    assert "4111" not in describe(error)


def test_the_server_s_own_text_within_a_function_is_shown() -> None:
    error = Said("int4div", "int.c", "PL/pgSQL-Funktion pruefe() Zeile 3 bei Zuweisung")
    assert not is_author(error)


def test_each_error_says_what_to_do() -> None:
    """Those without a rule of their own too."""
    assert [rule.error.__name__ for rule in RULES if not rule.hint] == []
    for error in (errors.DuplicateColumn, errors.TooManyColumns, errors.UndefinedObject, errors.ProgramLimitExceeded):
        assert failure(error("said"), "doing").hint
