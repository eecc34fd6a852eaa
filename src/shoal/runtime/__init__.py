"""How a process lives: time, files, stopping, retrying, limits, logs, its recipe, and the processes it starts."""
