"""`shoal ledger`: whoever tampers with a ledger is found out by anyone who holds a head from before."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hubrun import batch, earn, hub_config, join, join_validator, make_folder, publish, record, serving

from kit import Capture, Patch, TempPaths
from kit.cli import told
from kit.run import ledger as rows
from shoal.cli.main import main
from shoal.errors import LedgerError, UserError
from shoal.hub.service import Hub
from shoal.ledger import Account, Accounts, append, head_of
from shoal.protocol import LedgerEntry, SigningKey, Vouch, sign_document
from shoal.run.folder import RunFolder, find_run
from shoal.run.launch import ledger_line
from shoal.run.ledger.check import Book, check_ledger, export_ledger
from shoal.run.ledger.sources import CertifiedHead, KeptHead, kept_path
from shoal.runtime.clock import ManualClock

ALICE, BOB = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2))
OWNER_KEY = SigningKey.from_seed(b"o" * 32)
OWNER = OWNER_KEY.public_key


@pytest.fixture(scope="module")
def original(tmp_path_factory: TempPaths) -> Path:
    """A run folder: two nodes, one vouched for, credit, two batches, a policy whose manifest has the head between."""
    folder = make_folder(tmp_path_factory.mktemp("original") / "run")
    hub = Hub(hub_config(folder), ManualClock())
    join_validator(hub, folder)
    alice, bob = join(hub, ALICE, "alice"), join(hub, BOB, "bob")
    earn(hub, folder, alice, 0, 30)
    earn(hub, folder, bob, 1, 10)
    record(hub, batch(0))
    publish(folder, hub, 1)
    join(hub, ALICE, "alice", sign_document(Vouch(owner=OWNER, node=alice, issued_at_ms=1), OWNER_KEY))
    earn(hub, folder, bob, 2, 20)
    record(hub, batch(1))
    hub.close()
    return folder.path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def execute(run: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(run / "hub" / "hub.db", isolation_level=None)) as connection:
        connection.execute(statement, values)


def rewrite(run: Path, entries: list[LedgerEntry]) -> None:
    execute(run, "DELETE FROM ledger")
    for entry in entries:
        values = (entry.index, entry.kind, json.dumps(entry.body), entry.at_ms, entry.previous, entry.hash)
        execute(run, "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?)", *values)


def rehash(entries: list[LedgerEntry]) -> list[LedgerEntry]:
    """What a forger with all the time in the world would do: a chain without a flaw."""
    made: list[LedgerEntry] = []
    for entry in entries:
        made.append(append(made[-1] if made else None, entry.kind, entry.body, entry.at_ms))
    return made


def forged_row(index: int, at_ms: int | None = None, **changes: object) -> Callable[[Path], None]:
    """A row changed, and all hashes after it."""

    def forge(run: Path) -> None:
        entries = rows(run)
        body, old_ms = {**entries[index].body, **changes}, entries[index].at_ms
        entries[index] = entries[index].model_copy(update={"body": body, "at_ms": old_ms if at_ms is None else at_ms})
        rewrite(run, rehash(entries))
        if "credit" in changes:
            execute(run, "UPDATE nodes SET credit = ? WHERE name = 'alice'", changes["credit"])

    return forge


def lose_a_verdict(run: Path) -> None:
    execute(run, "DELETE FROM verdicts WHERE submission = ?", rows(run)[3].body["submission"])


def order_unsigned(run: Path) -> None:
    entries = rows(run)
    forged = {"verb": "pause", "order": {"action": {"kind": "admin-action"}, "certificate": None}}
    rewrite(run, [*entries, append(entries[-1], "admin", forged, 0)])


def cut_off(run: Path) -> None:
    execute(run, 'DELETE FROM ledger WHERE "index" > 3')


FORGED_END = forged_row(-1, digest="another")


def test_an_honest_ledger_holds(run: Path) -> None:
    checked = check_ledger(str(run))
    assert checked.compared
    assert [pin.source for pin in checked.pins] == ["the manifest of policy 0.1"]
    assert checked.accounts.total_credit == 60
    again = check_ledger(str(run))
    assert "the head kept here" in again.pins[-1].source
    assert again.pins[-1].head.index == rows(run)[-1].index


def edit(what: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Lines of an exported ledger, or of the file beside it, are changed."""

    def tamper(ledger: Path) -> None:
        file = Path(f"{ledger}{what}")
        file.write_text("".join(f"{line}\n" for line in change(file.read_text().splitlines())))

    return tamper


NO_EVIDENCE, MORE_TOKENS = r"is missing|which has none", ('"generated_tokens":30', '"generated_tokens":31')


