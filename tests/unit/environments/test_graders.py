"""Graders that run nothing: the part that is the answer, a letter among several, the instructions of IFEval."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from shoal.environments.graders.choice import ChoiceGrader, chosen_letter
from shoal.environments.graders.instructions import CHECKS, is_language, may_be_english, sentences
from shoal.environments.graders.registry import grader
from shoal.environments.graders.thinking import after_thinking
from shoal.errors import ScoringFailure

CODE = '```python\nprint("<think>")\n```'


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("5", "5"), ("", ""), ("<think>4?</think>5", "5"), ("\n<think>4?</think>5", "5"), ("4?</think>5", "5"),
        ("<think>4?</think>4<think>5?</think>5", "5"), ("<think>4?", ""), ("  <think>4?", ""),
        ("</think> 8 <think>7", " 8 "), ("<think>a</think> 8 <think>7", " 8 "),
        ("<think>a</think> 8 <think>7 <think>6", " 8 "), ("Write <think> first. 5", "Write <think> first. 5"),
        (CODE, CODE), ("<think>a</think>" + CODE, CODE), ("a</think>" + CODE + "<think>b", CODE),
        ("```python\nx = 1  # </think>\n```", "```python\nx = 1  # </think>\n```"),
        ("<think>a</think>```python\nx = 1  # </think>\n```", "```python\nx = 1  # </think>\n```"),
        ("<think>```python\nnever closed</think>5", "5"), ("```python\nnever closed\n</think>5", "5"),
    ],
)  # fmt: skip
def test_the_answer_is_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


@pytest.mark.parametrize("piece", ["</think>", "<think>", "```", "<think></think>", "```</think>"])
def test_many_marks_take_no_longer_than_their_number(piece: str) -> None:
    assert len(after_thinking(piece * 200_000)) <= len(piece) * 200_000


# A letter among several: which one an answer gives, and that no answer gives two

GIVEN = [
    ("Answer: B", "B"), ("answer: (B)", "B"), ("**Answer:** C", "C"), ("The correct answer is **D**.", "D"),
    ("The answer is \\boxed{A}.", "A"), ("\\boxed{\\text{(C)}}", "C"), ("So the final answer is option C.", "C"),
    ("I choose option D", "D"), ("B", "B"), ("(B)", "B"), ("Long thoughts.\n\n**C)**", "C"),
    ("Answer: A\nNo, wait.\nAnswer: B", "B"), ("Answer: C. Option A is wrong because it is cold.", "C"),
    ("Answer: $C$", "C"), ("Answer: A, I am sure", "A"), ("Answer: A or B", ""), ("Answer: A and B", ""),
    ("Answer: (A) / (B)", ""), ("\\boxed{A} or \\boxed{B}", "B"), ("A, B, C, D", ""),
    ("The answer depends on many things.", ""), ("Because it is so", ""), ("a", ""), ("", ""), ("Answer:", ""),
    ("Answer: Argon", ""), ("Answer: A B C D", ""), ("Answer: (A) (B) (C)", ""), ("I think Answer: A|B", ""),
    ("Answer: B; C", ""), ("Answer: B - C", ""), ("Answer: B & C", ""), ("Answer: B or I", ""),
    ("Answer: B\n\nC", ""), ("Answer: B. A is too cold.", "B"), ("Answer: B\nI am sure", "B"),
    ("Answer: B (not C)", "B"), ("The answer is not B", ""), ("The answer cannot be B", ""),
    ("None, the answer would be neither A nor B", ""), ("Answer: A. In the end the answer is not A", ""),
    ("The answer is not B. Answer: C", "C"), ("Final Answer: `B`", "B"), ("`B`", "B"), ("B. foo", "B"),
    ("After all this:\n(C) Nitrogen", "C"), ("A. foo\nB. bar\nC. baz", ""), ("A) B) C) D)", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "letter"), GIVEN)
def test_the_letter_that_an_answer_gives(text: str, letter: str) -> None:
    assert chosen_letter(text) == letter


def test_only_what_follows_the_thinking_counts() -> None:
    choice = ChoiceGrader()
    assert choice.score("B", "<think>Answer: B</think> Answer: C").value == 0.0
    assert choice.score("B", "<think>Answer: C</think> Answer: B").value == 1.0
    assert choice.score("B", "<think>Answer: B").value == 0.0
    assert choice.score("B", "B? Perhaps.").notes == "no option was chosen"


def test_answers_of_tasks_are_letters() -> None:
    choice = grader("choice")
    assert choice.problem("C") == ""
    for wrong in ("", "c", "AB", "K", "Nitrogen"):
        assert "not a letter" in choice.problem(wrong)


@given(st.text())
def test_garbage_never_raises(text: str) -> None:
    assert ChoiceGrader().score("B", text).value in (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["answer " * 100_000, "answer is" + " (" * 300_000, "\\boxed{" * 100_000, "\n" * 10**6]
)
def test_long_garbage_is_read_in_no_time(text: str) -> None:
    assert ChoiceGrader().score("B", text).value == 0.0


# Every instruction of IFEval: a text that follows it, and texts that nearly do

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Tide", "moon"]}, ["The tide follows the Moon."], ["The tide.", "moon"]),
    ("keywords:frequency", {"keyword": "fish", "frequency": 2, "relation": "at least"},
     ["Fish eat fish.", "fish fish fish"], ["A fish."]),
    ("keywords:frequency", {"keyword": "fish", "frequency": 2, "relation": "less than"}, ["A fish."], ["Fish, fish."]),
    ("keywords:forbidden_words", {"forbidden_words": ["net", "Hook"]},
     ["A network of hooks.", "sea"], ["The net is torn.", "a hook"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
     ["Eleven eels"], ["two eels"]),
    ("language:response_language", {"language": "es"},
     ["El agua es lo que más se bebe en los días de verano."], ["Water is what we drink.", "L'eau est dans la mer."]),
    ("language:response_language", {"language": "hi"},
     ["यह एक अच्छा दिन है और हम घर में हैं"], ["This is a good day", "आणि हे घर आहे"]),
    ("language:response_language", {"language": "ko"}, ["오늘은 날씨가 좋습니다"], ["今日は天気がいい", "It is"]),
    ("language:response_language", {"language": "ja"}, ["今日は天気がいいです"], ["今天天气很好", "오늘은"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["A cat. A dog."], ["Dr. X"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["First.\n***\nSecond.", "First *** Second ***"], ["First.", "A *** B *** C", "A *** *** B"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Sea"},
     ["One.\n\nSea, it is.", "One.\n\n\"SEA\" is it."], ["Sea.\n\nOne.", "One.\n\nTwo.\n\nSea.", "One.\n\nSeaside."]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["Dear [name], see [place]."], ["Dear [name].", "Dear [name", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. Rain.", "p. s. x"], ["Bye. PS"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye.\nP.P.S Rain."], ["Bye.\nP.S. Rain."]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "- a\n  * b"], ["* a", "* a\n* b\n- c", "**a**\n* b"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["Yes.", "my answer is yes"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*one* and *two*", "**one** and *two*"], ["*one*", "* * and *one*"[:3] + "*one*"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     ["SECTION 1\na\nSECTION 2\nb"], ["SECTION 1\na", "Section 1 Section 2"]),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["a: 1", '{"a": 1', "Here: {}"]),
    ("detectable_format:title", {}, ["<<The Sea>>\ntext"], ["<The Sea>", "<<>>", "<<The\nSea>>"]),
    ("combination:two_responses", {}, ["One.******Two."], ["One.", "One.******One.", "A******B******C", "A*****B"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi! Say hi."]),
    ("startend:end_checker", {"end_phrase": "That is all."}, ["Sea. That is ALL.", 'Sea. "That is all."'],
     ["That is all. Really."]),
    ("startend:quotation", {}, ['"The sea."'], ['The "sea"', '"The sea.', '"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["The SEA is BLUE"], ["The SEA is Blue"]),
    ("change_case:english_capital", {}, ["THE SEA IS BLUE."], ["THE SEA is BLUE.", "DAS IST DIE SEE UND DER WIND."]),
    ("change_case:english_lowercase", {}, ["the sea is blue."], ["The sea.", "das ist die see und der wind."]),
    ("punctuation:no_comma", {}, ["The sea; the sky."], ["The sea, the sky."]),
]  # fmt: skip


def answer(*instructions: tuple[str, dict[str, Any]]) -> str:
    return json.dumps({"instructions": [{"id": name, "settings": settings} for name, settings in instructions]})


def test_there_are_the_twenty_five_of_ifeval_and_each_has_a_case() -> None:
    assert len(CHECKS) == 25
    assert {name for name, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize(("name", "settings", "good", "bad"), CASES)
def test_following_an_instruction(name: str, settings: dict[str, Any], good: list[str], bad: list[str]) -> None:
    instructions = grader("instructions")
    task = answer((name, settings))
    assert instructions.problem(task) == ""
    for text in good:
        assert instructions.score(task, f"<think>, or so</think>{text}").parts == {name: 1.0}, text
    for text in bad:
        assert instructions.score(task, text).value == 0.0, text
    assert instructions.score(task, " \n").value == 0.0  # nothing is no answer, whatever was asked


def test_all_or_nothing_with_a_part_for_each() -> None:
    task = answer(("punctuation:no_comma", {}), ("startend:quotation", {}), ("punctuation:no_comma", {}))
    score = grader("instructions").score(task, "The sea.")
    assert score.value == 0.0
    assert score.parts == {"punctuation:no_comma": 1.0, "startend:quotation": 0.0, "punctuation:no_comma#3": 1.0}
    assert score.notes == "not followed: startend:quotation"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("", "Expecting value"),
        ("[]", "there are no instructions"),
        ('{"instructions": []}', "there are no instructions"),
        (answer(("poetry:rhyme", {})), "there is no instruction 'poetry:rhyme'"),
        (answer(("keywords:existence", {})), "lacks its setting 'keywords'"),
        (answer(("keywords:existence", {"keywords": "sea"})), "is no list of words"),
        (answer(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"})), "relation is 'about'"),
        (answer(("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "at least"})), "no"),
        (answer(("length_constraints:number_words", {"num_words": -1, "relation": "at least"})), "no number of things"),
        (answer(("language:response_language", {"language": "tlh"})), "cannot be decided here"),
        (answer(("length_constraints:nth_paragraph_first_word",
                 {"num_paragraphs": 1, "nth_paragraph": 0, "first_word": "a"})), "counted from 1"),
    ],
)  # fmt: skip
def test_instructions_that_are_not_possible(task: str, said: str) -> None:
    instructions = grader("instructions")
    assert said in instructions.problem(task)
    with pytest.raises(ScoringFailure):
        instructions.score(task, "text")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3), ("Wait... what?", 2), ("At 5 p.m. Mr. Smith came.", 1), ("It costs 3.50 dollars.", 1),
        ('He said "Stop." Then he left.', 2), ("1. First point. 2. Second point.", 2), ("", 0), ("...", 0),
        ("海は青い。空も青い。", 2),
    ],
)  # fmt: skip
def test_sentences(text: str, count: int) -> None:
    assert sentences(text) == count


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "The sea is what we have in common with the fish."),
        ("de", "Das Meer ist das, was wir mit den Fischen gemein haben."),
        ("fr", "La mer est ce que nous avons en commun avec les poissons."),
        ("it", "Il mare è quello che abbiamo in comune con i pesci della costa."),
        ("pt", "O mar é o que temos em comum com os peixes, mas não com as aves."),
        ("ru", "Море это то, что у нас общее с рыбами, но не с птицами."),  # noqa: RUF001
        ("uk", "Море це те, що є у нас спільного з рибами, але не з птахами."),  # noqa: RUF001
        ("bg", "Морето е това, което ни е общо с рибите, но не и с птиците, и се вижда от тук."),  # noqa: RUF001
        ("ar", "البحر هو ما لدينا من شيء مشترك مع الأسماك في هذا العالم"),
        ("fa", "دریا چیزی است که ما با ماهی ها در این جهان مشترک داریم"),  # noqa: RUF001
        ("ur", "سمندر وہ ہے جو ہم میں اور مچھلیوں میں ایک ہے"),
        ("th", "ทะเลเป็นสิ่งที่เรามีร่วมกับปลา"),
        ("ta", "கடல் நமக்கும் மீன்களுக்கும் பொதுவானது"),
    ],
)
def test_languages(language: str, text: str) -> None:
    known = ("en", "de", "fr", "it", "pt", "ru", "uk", "bg", "ar", "fa", "ur", "th", "ta", "es", "fi", "pl", "mr")
    assert [code for code in known if is_language(text, code)] == [language]
    assert may_be_english(text) == (language == "en")


@how(max_examples=50)
@given(st.text(max_size=200), st.integers(0, len(CASES) - 1))
def test_no_text_makes_an_instruction_raise(text: str, number: int) -> None:
    name, settings, *_ = CASES[number]
    assert grader("instructions").score(answer((name, settings)), text).value in (0.0, 1.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["[", "*", "* ", "<<", "\n", " ", "P.", "******", '"', "a", "a. ", "{", "SECTION ", "-\n"]
)
def test_long_garbage_is_read_in_linear_time(piece: str) -> None:
    """A check that were quadratic would take minutes here, and the time limit of the test would end it."""
    text = piece * (150_000 // len(piece))
    task = answer(*((name, settings) for name, settings, *_ in CASES))
    assert grader("instructions").score(task, text).value == 0.0
