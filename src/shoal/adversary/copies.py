"""Cheats that hand in what was made before: by themselves for another rollout or unit, or by somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from msgspec.structs import replace as replaced

from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, Disguise, Groups
from shoal.engines import GenerationRequest
from shoal.protocol import Lease, ProofParameters, Rollout, Submission

COPIED = frozenset({"duplicate.rollout", "duplicate.proof", "proofs.malformed"})


class Copying(Disguise):
    """Generates for the first seed of a group and hands that in for all of them."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, seeds=request.seeds[:1]) for request in requests]
        drawn = self._engine.generate(asked, proof)
        return [group * len(request.seeds) for request, group in zip(requests, drawn, strict=True)]


class CopyOne(Cheat):
    name = "copy"
    what = "generates one completion of every group and hands it in for all of them"
    reasons = OTHER_TOKENS | COPIED
    disguise = Copying


class ReplayFirst(Cheat):
    name = "replay"
    what = "generates for its first lease and hands that in for every later one"
    reasons = OTHER_WEIGHTS | COPIED

    def __init__(self) -> None:
        self._first: list[Rollout] = []

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        self._first = self._first or submission.rollouts
        return replaced(submission, rollouts=self._first)


class Steal(Cheat):
    name = "steal"
    what = "hands in what another node made, if it can lay its hands on it"
    reasons = OTHER_WEIGHTS | COPIED

    library: ClassVar[list[Submission]] = []
    """Others' submissions. No honest party gives them away: whoever tests the worst case lays them in here."""

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        fitting = [each for each in self.library if len(each.rollouts) == len(submission.rollouts)]
        same_task = [each for each in fitting if each.prompt == submission.prompt]
        found = (same_task or fitting)[-1:]
        return replaced(submission, rollouts=found[0].rollouts) if found else submission
