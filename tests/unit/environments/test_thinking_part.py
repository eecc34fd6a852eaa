"""Which part of a completion is the answer."""

from __future__ import annotations

import pytest

from shoal.environments.graders.thinking import after_thinking

CODE = '```python\nprint("<think>")\n```'


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("5", "5"),
        ("", ""),
        ("<think>4?</think>5", "5"),
        ("\n<think>4?</think>5", "5"),
        ("4?</think>5", "5"),
        ("<think>4?</think>4<think>5?</think>5", "5"),
        ("<think>4?", ""),
        ("  <think>4?", ""),
        ("</think> 8 <think>7", " 8 "),
        ("<think>a</think> 8 <think>7", " 8 "),
        ("<think>a</think> 8 <think>7 <think>6", " 8 "),
        ("Write <think> first. 5", "Write <think> first. 5"),
        (CODE, CODE),
        ("<think>a</think>" + CODE, CODE),
        ("a</think>" + CODE + "<think>b", CODE),
        ("```python\nx = 1  # </think>\n```", "```python\nx = 1  # </think>\n```"),
        ("<think>a</think>```python\nx = 1  # </think>\n```", "```python\nx = 1  # </think>\n```"),
        ("<think>```python\nnever closed</think>5", "5"),
        ("```python\nnever closed\n</think>5", "5"),
    ],
)
def test_the_answer_is_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


@pytest.mark.parametrize("piece", ["</think>", "<think>", "```", "<think></think>", "```</think>"])
def test_many_marks_take_no_longer_than_their_number(piece: str) -> None:
    assert len(after_thinking(piece * 200_000)) <= len(piece) * 200_000
