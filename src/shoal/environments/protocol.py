"""What an environment is: a sequence of tasks per split, and a function that scores a completion; and when two tasks
ask the same question."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from shoal.environments.tools import TOOLS
from shoal.errors import EnvironmentSetupError, UnusableTask

DEFAULT_TURNS = 3
MAX_TURNS = 64  # as many as a lease can say
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class Task:
    """One question. `answer` never leaves the trusted side: workers are sent prompts only.

    `prompt` is what the user says last; `history` is what was said before, as (role, text), a system message first.
    `kind` names the grader, where an environment has several.
    """

    id: str
    prompt: str
    answer: str
    kind: str = ""
    history: tuple[tuple[str, str], ...] = ()


class LazyTasks(Sequence[Task]):
    """So many tasks, each made by its position when it is asked for; nothing is listed in advance."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        positions = range(self._size)[index]
        return self._make(positions) if isinstance(positions, int) else [self._make(each) for each in positions]


@dataclass(frozen=True)
class Score:
    """What a completion is worth: `value` is trained on, `parts` and `notes` are for people."""

    value: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    notes: str = ""


@runtime_checkable
class Environment(Protocol):
    """Tasks and their scoring, both deterministic.

    `score` returns a low value for a bad completion, and raises `ScoringFailure` only when the machinery itself
    failed: the first is a sample, the second leaves it unscored.
    """

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...  # hex SHA-256 over everything that determines tasks and scores

    def tasks(self, split: Split) -> Sequence[Task]: ...  # indexing is cheap, nothing is listed in advance

    def task(self, task_id: str) -> Task: ...  # of either split; an unknown id is an `EnvironmentSetupError`

    def score(self, task: Task, completion: str) -> Score: ...


@dataclass(frozen=True)
class DialogueRule:
    """Which tool answers, and how many turns the model has at most. `max_turns` 1 is no dialogue.

        prompt ─► turn ─► tool ─┬─ an answer ─► turn ─► tool ─► …
                                └─ none, or `max_turns` ─► the last turn is what is scored

    Only tools that ship with shoal can be named: contributors run them, and nothing that an owner or a model wrote.
    """

    tool: str
    max_turns: int

    def __post_init__(self) -> None:
        if self.tool not in TOOLS:
            raise EnvironmentSetupError(f"there is no tool {self.tool!r}; there are {', '.join(sorted(TOOLS))}")


@runtime_checkable
class DialogueEnvironment(Environment, Protocol):
    """An environment whose tasks, or some of them, are dialogues. What is scored is the model's last turn."""

    def dialogue(self, task: Task) -> DialogueRule | None: ...


@runtime_checkable
class DigestedEnvironment(Environment, Protocol):
    """An environment that knows the digests of its questions without making tasks of them."""

    def prompt_digests(self, split: Split) -> Iterable[bytes]: ...  # `question_digest` of every task, in order


@runtime_checkable
class GeneratingEnvironment(Environment, Protocol):
    """An environment that makes tasks without end and holds out by content, as all of its kind do: what one holds out
    none trains on. To list its held-out tasks may take hours; to ask about one prompt takes nothing."""

    def holds_out(self, prompt: str) -> bool: ...  # whether a prompt, should it ever be made, is a held-out one


@runtime_checkable
class Demanding(Protocol):
    """An environment or a grader whose scoring needs something of the machine: a sandbox for programs, say."""

    def prepare(self) -> None: ...  # an `EnvironmentSetupError` says what is missing


def require_scoring(scoring: object) -> None:
    """Refuse once, at the start, a machine that lacks what an environment or a grader needs."""
    if isinstance(scoring, Demanding):
        scoring.prepare()


@dataclass(frozen=True)
class Identity:
    """Which tasks and which scoring: hub and validator must agree on all of it. `data_digest` is empty without data."""

    name: str
    version: int
    digest: str
    data_digest: str = ""


def identity_of(environment: Environment) -> Identity:
    version, data_digest = getattr(environment, "version", 1), getattr(environment, "data_digest", "")
    return Identity(environment.name, int(version), environment.digest, str(data_digest))


RESERVED = ("task", "length", "target", "limit", "shuffled_from")
RESERVED_PREFIX = "judge."
RESERVED_NAMES = f"{', '.join(RESERVED)} and {RESERVED_PREFIX}*"  # parts of a score that shoal adds itself


def is_reserved(name: str) -> bool:
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


# Whether two prompts are the same question

DIGEST_BYTES = 16
LOWER = bytes(range(256)).lower()
SPACES = bytes([*range(9, 14), *range(28, 33)])
"""What `str.isspace` says of ASCII."""
UNUSABLE = b""
"""Stands for a task that cannot be asked: no question has this digest."""


def prompt_digest(text: str) -> bytes:
    """Sixteen bytes that name a question, however it is spaced and capitalised."""
    if text.isascii():  # in one pass: a hundred thousand prompts take a tenth of a second
        plain = text.encode().translate(LOWER, SPACES)
    else:
        words = "".join(unicodedata.normalize("NFKC", text).casefold().split())
        plain = words.encode(errors="surrogatepass")
    return sha256(plain).digest()[:DIGEST_BYTES]


def question_digest(prompt: str, history: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest of a prompt with what was said before it: the same last words ask for something else after others.
    What the system said does not count: it tells how to answer, not what is asked."""
    before = [role.encode() + prompt_digest(text) for role, text in history if role != "system"]
    asked = prompt_digest(prompt)
    return sha256(b"\n".join([*before, asked])).digest()[:DIGEST_BYTES] if before else asked


def task_digest(task: Task) -> bytes:
    return question_digest(task.prompt, task.history)


def task_digests(environment: Environment, split: Split) -> Iterator[bytes]:
    """The digest of every task of a split, in order; `UNUSABLE` for those that cannot be used."""
    if isinstance(environment, DigestedEnvironment):
        yield from environment.prompt_digests(split)
        return
    tasks = environment.tasks(split)
    for index in range(len(tasks)):
        try:
            yield task_digest(tasks[index])
        except UnusableTask:
            yield UNUSABLE
