"""Tasks as prompts of a model, and whether the model can take them. The hub, preflight checks and evaluation use
this."""

from collections.abc import Mapping

from shoal.environments import Environment, Task, budget_of, prompt_settings_of
from shoal.errors import UnusableTask
from shoal.models import PromptEncoder, read_config

TOKENS_SHOWN = 48


class CannotBeAsked(UnusableTask):
    """The model cannot take the prompt of a task. `reason` names no task, so equal reasons can be counted."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Asking:
    def __init__(self, files: Mapping[str, bytes], environment: Environment, max_new_tokens: int) -> None:
        config = read_config(files)
        positions = config.get("max_position_embeddings", config.get("n_positions"))  # the name in GPT-2
        self.encoder = PromptEncoder(files, **prompt_settings_of(environment).model_dump())
        self._budget, self._name = budget_of(environment), environment.name
        self._room = positions - max_new_tokens if isinstance(positions, int) and positions > 0 else None

    def ids(self, task: Task) -> tuple[int, ...]:
        """The prompt's tokens, as the hub sends them. The task's text contains its length target already."""
        unknown, detail, ids = self.encoder.tokenizer.unknown_token_id, "", tuple[int, ...]()
        try:
            ids = self.encoder.encode(task.prompt, task.history)
            reason = "" if ids else "has no tokens"
        except UnicodeEncodeError as error:
            reason, detail = "is no proper text", str(error)
        if unknown is not None and unknown in ids:
            reason, detail = "has characters that the model's tokenizer does not know", f"{task.prompt!r:.300}"
        elif self._room is not None and len(ids) > self._room:
            room = f"room for {max(0, self._room)} tokens: ask for fewer new ones with run.max_new_tokens"
            reason, detail = f"and its completion are longer than the model's context ({room})", f"it has {len(ids)}"
        if not reason:
            return ids
        sentence = f"the prompt of task {task.id} of environment {self._name} {reason}"
        raise CannotBeAsked(f"{sentence}: {detail}" if detail else sentence, f"the prompt {reason}")

    def check(self, task: Task) -> None:
        """Raise `CannotBeAsked` if the prompt does not fit, with the length target whose number is longest."""
        self.ids(self._with_target(task))

    def rendered(self, task: Task) -> str:
        """The prompt as the model gets it, and its first tokens."""
        ids, decode = self.ids(self._with_target(task)), self.encoder.tokenizer.decode_many
        pieces = " ".join(repr(piece) for piece in decode([[token] for token in ids[:TOKENS_SHOWN]]))
        more = f" … and {len(ids) - TOKENS_SHOWN} more" if len(ids) > TOKENS_SHOWN else ""
        return (
            f"the prompt of task {task.id}, {len(ids)} tokens: {decode([list(ids)])[0]!r}; its tokens: {pieces}{more}"
        )

    def _with_target(self, task: Task) -> Task:
        if self._budget is None or not self._budget.targets:
            return task
        return self._budget.ask(task, max(self._budget.targets, key=lambda target: len(str(target))))
