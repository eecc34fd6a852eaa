"""`shoal cast`: whom it believes, where it puts things, what it says; and mistakes, each in one clear sentence."""

import io
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import shoal.run.join
import shoal.shardcast
from kit import Capture, Patch
from kit.cast import DEAD, Lab, from_folder
from kit.cli import told
from shoal.cli.main import main
from shoal.cli.printing import CommandTerminal, counted
from shoal.errors import UserError
from shoal.protocol import PolicyRef, SigningKey
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import PUBLIC_ONLY, Nearness, Reach
from shoal.shardcast import Content, Downloader, Origin, Payload, Progress, RelayConfig
from shoal.shardcast.cast import Sources, say_commands
from shoal.shardcast.cast.fetch import Delivery
from shoal.shardcast.download import OnProgress
from shoal.shardcast.server import public_url

KEY, OTHER = SigningKey.from_seed(b"\x21" * 32), SigningKey.from_seed(b"\x22" * 32)
KEYED = f"{DEAD}/#{KEY.public_key}"
Serve = Callable[[Path], str]


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def serve(lab: Lab) -> Serve:
    """Static servers of folders."""
    return lambda folder: lab.source(from_folder(folder)).url


def published(folder: Path, run: str = "files", key: SigningKey = KEY, files: dict[str, bytes] | None = None) -> Path:
    origin = Origin(folder, run, key)
    head = origin.head()
    origin.publish(0 if head is None else head.policy.version + 1, Content.of(files or {"a.bin": b"content"}))
    return folder


def test_a_key_may_stand_behind_any_of_the_urls() -> None:
    key = "AB" * 32
    assert Sources.parse([f"http://a:1/#{key}", "http://b:1/"]) == Sources(("http://a:1", "http://b:1"), key.lower())
    assert Sources.parse(["http://a:1", f"http://b:1#{key}"]).key == key.lower()
    assert Sources.parse(["http://a:1/", f"http://a:1#{key}"]).urls == ("http://a:1",)


