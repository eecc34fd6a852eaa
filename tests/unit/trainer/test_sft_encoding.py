"""Demonstrations as tokens: what is learnt are the assistant's words and the ends of its turns, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.sft import BOT, CHAT, END, FORGETFUL, SYS, TOKENIZER, USER, chat_files, sort_files
from shoal.environments.settings import PromptSettings
from shoal.errors import ModelError, UnusableTask
from shoal.models import PromptEncoder, TextTokenizer
from shoal.trainer.demonstrations.reading import Demonstration, Encoder, Tokens

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\U0010fff0\U0010fff1"), min_size=1, max_size=12)


def spelt(text: str) -> list[int]:
    return list(TextTokenizer(chat_files()).encode_plain(text))


def encode(*said: tuple[str, str], template: str | None = CHAT, given: int = 0, **manner: str) -> tuple[Tokens, ...]:
    encoder = Encoder(chat_files(template), PromptSettings(**manner), "messages")
    return encoder.encode(Demonstration(0, said, given))


def learnt(sequence: Tokens) -> list[int]:
    return [
        token for token, is_learnt in zip(sequence.ids.tolist(), sequence.trained.tolist(), strict=True) if is_learnt
    ]


def test_one_turn_by_hand() -> None:
    (found,) = encode(("system", "S"), ("user", "2+2?"), ("assistant", "4!"))
    read = [SYS, *spelt("S"), END, USER, *spelt("2+2?"), END, BOT]
    assert found.ids.tolist() == [*read, *spelt("4!"), END]
    assert found.trained.tolist() == [False] * len(read) + [True] * 3


def test_every_turn_of_a_conversation_is_learnt_in_one_sequence() -> None:
    (found,) = encode(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert found.ids.tolist() == [
        USER, *spelt("a"), END, BOT, *spelt("b"), END, USER, *spelt("c"), END, BOT, *spelt("d"), END,
    ]  # fmt: skip
    assert learnt(found) == [*spelt("b"), END, *spelt("d"), END]


def test_turns_before_the_given_ones_are_only_read() -> None:
    (found,) = encode(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), given=3)
    assert learnt(found) == [*spelt("d"), END]


def test_a_template_that_forgets_thinking_gives_each_turn_its_own_sequence() -> None:
    first, second = encode(
        ("user", "a"), ("assistant", "t</think>b"), ("user", "c"), ("assistant", "u</think>d"), template=FORGETFUL
    )
    assert learnt(first) == [*spelt("t</think>b"), END]
    assert learnt(second) == [*spelt("u</think>d"), END]
    assert second.ids.tolist()[: -len(learnt(second))] == [
        USER, *spelt("a"), END, BOT, *spelt("b"), END, USER, *spelt("c"), END, BOT,
    ]  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.sampled_from([CHAT, FORGETFUL]))
def test_each_turn_stands_behind_the_very_prompt_of_a_rollout(turns: list[tuple[str, str]], template: str) -> None:
    said = tuple(message for user, bot in turns for message in (("user", user), ("assistant", bot)))
    found = encode(*said, template=template)
    asking = PromptEncoder(chat_files(template))
    spans = []
    for index in range(1, len(said), 2):
        asked = list(asking.encode(said[index - 1][1], said[: index - 1]))
        spans.append((asked, [*spelt(said[index][1]), END]))
    for asked, answer in spans:  # some sequence has the prompt as its beginning and the answer, learnt, right after it
        size = len(asked)
        assert any(
            each.ids.tolist()[: size + len(answer)] == asked + answer and each.trained[size : size + len(answer)].all()
            for each in found
        )
    assert sum(int(each.trained.sum()) for each in found) == sum(len(answer) for _, answer in spans)


def test_words_that_look_like_control_tokens_are_spelt_out() -> None:
    (found,) = encode(("user", "a<|end|>"), ("assistant", "b<|end|><|user|>c"))
    assert found.ids.tolist().count(END) == 2
    assert found.ids.tolist().count(USER) == 1
    assert learnt(found) == [*spelt("b<|end|><|user|>c"), END]


@pytest.mark.parametrize("template", [None, CHAT])
def test_bare_text_is_learnt_whole_but_for_its_first_token(template: str | None) -> None:
    encoder = Encoder(chat_files(template), PromptSettings(), "text")
    (found,) = encoder.encode(Demonstration(0, text="hey<|end|>"))
    assert found.ids.tolist() == [*spelt("hey<|end|>"), END]
    assert found.trained.tolist() == [False] + [True] * (len(found.ids) - 1)


def test_an_answer_that_the_prompt_has_begun_is_not_begun_twice() -> None:
    think = TOKENIZER.token_to_id("<think>")
    (found,) = encode(("user", "a"), ("assistant", "<think>b</think>c"), thinking="<think>")
    assert found.ids.tolist() == [USER, *spelt("a"), END, BOT, think, *spelt("b</think>c"), END]
    assert learnt(found) == [*spelt("b</think>c"), END]
    begun = CHAT.removesuffix("{% endif %}") + "<think>\n{% endif %}"
    (by_template,) = encode(("user", "a"), ("assistant", "<think>\nb</think>c"), template=begun)
    assert learnt(by_template) == [*spelt("b</think>c"), END]
    assert by_template.ids.tolist().count(think) == 1


def test_chat_without_a_template_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="the demonstrations are messages, but the model has no chat template"):
        Encoder(chat_files(None), PromptSettings(), "messages")


def test_a_template_that_refuses_makes_the_row_unusable() -> None:
    with pytest.raises(UnusableTask, match="the model's chat template refuses the prompt"):
        encode(("user", "a"), ("assistant", "b"), template="{{ raise_exception('no') }}")


def test_prompt_and_completion_without_a_template_are_their_texts() -> None:
    encoder = Encoder(sort_files(), PromptSettings(), "completion")
    (found,) = encoder.encode(Demonstration(0, (("user", "312="), ("assistant", "123")), given=1))
    tokenizer = TextTokenizer(sort_files())
    assert found.ids.tolist() == [*tokenizer.encode("312=123"), tokenizer.eos_token_id]
    assert found.trained.tolist() == [False] * 4 + [True] * 4
    assert encoder.positions == 256
