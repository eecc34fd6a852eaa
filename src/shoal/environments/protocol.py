"""The interface of environments: a sequence of tasks per split, and a function that scores a completion; and digests
that tell whether two tasks ask the same question."""

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
    """One question. `answer` stays on the trusted side: workers get prompts only.

    `prompt` is the user's last message; `history` has the earlier ones as (role, text), a system message first. `kind`
    names the grader if an environment has several.
    """

    id: str
    prompt: str
    answer: str
    kind: str = ""
    history: tuple[tuple[str, str], ...] = ()


class LazyTasks(Sequence[Task]):
    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        positions = range(self._size)[index]
        return self._make(positions) if isinstance(positions, int) else [self._make(each) for each in positions]


@dataclass(frozen=True)
class Score:
    """The score of a completion: `value` is trained on, `parts` and `notes` are for people."""

    value: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    notes: str = ""


@runtime_checkable
class Environment(Protocol):
    """Tasks and their scoring, both deterministic.

    `score` returns a low value for a bad completion. It raises `ScoringFailure` only for a failure of the machinery,
    which leaves the completion unscored."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...  # hex SHA-256 over everything that determines tasks and scores

    def tasks(self, split: Split) -> Sequence[Task]: ...  # made on access: indexing is cheap

    def task(self, task_id: str) -> Task: ...  # of either split; an unknown id is an `EnvironmentSetupError`

    def score(self, task: Task, completion: str) -> Score: ...


@dataclass(frozen=True)
class DialogueRule:
    """The tool that answers, and the largest number of the model's turns (1: no dialogue).

        prompt ─► turn ─► tool ─┬─ an answer ─► turn ─► tool ─► …
                                └─ none, or `max_turns` ─► the last turn is scored

    Only tools of shoal can be named: contributors run no code of an owner or a model.
    """

    tool: str
    max_turns: int

    def __post_init__(self) -> None:
        if self.tool not in TOOLS:
            raise EnvironmentSetupError(f"there is no tool {self.tool!r}; there are {', '.join(sorted(TOOLS))}")


@runtime_checkable
class DialogueEnvironment(Environment, Protocol):
    """An environment in which some tasks are dialogues. The model's last turn is scored."""

    def dialogue(self, task: Task) -> DialogueRule | None: ...


@runtime_checkable
class DigestedEnvironment(Environment, Protocol):
    """An environment that knows the digests of its questions without making tasks of them."""

    def prompt_digests(self, split: Split) -> Iterable[bytes]: ...  # `question_digest` of every task, in order


@runtime_checkable
class GeneratingEnvironment(Environment, Protocol):
    """Generates tasks without end. All environments of this kind hold out the same prompts, by content. Listing the
    held-out tasks may take hours; asking about one prompt is cheap."""

    def holds_out(self, prompt: str) -> bool: ...  # whether a prompt is a held-out one


@runtime_checkable
class TableEnvironment(Environment, Protocol):
    def columns(self, task_id: str) -> Mapping[str, Any]: ...  # of the task's row, beside its prompt


@runtime_checkable
class Demanding(Protocol):
    def prepare(self) -> None: ...  # an `EnvironmentSetupError` says what is missing


@runtime_checkable
class TokenEnvironment(Environment, Protocol):
    """An environment whose score may need the completion's tokens: then `reads_tokens`, and `score` takes them too."""

    @property
    def reads_tokens(self) -> bool: ...

    def score(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Score: ...


def reads_tokens(environment: Environment) -> bool:
    return isinstance(environment, TokenEnvironment) and environment.reads_tokens


def score_of(environment: Environment, task: Task, completion: str, token_ids: Sequence[int] | None) -> Score:
    """The score of a completion, by its tokens too if the environment wants them (None: they are not known)."""
    if isinstance(environment, TokenEnvironment) and environment.reads_tokens:
        return environment.score(task, completion, token_ids)
    return environment.score(task, completion)


def refuse_tokens(environment: Environment, command: str) -> None:
    """Raise `EnvironmentSetupError` where texts are scored whose tokens are not known."""
    if reads_tokens(environment):
        why = "a reward function asks for completion_ids, the tokens that a model drew"
        raise EnvironmentSetupError(f"{command} scores texts, and {why}: leave that function out of the file for this")


def require_scoring(scoring: object) -> None:
    """Raise `EnvironmentSetupError` at the start if this machine lacks what scoring needs."""
    if isinstance(scoring, Demanding):
        scoring.prepare()


@dataclass(frozen=True)
class Identity:
    """Identifies tasks and scoring; hub and validator must agree. `data_digest` is empty without data."""

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


DIGEST_BYTES = 16
LOWER = bytes(range(256)).lower()
SPACES = bytes([*range(9, 14), *range(28, 33)])  # ASCII characters for which `str.isspace` is true
UNUSABLE = b""  # in place of the digest of a task that cannot be asked


def prompt_digest(text: str) -> bytes:
    """Sixteen bytes that identify a question, whatever its spaces and case."""
    if text.isascii():  # in one pass: 100,000 prompts take 0.1 s
        plain = text.encode().translate(LOWER, SPACES)
    else:
        words = "".join(unicodedata.normalize("NFKC", text).casefold().split())
        plain = words.encode(errors="surrogatepass")
    return sha256(plain).digest()[:DIGEST_BYTES]


def question_digest(prompt: str, history: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest of a prompt with its history, without system messages: they say how to answer, not what is asked."""
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