@pytest.mark.parametrize(("urls", "sentence"), [
    (["example.org:8471"], "is not a URL such as"), (["ftp://host/"], "is not a URL such as"),
    (["http://"], "is not a URL such as"), (["http://host:port/"], "is not a URL"),
    (["http://host:1/#abc"], "does not end in a key"), (["http://host:1/#"], "does not end in a key"),
    (["http://host:1/#" + "xy" * 32], "does not end in a key"),
    (["http://a:1/#" + "ab" * 32, "http://b:1/#" + "cd" * 32], "different keys"),
    (["http://a:1/", "http://b:1"], "no URL names the publisher's key"),
])  # fmt: skip
def test_urls_that_cannot_be(urls: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Sources.parse(urls)


def test_other_keys_and_other_broadcasts_are_refused(here: Path, serve: Serve, capsys: Capture) -> None:
    url, sibling = serve(published(here / "www")), serve(published(here / "sibling", run="others"))
    code, said = complaint(capsys, "fetch", f"{url}/#{OTHER.public_key}", "--out", "out", "--wait", "1")
    assert (code, "not trusted" in said) == (1, True), said
    assert not (here / "out").exists()
    assert main(["cast", "fetch", f"{url}/#{KEY.public_key}", "--out", "out"]) == 0
    capsys.readouterr()
    code, said = complaint(capsys, "fetch", f"{sibling}/#{KEY.public_key}", "--out", "out", "--wait", "1")
    assert (code, "belongs to run others" in said) == (1, True), said


def fetched(tmp_path: Path, serve: Serve, files: dict[str, bytes]) -> Payload:
    url = serve(published(tmp_path / "www", files=files))
    downloader = Downloader([url], "files", KEY.public_key, tmp_path / "cache", StopToken())
    return downloader.fetch(downloader.newest(10), 10)


def deliver(payload: Payload, output: str, force: bool = False) -> Path:
    return Delivery(output, payload.path.parent, force).deliver(payload)


def test_a_single_file_shares_its_bytes_with_the_cache_and_may_go_into_a_folder(tmp_path: Path, serve: Serve) -> None:
    payload, target = fetched(tmp_path, serve, {"a.bin": b"content"}), tmp_path / "deep" / "out.bin"
    for _ in range(2):
        assert deliver(payload, str(target)) == target
    assert target.read_bytes() == b"content"
    assert payload.path is not None
    assert target.samefile(payload.path)
    assert list(target.parent.iterdir()) == [target]
    (tmp_path / "there").mkdir()
    assert deliver(payload, str(tmp_path / "there")) == tmp_path / "there" / "a.bin"
    assert deliver(payload, f"{tmp_path}/new/") == tmp_path / "new" / "a.bin"


def test_resumed_fetch_says_what_was_here_before(here: Path, serve: Serve, capsys: Capture, monkeypatch: Patch) -> None:
    """3 MB of 8 MB were here; 2 MB have come since."""
    fetch = Downloader.fetch

    def resumed(downloader: Downloader, ref: PolicyRef, deadline_s: float, report: OnProgress) -> Payload:
        report(Progress("0.1", 5_000_000, 8_000_000, 1.0, {DEAD: 2_000_000}, "whole"))
        return fetch(downloader, ref, deadline_s, report)

    monkeypatch.setattr(Downloader, "fetch", resumed)
    url = f"{serve(published(here / 'www'))}/#{KEY.public_key}"
    said = told(capsys, 0, "cast", "fetch", url, "--out", "copy.bin").err
    assert said == "fetching version 0: continues: 3 MB of 8 MB are done\n"


def test_existing_files_are_replaced_only_by_force_and_link_targets_never(tmp_path: Path, serve: Serve) -> None:
    payload = fetched(tmp_path, serve, {"a.bin": b"content"})
    (tmp_path / "odd" / "a.bin").mkdir(parents=True)
    (tmp_path / "precious").write_bytes(b"elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    for name, words in (("odd", "is a folder"), ("out", "not fetched from here")):
        with pytest.raises(UserError, match=words):
            deliver(payload, str(tmp_path / name))
    deliver(payload, str(tmp_path / "out"), force=True)
    assert (tmp_path / "out").read_bytes() == b"content"
    assert (tmp_path / "precious").read_bytes() == b"elsewhere"


def test_several_files_become_a_folder(tmp_path: Path, serve: Serve) -> None:
    files = {"a.bin": b"1", "sub/b.bin": b"2", "sub/empty": b""}
    payload = fetched(tmp_path, serve, files)
    deliver(payload, str(tmp_path / "out"))
    found = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*")}
    assert {name: path.read_bytes() for name, path in found.items() if path.is_file() and name in files} == files
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="is a file; give a folder"):
        deliver(payload, str(tmp_path / "file"))


def test_files_of_an_older_version_are_removed_unless_they_were_edited(tmp_path: Path, serve: Serve) -> None:
    out, files = tmp_path / "out", {"keep": b"1", "gone": b"2", "edited": b"3"}
    deliver(fetched(tmp_path, serve, files), str(out))
    (out / "mine").write_text("mine")
    (out / "edited").write_text("edited")
    deliver(fetched(tmp_path, serve, {"keep": b"1"}), str(out))
    assert sorted(path.name for path in out.iterdir()) == ["edited", "keep", "mine"]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with counted("fetching", console, unit="MB") as report:
        report(5_000_000, 20_000_000)
    assert "fetching" in file.getvalue()
    assert "25 %" in file.getvalue()


def test_the_commands_name_an_address_that_others_can_reach(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.shardcast.server.own_address", lambda: "192.0.2.5")
    for everywhere in ("0.0.0.0", "::", ""):
        say_commands(CommandTerminal(), public_url(everywhere, 7), "ab" * 32, "my file")
        assert f"shoal cast fetch http://192.0.2.5:7/#{'ab' * 32} --out 'my file'\n" in capsys.readouterr().out
    assert public_url("127.0.0.1", 7) == "http://127.0.0.1:7"
    assert public_url("fe80::1", 7) == "http://[fe80::1]:7"


def complaint(capsys: Capture, *arguments: str) -> tuple[int, str]:
    code = main(["cast", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.startswith("shoal: "), said.err
    assert said.err.count("\n") == 1, said.err
    return code, said.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folder_of_another_key_or_name_is_refused(here: Path, capsys: Capture) -> None:
    (here / "file").write_bytes(b"content")
    told(capsys, 0, "cast", "publish", "file", "--folder", "named", "--name", "mine", "--no-serve")
    for folder in ("www", "mirror"):
        published(here / folder, key=OTHER)
    for arguments, words in (
        (("publish", "file", "--no-serve"), "is not signed by this key"),
        (("publish", "file", "--folder", "named", "--name", "yours", "--no-serve"), "is the broadcast 'mine'"),
        (("relay", "--upstream", KEYED), "mirrors another publisher"),
    ):
        code, said = complaint(capsys, *arguments)
        assert (code, words in said) == (2, True), said


def test_the_key_is_private_beside_the_tree_and_made_once(here: Path, capsys: Capture) -> None:
    (here / "file").write_bytes(b"content")
    for _ in range(2):
        assert main(["cast", "publish", "file", "--folder", "deep/www", "--no-serve"]) == 0
    said, progress = capsys.readouterr()
    assert "continues" not in progress
    assert "file version 1 is published already, and nothing has changed since" in said
    assert (here / "deep" / "www.key").stat().st_mode & 0o777 == 0o600
    assert len({line.partition("#")[2] for line in said.splitlines() if "#" in line}) == 1
    assert not any("key" in path.name for path in (here / "deep" / "www").rglob("*"))
    (here / "deep" / "www.key").chmod(0o644)
    assert "is readable by others" in complaint(capsys, "publish", "file", "--folder", "deep/www", "--no-serve")[1]


@pytest.fixture
def configs(monkeypatch: Patch) -> list[RelayConfig]:
    """The set-ups of the relays that were started; none of them runs."""
    found: list[RelayConfig] = []
    info = SimpleNamespace(sources=("http://relay:1",), last_resort=("http://origin:1",))
    trusted = SimpleNamespace(root_fingerprint="ab", run="run-1", info=info, trainer_key="ab" * 32, reach=PUBLIC_ONLY)

    def remember(config: RelayConfig, *_: Any) -> None:
        found.append(config)

    client = SimpleNamespace(url=DEAD, trusted_run=lambda: trusted, close=lambda: None)
    monkeypatch.setattr(shoal.run.join.HubClient, "of_a_person", lambda *_: client)
    monkeypatch.setattr(shoal.run.join, "remember_root", lambda *_: None)
    monkeypatch.setattr(shoal.run.join, "start_role", lambda *_: StopToken())
    monkeypatch.setattr(shoal.shardcast, "run_relay", remember)
    return found


def test_every_option_reaches_the_relay(configs: list[RelayConfig], tmp_path: Path) -> None:
    options = (
        "--upstream http://a:1 --upstream http://b:1 --peer http://c:1 --peer http://d:1 --host 127.0.0.1 --port 7 "
        "--keep-versions 4 --max-disk 1.5GB"
    )
    assert main(["relay", DEAD, "--folder", str(tmp_path), *options.split()]) == 0
    upstreams, peers = ("http://a:1", "http://b:1"), ("http://c:1", "http://d:1")
    named = Reach(Nearness.PUBLIC, frozenset((name, 1) for name in "abcd"))  # the user's own choice is not checked
    assert configs == [
        RelayConfig(tmp_path, upstreams, "run-1", "ab" * 32, "127.0.0.1", 7, peers, 4, 15 * 10**8, reach=named)
    ]


def test_without_options_a_relay_is_as_a_recipe_would_have_it(configs: list[RelayConfig], tmp_path: Path) -> None:
    assert main(["relay", DEAD, "--folder", str(tmp_path)]) == 0
    budget, plain = configs[0].disk_bytes, RelayConfig(tmp_path, (), "", "")
    assert (configs[0].keep_versions, configs[0].peers) == (plain.keep_versions, plain.peers)
    assert budget is not None  # a part of what is free: whoever publishes cannot fill the disk
    assert 0 < budget < shutil.disk_usage(tmp_path).free
    assert configs[0].upstreams == ("http://relay:1", "http://origin:1")
    assert configs[0].reach == PUBLIC_ONLY
