"""WebHDFS without a cluster: what is said when no NameNode answers. With one: test_checkpoint_stores.py."""

from __future__ import annotations

import pytest

from epochsink.devkit.services.ports import free_port
from epochsink.protocol.webhdfs import WebHdfs


def test_without_an_address_nothing_is_asked() -> None:
    with pytest.raises(OSError, match="no NameNode's address is known"):
        WebHdfs([], "etl").check()


def test_each_address_is_tried_and_the_last_refusal_is_told() -> None:
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(ConnectionError):
        WebHdfs(addresses, "etl").check()
