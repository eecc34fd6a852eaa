"""Of any text: no exception, the same score again, and a gold answer is right against itself."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environments.graders.mathematics import MathematicsGrader

_SIGNS = (
    r"\frac { } 1 2 x + - * / ^ ( ) [ ] , \sqrt \pi = < | \{ \} % \text{cm} . : \pm \cup \infty ! _ \sin e i or $ "
    r"\le \begin{pmatrix} \end{pmatrix} & \\ \log \overline \circ and 0"
)
PIECES = st.sampled_from([*_SIGNS.split(), " "])
FORMULAS = st.lists(PIECES, max_size=25).map("".join)
NUMBERS = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=1000)


def never(gold: str, given: str) -> bool:
    """Symbolic algebra has tests of its own; here it would only take time."""
    return False


GRADER = MathematicsGrader(symbolic=never)


@given(gold=FORMULAS | st.text(max_size=40), completion=FORMULAS | st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_none_is_scored_twice_differently(gold: str, completion: str) -> None:
    if GRADER.problem(gold):
        return
    first = GRADER.score(gold, completion)
    assert first.value in (0.0, 1.0)
    assert GRADER.score(gold, completion) == first
    boxed = GRADER.score(gold, f"\\boxed{{{completion}}}")
    assert GRADER.score(gold, f"\\boxed{{{completion}}}") == boxed


@given(text=FORMULAS | st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_gold_answer_is_right_against_itself(text: str) -> None:
    if GRADER.problem(text) or "<think>" in text or text.endswith("\\"):  # a last backslash would take the box's brace
        return
    assert GRADER.score(text, f"\\boxed{{{text}}}").value == 1.0


@given(value=NUMBERS)
@settings(max_examples=80, deadline=None)
def test_every_spelling_of_a_number_is_that_number_and_no_other(value: Fraction) -> None:
    gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    top, bottom = value.numerator, value.denominator
    spellings = [
        f"{top}/{bottom}",
        f"\\dfrac{{{3 * top}}}{{{3 * bottom}}}",
        f"x = {top}/{bottom}",
        f"{top} \\div {bottom}",
    ]
    for spelling in spellings:
        assert GRADER.score(gold, f"\\boxed{{{spelling}}}").value == 1.0
    other = value + Fraction(1, 1001)
    assert GRADER.score(gold, f"\\boxed{{{other.numerator}/{other.denominator}}}").value == 0.0


@given(roots=st.lists(st.integers(-9, 9), min_size=1, max_size=4), step=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_a_polynomial_is_its_expansion_and_no_other(roots: list[int], step: int) -> None:
    factored = "".join(f"(x - {root})" if root >= 0 else f"(x + {-root})" for root in roots)
    coefficients = [1]
    for root in roots:
        shifted, scaled = [*coefficients, 0], [0, *(-root * c for c in coefficients)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    assert GRADER.score(factored, f"\\boxed{{{_expanded(coefficients)}}}").value == 1.0
    coefficients[-1] += step
    assert GRADER.score(factored, f"\\boxed{{{_expanded(coefficients)}}}").value == 0.0


def _expanded(coefficients: list[int]) -> str:
    degree = len(coefficients) - 1
    return " + ".join(f"({c})x^{{{degree - index}}}" for index, c in enumerate(coefficients))
