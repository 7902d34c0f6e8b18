"""Compare receipts with the index: documents by the epoch in their ``_id`` or, if they have a key, by their version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epochsink.elasticsearch.committable import SpooledEpoch
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.indices import refresh_all
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.sink import Compared, Comparison, Identity, Receipt, identity_key

_DELETED: Final = "another program has deleted some, or the life cycle of a data stream has"
_CHANGED: Final = "another program has changed or deleted some"


def audit(
    server: ElasticsearchServer,
    config: ElasticsearchConfig,
    identity: Identity,
    receipts: Sequence[Receipt],
    *,
    newest: int,
) -> list[Comparison]:
    """Return how each receipt compares with the index.

    ``newest`` is the epoch that no later one has begun to replace; -1 if there is none. Raises what the client raises.
    """
    known = {receipt.epoch: SpooledEpoch.from_json(receipt.parts[0]) for receipt in receipts if receipt.parts}
    wanted = {receipt.epoch for receipt in receipts if not config.key or receipt.epoch == newest}
    indices = _indices(config, [known[epoch] for epoch in wanted & known.keys()])
    counts = _count(server, config, identity, indices) if wanted and indices else Counter[int]()
    return [
        _compared(config, receipt, known.get(receipt.epoch), counts[receipt.epoch], is_newest=receipt.epoch == newest)
        for receipt in receipts
    ]


def _indices(config: ElasticsearchConfig, epochs: Iterable[SpooledEpoch]) -> list[str]:
    if config.index:
        return [config.index]
    return sorted({name for prepared in epochs for name in prepared.indices or ()})


def _count(
    server: ElasticsearchServer, config: ElasticsearchConfig, identity: Identity, indices: Sequence[str]
) -> Mapping[int, int]:
    """Return how many documents each epoch has left. Reads the id and the version of every document."""
    for index in indices:
        refresh_all(server, index)
    # neither _id nor _version can be searched for by range or prefix
    versions = server.versions(indices)
    if config.key:
        base = int(identity.origin["base"])
        return Counter(version - base for _, version in versions)
    prefix = f"{identity_key(identity)}-"
    return Counter(int(name.removeprefix(prefix).partition("-")[0]) for name, _ in versions if name.startswith(prefix))


def _compared(
    config: ElasticsearchConfig, receipt: Receipt, prepared: SpooledEpoch | None, found: int, *, is_newest: bool
) -> Comparison:
    if not config.index and prepared is None:
        return receipt.not_compared("the ledger keeps the indices of the newest epochs only")
    expected = receipt.rows - (receipt.set_aside or 0)
    if not config.key:
        return _counted(receipt, found, expected, _DELETED)
    if not is_newest:
        return receipt.not_compared("later epochs may have replaced its documents")
    if prepared is None or prepared.by_task or receipt.deleted:
        most = expected - receipt.deleted
        why = "rows of it delete keys, or replace each other in a number that is not recorded"
        if found > most and not receipt.deleted:
            return _counted(receipt, found, most, _CHANGED)
        return receipt.not_compared(f"{found} document(s) of it are there, of at most {expected}: {why}")
    return _counted(receipt, found, expected - prepared.replaced, _CHANGED)


def _counted(receipt: Receipt, found: int, expected: int, doubt: str) -> Comparison:
    # A retry writes a dead letter with the id and the version of its epoch.
    if 0 < found - expected <= (receipt.set_aside or 0):
        again = f"{found - expected} dead letter(s) were written again"
        return Comparison(receipt.epoch, Compared.AGREES, receipt.rows, found, again)
    return receipt.counted(found, expected, doubt)
