"""The cheats without a run: what they ask of the engine and what they hand on, on the scripted engine."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx2
import numpy as np
import pytest

from kit.asgi import InProcess
from shoal.adversary import CHEATS, Cheat, CheatContext, find_cheat
from shoal.adversary.tokens import Sleeper, Steal, own_seeds
from shoal.adversary.weights import FIELD, chunks_of
from shoal.engines import Completion, Engine, GenerationRequest, Groups
from shoal.engines.groups import submission_of
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import ConfigError
from shoal.hub.service import work as hub_work
from shoal.models.folder import from_numpy
from shoal.protocol import Lease, PolicyRef, ProofParameters, SamplingParameters, Submission
from shoal.runtime.stop import StopToken
from shoal.validator import checks
from shoal.worker.loop import run_worker
from shoal.worker.settings import WorkerConfig, WorkerSettings

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=6, eos_token_ids=(1,))
REQUESTS = [GenerationRequest((10, 11), (1, 2, 3), SAMPLING), GenerationRequest((12,), (4, 5), SAMPLING)]
REF = PolicyRef(incarnation=0, version=3, digest="d" * 64)
PROOF = ProofParameters(topk=16, rows=4)
TENSORS = {
    "w": from_numpy("w", np.linspace(-1, 1, 64, dtype="<f4").reshape(8, 8)),
    "model.layers.0.w": from_numpy("model.layers.0.w", np.ones(4, dtype="<f4")),
    "model.layers.7.w": from_numpy("model.layers.7.w", np.ones(4, dtype="<f4")),
}


class Asked(ScriptedEngine):
    """Remembers the seeds it was asked for."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(files)
        self.seeds: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        self.seeds += [request.seeds for request in requests]
        return super().generate(requests, proof)


NOTHING = CheatContext({}, "my-own", Asked)


def loaded(name: str, context: CheatContext = NOTHING) -> tuple[Asked, Engine]:
    asked = Asked()
    engine = find_cheat(name).engine(asked, context)
    engine.load_policy(REF, TENSORS)
    if asked.policy is None:  # small-model never touches the engine that it was given
        asked.load_policy(REF, TENSORS)
    return asked, engine


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def lease_of(request: GenerationRequest, unit: int = 0) -> Lease:
    return Lease(
        run="r", lease=f"u{unit}a0", node="n" * 32, unit=unit, attempt=0, policy=REF, task="t", proof=PROOF,
        prompt_ids=request.prompt_ids, seeds=tuple(f"{seed:016x}" for seed in request.seeds), sampling=SAMPLING,
        environment_digest="e" * 64, issued_at_ms=0, deadline_ms=1,
    )  # fmt: skip


def handed_in(cheat: Cheat, request: GenerationRequest = REQUESTS[0], unit: int = 0) -> tuple[Submission, Submission]:
    """What an honest worker would hand in, and what the cheat makes of the same."""
    engine = Asked()
    engine.load_policy(REF, TENSORS)
    [group] = engine.generate([request], PROOF)
    honest = submission_of(lease_of(request, unit), group, "scripted")
    return honest, cheat.submission(honest, lease_of(request, unit))


@pytest.mark.parametrize("name", CHEATS)
def test_from_outside_it_is_the_engine_it_hides(name: str) -> None:
    asked, engine = loaded(name)
    assert isinstance(engine, Engine)
    assert (engine.name, engine.kind, engine.policy) == ("scripted", "scripted/cpu/float32", REF)
    assert (engine.vocabulary_size, engine.hidden_size) == (asked.vocabulary_size, asked.hidden_size)
    assert [len(group) for group in engine.generate(REQUESTS, PROOF)] == [3, 2]
    assert all(completion.proofs for group in engine.generate(REQUESTS, PROOF) for completion in group)


@pytest.mark.parametrize("name", CHEATS)
def test_its_words_and_reasons_are_for_people_and_for_the_tables_of_codes(name: str) -> None:
    cheat = CHEATS[name]
    known = set(re.findall(r"^\| ([a-z_.]+) +\|", checks.__doc__ or "", re.MULTILINE))
    at_the_door = set(re.findall(r'"(submission\.[a-z_]+)"', Path(hub_work.__file__).read_text()))
    assert cheat.name == name
    assert cheat.reasons <= known | at_the_door
    assert cheat.reasons
    assert len(cheat.what.split()) >= 3


def test_the_guide_lists_them_all_in_their_own_words() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "attack-your-run.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+?) \|", guide, re.MULTILINE))
    assert listed == {name: cheat.what for name, cheat in CHEATS.items()}


@pytest.mark.parametrize(
    ("engine", "cheat", "sentence"),
    [("steam", None, "there is no"), ("scripted", "bribe", "there is no cheat 'bribe'; there are answer, best-of, ")],
)
def test_a_name_that_is_not_there_makes_nothing_anywhere(tmp_path, engine, cheat, sentence):
    asked: list[httpx2.Request] = []
    http = InProcess(lambda request: asked.append(request) or httpx2.Response(500))
    folder = tmp_path / "node"
    config = WorkerConfig(folder, WorkerSettings(), engine, "http://hub", None, "n", http, cheat)
    with pytest.raises(ConfigError, match=sentence):
        run_worker(config, StopToken())
    assert asked == []
    assert not folder.exists()


def test_loose_claims_the_loosest_profile_that_the_run_takes() -> None:
    loose = find_cheat("loose")
    assert loose.profile("torch/cpu/float32", ["torch/cpu/bfloat16", "torch/cpu/float32"]) == "torch/cpu/bfloat16"
    assert loose.profile("torch/cpu/float32", ["torch/cpu/float32"]) == "torch/cpu/float32"
    assert find_cheat("copy").profile("torch/cpu/float32", ["torch/cpu/bfloat16"]) == "torch/cpu/float32"


def test_steal_takes_what_it_finds_the_same_prompt_first(monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = handed_in(Cheat(), GenerationRequest((12,), (7, 8, 9), SAMPLING))
    same, _ = handed_in(Cheat(), GenerationRequest((10, 11), (7, 8, 9), SAMPLING))
    honest, cheated = handed_in(find_cheat("steal"))
    assert cheated == honest
    monkeypatch.setattr(Steal, "library", [same, other])
    assert handed_in(find_cheat("steal"))[1].rollouts == same.rollouts
    monkeypatch.setattr(Steal, "library", [other])
    assert handed_in(find_cheat("steal"))[1].rollouts == other.rollouts


@pytest.mark.parametrize("name", ["null-proofs", "constant-proofs", "modulus-one", "random-proofs"])
def test_forgeries_without_computation_have_the_size_of_honest_proofs(name: str) -> None:
    honest, cheated = handed_in(find_cheat(name))
    for before, after in zip(honest.rollouts, cheated.rollouts, strict=True):
        assert (len(after.proofs), after.proofs != before.proofs) == (len(before.proofs), True)
        for forged in chunks_of(after.proofs, 2 + 2 * PROOF.topk) if name == "random-proofs" else ():  # well formed
            numbers = np.frombuffer(forged, dtype=">u2")
            assert (numbers[0], (numbers[1:] < FIELD).all()) == (FIELD, True)


def test_the_sleeper_is_honest_for_so_many_groups_and_not_for_one_more() -> None:
    asked = Asked()
    engine = Sleeper(3).engine(asked, NOTHING)
    engine.load_policy(REF, TENSORS)
    for requests in (REQUESTS, REQUESTS):
        engine.generate(requests)
    honest = [request.seeds for request in REQUESTS]
    assert asked.seeds == [*honest, honest[0], own_seeds(honest[1])]
