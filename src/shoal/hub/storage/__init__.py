"""Where the hub keeps things: rows in a database, submissions as files.

tables     the tables, with the reason on each constraint; prepare: made, or accepted, or refused
mapping    rows of the database as the hub's dataclasses, and back
reader     Reader: every question, for decisions and for who asks why
writer     Writer: applying what a decision asked for
sqlite     SqliteStorage: the database of one hub; grouping: its group commit; counts: the sums that its writer keeps
postgres   PostgresStorage: the database of several
opening    Storage, open_storage: whichever the settings name
copying    a run's rows and submissions, for backups and restores
blobs      Blobs, open_blobs; BlobFolder: submissions by hash
s3         S3Blobs: the same in a bucket

A decision is one write transaction: rows are read, the pure core decides, its commands are applied, all or nothing.
What it read stays true until its commit: in SQLite, because writers exclude each other from their first statement on;
in PostgreSQL, because what a writer reads of single rows it locks, and what concerns all rows (the newest policy, the
next step) only an `exclusive` one changes.

    decision ─► Record ─► ledger_outbox ─ one poster, in order ─► ledger (the chain)
"""

from shoal.hub.storage.blobs import BlobFolder, Blobs, open_blobs
from shoal.hub.storage.opening import Storage, open_storage
from shoal.hub.storage.reader import Reader
from shoal.hub.storage.sqlite import SqliteStorage
from shoal.hub.storage.tables import Presence
from shoal.hub.storage.writer import StaleRow, Writer

__all__ = [
    "BlobFolder", "Blobs", "Presence", "Reader", "SqliteStorage", "StaleRow", "Storage", "Writer", "open_blobs",
    "open_storage",
]  # fmt: skip
