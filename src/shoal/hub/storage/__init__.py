"""Where the hub keeps things: rows in a database, submissions as files.

protocol   Storage, Reader, StoryReader, Writer: what a database must do
tables     the tables, with the reason on each constraint
queries    SqlReader, over SQLAlchemy Core; story_queries: for who asks why
writes     SqlWriter, over SQLAlchemy Core
schema     prepare: the tables made, or accepted, or refused
sqlite     SqliteStorage: the database of one hub, or one in memory; grouping: commits; counts: sums kept by its writer
postgres   PostgresStorage: the database of several
opening    open_storage: whichever the settings name
blobs      Blobs, open_blobs; BlobFolder: submissions by hash
s3         S3Blobs: the same in a bucket; sigv4 signs leave to upload
"""

from shoal.hub.storage.blobs import BlobFolder, Blobs, open_blobs
from shoal.hub.storage.opening import open_storage
from shoal.hub.storage.protocol import Presence, Reader, StaleRow, Storage, StoryReader, Writer
from shoal.hub.storage.sqlite import SqliteStorage

__all__ = [
    "BlobFolder",
    "Blobs",
    "Presence",
    "Reader",
    "SqliteStorage",
    "StaleRow",
    "Storage",
    "StoryReader",
    "Writer",
    "open_blobs",
    "open_storage",
]
