"""All instructions of a task, or nothing: what IFEval calls strict accuracy of the prompt."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, ClassVar

from shoal.environments.graders.instructions.checks import CHECKS, Settings
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.protocol import Score
from shoal.errors import ScoringFailure

LONGEST = 200_000
"""Characters of an answer that are read; one that is longer follows no instruction."""
TRIAL = "A trial, to see whether the settings are possible."


class InstructionsGrader:
    """The answer of a task is JSON: {"instructions": [{"id": "punctuation:no_comma", "settings": {}}, …]}.

    Parts of a score are the single instructions, by id; one that occurs twice is numbered.
    """

    name: ClassVar[str] = "instructions"
    version: ClassVar[int] = 2

    def problem(self, answer: str) -> str:
        try:
            for name, settings in _instructions(answer):
                CHECKS[name](TRIAL, settings)
        except (KeyError, TypeError, ValueError) as error:
            return _sentence(error)
        return ""

    def score(self, answer: str, completion: str) -> Score:
        text = after_thinking(completion)
        try:
            followed = [(name, _follows(name, text, settings)) for name, settings in _instructions(answer)]
        except (KeyError, TypeError, ValueError) as error:
            raise ScoringFailure(f"the instructions of the task cannot be checked: {_sentence(error)}") from error
        parts: dict[str, float] = {}
        for name, done in followed:
            parts[name if name not in parts else f"{name}#{len(parts) + 1}"] = float(done)
        missed = [name for name, done in followed if not done]
        return Score(value=float(not missed), parts=parts, notes=f"not followed: {', '.join(missed)}" if missed else "")


def _follows(name: str, text: str, settings: Settings) -> bool:
    return bool(text.strip()) and len(text) <= LONGEST and CHECKS[name](text, settings)


@lru_cache(maxsize=1024)
def _instructions(answer: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """(id, settings) of each instruction; `ValueError` says what is wrong."""
    content = json.loads(answer)
    listed = content.get("instructions") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError("there are no instructions")
    return tuple(_instruction(entry) for entry in listed)


def _instruction(entry: object) -> tuple[str, dict[str, Any]]:
    name = entry.get("id") if isinstance(entry, dict) else None
    settings = entry.get("settings", {}) if isinstance(entry, dict) else None
    if name not in CHECKS or not isinstance(settings, dict):
        raise ValueError(f"there is no instruction {str(name)[:60]!r}")
    return str(name), settings


def _sentence(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"an instruction lacks its setting {error}"
    return " ".join(str(error).split())[:200]
