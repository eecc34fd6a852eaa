"""What a completion of one kind of task is worth; `registry` has the list."""
