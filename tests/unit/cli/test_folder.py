"""The run folder: keys once, certificates that hold, one recipe, addresses that stay."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import Patch
from shoal.errors import ConfigError, ResourceError
from shoal.protocol import RoleCertificate, SigningKey, fingerprint, load_or_create_key, open_document, sign_document
from shoal.run.folder import Endpoints, RunFolder, masked, port_of, without_passwords
from shoal.run.recipe import Recipe
from shoal.runtime import FolderLock, StopToken
from shoal.runtime.config import dump_config, parse_config


def recipe(*overrides: str) -> Recipe:
    return parse_config("[hub]\nport = 0\n[validator]\ncount = 2", Recipe, "test", overrides)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.prepare(tmp_path / "run", recipe())


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_preparing_makes_the_recipe_the_keys_and_certificates(folder: RunFolder) -> None:
    names = ["hub", "trainer", "validator-0", "validator-1"]
    assert sorted(files(folder.path)) == sorted(
        [
            ".lock", "recipe.toml", "keys/root.key",
            *(f"keys/{name}{end}" for name in (*names, "admin") for end in (".key", ".json")),
        ]
    )  # fmt: skip
    for name in (*names, "admin", "root"):
        assert (folder.path / "keys" / f"{name}.key").stat().st_mode & 0o777 == 0o600
    for name, signed in zip(names, folder.certificates, strict=True):
        document = open_document(signed, RoleCertificate, folder.key("root").public_key)
        assert document.role == name.split("-")[0]
        assert document.public_key == folder.key(name).public_key
        assert document.run == folder.run_id == f"run-{fingerprint(folder.key('root').public_key)[:12]}"


def test_recipe_with_a_password_is_private_and_any_password_is_masked(tmp_path: Path) -> None:
    given = recipe("hub.database=postgresql://shoal:s3cret@db.example:5432/run?sslpassword=s3cret2")
    folder = RunFolder.prepare(tmp_path / "run", given)
    assert (folder.path / "recipe.toml").stat().st_mode & 0o777 == 0o600
    assert RunFolder.open(folder.path).recipe == given
    shown = dump_config(without_passwords(given))
    assert "s3cret" not in shown
    assert "postgresql://shoal:***@db.example:5432/run?sslpassword=***" in shown
    assert without_passwords(recipe()) == recipe()
    for url in ("postgresql://u:a/b@c@h/d", "postgresql://:a/b@c@h", "postgres://u:a/b@c@h:1/d?x=y"):
        assert masked(url) == url.replace("a/b@c", "***")


def test_preparing_again_changes_nothing_and_needs_no_root_key(folder: RunFolder) -> None:
    before, run = files(folder.path), folder.run_id
    assert RunFolder.prepare(folder.path, recipe()) == RunFolder.open(folder.path) == folder
    assert files(folder.path) == before
    (folder.path / "keys" / "root.key").unlink()
    assert RunFolder.prepare(folder.path, recipe()).run_id == run
    assert not (folder.path / "keys" / "root.key").exists()


def test_a_missing_certificate_needs_the_same_root_key_and_no_second_one_is_made(folder: RunFolder) -> None:
    root = folder.path / "keys" / "root.key"
    root.unlink()
    with pytest.raises(ConfigError, match="so is the root key: put it back"):
        RunFolder.prepare(folder.path, recipe("validator.count=3"))
    load_or_create_key(root)
    with pytest.raises(ConfigError, match="is not the root key"):
        RunFolder.prepare(folder.path, recipe("validator.count=3"))
    root.unlink()
    (folder.path / "keys" / "hub.json").unlink()
    with pytest.raises(ConfigError, match="so is the root key: put it back"):
        RunFolder.prepare(folder.path, folder.recipe)


def test_a_folder_takes_its_own_recipe_changed_until_something_has_happened_in_it(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"another recipe \(run.seed was 0, is 3\); .* change it: shoal run .* --set"):
        RunFolder.prepare(folder.path, recipe("run.seed=3"))
    RunFolder.prepare(folder.path, recipe("run.seed=3"), changed=True)
    (folder.path / "hub").mkdir()
    with pytest.raises(ConfigError, match=r"another recipe \(run.seed was 3, is 7; trainer.loss was 'two_sided_clip'"):
        RunFolder.prepare(folder.path, recipe("run.seed=7", "trainer.loss=ppo_clip"), changed=True)
    assert RunFolder.open(folder.path).recipe.run.seed == 3


def test_running_run_keeps_its_recipe(folder: RunFolder, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.run.folder.LOCK_WAIT_S", 0.0)
    before = files(folder.path)
    with FolderLock(folder.path).acquire(StopToken()), pytest.raises(ResourceError, match="in use by process"):
        RunFolder.prepare(folder.path, recipe("worker.count=3"))
    assert files(folder.path)["recipe.toml"] == before["recipe.toml"]


CHANGEABLE = (
    "run.steps=99", "worker.count=3", "relay.count=0", "hub.lease_s=5",
    'trainer.tracking=["tensorboard"]', "trainer.batch_deadline_s=60.0", "trainer.keep_checkpoints=3",
    "trainer.keep_best=2", "trainer.checkpoint_every=5", "trainer.evaluate_every=3",
    "trainer.guards.no_signal.limit=9.0", "trainer.guards.divergence.action=warn",
)  # fmt: skip
TRAINED = (
    "trainer.learning_rate=0.5", "trainer.objective.kl=0.1", "trainer.memory.precision=bfloat16",
    "trainer.publish_dtype=bfloat16", "trainer.evaluate_tasks=3", "trainer.lora.rank=4", "trainer.minibatches=1",
    "trainer.mask_truncated=false",
)  # fmt: skip


def test_settings_that_do_not_affect_training_may_change(folder: RunFolder) -> None:
    begun(folder)
    for override in TRAINED:
        with pytest.raises(ConfigError, match=r"was made with another recipe \(trainer\..* was .*, is "):
            RunFolder.prepare(folder.path, recipe(override))
    for override in CHANGEABLE:
        RunFolder.prepare(folder.path, recipe("run.steps=99", override))
        assert RunFolder.open(folder.path).recipe == recipe("run.steps=99", override) != recipe()


def begun(folder: RunFolder) -> RunFolder:
    (folder.path / "hub").mkdir()
    (folder.path / "hub" / "hub.db").touch()
    return folder


@pytest.mark.parametrize(("before", "override", "command"), [
    ("", "hub.database=postgresql://u:s3cret@h/d", r" --set hub.database=postgresql://u:\*\*\*@h/d"),
    ("", "hub.storage=s3://bucket/x", " --set hub.storage=s3://bucket/x"),
    ("hub.database=postgresql://u:old@h/d", "hub.host=127.0.0.1", ""),  # nor back, by its first recipe
])  # fmt: skip
def test_only_a_restore_moves_a_run_that_has_begun(tmp_path: Path, before: str, override: str, command: str) -> None:
    run = begun(RunFolder.prepare(tmp_path / "run", recipe(*before.split())))
    there = files(run.path)
    with pytest.raises(ConfigError, match=f"restore FILE RUN{command}$"):
        RunFolder.prepare(run.path, recipe(override))
    assert files(run.path) == there


def test_database_password_may_change_and_all_of_it_before_the_run(tmp_path: Path) -> None:
    for host in ("typo", "h"):
        run = RunFolder.prepare(tmp_path / host, recipe(f"hub.database=postgresql://u:old@{host}/d"))
        (run.path / "hub").mkdir()
        (run.path / "origin" / "manifests").mkdir(parents=True)
        if host == "h":
            (run.path / "hub" / "hub.db").touch()
        RunFolder.prepare(run.path, recipe("hub.database=postgresql://u:new@h/d"))
        assert RunFolder.open(run.path).recipe.hub.database == "postgresql://u:new@h/d"


def test_a_run_that_has_begun_can_be_made_longer_never_shorter(folder: RunFolder) -> None:
    (folder.path / "hub").mkdir()
    RunFolder.prepare(folder.path, recipe("run.steps=40"))
    with pytest.raises(ConfigError, match=r"run.steps was 40, is 39: .* never shorter"):
        RunFolder.prepare(folder.path, recipe("run.steps=39"))
    assert RunFolder.open(folder.path).recipe.run.steps == 40


def test_a_folder_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(ConfigError, match="is not empty and not a run's"):
        RunFolder.prepare(tmp_path, recipe())
    assert sorted(files(tmp_path)) == ["photo.jpg"]


def test_a_certificate_that_is_not_this_processs_is_refused(folder: RunFolder) -> None:
    path, root = folder.path / "keys" / "trainer.json", folder.key("root")
    good, made = path.read_text(), []
    for run, key in (("other-run", folder.key("hub")), (folder.run_id, SigningKey.generate())):
        document = RoleCertificate(run=run, role="trainer", public_key=key.public_key, issued_at_ms=1)
        made.append((sign_document(document, root).model_dump_json(), "is for another key, role or run"))
    tampered = good.replace('"trainer"', '"validator"'), r"trainer\.json: .*remove it to get a new one"
    for text, words in (*made, tampered, (good[: len(good) // 2], r"trainer\.json is not a certificate")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            folder.certificate("trainer")
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read the certificate"):
        folder.certificate("trainer")


def test_addresses_are_written_down_and_kept_for_the_next_start(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"no endpoints\.json"):
        _ = folder.endpoints
    first = folder.assign_endpoints()
    assert folder.endpoints == first
    ports = [port_of(url) for url in (first.hub, first.origin, *first.relays)]
    assert len(set(ports)) == 3
    assert first.join == f"{first.hub}/#{fingerprint(folder.root_key)}"
    assert (first.sources, first.last_resort) == (first.relays, (first.origin,))
    assert folder.assign_endpoints() == first


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_taken_port_and_damaged_endpoints_are_replaced(folder: RunFolder, taken: int) -> None:
    first = folder.assign_endpoints()
    path = folder.path / "endpoints.json"
    path.write_text(path.read_text().replace(first.origin, f"http://127.0.0.1:{taken}"))
    second = folder.assign_endpoints()
    assert port_of(second.origin) != taken
    assert second.hub == first.hub
    folder.assign_endpoints()
    (folder.path / "endpoints.json").write_text('{"hub": 3')
    with pytest.raises(ConfigError, match=r"endpoints\.json is damaged"):
        _ = folder.endpoints
    assert isinstance(folder.assign_endpoints(), Endpoints)


def test_unusable_address_is_one_sentence(tmp_path: Path, taken: int) -> None:
    folder = RunFolder.prepare(tmp_path / "run", recipe(f"hub.port={taken}"))
    with pytest.raises(ResourceError, match=rf"cannot listen on port {taken} .*hub\.port=0"):
        folder.assign_endpoints()
    folder = RunFolder.prepare(tmp_path / "other", recipe("hub.host=192.0.2.1"))
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1 .*is it an address of this machine"):
        folder.assign_endpoints()


@pytest.mark.parametrize(
    ("text", "said"),
    [("", r"recipe\.toml is damaged: it has no \[run\] section"), ("[run]\n[oops", r"recipe\.toml: not valid TOML"),
     (None, "not a run's folder")],
)  # fmt: skip
def test_a_folder_without_a_whole_recipe_cannot_be_opened(folder: RunFolder, text: str | None, said: str) -> None:
    path = folder.path / "recipe.toml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        RunFolder.open(folder.path)
    assert (path.read_text() if path.exists() else None) == text


def test_the_address_that_others_use_goes_into_the_join_url(tmp_path: Path) -> None:
    given = ("https://shoal.example.org/", "https://two.example.org")
    folder = RunFolder.prepare(tmp_path / "run", recipe(f"hub.advertise={list(given)}".replace("'", '"')))
    endpoints = folder.assign_endpoints()
    assert endpoints.join == f"https://shoal.example.org/#{fingerprint(folder.root_key)}"
    assert endpoints.advertise == given
    assert endpoints.hub.startswith("http://127.0.0.1:")
