"""What a demonstration must be. A filter takes a few candidates and says of each why it is left out, or nothing.

Filters are asked in the order of their cost, and each sees only what those before it have kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.environments.data.prompts import prompt_digest, question_digest
from shoal.errors import ConfigError
from shoal.trainer.demonstrations.encoding import Sequence as Tokens
from shoal.trainer.demonstrations.likeness import MARKS, Lookalikes, digest_of, plain_text
from shoal.trainer.demonstrations.reading import Demonstration

FORMS: Mapping[str, str] = {
    "thinking": r"(?s)<think>.*\S.*</think>.*\S",
    "boxed": r"\\(boxed|fbox)\s*\{[^}]*\S",
    "answer": r"(?s)<answer>.*\S.*</answer>",
}
"""Words for `--require`; anything else is a regular expression of one's own."""


@dataclass
class Candidate:
    """A demonstration on its way through the filters; what they find out about it is kept for the report."""

    demonstration: Demonstration
    sequences: tuple[Tokens, ...]
    reward: float | None = None
    rank: float | None = None

    @property
    def row(self) -> int:
        return self.demonstration.row

    @property
    def tokens(self) -> int:
        return max((len(sequence.ids) for sequence in self.sequences), default=0)

    @property
    def tokens_learnt(self) -> int:
        return sum(sequence.tokens_learnt for sequence in self.sequences)

    @property
    def question(self) -> bytes:
        """The digest of what it answers, or of the text itself."""
        said = self.demonstration
        return question_digest(said.prompt, said.history) if said.messages else question_digest(said.text)

    @property
    def turns(self) -> tuple[bytes, ...]:
        """The digest of everything that it is asked, in order, each without what was said before; or of the text."""
        asked = [text for role, text in self.demonstration.messages if role == "user"]
        return tuple(map(prompt_digest, asked or [self.demonstration.text]))

    @property
    def plain(self) -> bytes:
        """What is said, by whom, and which of it is learnt; without the system message."""
        said = self.demonstration
        marked = [
            (text, MARKS["" if role == "assistant" and index >= said.given else role])
            for index, (role, text) in enumerate(said.messages)
            if role != "system"
        ]
        return plain_text(*zip(*marked, strict=True)) if marked else plain_text([said.text])

    @property
    def system(self) -> bytes:
        """The system message; empty if there is none."""
        texts = [text for role, text in self.demonstration.messages if role == "system"]
        return plain_text(texts, MARKS["system"])


class Filter(Protocol):
    """`name` is what the table calls it."""

    @property
    def name(self) -> str: ...

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        """For each candidate why it is left out; empty for those that stay. Rows come in their order."""
        ...


@dataclass(frozen=True)
class Length:
    """Tokens of the longest sequence, within bounds, with something to be learnt in them."""

    least: int
    most: int | None
    name: str = "length"

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        return [self._reason(each) for each in candidates]

    def _reason(self, candidate: Candidate) -> str:
        if not candidate.tokens_learnt:
            return "no token of it would be learnt"
        if self.most is not None and candidate.tokens > self.most:
            return f"more than {self.most} tokens"
        if candidate.tokens < self.least:
            return f"less than {self.least} tokens"
        return ""


@dataclass(frozen=True)
class Form:
    """The last words must match a regular expression."""

    wanted: str
    name: str = "form"
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_pattern", re.compile(FORMS.get(self.wanted, self.wanted)))
        except re.error as error:
            raise ConfigError(
                f"--require {self.wanted}: no regular expression ({error}), nor one of {', '.join(FORMS)}"
            ) from error

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        found = [self._pattern.search(each.demonstration.completion) for each in candidates]
        return ["" if match else f"no {self.wanted} in it" for match in found]


@dataclass(frozen=True)
class Known:
    """No character that the tokenizer does not know: it would be learnt as `<unk>`."""

    unknown: int | None
    name: str = "characters"

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        return ["characters that the tokenizer does not know" if self._has(each) else "" for each in candidates]

    def _has(self, candidate: Candidate) -> bool:
        return self.unknown is not None and any(self.unknown in sequence.ids for sequence in candidate.sequences)


@dataclass
class Duplicates:
    """The first of equal demonstrations stays."""

    name: str = "duplicates"
    _seen: dict[bytes, int] = field(default_factory=dict)

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        return [self._reason(each) for each in candidates]

    def _reason(self, candidate: Candidate) -> str:
        first = self._seen.setdefault(digest_of(candidate.system + candidate.plain), candidate.row)
        return "" if first == candidate.row else f"the same as row {first}"


@dataclass
class NearDuplicates:
    """The first of demonstrations that are nearly equal stays (`likeness`); another system message makes another one.

    That message is compared as a whole: if it were part of the text, a long one would make all rows alike.
    """

    threshold: float
    name: str = "near duplicates"
    _known: Lookalikes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = Lookalikes(self.threshold)

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        found = [self._known.earlier(each.row, each.plain, digest_of(each.system)) for each in candidates]
        return ["" if row is None else f"nearly the same as row {row}" for row in found]
