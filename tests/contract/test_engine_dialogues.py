"""What every engine promises where the environment answers the model's turns, run against each of them."""

from dataclasses import replace

import numpy as np
import pytest

from kit.engines import ENGINE_NAMES
from shoal.engines import Chunks, Completion, Engine, GenerationRequest, PrefillRequest, build
from shoal.engines.dialogue import Characters, Dialogue
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import DialogueTerms, ProofParameters, SamplingParameters
from shoal.sampling import check_seeded, uniforms
from shoal.toploc import check_proofs, compare, split_proofs

EOS = 1
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_id=EOS)
PROOF = ProofParameters(topk=16, rows=8)
PROMPTS = ("31=", "90713=", "5=")
SEEDS = tuple(range(10))


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module", params=ENGINE_NAMES)
def engine(request, tiny) -> Engine:
    made = build(request.param, tiny.files)
    made.load_policy(None, policy_views(tiny.model))
    return made


def echo(turns):
    """Says how many tokens each turn had, in characters that are tokens of any vocabulary of 96."""
    return "".join(chr(5 + len(turn)) for turn in turns)


def dialogue(max_turns=3, limit=SAMPLING.max_new_tokens, tool=echo) -> Dialogue:
    terms = DialogueTerms(tool="echo", max_turns=max_turns, before=(70, EOS, 71), after=(72,))
    return Dialogue(terms, EOS, limit, tool, Characters())


def asked(tiny, prompt="31=", talk: Dialogue | None = None, seeds=SEEDS, limit=SAMPLING.max_new_tokens):
    sampling = SAMPLING.model_copy(update={"max_new_tokens": limit})
    respond = None if talk is None else talk.respond
    return GenerationRequest(tiny.tokenizer.encode(prompt), seeds, sampling, respond=respond)


def drawn_of(completion: Completion):
    mask = np.ones(len(completion.token_ids), dtype=bool)
    for start, length in completion.given:
        mask[start : start + length] = False
    return mask


def test_tool_answers_each_turn_but_the_last(engine, tiny):
    talk = dialogue()
    [group] = engine.generate([asked(tiny, talk=talk)])
    assert {len(each.given) for each in group} == {2}
    for each in group:
        tokens = each.token_ids.tolist()
        assert tokens[-1] == EOS
        assert each.finish == "eos"
        ends = [start for start, _ in each.given]
        assert all(tokens[end - 1] == EOS for end in ends)
        first = tokens[: ends[0] - 1]
        start, length = each.given[0]
        assert tokens[start : start + length] == [70, EOS, 71, 5 + len(first), 72]
        assert EOS not in [tokens[i] for i in np.flatnonzero(drawn_of(each))[:-1] if i + 1 not in ends]


def test_drawn_dialogue_reads_the_same_to_a_validator(engine, tiny):
    for max_turns, limit in ((1, 40), (5, 40), (3, 9)):
        talk = dialogue(max_turns, limit)
        for each in engine.generate([asked(tiny, talk=talk, limit=limit)])[0]:
            reading = talk.read(each.token_ids.tolist())
            assert (reading.given, reading.finish, reading.problem) == (each.given, each.finish, "")
            assert len(each.token_ids) <= limit


def test_tool_tokens_use_up_no_draw(engine, tiny):
    request = asked(tiny, talk=dialogue())
    [group] = engine.generate([request])
    prefills = engine.prefill([PrefillRequest(request.prompt_ids, each.token_ids, 1.0) for each in group])
    for seed, each, seen in zip(SEEDS, group, prefills, strict=True):
        mask, u_T = drawn_of(each), uniforms(seed, 0, len(each.token_ids))
        assert check_seeded(u_T[mask], seen.cdf_low[mask], seen.cdf_high[mask], seen.logprobs[mask]).passed
        np.testing.assert_allclose(each.logprobs[mask], seen.logprobs[mask], atol=1e-3)
        assert not each.logprobs[~mask].any()
        assert (~mask).sum() >= 8


def test_proofs_include_tool_tokens(engine, tiny):
    request = asked(tiny, talk=dialogue())
    [group] = engine.generate([request], PROOF)
    prefills = engine.prefill([PrefillRequest(request.prompt_ids, each.token_ids, 1.0) for each in group], PROOF)
    for each, seen in zip(group, prefills, strict=True):
        chunks = split_proofs(each.proofs, len(each.token_ids), engine.hidden_size, PROOF.topk, PROOF.rows)
        assert check_proofs(compare(seen.points, chunks)).passed


def test_rows_do_not_change_each_other(engine, tiny):
    """Rows with and without a dialogue, of several prompts and limits, together and alone."""
    requests = [
        asked(tiny, PROMPTS[0], dialogue(2)), asked(tiny, PROMPTS[1]), asked(tiny, PROMPTS[2], dialogue(4)),
        asked(tiny, PROMPTS[0]), asked(tiny, PROMPTS[1], dialogue(3, 12), limit=12),
    ]  # fmt: skip
    for request, together in zip(requests, engine.generate(requests, PROOF), strict=True):
        for seed, each in zip(request.seeds, together, strict=True):
            [[alone]] = engine.generate([replace(request, seeds=(seed,))], PROOF)
            assert each.token_ids.tolist() == alone.token_ids.tolist()
            assert (each.given, each.finish) == (alone.given, alone.finish)
            np.testing.assert_allclose(each.logprobs, alone.logprobs, atol=1e-3)


def test_silent_tool_changes_nothing(engine, tiny):
    heard: list[list[int]] = []
    silent = dialogue(tool=lambda turns: heard.append(list(turns[-1])))
    [spoken, plain] = engine.generate([asked(tiny, talk=silent), asked(tiny)])
    for one, other in zip(spoken, plain, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.given, one.finish) == ((), other.finish)
    finished = [list(map(chr, each.token_ids.tolist()[:-1])) for each in spoken if each.finish == "eos"]
    assert finished
    assert sorted(heard) == sorted(finished)


def test_tool_answer_that_fills_the_limit_is_left_out(engine, tiny):
    """With one token more of room it is: the limit is exact."""
    [[each]] = engine.generate([asked(tiny, talk=dialogue(), seeds=(3,))])
    start, length = each.given[0]
    full = start + length
    [[cut]] = engine.generate([asked(tiny, talk=dialogue(limit=full), seeds=(3,), limit=full)])
    assert (cut.token_ids.tolist(), cut.finish, cut.given) == (each.token_ids.tolist()[:start], "length", ())
    [[more]] = engine.generate([asked(tiny, talk=dialogue(limit=full + 1), seeds=(3,), limit=full + 1)])
    assert more.token_ids.tolist() == each.token_ids.tolist()[: full + 1]
    assert more.given == ((start, length),)


def test_tool_tokens_outside_the_vocabulary_are_refused(engine, tiny):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([replace(asked(tiny), respond=lambda _tokens: (96,))])


def test_shown_chunks_include_tool_tokens(engine, tiny):
    shown: list[dict[int, Chunks]] = []
    request = replace(asked(tiny, talk=dialogue()), on_chunks=lambda take: shown.append(take()))
    [group] = engine.generate([request], PROOF)
    last = shown[-1]
    assert any(
        start < len(last[seed].token_ids) for seed, each in zip(SEEDS, group, strict=True) for start, _ in each.given
    )
    for seed, each in zip(SEEDS, group, strict=True):
        tokens = last[seed].token_ids
        assert tokens.tolist() == each.token_ids[: len(tokens)].tolist()
        assert each.proofs.startswith(b"".join(last[seed].proofs))
