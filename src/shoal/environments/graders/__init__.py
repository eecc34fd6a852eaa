"""What a completion of one kind of task is worth; `registry` has the list. What is graded comes after the thinking."""

OPENING = "<think>"
CLOSING = "</think>"


def after_thinking(completion: str) -> str:
    """What follows the last `</think>`, up to a thinking that is begun after it and never ended. Without any
    `</think>`: nothing if the completion begins with `<think>`, all of it otherwise."""
    _thought, end, said = completion.rpartition(CLOSING)
    if end:
        return said.partition(OPENING)[0]
    return "" if completion.lstrip().startswith(OPENING) else completion
