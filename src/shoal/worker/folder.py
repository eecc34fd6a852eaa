"""A worker's folder: its identity, its outbox, its cache of weights. One process at a time.

node.key           who this node is; credit belongs to it, so keep it
heads.jsonl        receipts with the ledger heads that they name, the newest thousand or more (`heads`)
outbox/            finished work not yet promised by a hub
cache/             weights
.lock              held while a worker runs here: two with one key and one outbox would answer for each other
"""

from __future__ import annotations

from pathlib import Path

from shoal.protocol import SigningKey, load_or_create_key


def identity(folder: Path) -> SigningKey:
    return load_or_create_key(folder / "node.key")
