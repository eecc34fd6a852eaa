"""Telling a payload as a difference to another: block by block, in chunks, given up as soon as it does not pay."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from shoal.shardcast.bases import Base
from shoal.shardcast.content import Content
from shoal.shardcast.delta import BLOCK_BYTES, MAGIC, Block, blocks_of, encode_block
from shoal.shardcast.inorder import in_order

JUDGED_AFTER_BYTES = 32 * 1024 * 1024  # of the payload: before, a few blocks that changed much say little


class DoesNotPay(Exception):
    """The difference is too large, or its base is not all there."""


def difference(base: Base, content: Content, chunk_size_bytes: int, pays: float) -> Iterator[memoryview]:
    """The delta from `base` to `content`, cut into chunks; a few blocks are held in memory.

    Raises `DoesNotPay` when it needs more than the share `pays` of the bytes that it has told so far.
    """
    scratch = threading.local()

    def tell(block: Block) -> bytes:
        if not hasattr(scratch, "old"):
            scratch.old, scratch.new = (memoryview(bytearray(BLOCK_BYTES)) for _ in range(2))
        old = scratch.old[: block.size_bytes]
        if not base.read_into(block.offset, old):
            raise DoesNotPay
        return encode_block(old, content.part(block.offset, block.size_bytes, scratch.new), block.width)

    pending, size = bytearray(MAGIC), len(MAGIC)
    for block, told in zip(blocks_of(content.entries), in_order(tell, blocks_of(content.entries)), strict=True):
        pending, size = pending + told, size + len(told)
        if size > pays * max(block.end, min(JUDGED_AFTER_BYTES, content.size_bytes)):
            raise DoesNotPay
        while len(pending) >= chunk_size_bytes:
            yield memoryview(bytes(pending[:chunk_size_bytes]))
            del pending[:chunk_size_bytes]
    if pending:
        yield memoryview(bytes(pending))
