"""How a process lives: time, files, stopping, retrying, logs, numbers, its recipe, and the processes it starts.

clock      Clock, SystemClock, SteadyClock (wall time without jumps), ManualClock
stop       StopToken, stop_on_signals
retry      Backoff
files      ensure_folder, write_atomically, sync_folder, resource_error, is_full
lock       FolderLock: one process per folder
config     load_config, parse_config, dump_config: TOML into a typed model and back
logs       setup: one-line records on stderr and in a file
metrics    MetricsLog: one JSON line per step
program    shoal_command, install_command: what is printed for somebody to copy
supervise  Supervisor, ProcessSpec, Ending, follow_supervisor
"""
