"""Tables of cases in tests/data: a JSON object of lists, one case to a line, for tests that read the same way."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def table(name: str, section: str) -> list[Any]:
    """The cases of a section: a tuple for each list, other values as they are."""
    cases = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))[section]
    return [tuple(case) if isinstance(case, list) else case for case in cases]
