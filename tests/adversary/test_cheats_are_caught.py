"""Every cheat against a real run: the bytes that it submits are all that hub and validator see of it.

One run serves all tests. An honest worker works all the time; the cheaters come a few at a time, each until the hub has
shut it out, or has refused what it sends. `make test` prints the table of what came of it.
"""

from collections.abc import Callable, Iterator

import pytest

from kit import TempPaths
from kit.attack import HONEST, Attack, Attacked, Result, results, table
from shoal.adversary import CHEATS
from shoal.adversary.tokens import HONEST_UNITS, Steal
from shoal.errors import ShutOut
from shoal.ledger import Account, fold
from shoal.protocol import LedgerEntry, NodeState, SubmissionStory

ELSEWHERE = {"steer", "loose"}  # caught by sums over many tokens: test_trials
ELSEWHERE |= {"branch"}  # caught by rewards over many groups: test_steered_branches
ELSEWHERE |= {"show-random", "show-other"}  # only of slow groups is anything shown: integration/test_shown_progress
HERE = [name for name in CHEATS if name not in ELSEWHERE]
AT_THE_DOOR = {"claim-node", "few"}  # refused by the hub: never judged, so nobody is banned
HONEST_AT_FIRST = {"stale", "sleeper", "replay", "swap-prompt"}  # right until the policy, or the unit, is another

HONEST_LEAST = 20
pytestmark = pytest.mark.timeout(900)  # setting up the run counts as part of the first test, on a busy machine too

# How many of its own groups a cheater may submit until the first is rejected. A group in which the policy is sure of
# every token comes out the same with any seed, and such a group is honest work: hence more than 1. The groups of a
# policy that has trained for a while are sure of most tokens; how many groups each cheat takes is in test_trials.
WITHIN = dict.fromkeys(HERE, 8) | {
    "int4-decodes": 16,  # most of its groups are, token by token, what the right weights give
    "swapped-proofs": 10,  # a group needs a rollout of two chunks
    "sleeper": HONEST_UNITS + 6,
    "stale": 60,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: TempPaths) -> Iterator[Attacked]:
    with Attacked.running(tmp_path_factory.mktemp("adversary") / "run") as attacked:
        honest = attacked.nodes()[HONEST].node
        Steal.library[:] = attacked.watch.bodies_of(honest)
        attacked.attack(sorted(HERE, key=WITHIN.__getitem__, reverse=True))  # those that take longest first
        Steal.library.clear()
        attacked.wait_until("honest work beside them", lambda: attacked.nodes()[HONEST].accepted >= HONEST_LEAST)
        attacked.rest()
        yield attacked


@pytest.fixture(scope="module")
def found(run: Attacked) -> dict[str, Result]:
    return results(run)


@pytest.fixture(scope="module")
def ledger(run: Attacked) -> list[LedgerEntry]:
    return run.ledger()


def attack_of(run: Attacked, cheat: str) -> Attack:
    return next(attack for attack in run.attacks if attack.cheat == cheat)


@pytest.mark.parametrize("cheat", HERE)
def test_cheat_is_caught_in_time_and_paid_only_for_groups_of_its_seeds(found, cheat, run, ledger):
    result = found[cheat]
    assert result.reason in CHEATS[cheat].reasons
    assert result.caught_at is not None
    assert result.caught_at <= WITHIN[cheat]
    node = run.nodes()[attack_of(run, cheat).name]
    rejected = {each.submission for each in run.story(node.node).refused if each.state == "rejected"}
    credited = {str(e.body["submission"]) for e in ledger if e.kind == "credit" and e.body["node"] == node.node}
    assert not rejected & credited
    assert (len(rejected), len(credited)) == (node.rejected, node.accepted)
    assert fold(ledger).by_node.get(node.node, Account()).credit == node.credit
    # nobody can tell such a group from honest work, for it is the same, but for a token where rounding decides
    assert found[cheat].wrong == 0
    assert found[cheat].near <= 1
    if cheat not in HONEST_AT_FIRST:
        # those under way when it was caught, twice (a second statistical strike is of work leased after the first): up
        # to four each time, on a busy machine all of them
        assert found[cheat].accepted <= WITHIN[cheat] + 8


@pytest.mark.parametrize("cheat", sorted(set(HERE) - AT_THE_DOOR))
def test_cheating_node_is_banned_and_told_why(run: Attacked, found: dict[str, Result], cheat: str) -> None:
    node, ending = run.nodes()[attack_of(run, cheat).name], attack_of(run, cheat).ending
    assert found[cheat].banned
    assert node.reason.partition(":")[0] in CHEATS[cheat].reasons
    assert isinstance(ending, ShutOut)
    assert node.reason in str(ending)


@pytest.mark.parametrize("cheat", sorted(AT_THE_DOOR))
def test_submission_refused_by_the_hub_is_never_judged(run: Attacked, found: dict[str, Result], cheat: str) -> None:
    assert found[cheat].severity == "refused"
    assert run.watch.of(found[cheat].node) == []
    assert run.nodes()[attack_of(run, cheat).name].credit == 0


@pytest.mark.parametrize("cheat", sorted(set(HERE) - AT_THE_DOOR))
def test_banned_by_first_certain_or_second_statistical_failure(run, found, cheat):
    story = run.story(found[cheat].node)
    strikes = sorted((each for each in story.refused if severity_of(each)), key=lambda each: each.decided_at_ms or 0)
    seen = [severity_of(each) for each in strikes]
    last = next(n for n, each in enumerate(seen) if each == "certain" or seen[: n + 1].count("statistical") == 2)
    since_ms = strikes[0 if seen[last] == "certain" else last].decided_at_ms or 0
    # a second statistical strike is of work that was leased after the first: perhaps not the next rejection
    then = [each for each in strikes if (each.decided_at_ms or 0) >= since_ms]
    assert story.node.reason in {f"{each.reason}: {each.message}" for each in then}


def severity_of(submission: SubmissionStory) -> str | None:
    severity: str | None = submission.verdict.document["severity"]
    return severity


def test_batches_hold_only_right_groups_and_honest_worker_is_not_punished(run, found):
    right = {each.verdict.submission for each in run.watch.judged if each.is_near}
    trained = run.trained()
    assert {group.submission for group in trained} <= right
    cheaters = {result.node for result in found.values() if result.accepted == 0}
    assert len(cheaters) > 20
    assert not cheaters & {group.node for group in trained}
    node = run.nodes()[HONEST]
    assert node.state is NodeState.ACTIVE
    assert (node.rejected, node.strikes) == (0, 0)
    assert node.unsure <= 0.01 * node.accepted
    assert node.accepted >= HONEST_LEAST
    assert node.node in {group.node for group in run.trained()}


def test_banned_key_is_refused_when_it_returns(run: Attacked) -> None:
    """Honest this time, but with the same key."""
    outcome = run.start(attack_of(run, "best-of").name).exception(60)
    assert isinstance(outcome, ShutOut)
    assert str(outcome).startswith("the hub has banned this node: sampling.seed")


def test_table_of_results_is_printed(run: Attacked, record_property: Callable[[str, object], None]) -> None:
    text = table(run)
    assert all(f"| {name} |" in text for name in HERE)
    record_property("table", text)
