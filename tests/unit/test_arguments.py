"""Arguments as users get them wrong: each mistake is named."""

from __future__ import annotations

from typing import Any

import pytest

from epochsink import arguments
from epochsink.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "expected"), [("order_id", ("order_id",)), (["a", "b"], ("a", "b")), (None, ()), (("a",), ("a",))]
)
def test_a_string_is_one_expression(given: Any, expected: tuple[str, ...]) -> None:
    assert arguments.expressions("select", given) == expected


@pytest.mark.parametrize("given", [5, b"x", {"a": 1}, [], [""], [5], "", " "])
def test_what_is_not_text_is_no_expression(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="key="):
        arguments.expressions("key", given)


@pytest.mark.parametrize("given", ["no", 0, 1, None, "True"])
def test_a_flag_is_true_or_false(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"invalid atomic=.*expected True or False"):
        arguments.flag("atomic", given)


@pytest.mark.parametrize("given", ["2", 0, -1, True, 1.5, None])
def test_a_count_is_a_whole_number(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="invalid threads="):
        arguments.count("threads", given)


@pytest.mark.parametrize("given", ["2", 0, -1, True, float("nan"), float("inf"), None])
def test_seconds_are_positive(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="invalid timeout="):
        arguments.seconds("timeout", given)


@pytest.mark.parametrize("given", ["24", "h", "1.5h", "-1h", "0h", "24 h", 24, "", True])
def test_a_duration_has_a_unit(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'invalid retain=.*expected a duration such as "90s"'):
        arguments.duration("retain", given)


def test_good_values_pass() -> None:
    assert [arguments.duration("retain", each) for each in (None, "90s", "30m", "24h", "7d")] == [
        0.0,
        90.0,
        1800.0,
        86400.0,
        604800.0,
    ]
    assert arguments.flag("atomic", False) is False  # noqa: FBT003 - the value under test
    assert arguments.count("threads", 3) == 3
    assert arguments.seconds("timeout", 3) == 3.0
    assert arguments.text("topic", "orders") == "orders"
    assert arguments.optional_text("where", None) is None
    assert arguments.choice("commit", "auto", ("auto", "staged")) == "auto"
    assert arguments.mapping("options", {"a": 1}) == {"a": 1}


def test_a_wrong_choice_names_the_right_ones() -> None:
    with pytest.raises(ConfigurationError, match="one of 'auto', 'staged'"):
        arguments.choice("commit", "never", ("auto", "staged"))


@arguments.checked_names
class Plain:
    def __init__(self, dsn: str, *, table: str = "", key: str = "") -> None: ...


@arguments.checked_names
class WithOptions:
    def __init__(self, *, key: str = "", options: dict[str, str] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("owner", "given", "hint"),
    [
        (Plain, {"keys": 1}, "did you mean key=?"),
        (Plain, {"tabel": 1}, "did you mean table=?"),
        (Plain, {"zzzz": 1}, "the arguments are: dsn, key, table"),
        (WithOptions, {"api_key": 1}, "did you mean key=?; settings of the client go into options={'api_key': ...}"),
    ],
)
def test_an_unknown_argument_says_what_was_meant(owner: type[Any], given: dict[str, Any], hint: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{owner.__name__}\({next(iter(given))}=...\): there is no such"
    ) as caught:
        owner(**given)
    assert caught.value.hint == hint


def test_a_missing_argument_is_named_with_all_that_there_are() -> None:
    untyped: Any = Plain
    with pytest.raises(ConfigurationError, match=r"Plain\(...\): missing a required argument: 'dsn'") as caught:
        untyped(table="t")
    assert caught.value.hint == "the arguments are: dsn, key, table"


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ConfigurationError, match=r'pip install "epochsink\[kafka\]"'):
        arguments.require_package("Kafka", "kafka", "a_package_that_nobody_has")