@pytest.mark.parametrize(("place", "tamper", "words"), [
    ("folder", lambda run: execute(run, 'UPDATE ledger SET body = ? WHERE "index" = 3', "{}"), "row 3 was changed"),
    ("folder", lambda run: execute(run, 'DELETE FROM ledger WHERE "index" = 3'), "row 3 is missing"),
    ("folder", cut_off, r"ends at row 3, but row 6 was signed for \(the manifest of policy 0.1\): it was rolled back"),
    ("folder", forged_row(6, digest="another"), r"row 6 is not the one that was signed for \(the manifest of policy "),
    ("folder", forged_row(3, at_ms=7), r"row 3 is not the one that the hub named in the receipt behind row 5"),
    ("folder", forged_row(3, tokens=32, credit=32), r"row 3 \(credit\) is not proven: .* with 30 tokens; the row "),
    ("folder", lose_a_verdict, r"row 3 \(credit\) is not proven: its signed verdict is missing"),
    ("folder", order_unsigned, r"row \d+ \(admin\) is not proven: an order of the run"),
    ("folder", lambda run: execute(run, "UPDATE nodes SET credit = 31 WHERE name = 'alice'"), "has 31 credit and 0 pe"),
    ("folder seen before", cut_off, "the head kept here since"),
    ("folder seen before", FORGED_END, "the head kept here since"),
    ("file", edit("", lambda lines: [*lines[:2], "{}", *lines[3:]]), "line 3: not a ledger entry"),
    ("file", edit("", lambda lines: lines[:-1]), "it was rolled back"),
    ("file", edit(".evidence", lambda lines: lines[1:]), NO_EVIDENCE),
    ("file", edit(".evidence", lambda lines: lines[:-1]), NO_EVIDENCE),
    ("file", edit(".evidence", lambda lines: [lines[0], *lines[2:]]), NO_EVIDENCE),
    ("file", edit(".evidence", lambda lines: [lines[0].replace('"row":3', '"row":4'), *lines]), NO_EVIDENCE),
    ("file", edit(".evidence", lambda lines: [line.replace(*MORE_TOKENS) for line in lines]),
        r"row 3 .* is not the one that the row points to"),
])  # fmt: skip
def test_tampering_is_found(run, tmp_path, own_home, place, tamper, words):
    """The manifests find it; without them the head from last time, or the one that a file was exported with."""
    if place == "folder seen before":
        shutil.rmtree(run / "origin")
        assert "no head to compare with" in check_ledger(str(run)).notes[-1]
    where = tmp_path / "ledger.jsonl" if place == "file" else run
    if place == "file":
        assert export_ledger(str(run), where) == len(rows(run))
        assert check_ledger(str(where)).pins[0].source == "ledger.jsonl.head"
        shutil.rmtree(own_home)
    tamper(where)
    with pytest.raises(LedgerError, match=words):
        check_ledger(str(where))


def test_a_head_that_somebody_else_kept_finds_it_too(run: Path, tmp_path: Path, own_home: Path) -> None:
    export_ledger(str(run), tmp_path / "out.jsonl")
    shutil.rmtree(run / "origin")
    FORGED_END(run)
    check_ledger(str(run))  # nobody here knows better
    shutil.rmtree(own_home)
    with pytest.raises(LedgerError, match=r"--head .*out.jsonl.head"):
        check_ledger(str(run), head=tmp_path / "out.jsonl.head")


def test_a_file_without_its_evidence_proves_no_credit(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "ledger.jsonl"
    export_ledger(str(run), out)
    Path(f"{out}.evidence").unlink()
    assert "there is no ledger.jsonl.evidence beside" in told(capsys, 5, "ledger", "verify", out).err
    assert "NOT PROVEN: 3 rows of credit" in told(capsys, 0, "ledger", "verify", out, "--without-evidence").out


def test_a_kept_head_never_goes_back(run: Path) -> None:
    check_ledger(str(run))
    name = RunFolder.open(run).run_id
    before = KeptHead.model_validate_json(kept_path(name).read_bytes())
    export_ledger(str(run), run / "ledger.jsonl")
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "old.jsonl").write_bytes(b"".join(lines[:4]))
    shutil.copy(run / "ledger.jsonl.evidence", run / "old.jsonl.evidence")
    checked = check_ledger(str(run / "old.jsonl"))
    assert any("it cannot be compared with that head" in note for note in checked.notes)
    assert KeptHead.model_validate_json(kept_path(name).read_bytes()) == before


def test_forged_file_with_an_unsigned_head_is_found_and_poisons_nothing(run, tmp_path, own_home):
    out = tmp_path / "ledger.jsonl"
    export_ledger(str(run), out)
    entries = rehash([*rows(run)[:-1], rows(run)[-1].model_copy(update={"at_ms": 1})])
    out.write_text("".join(f"{entry.model_dump_json()}\n" for entry in entries))
    beside = Path(f"{out}.head")
    found = CertifiedHead.model_validate_json(beside.read_bytes())
    stranger = sign_document(head_of(RunFolder.open(run).run_id, entries[-1]), SigningKey.generate())
    beside.write_text(found.model_copy(update={"head": stranger}).model_dump_json())
    with pytest.raises(LedgerError, match=r"ledger.jsonl.head was not signed by a hub of run"):
        check_ledger(str(out))
    beside.unlink()
    checked = check_ledger(str(out))
    assert any("anybody may have written it" in note for note in checked.notes)
    assert not kept_path(checked.run).exists(), "what nobody signed is not remembered"
    check_ledger(str(run))


