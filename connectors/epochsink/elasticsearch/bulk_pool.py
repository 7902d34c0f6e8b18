"""Several bulk requests at once."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.elasticsearch.bulk_request import Poster
    from epochsink.elasticsearch.errors import Refusal


def post_all(
    poster: Poster, requests: Iterable[Request], threads: int, answered: Callable[[Sequence[Refusal]], None]
) -> None:
    """Post requests, ``threads`` at once; each answer is judged in this thread, and may end it all by raising."""

    def settle(under_way: set[Future[list[Refusal]]]) -> set[Future[list[Refusal]]]:
        ended, going_on = wait(under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            answered(future.result())
        return going_on

    with ThreadPoolExecutor(threads, thread_name_prefix="epochsink-bulk") as pool:
        under_way: set[Future[list[Refusal]]] = set()
        try:
            for request in requests:
                under_way.add(pool.submit(poster.post, request))
                if len(under_way) > threads:
                    under_way = settle(under_way)
            while under_way:
                under_way = settle(under_way)
        except BaseException:
            poster.stop()
            pool.shutdown(cancel_futures=True)
            raise
