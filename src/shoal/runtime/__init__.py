"""How a process lives: time, files, stopping, retrying, logs, numbers, its recipe, and the processes it starts.

clock      Clock, SystemClock, SteadyClock (wall time without jumps), ManualClock; Backoff
stop       StopToken, stop_on_signals
files      ensure_folder, write_atomically, sync_folder, resource_error, is_full; home: the user's own folder
lock       FolderLock: one process per folder
config     load_config, parse_config, dump_config: TOML into a typed model and back
logs       setup: one-line records on stderr and in a file
metrics    MetricsLog: one JSON line per step
text       visible: others' words, fit for a terminal; shoal_command, install_command: what is printed to be copied
supervise  Supervisor, ProcessSpec, Ending, follow_supervisor
"""
