"""Graders score completions of one kind of task; `registry` has the list. They grade the text after the thinking."""

OPENING, CLOSING = "<think>", "</think>"


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`, up to another `<think>`. Without `</think>`: all of it, or nothing if it
    begins with `<think>`."""
    _thought, end, rest = completion.rpartition(CLOSING)
    if end:
        return rest.partition(OPENING)[0]
    return "" if completion.lstrip().startswith(OPENING) else completion
