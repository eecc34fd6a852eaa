"""Guesses of a row's next tokens, without a second model: what followed the same tokens before, in the prompt, in the
row itself or in its group's other rollouts. A guess costs a little of a forward pass and cannot change a token: it is
kept only if the seed draws that very token."""

from collections.abc import Sequence
from dataclasses import dataclass

LENGTH = 3  # tokens that have to be the same
AHEAD = 8  # tokens guessed at once, at most
PATIENCE = 16  # steps without a guess, once guesses have failed


class SeenTokens:
    """What followed each `LENGTH` tokens last, for the rows of a group.

    >>> SeenTokens([1, 2, 3, 4, 1, 2, 3]).guess([7, 1, 2, 3], 4)
    [4, 1, 2, 3]
    """

    def __init__(self, *texts: Sequence[int]) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        for text in texts:
            self.learn(text, len(text))

    def learn(self, text: Sequence[int], new: int) -> None:
        """The last `new` tokens of a text."""
        for end in range(max(LENGTH, len(text) - new), len(text)):
            self._next[tuple(text[end - LENGTH : end])] = text[end]

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        tail = tuple(text[-LENGTH:])
        while len(found) < most and (token := self._next.get(tail)) is not None:
            found.append(token)
            tail = (*tail[1:], token)
        return found


@dataclass(eq=False)
class Guessed:
    """A row with guesses: twice as many tokens ahead after a good guess, none for a while after a bad one."""

    text: list[int]
    seen: SeenTokens
    ahead: int = 2
    rest: int = 0
    right: int = 0

    def guess(self, most: int) -> list[int]:
        self.rest -= 1
        return self.seen.guess(self.text, min(self.ahead, most)) if self.rest < 0 else []

    def take(self, tokens: Sequence[int], guessed: int) -> None:
        """Add the tokens that were drawn: the right guesses and one more."""
        self.text += tokens
        self.seen.learn(self.text, len(tokens))
        right = len(tokens) - 1
        self.right += right
        if guessed and right == guessed:
            self.ahead = min(AHEAD, 2 * self.ahead)
        elif guessed:
            self.ahead = max(1, right)
            self.rest = 0 if right else PATIENCE
