"""Tasks as prompts of a model, and whether it can take them: the hub, the checks before a run and evaluation ask here.

    task, its length target said ─► text by the model's chat template ─► token ids, or `CannotBeAsked`

Importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.environments import Environment, Task, budget_of, prompt_settings_of
from shoal.errors import UnusableTask
from shoal.models import PromptEncoder
from shoal.models.folder import read_config


class CannotBeAsked(UnusableTask):
    """A task whose prompt the model cannot take. `reason` names no task: many may be counted under one."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Asking:
    """Tasks as prompts of one model. One whose prompt the model cannot take is `CannotBeAsked`: another is drawn.

    >>> Asking(files, environment, 10).ids(Task("t", "", ""))                             # doctest: +SKIP
    CannotBeAsked: the prompt of task t of environment sort has no tokens: a prompt needs at least one
    """

    def __init__(self, files: Mapping[str, bytes], environment: Environment, max_new_tokens: int) -> None:
        positions = read_config(files).get("max_position_embeddings")
        self.encoder = PromptEncoder.of(files, prompt_settings_of(environment))
        self._budget = budget_of(environment)
        self._name = environment.name
        self._room = positions - max_new_tokens if isinstance(positions, int) and positions > 0 else None

    def ids(self, task: Task) -> tuple[int, ...]:
        """The prompt's tokens, as the hub sends them; the task says its length target already."""
        try:
            ids = self.encoder.encode(task.prompt, task.history)
        except UnicodeEncodeError as error:
            raise self._problem(task, f"is no proper text: {error}", "is no proper text") from error
        if not ids:
            raise self._problem(task, "has no tokens: a prompt needs at least one", "has no tokens")
        unknown = self.encoder.tokenizer.unknown_token_id
        if unknown is not None and unknown in ids:
            reason = "has characters that the model's tokenizer does not know"
            raise self._problem(task, f"{reason}: {task.prompt!r:.300}", reason)
        if self._room is not None and len(ids) > self._room:
            room = max(0, self._room)
            counted = f"has {len(ids)} tokens; with run.max_new_tokens the model has room for {room}"
            reason = (
                f"and its completion are longer than the model's context (room for {room}: ask for fewer new tokens)"
            )
            raise self._problem(task, counted, reason)
        return ids

    def _problem(self, task: Task, what: str, reason: str) -> CannotBeAsked:
        return CannotBeAsked(f"the prompt of task {task.id} of environment {self._name} {what}", f"the prompt {reason}")

    def check(self, task: Task) -> None:
        """Whether a task can be asked, with the length target whose number is longest."""
        longest = max(self._budget.settings.targets, key=lambda target: len(str(target))) if self._budget else None
        self.ids(task if self._budget is None or longest is None else self._budget.ask(task, longest))
