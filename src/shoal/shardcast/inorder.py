"""Work on many parts in a few threads, results in order, never more than a few parts in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = min(8, os.cpu_count() or 1)  # hashing, comparing, compressing and writing all let go of the interpreter


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> Iterator[R]:
    """`work` of every item, in the items' order. What one of them raises is raised here, and no more are begun.

    >>> list(in_order(len, ["a", "bb", "ccc"]))
    [1, 2, 3]
    """
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="in-order") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
