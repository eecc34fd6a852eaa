"""Where the hub keeps things: rows in a database, submissions as files.

protocol   Storage, Reader, Writer: what a database must do
tables     the tables, with the reason on each constraint
queries    SqlReader, over SQLAlchemy Core
writes     SqlWriter, over SQLAlchemy Core
sqlite     SqliteStorage: the database of one machine
memory     MemoryStorage: the same in this process only, for simulations and tests
blobs      BlobFolder: submissions by hash
"""

from shoal.hub.storage.blobs import BlobFolder
from shoal.hub.storage.memory import MemoryStorage
from shoal.hub.storage.protocol import Presence, Reader, StaleRow, Storage, Writer
from shoal.hub.storage.sqlite import SqliteStorage

__all__ = ["BlobFolder", "MemoryStorage", "Presence", "Reader", "SqliteStorage", "StaleRow", "Storage", "Writer"]
