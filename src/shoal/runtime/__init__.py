"""How a process lives: time, files, stopping, retrying, limits, logs, its recipe, and the processes it starts."""

# fmt: off
# isort: off
from shoal.runtime.clock import Backoff, Clock, ManualClock, SystemClock
from shoal.runtime.crash import point
from shoal.runtime.files import (
    FolderLock, ensure_folder, home, open_in_place, resource_error, sync_folder, write_atomically,
)
from shoal.runtime.limits import UNLIMITED_BYTES, MachineLimits, free_memory_bytes, show_bytes
from shoal.runtime.logs import is_verbose
from shoal.runtime.stop import STOPPED_CODE, SUPERVISED, StopToken, stop_on_signals
from shoal.runtime.text import (
    count_of, duration, install_command, meant, printable, shoal_command, visible, visible_json,
)
