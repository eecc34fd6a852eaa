"""Tokens that the environment gave: the model reads them, and learns nothing from them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from trainer_stubs import EOS, SETTINGS, learner, logprobs_of, tiny_files, tiny_model

from shoal.errors import ProtocolError
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import (
    Batch,
    BatchGroup,
    PolicyRef,
    TrainingBatch,
    TrainingGroup,
    TrainingRollout,
    pack_logprobs,
    pack_tokens,
)
from shoal.protocol.submission import drawn_mask, pack_spans
from shoal.trainer.archive import as_table
from shoal.trainer.step import StepWork, train_step

STILL = SETTINGS.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0, "grad_clip": 1e9, "minibatches": 1})
SPANS = ([(2, 3)], [(1, 2), (5, 3)], [], [(4, 1)])


def dialogue_group(unit: int, behaviour: Any) -> TrainingGroup:
    random = np.random.default_rng(unit)
    prompt = random.integers(3, 90, size=4)
    rollouts = []
    for spans, reward in zip(SPANS, (1.0, 0.0, 0.5, 0.0), strict=True):
        tokens = random.integers(3, 90, size=10)
        logprobs = logprobs_of(behaviour, prompt, tokens)
        given = pack_spans(spans)
        logprobs = np.where(drawn_mask(given, 10), logprobs, 0.0)
        rollouts.append(TrainingRollout(pack_tokens(tokens), pack_logprobs(logprobs), "eos", reward, given))
    return TrainingGroup(unit, f"task/{unit}", 0, pack_tokens(prompt), rollouts)


@pytest.fixture(scope="module")
def groups() -> list[TrainingGroup]:
    behaviour = tiny_model(seed=5)  # not the model that is trained: ratios differ from 1
    return [dialogue_group(unit, behaviour) for unit in range(2)]


def gradient_of(groups: list[TrainingGroup], **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    made, seen = learner(STILL.model_copy(update=changes)), []
    named = list(made.model.named_parameters())
    made.optimizer.register_step_pre_hook(lambda *_: seen.append({n: p.grad.clone() for n, p in named}))
    metrics = train_step(made, StepWork(0, groups, temperature=1.0, max_staleness=0))
    return seen[0], metrics


def plain_gradient(groups: list[TrainingGroup]) -> dict[str, torch.Tensor]:
    """One sequence at a time, the loss of drawn tokens written out; given ones are in the context only."""
    model = tiny_model()
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    count = sum(int(drawn_mask(rollout.given, 10).sum()) for _, rollout in rollouts)
    for group, rollout in rollouts:
        a = rollout.reward - sum(each.reward for each in group.rollouts) / len(group.rollouts)
        ids = torch.tensor([[*group.prompt_ids, *rollout.token_ids]])
        logp = model(ids).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
        for place in np.flatnonzero(drawn_mask(rollout.given, 10)):
            r = (logp[place, rollout.token_ids[place]] - float(rollout.logprob_values[place])).exp()
            (-torch.minimum(r.clamp(max=4.0) * a, r.clamp(0.8, 1.2) * a) / count).backward(retain_graph=True)
    return {name: value.grad for name, value in model.named_parameters()}


def test_the_gradient_is_that_of_the_drawn_tokens_alone(groups: list[TrainingGroup]) -> None:
    seen, metrics = gradient_of(groups)
    for name, expected in plain_gradient(groups).items():
        torch.testing.assert_close(seen[name], expected, rtol=1e-4, atol=1e-7)
    assert metrics["tokens"] == 2 * (40 - 3 - 5 - 1)


@pytest.mark.parametrize("budget", [1, 30])
def test_however_it_is_split(groups: list[TrainingGroup], budget: int) -> None:
    whole, _ = gradient_of(groups)
    split, _ = gradient_of(groups, micro_batch_tokens=budget)
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], rtol=1e-4, atol=1e-7)


def test_what_was_said_of_a_given_token_does_not_matter_but_the_token_does(groups: list[TrainingGroup]) -> None:
    """Its log-probability, then and now, has no influence; that the model reads it has."""

    def with_first(**changes: Any) -> list[TrainingGroup]:
        first = msgspec.structs.replace(groups[0].rollouts[0], **changes)
        return [msgspec.structs.replace(groups[0], rollouts=[first, *groups[0].rollouts[1:]]), groups[1]]

    rollout = groups[0].rollouts[0]
    logprobs, tokens = rollout.logprob_values, rollout.token_ids
    logprobs[2:5] = -7.0
    before, metrics = gradient_of(groups)
    after, metrics_after = gradient_of(with_first(logprobs=pack_logprobs(logprobs)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert metrics == metrics_after
    tokens[3] = (tokens[3] + 1) % 90
    other, _ = gradient_of(with_first(tokens=pack_tokens(tokens)))
    assert not all(torch.equal(before[name], other[name]) for name in before)
    unmasked, _ = gradient_of(with_first(given=b""))
    assert not all(torch.allclose(before[name], unmasked[name], rtol=1e-3) for name in before)


def test_spans_that_are_none_are_refused_with_their_unit(groups: list[TrainingGroup]) -> None:
    broken = msgspec.structs.replace(groups[0].rollouts[0], given=pack_spans([(8, 9)]))
    bad = msgspec.structs.replace(groups[0], rollouts=[broken, *groups[0].rollouts[1:]])
    with pytest.raises(ProtocolError, match="unit 0: the spans of a rollout cannot be read"):
        gradient_of([bad])


def test_the_archive_has_the_spans() -> None:
    tokenizer = TextTokenizer(tiny_files(tiny_model()))
    ids = [*tokenizer.encode("1+1"), EOS, *tokenizer.encode("2"), *tokenizer.encode("2"), EOS]
    rollout = TrainingRollout(pack_tokens(ids), pack_logprobs(np.zeros(len(ids))), "eos", 1.0, pack_spans([(4, 1)]))
    group = TrainingGroup(0, "t/0", 0, pack_tokens([5]), [rollout])
    policy = PolicyRef(incarnation=0, version=0, digest="d" * 64)
    written = BatchGroup(unit=0, submission="a" * 64, node="n", policy=policy, rewards=(1.0,))
    batch = Batch(step=0, groups=(written,), written_at_ms=0)
    [row] = as_table(batch, TrainingBatch(step=0, groups=[group]), tokenizer.decode).to_pylist()
    assert row["given"] == [4, 1]
    assert row["completion"] == "1+1<eos>22"
