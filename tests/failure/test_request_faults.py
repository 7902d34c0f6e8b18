"""Faults at requests of a driver's life, on a real server: a share of all plans with one, and a few with two.

Each day another target; `make prove ONLY=requests` plays all of them, and as many with two as one likes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
from shares import SHARE, Share

from request_faults.families import SET_BACK, WRITES_REFUSED, ElasticsearchSide, PostgresSide
from request_faults.run import SIDES, Asked, play
from request_faults.runner import STORIES, Hit, Plan, Runner, is_answer_to
from request_faults.wire import Fate

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink_devkit.services import ElasticsearchService, PostgresService
    from request_faults.families import Place
    from request_faults.runner import Verdict

PAIRS = 4
"""Plans with two faults, at random, besides."""
RARER = 10
"""So many more days than the simulation's plans these take until all are played: each takes a second or more."""
NAMES = list(SIDES)
PREPARE = "PREPARE TRANSACTION ?"
TAMPERING, NOTHING = "tampering", "nothing"
DOUBLED = "INSERT INTO {table} SELECT * FROM {table} WHERE src_off = 1 AND src_part = 0"
OF_THE_DAY = NAMES if SHARE.each == 1 else [NAMES[SHARE.place % len(NAMES)]]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("of", OF_THE_DAY)
def test_a_fault_at_a_request_loses_and_doubles_nothing(of: str) -> None:
    share = Share(SHARE.place // len(NAMES), SHARE.each * RARER)
    seed = random.randrange(10**6)
    print(f"request_faults.run --of {of} --workers 1 --pairs {PAIRS} --seed {seed}")  # noqa: T201 - to repeat it
    results = [*play(of, Asked((of,), share)), *play(of, Asked((of,), pairs=PAIRS, seed=seed))]
    flaws = [one.flaw for one in results if one.flaw]
    assert not flaws, "\n\n".join(flaws)
    struck = sum(one.struck for one in results)
    assert struck > (len(results) - PAIRS) / 2, f"the fault of only {struck} of {len(results)} plans met its request"


@pytest.mark.parametrize(
    ("statement", "anomaly"),
    [
        ("DELETE FROM {table} WHERE epoch = 0 AND src_off = 1", "lost"),
        (DOUBLED, "duplicate"),
        ("UPDATE {table} SET crc = 0 WHERE src_off = 1", "corrupt"),
    ],
)
def test_what_nobody_could_notice_the_judge_notices(
    statement: str, anomaly: str, postgres: PostgresService, tmp_path: Path
) -> None:
    """Somebody changes rows behind the marker: if the judge were blind, it would be silent here too."""
    verdict = tampered(postgres, tmp_path, statement, Plan(STORIES[0], (Hit(PREPARE, 1, deed=TAMPERING),)))
    assert verdict.struck
    assert [flaw for flaw in verdict.flaws if flaw.startswith(anomaly)], verdict


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (("refused", "WentBack", "the table holds no epoch of this query"), True),
        (("refused", "OutcomeUnknown", "topic(s) t were deleted, and perhaps created again"), True),
        (("refused", "OutcomeUnknown", "the server did not answer"), False),
        (("refused", "Stalled", "nothing is committed for 20 s"), False),
        (("refused", "TaskFailed", "the task failed"), False),
        (("broke", "WentBack", "in a traceback"), False),
    ],
)
def test_a_query_that_hangs_or_stops_for_another_reason_has_not_answered_to_a_set_back(
    answer: tuple[str, str, str],
    is_right: bool,  # noqa: FBT001 - pytest's way
) -> None:
    assert is_answer_to({SET_BACK}, answer) is is_right
    assert not is_answer_to({WRITES_REFUSED}, answer)


@pytest.mark.parametrize("together", [True, False])
def test_a_second_fault_strikes_the_same_life_or_the_next(
    together: bool,  # noqa: FBT001 - pytest's way
    postgres: PostgresService,
    tmp_path: Path,
) -> None:
    second = Hit(PREPARE, 1 if together else 0, deed=TAMPERING)
    verdict = tampered(postgres, tmp_path, DOUBLED, Plan(STORIES[0], (Hit(PREPARE, 0, deed=NOTHING), second), together))
    assert verdict.struck
    assert [flaw for flaw in verdict.flaws if flaw.startswith("duplicate")], verdict
    # the life that is struck first, one more if it is another, and the undisturbed one
    assert len(verdict.answers) == (2 if together else 3)


def test_writes_to_an_index_that_is_not_made_yet_are_refused_by_nobody(
    elasticsearch: ElasticsearchService, tmp_path: Path
) -> None:
    """A plan whose deed finds nothing to do yet is played to its end: it is no flaw of the query."""
    with Runner(ElasticsearchSide(elasticsearch.url, elasticsearch.port), tmp_path) as runner:
        verdict = runner.play(Plan(STORIES[0], (Hit("PUT /?", 0, deed=WRITES_REFUSED),)))
    assert verdict.struck
    assert not verdict.flaws, str(verdict)


def test_a_question_about_the_table_that_the_server_refuses_is_a_finding(
    postgres: PostgresService, tmp_path: Path
) -> None:
    question = "SELECT pg_is_in_recovery(), pg_catalog.current_setting(?)"
    plan = Plan(STORIES[0], (Hit(question, 0, Fate.FORBIDDEN),))
    with Runner(PostgresSide(postgres.dsn, postgres.port, way={"commit": "prepared"}), tmp_path) as runner:
        verdict = runner.play(plan)
    assert verdict.struck
    assert not verdict.flaws, str(verdict)
    _, name, text = verdict.answers[0]
    assert name == "CheckFailed"
    assert "cannot look into database" in text
    assert "permission denied" in text


def tampered(postgres: PostgresService, folder: Path, statement: str, plan: Plan) -> Verdict:
    """Play a plan in which somebody changes a table."""

    class Tampered(PostgresSide):
        def fresh(self, port: int) -> Place:
            place = super().fresh(port)
            tamper = partial(_run, postgres, statement.format(table=place.options["t0"]["table"]))
            return replace(place, deeds={TAMPERING: tamper, NOTHING: lambda: None})

    with Runner(Tampered(postgres.dsn, postgres.port, way={"commit": "prepared"}), folder) as runner:
        return runner.play(plan)


def _run(postgres: PostgresService, statement: str) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
