"""Dialogues in evaluation: greedy, turn by turn, under the terms that leases would have."""

from __future__ import annotations

import pytest

from shoal.engines import Engine, GenerationRequest, build
from shoal.engines.dialogue import Characters, Dialogue, Talks, greedy_answers
from shoal.environments import EnvironmentSettings, has_dialogues
from shoal.environments import build as build_environment
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import DialogueTerms, SamplingParameters

EOS = 1
COLD = SamplingParameters(temperature=1e-4, max_new_tokens=24, eos_token_id=EOS)
PROMPTS = ("31=", "90713=", "5=", "8642=")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(params=["torch", "scripted"])
def engine(request: pytest.FixtureRequest, tiny: LoadedModel) -> Engine:
    made = build(request.param, tiny.files)
    made.load_policy(None, policy_views(tiny.model))
    return made


@pytest.mark.parametrize("limit", [24, 9])
def test_greedy_dialogues_are_those_of_sampling_without_heat(engine: Engine, tiny: LoadedModel, limit: int) -> None:
    sampling = COLD.model_copy(update={"max_new_tokens": limit})
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    terms = DialogueTerms(tool="t", max_turns=3, before=(3,), after=(3,))
    talk = Dialogue(terms, EOS, limit, lambda turns: chr(5 + len(turns)), Characters())
    talks = [talk, None, talk, talk]
    wanted = []
    for prompt, each in zip(prompts, talks, strict=True):
        respond = None if each is None else each.respond
        [[drawn]] = engine.generate([GenerationRequest(prompt, (7,), sampling, respond=respond)])
        ids = drawn.token_ids.tolist()[sum(drawn.given[-1]) if drawn.given else 0 :]
        wanted.append(ids[:-1] if ids[-1] == EOS else ids)
    assert greedy_answers(engine, prompts, talks, sampling) == wanted


def test_nobody_answers_where_the_environment_does_not(engine: Engine, tiny: LoadedModel) -> None:
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    plain = [ids.tolist() for ids in engine.greedy(prompts, 24, EOS)]
    wanted = [ids[:-1] if ids[-1] == EOS else ids for ids in plain]
    assert greedy_answers(engine, prompts, [None] * 4, COLD) == wanted


def test_a_task_has_the_dialogue_that_its_lease_would_have(tiny: LoadedModel) -> None:
    calculator = build_environment(EnvironmentSettings(name="calculator", options={"max_turns": 4}))
    talks = Talks(calculator, tiny.files, COLD)
    task = calculator.tasks("held_out")[0]
    talk = talks.of(task)
    assert talk is not None
    newline = tiny.tokenizer.encode("\n")
    assert talk.terms == DialogueTerms(tool="calculator", max_turns=4, before=newline, after=newline)
    assert talks.of(task.id) == talk
    assert talk.respond([*tiny.tokenizer.encode("2*3"), EOS]) == (*newline, *tiny.tokenizer.encode("6"), *newline)
    sort = build_environment(EnvironmentSettings())
    assert Talks(sort, tiny.files, COLD).of("sort/held_out/0") is None


def test_of_a_mixture_only_the_parts_that_answer_do(tiny: LoadedModel) -> None:
    mixed = build_environment(EnvironmentSettings(mix=({"name": "sort"}, {"name": "calculator"})))
    talks = Talks(mixed, tiny.files, COLD)
    held_out = mixed.tasks("held_out")
    kinds = {task.id.partition(":")[0]: talks.of(task) for task in (held_out[index] for index in range(8))}
    assert kinds["sort"] is None
    assert kinds["calculator"] is not None
    silent = build_environment(EnvironmentSettings(mix=({"name": "sort"}, {"name": "addition"})))
    assert Talks(silent, tiny.files, COLD).of(silent.tasks("train")[0]) is None
    assert (has_dialogues(mixed), has_dialogues(silent)) == (True, False)
