"""What a completion of one kind of task is worth; `registry` has the list. What is graded comes after the thinking."""

OPENING, CLOSING = "<think>", "</think>"


def after_thinking(completion: str) -> str:
    """What follows the last `</think>`, up to another `<think>`; without it all, unless it begins with `<think>`."""
    _thought, end, rest = completion.rpartition(CLOSING)
    if end:
        return rest.partition(OPENING)[0]
    return "" if completion.lstrip().startswith(OPENING) else completion
