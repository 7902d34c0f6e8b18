"""Each command of an error's hint is typed as it stands, in the state that raised the error: it ends well there.

The checkpoints are made by hand, the sinks are plain folders; one sink's name has a space.
"""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderParticipant, FolderSink
from hints import States, commands_in, declared, places, type_look, type_words
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import Addresses, EpochsinkError
from epochsink.protocol.spool import Spool
from epochsink.sink import Losses
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typer.testing import Result

    from epochsink.sink import Sink

ROWS = pa.record_batch({"id": pa.array([1, 2], pa.int64())})
SEARCH = "the search"
STATES = States()
NOT_TYPED = {
    "errors.py LOOK_FIRST: status": "the line `Type: ` of most errors: typed in each state, before the hint's commands",
    "kafka/sweep.py _tell: kafka-transactions.sh": "Kafka's own program, which is not part of this package",
}
"""Commands that no state shows by itself, each with the reason."""


class Stage:
    """One checkpoint in a folder of its own, and the module that names its sinks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, spool_elsewhere: bool) -> None:
        folder.mkdir()
        monkeypatch.chdir(folder)
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.module = f"staged_{uuid.uuid4().hex}"
        self.sinks = {name: FolderSink(str(folder / name)) for name in ("table", SEARCH)}
        self.kit = CheckpointKit(folder / "my checkpoint", self.sinks)
        if spool_elsewhere:
            self.kit.spool = Spool(str(folder / "spool"))
            self.kit.coordinator = self.kit.start()
        place = f"spool={str(folder / 'spool')!r}" if spool_elsewhere else ""
        (folder / f"{self.module}.py").write_text(
            "from folder_sink import FolderSink\n"
            "from epochsink import ExactlyOnce\n"
            f"SINKS = {{name: FolderSink(f'{folder}/{{name}}') for name in ('table', {SEARCH!r})}}\n"
            f"sink = ExactlyOnce(checkpoint={str(self.kit.root)!r}, sinks=SINKS, {place})\n"
        )

    @property
    def addresses(self) -> Addresses:
        spool = self.kit.spool
        return Addresses(str(self.kit.root), f"{self.module}:sink", "" if spool.beside_ledger else spool.root)

    def rows(self, *names: str) -> dict[str, Any]:
        return dict.fromkeys(names or self.sinks, ROWS)

    def started(self, sinks: dict[str, Sink] | None = None) -> EpochsinkError:
        """Start the query as Spark does, and return the error that stops it."""
        return self.kit.stopped_start(f"{self.module}:sink", sinks)

    def type(self, *words: str) -> Result:
        """Type a command; the checkpoint follows the verb."""
        return CliRunner().invoke(app, list(words))

    def refused(self, verb: str, *arguments: str, sinks: bool = True) -> EpochsinkError:
        """Type a command that is refused, and return its error."""
        named = ["--sinks", f"{self.module}:sink"] if sinks else []
        result = self.type(verb, str(self.kit.root), *arguments, *named, "--yes", "--json")
        assert result.exit_code == 1, result.output
        told = json.loads(result.stdout)["error"]
        return EpochsinkError(told["message"], hint=told["hint"])

    def visible(self, name: str) -> list[Path]:
        """Return the files of a sink that readers see."""
        return sorted((self.folder / name / "visible").glob("*/*.arrow"))

    def spooled(self) -> list[Path]:
        """Return the files of the spool."""
        return sorted(Path(self.kit.spool.root).rglob("*.arrow"))


# ---- the states


@STATES.shows("sink/marks.py _target_is_older: accept")
def the_target_was_set_back(stage: Stage) -> EpochsinkError:
    for number in range(3):
        stage.kit.run(number, stage.rows())
    stage.visible(SEARCH)[-1].unlink()
    return stage.started()


@STATES.shows("sink/marks.py _marker_is_gone: accept 2")
def the_marker_is_gone(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    stage.visible("table")[0].unlink()
    return stage.started()


@STATES.shows("sink/marks.py _marker_is_gone: accept", "sink/marks.py _marker_is_gone: accept 2")
def the_marker_is_gone_and_an_epoch_is_pending(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    stage.kit.record(1, stage.rows())
    stage.kit.decide(1)
    stage.visible("table")[0].unlink()
    return stage.started()


@STATES.shows("protocol/consistency.py ledger_is_older: abandon")
def the_ledger_is_the_older_copy(stage: Stage) -> EpochsinkError:
    ledger = stage.kit.root / "epochsink" / "ledger"
    stage.kit.run(0, stage.rows())
    shutil.copytree(ledger, stage.folder / "copy")
    for number in (1, 2):
        stage.kit.run(number, stage.rows())
    shutil.rmtree(ledger)
    shutil.copytree(stage.folder / "copy", ledger)
    return stage.started()


@STATES.shows("protocol/consistency.py ledger_lost_prepared: accept")
def the_ledger_lacks_what_is_prepared(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    stage.kit.write(1, stage.rows())
    stage.kit.decide(1)
    return stage.started()


@STATES.shows("protocol/consistency.py decided_without_us: accept")
def an_epoch_was_decided_without_us(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    stage.kit.plan(1)
    stage.kit.decide(1)
    return stage.started()


@STATES.shows("protocol/consistency.py sink_is_gone: resolve")
def a_sink_is_gone(stage: Stage) -> EpochsinkError:
    stage.kit.record(0, stage.rows())
    stage.kit.decide(0)
    return stage.started({"table": stage.sinks["table"]})


@STATES.shows("protocol/consistency.py unknown_outcome: resolve")
def an_outcome_is_unknown(stage: Stage) -> EpochsinkError:
    stage.kit.record(0, stage.rows(SEARCH))
    stage.kit.decide(0)
    stage.sinks[SEARCH].faults.arm("commit-unknown")
    return stage.started()


def lost_and(stage: Stage, spoil: Callable[[Path], object]) -> EpochsinkError:
    stage.kit.record(0, stage.rows(SEARCH))
    stage.kit.decide(0)
    shutil.rmtree(next((stage.folder / SEARCH / "prepared").iterdir()))
    for file in stage.spooled():
        spoil(file)
    return stage.started()


@STATES.shows("protocol/spool.py _way_on: resolve")
def the_spool_is_damaged(stage: Stage) -> EpochsinkError:
    return lost_and(stage, lambda file: file.write_bytes(file.read_bytes()[:-20]))


@STATES.shows("protocol/spool.py _way_on: resolve")
def the_spool_is_gone(stage: Stage) -> EpochsinkError:
    return lost_and(stage, Path.unlink)


@STATES.shows("protocol/joining.py refuse_other_kind: status")
def a_sink_is_of_another_kind(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    return stage.started({**stage.sinks, "table": LocalSink(stage.folder / "local")})


@STATES.shows("protocol/ledger.py _START_ANEW: status")
def the_checkpoint_was_abandoned(stage: Stage) -> EpochsinkError:
    stage.kit.run(0, stage.rows())
    assert stage.type("abandon", str(stage.kit.root), "--sinks", f"{stage.module}:sink", "--yes").exit_code == 0
    return stage.started()


@STATES.shows("cli/abandon.py _refuse_gone: resolve")
def a_target_is_gone_with_a_decided_epoch(stage: Stage) -> EpochsinkError:
    stage.kit.record(0, stage.rows())
    stage.kit.decide(0)
    return stage.refused("abandon", "--gone", SEARCH)


@STATES.shows("cli/resolve.py is_lost: recover")
def a_part_that_was_called_committed_is_gone(stage: Stage) -> EpochsinkError:
    stage.kit.record(0, stage.rows(SEARCH))
    stage.kit.decide(0)
    shutil.rmtree(next((stage.folder / SEARCH / "prepared").iterdir()))
    return stage.refused("resolve", "0", "--sink", SEARCH, "--as", "committed")


@STATES.shows("protocol/repair.py _not_retained: accept 2")
def what_is_lacking_is_not_retained(stage: Stage) -> EpochsinkError:
    repaired = lambda participant: SimpleNamespace(losses=lambda: Losses(participant.marks))  # noqa: E731 - in place
    stage.monkeypatch.setattr(FolderParticipant, "operator", repaired)
    the_target_was_set_back(stage)
    return stage.refused("repair")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    made: list[Stage] = []

    def make(*, spool_elsewhere: bool) -> Stage:
        made.append(Stage(tmp_path / f"stage {len(made)}", monkeypatch, spool_elsewhere=spool_elsewhere))
        return made[-1]

    yield make
    for each in made:
        with suppress(OSError):
            each.kit.close()
        sys.modules.pop(each.module, None)


@pytest.mark.parametrize("spool_elsewhere", [False, True], ids=["", "spool elsewhere"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_each_command_of_a_hint_does_what_the_hint_says(
    stage: Callable[..., Stage], state: Callable[[Stage], EpochsinkError], *, spool_elsewhere: bool
) -> None:
    for index in range(len(STATES[state])):
        # anew for each: one command of a hint is an alternative to another
        staged = stage(spool_elsewhere=spool_elsewhere)
        error = state(staged)
        words = commands_in(error, STATES[state])[index]
        type_look(error, staged.addresses)
        type_words(words)


def test_every_command_of_the_library_is_typed_in_a_state_that_shows_it() -> None:
    """On folders here, on the real services in tests/integration; or this table says why not."""
    shown = declared()
    assert sorted({*places()} - {*shown, *NOT_TYPED}) == []
    assert sorted({*shown, *NOT_TYPED} - {*places()}) == [], "no such place"
    assert not NOT_TYPED.keys() & {*shown}
