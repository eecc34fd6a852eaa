"""Completions of tasks: prompts by the model's own rules, dice from the plan.

    task ─► length target, if the environment has budgets ─► token ids ─► engine ─► text, tokens, how it ended
                                                                            │
                                                     a tool, if the task is a dialogue, answers between turns

A prompt that the model cannot take (too long, characters that it does not know) is a problem of that task, not of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engines import Engine, GenerationRequest
from shoal.engines.asking import Asking, CannotBeAsked
from shoal.engines.dialogue import Dialogue, Talks, greedy_lines
from shoal.environments import Environment, Task
from shoal.errors import ModelError
from shoal.evaluation.plan import SamplingPlan, as_asked, sample_seed
from shoal.evaluation.records import SampleRecord
from shoal.evaluation.subject import EvaluatedModel, memory_errors
from shoal.protocol import SamplingParameters

ANY_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a task; nothing, and why, where `problem` says so."""

    task: Task
    problem: str = ""
    samples: tuple[SampleRecord, ...] = ()


@dataclass(frozen=True)
class AskedTask:
    """A task as the model is asked it."""

    task: Task
    ids: tuple[int, ...]
    talk: Dialogue | None


class Sampler:
    """Draws `plan.samples` completions of each task given. Which tasks come together changes no dice."""

    def __init__(self, subject: EvaluatedModel, environment: Environment, plan: SamplingPlan) -> None:
        self._engine: Engine = subject.engine
        self._asking = Asking(subject.files, environment, plan.max_new_tokens)
        self._tokenizer = self._asking.encoder.tokenizer
        self._environment = environment
        self._plan = plan
        self._sampling = SamplingParameters(
            temperature=plan.temperature or ANY_TEMPERATURE,  # greedy decoding does not look at it
            max_new_tokens=plan.max_new_tokens,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        self._talks = Talks(environment, subject.files, self._sampling)

    def draw(self, tasks: Sequence[tuple[int, Task]]) -> list[Drawn]:
        """One result per (number, task), in order."""
        prompts = [self._prompt(number, task) for number, task in tasks]
        usable = [place for place, (_, problem) in enumerate(prompts) if not problem]
        asked = [AskedTask(tasks[place][1], prompts[place][0], self._talks.of(tasks[place][1])) for place in usable]
        with memory_errors("draw these completions"):
            found = self._greedy(asked) if self._plan.temperature == 0 else self._sample(asked)
        drawn = dict(zip(usable, found, strict=True))
        return [Drawn(task, prompts[place][1], drawn.get(place, ())) for place, (_, task) in enumerate(tasks)]

    # ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────

    def _prompt(self, number: int, task: Task) -> tuple[tuple[int, ...], str]:
        """Token ids, or what is wrong with the prompt."""
        question = as_asked(self._environment, self._plan, number, task)
        try:
            return self._asking.ids(question), ""
        except CannotBeAsked as error:
            return (), error.reason
        except ModelError:
            return (), "the model's chat template refuses the prompt"

    # ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────

    def _sample(self, asked: Sequence[AskedTask]) -> list[tuple[SampleRecord, ...]]:
        plan = self._plan
        requests, owners = [], []
        for owner, each in enumerate(asked):
            respond = None if each.talk is None else each.talk.respond
            seeds = tuple(sample_seed(plan.seed, each.task.id, sample) for sample in range(plan.samples))
            for start in range(0, len(seeds), plan.rows):  # an engine decodes a request whole, whatever memory it takes
                some = seeds[start : start + plan.rows]
                requests.append(GenerationRequest(each.ids, some, self._sampling, respond=respond))
                owners.append(owner)
        found: list[list[SampleRecord]] = [[] for _ in asked]
        for owner, group in zip(owners, self._engine.generate(requests), strict=True):
            found[owner] += [self._sampled(one.token_ids.tolist(), one.finish, one.given) for one in group]
        return [tuple(samples) for samples in found]

    def _greedy(self, asked: Sequence[AskedTask]) -> list[tuple[SampleRecord, ...]]:
        """As validators and the trainer answer held-out tasks."""
        prompts, talks = [each.ids for each in asked], [each.talk for each in asked]
        lines = greedy_lines(self._engine, prompts, talks, self._sampling)
        return [(self._sampled(line.tokens, line.finish, line.given),) for line in lines]

    def _sampled(self, ids: list[int], finish: str, given: Sequence[tuple[int, int]]) -> SampleRecord:
        """Not scored yet: the text that is scored (of a dialogue, the model's last turn), and how many tokens the model
        drew but for the one that ended it."""
        ended = ids[-1:] == [self._tokenizer.eos_token_id]
        last = sum(given[-1]) if given else 0
        drawn = len(ids) - sum(length for _, length in given) - ended
        return SampleRecord(None, drawn, finish, text=self._tokenizer.decode(ids[last:]))
