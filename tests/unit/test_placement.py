"""What decides where a row of a key is stored: words that are not known to mean the same each time are refused."""

from __future__ import annotations

import pytest

from epochsink.spark.placement import unsettled

COLUMNS = ["id", "name", "day", "s", "a b", "user"]


@pytest.mark.parametrize(
    "expression",
    [
        "ID",
        "`a b`",
        "user",
        "s.a",
        "s.`rand`",
        "concat('a', id % 7)",
        "concat('rand()', name) -- it's now()",
        "concat(/* rand() */ name, X'00', r'\\')",
        "'it\\'s' || name || 'it''s'",
        "date_format(day, 'yyyy.MM')",
        "array_join(transform(split(name, ''), x -> upper(x)), '')",
        "aggregate(split(name, ''), 0, (acc, x) -> acc + length(x))",
        "CASE WHEN name LIKE 'x%' AND NOT id IN (1, 2) THEN 1.5e3 ELSE -2L END",
        "date_trunc('month', day) + INTERVAL '1' DAY + INTERVAL 2 HOURS",
        "DATE'2026-01-01'",
        "timestamp_ltz '2026-01-01 00:00:00'",
        "CAST(id AS DECIMAL(10, 2))::string",
        "extract(YEAR FROM day)",
        "trim(BOTH ' ' FROM name)",
        "mask(name, upperChar => 'Q')",
        "name COLLATE UTF8_LCASE",
    ],
)
def test_columns_and_what_is_known_of_them_is_settled(expression: str) -> None:
    assert unsettled(expression, COLUMNS) == []


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rand()", ["rand"]),
        ("concat(name, CURDATE())", ["CURDATE"]),
        ("current_date", ["current_date"]),
        ("concat(id, unix_timestamp())", ["unix_timestamp"]),
        ("localtimestamp", ["localtimestamp"]),
        ("session_user()", ["session_user"]),
        ("user()", ["user"]),
        ("`rand`()", ["`rand`"]),
        ('"rand"()', ['"rand"']),
        ("system.builtin.rand()", ["system", "rand"]),
        ("my_function(id)", ["my_function"]),
        ("id + my_variable", ["my_variable"]),
        ("DATE 'today'", ["'today'"]),
        ("timestamp'Now '", ["'Now '"]),
        ("TIMESTAMP '12:30'", ["'12:30'"]),
        ("CAST(' tomorrow UTC' AS TIMESTAMP)", ["' tomorrow UTC'"]),
        ("date_format('yesterday', 'yyyy')", ["'yesterday'"]),
        ("(SELECT max(x) FROM t)", ["SELECT", "max", "x", "t"]),
        ("EXISTS (SELECT 1)", ["SELECT"]),
        ("max(id) OVER ()", ["max", "OVER"]),
    ],
)
def test_what_the_moment_or_the_session_decides_is_not(expression: str, words: list[str]) -> None:
    """The functions by name on Spark Connect, and the constants everywhere, were accepted."""
    assert unsettled(expression, COLUMNS) == words
