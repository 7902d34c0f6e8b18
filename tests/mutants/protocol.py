"""Mutants of connectors/epochsink/protocol."""

from __future__ import annotations

from mutants.mutant import Mutant

STORAGE = "tests/unit/test_storage.py"

MUTANTS: list[Mutant] = [
    Mutant(
        "protocol/storage.py",
        "                os.fsync(stream.fileno())\n",
        "",
        STORAGE,
        "a ledger entry that the machine's crash takes away again",
    ),
    Mutant(
        "protocol/storage.py",
        "        sync_path(target.parent)\n        return True",
        "        return True",
        STORAGE,
        "a ledger entry without a name after the machine's crash",
    ),
    Mutant(
        "protocol/storage.py",
        "            except FileExistsError:\n                return False",
        "            except FileExistsError:\n                return True",
        STORAGE,
        "two drivers that both own the ledger",
    ),
]
