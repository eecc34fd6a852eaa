"""The greedy held-out score."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
from trainer_stubs import EOS, SAMPLING, tiny_files, tiny_model

from shoal.environments import Score, Split, Task
from shoal.errors import ModelError, ScoringFailure, UnusableTask
from shoal.models.tokenizer import TextTokenizer
from shoal.trainer.held_out import GreedyEvaluator


class Recorder:
    """An environment that remembers what it was asked to score, and gives each task its own value."""

    name = "recorder"
    digest = hashlib.sha256(b"recorder").hexdigest()

    def __init__(self) -> None:
        self.scored: dict[str, str] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        assert split == "held_out"
        return [Task(f"t/{index}", f"{index}{index}=", "") for index in range(5)]

    def task(self, task_id: str) -> Task:
        return self.tasks("held_out")[int(task_id.removeprefix("t/"))]

    def score(self, task: Task, completion: str) -> Score:
        self.scored[task.id] = completion
        return Score(float(task.id.removeprefix("t/")))


def plain_greedy(model, tokenizer: TextTokenizer, prompt: str) -> str:
    ids = list(tokenizer.encode(prompt))
    start = len(ids)
    while len(ids) - start < SAMPLING.max_new_tokens and (len(ids) == start or ids[-1] != EOS):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:])


def test_the_score_is_the_mean_over_the_first_tasks_decoded_greedily() -> None:
    model, environment = tiny_model(), Recorder()
    tokenizer = TextTokenizer(tiny_files(model))
    evaluate = GreedyEvaluator(model, tokenizer, environment, SAMPLING, tasks=3)
    assert evaluate() == 1.0  # tasks 0, 1, 2
    assert environment.scored == {
        task.id: plain_greedy(model, tokenizer, task.prompt) for task in environment.tasks("held_out")[:3]
    }
    assert GreedyEvaluator(model, tokenizer, environment, SAMPLING, tasks=99)() == 2.0


def test_it_sees_the_model_as_it_is_now_and_leaves_it_trainable() -> None:
    model, environment = tiny_model(), Recorder()
    tokenizer = TextTokenizer(tiny_files(model))
    evaluate = GreedyEvaluator(model, tokenizer, environment, SAMPLING, tasks=1)
    state = torch.get_rng_state()
    evaluate()
    assert torch.equal(torch.get_rng_state(), state)  # an evaluation does not change what a resume would draw
    first = dict(environment.scored)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    evaluate()
    assert environment.scored != first
    model(torch.tensor([[3, 4]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_a_task_that_cannot_be_scored_is_left_out_and_never_counts_as_0() -> None:
    class Failing(Recorder):
        def score(self, task: Task, completion: str) -> Score:
            if task.id in ("t/0", "t/1"):
                raise ScoringFailure("the scorer is away")
            return super().score(task, completion)

    model = tiny_model()
    tokenizer = TextTokenizer(tiny_files(model))
    assert GreedyEvaluator(model, tokenizer, Failing(), SAMPLING, tasks=4)() == 2.5  # tasks 2 and 3
    assert GreedyEvaluator(model, tokenizer, Failing(), SAMPLING, tasks=2)() is None


class SomeBad(Sequence[Task]):
    """Held-out tasks, of which the row of the second cannot be used, and the third has no prompt."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        if index == 1:
            raise UnusableTask("row 1 (held.jsonl line 2) cannot be used: answer is empty")
        return Task(f"t/{index}", "" if index == 2 else f"{index}{index}=", "")


def test_a_task_that_cannot_be_used_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    class Holes(Recorder):
        def tasks(self, split: Split) -> Sequence[Task]:
            return SomeBad()

    def encode(task: Task) -> tuple[int, ...]:
        if task.id == "t/3":
            raise ModelError("the template refuses it")
        return tokenizer.encode(task.prompt)

    model = tiny_model()
    tokenizer = TextTokenizer(tiny_files(model))
    assert GreedyEvaluator(model, tokenizer, Holes(), SAMPLING, 5)() == 7 / 3  # tasks 0, 3 and 4
    assert "2 of 5 held-out tasks cannot be used (left out): row 1 (held.jsonl line 2)" in caplog.text
    assert GreedyEvaluator(model, tokenizer, Holes(), SAMPLING, 5, encode)() == 2.0  # tasks 0 and 4


def test_without_a_usable_task_there_is_no_score() -> None:
    class Nothing(Recorder):
        def tasks(self, split: Split) -> Sequence[Task]:
            return [Task("t/0", "", "")]

    model = tiny_model()
    assert GreedyEvaluator(model, TextTokenizer(tiny_files(model)), Nothing(), SAMPLING, 5)() is None
