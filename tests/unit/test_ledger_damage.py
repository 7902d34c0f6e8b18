"""A damaged ledger still tells what its other entries say, and what is at stake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.protocol.ledger import FOLDER, Ledger
from epochsink.protocol.ledger_damage import survey
from epochsink.protocol.ledger_entries import Done, Prepared, Share
from epochsink.protocol.storage import LocalStorage

if TYPE_CHECKING:
    from pathlib import Path


def three_epochs(root: Path) -> Ledger:
    """Return a ledger with a take (0) and three epochs (1 to 6)."""
    ledger = Ledger(LocalStorage(root), "driver")
    ledger.take("query", {"table": {}}, -1)
    for number in range(3):
        share = Share(({"epoch": 77, "gid": "x"},), ("t" * 32,))
        ledger.append(Prepared(number, "a" * 32, "digest", {"table": share}))
        ledger.append(Done(number))
    return ledger


def damage(root: Path, number: int, keep: int) -> None:
    path = root / FOLDER / f"{number:020d}"
    path.write_bytes(path.read_bytes()[:keep])


def test_a_ledger_that_is_whole_has_no_damage(tmp_path: Path) -> None:
    history = three_epochs(tmp_path).read()
    assert survey(LocalStorage(tmp_path)) == (history, [])


def test_an_entry_names_its_own_epoch_and_not_one_of_its_parts(tmp_path: Path) -> None:
    three_epochs(tmp_path)
    damage(tmp_path, 3, 150)
    history, [found] = survey(LocalStorage(tmp_path))
    assert (found.kind, found.epoch, list(found.epochs)) == ("prepared", 1, [1])
    assert (sorted(history.epochs), history.done) == ([0, 2], {0, 1, 2})


def test_a_take_puts_no_epoch_at_stake(tmp_path: Path) -> None:
    three_epochs(tmp_path).take("query", {}, -1)
    damage(tmp_path, 7, 40)
    _, [found] = survey(LocalStorage(tmp_path))
    assert (found.kind, list(found.epochs)) == ("take", [])


def test_remains_below_a_gap_count_for_nothing(tmp_path: Path) -> None:
    three_epochs(tmp_path).take("query", {}, -1)
    (tmp_path / FOLDER / f"{3:020d}").unlink()
    damage(tmp_path, 1, 5)
    history, damages = survey(LocalStorage(tmp_path))
    assert (sorted(history.epochs), damages) == ([0, 1, 2], []), "as the last take sums them up"