def test_an_export_is_whole_or_not_there(run: Path, tmp_path: Path) -> None:
    execute(run, 'UPDATE ledger SET at_ms = 7 WHERE "index" = 3')
    with pytest.raises(LedgerError, match="row 3 was changed"):
        export_ledger(str(run), tmp_path / "ledger.jsonl")
    assert list(tmp_path.glob("*ledger*")) == []


def test_a_run_that_went_well_leaves_its_ledger_and_fails_for_nothing_else(run: Path) -> None:
    line = ledger_line(run)
    assert f"{run / 'ledger.jsonl'}: {len(rows(run))} entries" in line
    assert check_ledger(str(run / "ledger.jsonl")).accounts.total_credit == 60
    shutil.rmtree(run / "hub")
    assert "could not be written out: there is no hub database" in ledger_line(run)


def test_the_ledger_of_a_running_hub(run: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = RunFolder.open(run)
    folder.assign_endpoints()
    with serving(folder) as url:
        checked = check_ledger(url)
        assert checked.pins[-1].source == "the hub's signed head"
        assert any("no source of this run could be asked" in note for note in checked.notes)
        assert main(["ledger", "verify", url, "--out", str(tmp_path / "o.jsonl")]) == 0
        assert "o.jsonl, and beside it o.jsonl.evidence and o.jsonl.head\n" in capsys.readouterr().out
        assert main(["ledger", "verify", str(run)]) == 0
        assert main(["ledger", "show", url, OWNER[:8], "--json"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said[said.index("{") :])["together"]["credit"] == 30
    assert main(["ledger", "verify", str(tmp_path / "o.jsonl")]) == 0


def test_commands_end_with_5_when_anything_is_wrong(run: Path, capsys: Capture) -> None:
    assert "every hash fits" in told(capsys, 0, "ledger", "verify", run).out
    cut_off(run)
    assert "it was rolled back" in told(capsys, 5, "ledger", "verify", run).err
    assert main(["ledger", "verify", str(run / "nowhere")]) == 2


def test_a_name_that_is_the_start_of_anothers_id_stands_for_neither() -> None:
    """The tables show the first digits of ids, and anybody may choose them for a name."""
    book = Book.__new__(Book)
    book.accounts, book.names = Accounts({"aa" * 16: Account(), "bb" * 16: Account()}), {"aa" * 16: "bbbbbbbb"}
    with pytest.raises(UserError, match="the name of one node and the start of another's id"):
        book.find("bbbbbbbb")
    assert book.find("bb" * 8) == ["bb" * 16]


def test_accounts_and_shares_for_people_and_programs_are_not_cut_in_a_pipe(run, capsys, monkeypatch):
    assert "30" in told(capsys, 0, "ledger", "show", run, "bob").out
    first = json.loads(told(capsys, 0, "ledger", "show", run, "--step", "0", "--json").out)
    assert [share["fraction"] for share in first["shares"]] == [[3, 4], [1, 4]]
    last = json.loads(told(capsys, 0, "ledger", "show", run, "--json").out)
    assert {share["holder"]: share["credit"] for share in last["shares"]} == {OWNER: 30, BOB.node: 30}
    assert "1/2" in told(capsys, 0, "ledger", "show", run).out
    assert main(["ledger", "show", str(run), "nobody"]) == 2
    assert main(["ledger", "show", str(run), "--step", "900"]) == 2
    monkeypatch.setenv("COLUMNS", "30")
    heads, row = told(capsys, 0, "ledger", "show", run, "bob").out.splitlines()
    assert heads.split() == ["node", "name", "credit", "pending", "void", "accepted", "rejected", "standing"]
    assert row.split()[:3] == [BOB.node[:16], "bob", "30"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_run_that_is_meant(elsewhere: Path, original: Path) -> None:
    with pytest.raises(UserError, match="runs/ has no run"):
        find_run(None)
    shutil.copytree(original, elsewhere / "runs" / "one")
    assert find_run(None) == "runs/one"
    assert find_run("x") == "x"
    shutil.copytree(original, elsewhere / "runs" / "two")
    with pytest.raises(UserError, match="runs/ has 2"):
        find_run(None)


def test_a_ledger_in_postgresql(tmp_path: Path, database_url: str) -> None:
    folder = make_folder(tmp_path / "run", f'hub.database="{database_url}"')
    hub = Hub(hub_config(folder), ManualClock())
    try:
        alice = join(hub, SigningKey.from_seed(b"\1" * 32), "alice")
        assert hub.context.lead()
        join_validator(hub, folder)
        earn(hub, folder, alice, 0, 30)
        record(hub, batch(0))
        publish(folder, hub, 1)
        earn(hub, folder, alice, 1, 12)
        assert [entry.kind for entry in hub.stories.node(alice).ledger] == ["node"]
    finally:
        hub.close()
    checked = check_ledger(str(folder.path))
    assert checked.compared
    assert checked.accounts.by_node[alice].credit == 42
    assert checked.pins[0].source == "the manifest of policy 0.1"
    assert main(["ledger", "verify", str(folder.path), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert check_ledger(str(tmp_path / "out.jsonl")).accounts.total_credit == 42
