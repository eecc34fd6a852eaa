"""What cannot be meant: one line that says so, an exit code, and nothing left behind. Nobody is asked before."""

import json
import os
import shlex
import socket
from pathlib import Path

import pytest

from kit import Patch, TempPaths
from kit.cast import DEAD, says
from kit.cli import TINY
from shoal.adversary import CHEATS
from shoal.cli.main import main

KEYED = f"{DEAD}/#{'ab' * 32}"
FILTER, SFT = "filter tiny sort --out x.parquet", "sft tiny --data demos.jsonl --out out"
PUBLISH, FETCH = "cast publish --no-serve", "cast fetch"

LEAKING = """
tasks = [{"prompt": f"{n}+1=", "answer": str(n + 1), "split": "train" if n < 8 else "held_out"} for n in range(10)]
tasks[9]["prompt"] = " 3+1 ="

def score(prompt, completion, answer):
    return float(completion == answer)
"""
MAY_STAY = {"www.key", ".out.cast", ".lock", "out.work", ".shoal-sft"}
"""What is used again by whoever mends the mistake."""

MISTAKES: list[tuple[str, int, str]] = [
    ("run --nonsense", 2, "No such option: --nonsense (see: shoal run --help)"),
    ("swim", 2, "No such command 'swim'"),
    ("stat demo", 2, "No such command 'stat'. Did you mean 'status'? (see: shoal --help)"),
    ("--verson", 2, "No such option: --verson (Possible options: --version) (see: shoal --help)"),
    ("ledger", 2, "Missing command. (see: shoal ledger --help)"),
    # runs
    ("run", 2, "which recipe? for example: shoal run"),
    ("run tinyy", 2, "there is no run folder runs/tinyy (did you mean 'tiny'?); to make one"),
    ("run none", 2, "there is no run folder runs/none; to make one: shoal run RECIPE runs/none"),
    ("init two words", 2, "unexpected extra argument"),
    ("init .", 2, "a run's name has letters, digits"),
    ("run hollow", 2, "hollow has no recipe.toml: it is not a run's folder"),
    ("run file", 2, "file: not valid TOML"),
    ("run TINY a b", 2, "Got unexpected extra argument(s) (b) (see: shoal run --help)"),
    ("run TINY --dry-rum", 2, "No such option: --dry-rum (Possible options: --dry-run)"),
    ("run TINY --patience soon", 2, "'--patience': 'soon' is not a number from 1 to 6,000,000 (see: shoal run --help)"),
    ("run TINY --set hub.port=99999", 2, "[hub] port = 99999: input should be less than or equal to 65535"),
    ("demo --steps -1", 2, "'--steps': '-1' is not a whole number from 1 to 100,000 (see: shoal demo --help)"),
    ("hub none", 2, "runs/none is not there; a run is given by its folder, its name under runs/, or its URL"),
    (f"trainer {DEAD}", 2, "is a URL: this command needs the run's folder, or its name under runs/"),
    (f"relay {DEAD} --origin", 2, "--origin: only for the run's folder"),
    (f"relay . --port 0 --upstream {DEAD}", 2, "--upstream, --port: only for a run's URL"),
    ("backup", 2, "give the run's folder and the file to write"),
    ("restore file ./again", 1, "the backup file is damaged"),
    # hubs
    ("status localhost:8470", 2, "or its URL, http://localhost:8470"),
    *((f"{command} WEB --wait 600", 4, "answers, but it is no shoal hub [HTTP 404]; check the address")
      for command in ("status", "why 1", "join", "relay", "ledger verify", "ledger show")),
    *((f"{command} {DEAD} --wait 0", 4, f"no usable answer from the hub at {DEAD} ")
      for command in ("status", "join", "relay")),
    (f"why 1 {DEAD} --wait 0", 4, "check the address, that the hub is running"),
    ("ledger verify none.jsonl", 2, "none.jsonl is no run's folder (here or in runs/), no exported ledger and no URL"),
    (f"ledger verify {DEAD} --recheck 3", 2, "--recheck needs the run's folder"),
    ("ledger show . bob --step 3", 2, "leave the node out"),
    ("ledger witness demo", 2, "a witness watches a hub: give its URL"),
    ("admin puase .", 2, "there is no order 'puase' (did you mean 'pause'?): shoal admin --help lists them"),
    ("admin ban .", 2, "this order is given so: shoal admin ban RUN NODE"),
    ("admin add-worker .", 2, "this order is given so: shoal admin add-worker RUN KEY"),
    ("admin add-worker . abc", 2, "'abc' is no public key: it has 64 hex digits"),
    (f"admin pause {DEAD}", 2, "give --keys FOLDER with admin.key and admin.json"),
    ("key vouch xyz --owner none", 2, "'xyz' is neither a node id"),
    *((f"run TINY --set run.{key}=1", 2, f"{key} is not supported: truncated sampling")
      for key in ("top_p", "top_k", "min_p")),
    ("run TINY --set trainer.minibatches=many", 2, "--set trainer.minibatches=many: [trainer] mini"),
    *((f"run TINY run --set 'trainer.lora.targets=[\"qproj\"]'{mode}", 2, "an adapter is called 'qproj'; there are: ")
      for mode in ("", " --dry-run", " --prepare")),
    *((f"run TINY {where}", 3, "a part of the path is a file, not a folder") for where in ("file", "file/run")),
    ("run TINY --set hub.database=mysql://x --prepare", 2, "hub.database is for mysql, not for PostgreSQL"),
    *((f"run TINY --set hub.storage={url} --prepare", 2, f"hub.storage = '{url}' is no bucket: write s3://BUCKET")
      for url in ("s3:/x", "http://x")),
    ("run TINY --set hub.storage=s3://x --set hub.storage_endpoint=host --prepare", 2, "'host' is no server: write"),
    ("run TINY fresh --prepare", 2, "or change it: shoal run {here}/fresh --set SECTION.KEY=VALUE"),
    ("run gym --dry-run --set environment.file=a.py", 2, "--set environment.options= takes away those of a recipe"),
    ("run gym", 2, "there is no model folder {here}/runs/gym-start"),
    ("export fresh out", 2, "there is no checkpoint in fresh/trainer/checkpoints yet: export again once its trainer"),
    ("export . out --best --version 3", 2, "--best and --version name two checkpoints"),
    ("status .", 2, ". has no recipe.toml: it is not a run's folder; a run is given by its folder"),
    ("status", 2, "which run? give its folder, its name under runs/, or its hub's URL"),
    ("data check a.jsonl --from 3", 2, "--seed and --from go with --order N"),
    ("doctor --device tpu", 2, "there is no device 'tpu'; there are auto, cpu, cuda"),
    ("compare hollow hollow", 2, "there are no results of an evaluation at hollow"),
    ("relay", 2, "Missing argument 'RUN'. (see: shoal relay --help)"),
    ("join", 2, "Missing argument 'URL|RUN'. (see: shoal join --help)"),
    ("join example", 2, "runs/example is not there; a run is given by its folder, its name under runs/, or its URL"),
    ("join http://host:1/#abc", 2, "is not a root fingerprint"),
    (f"join {DEAD} --max-memory lots", 2, "--max-memory 'lots' is no amount of bytes"),
    (f"join {DEAD} --max-bandwidth 20", 2, "--max-bandwidth '20' is no bandwidth: write for example 20Mbit/s"),
    *((f"join {DEAD} --hours {hours}", 2, f"--hours '{hours}': {why}: write for example 22-7, or ")
      for hours, why in (("22", "'22' is no part of a day"), ("25-3", "a day has 0:00 to 24:00"),
        ("1:60-3", "a day has 0:00 to 24:00"), ("9-12,7-7", "'7-7' ends when it begins"),
        ("9-12,", "'' is no part of a day"))),
    ("leave", 2, "Missing argument 'RUN'. (see: shoal leave --help)"),
    ("leave . --pause --resume", 2, "--pause and --resume exclude each other"),
    *((f"leave {where}", 2, f"{where}: no worker of this machine joined so; give the join URL, the run's name in ")
      for where in ("nowhere", "http://host:1", f"{DEAD}/#{'ab' * 20}", "fresh", "hollow")),
    ("join . --hours 22-7 --idle", 2, "--hours, --idle: only for a run's URL; what is in . is set by its recipe"),
    ("join . --max-disk 1GB", 2, "--max-disk: only for a run's URL; what is in . is set by its recipe"),
    ("join . --folder out --engine torch --device auto --dtype auto --name a --owner a --vouch b --no-check", 2,
        "--folder, --engine, --device, --dtype, --name, --owner, --vouch, --no-check: only for a run's URL"),
    ("join 127.0.0.1:9", 2, "or its URL, http://127.0.0.1:9"),
    (f"join http://a:1/#{'ab' * 20} http://b:1/#{'cd' * 20}", 2, "these URLs are of different runs"),
    (f"join {DEAD} --owner a --vouch b", 2, "--owner and --vouch say the same thing"),
    (f"join {DEAD} --engine scripted --dtype foo", 2, "foo"),
    (f"join {DEAD} --engine foo", 2, "there is no engine 'foo'; there are scripted, torch, vllm"),
    (f"join {DEAD} --engine scripted --cheat foo", 2, f"no cheat 'foo'; there are {', '.join(sorted(CHEATS))}"),
    ("join runs/x --cheat foo", 2, "there is no cheat 'foo'"),
    (f"join {DEAD} runs/x", 2, "give one run on this machine, or the join URLs of one run"),
    # environments, data, models
    ("eval tiny", 2, "give a MODEL and --env SPEC, or --rescore FOLDER"),
    ("eval tiny --rescore .", 2, "needs no model: leave tiny out"),
    ("eval --rescore . --out x --tasks 4", 2, "give it without --tasks and --out"),
    ("eval --rescore none", 2, "there is no such folder"),
    ("eval --rescore .", 2, "say with --env what the tasks are"),
    ("eval --rescore . --set environment.name=sort", 2, "say with --env what it changes"),
    ("eval tiny --env srot", 2, "there is no environment 'srot' (did you mean 'sort'?)"),
    ("eval tiny --env gqpa:x", 2, "there is no format 'gqpa' (did you mean 'gpqa'?)"),
    ("eval tiny --env sort --split test", 2, "--split test: there are held_out, train, all"),
    ("eval tiny --env sort --set run.steps=1", 2, "only settings of [environment] matter"),
    ("eval /none/such --env sort", 2, "there is no model folder /none/such"),
    ("eval tiny --env mine.py --trained-on mine.py", 5, "1 of the evaluated tasks are in the training set: mine/9; "
        "--allow-leaks leaves them out"),
    ("eval tiny --env none.jsonl --out mine", 2, "holds thesis.txt"),  # before tasks or models are loaded
    ("eval tiny --env none.jsonl --out mine/thesis.txt", 3, "is a file"),
    ("filter tiny none.jsonl --out free.parquet", 2, "holds thesis.txt"),
    ("filter tiny none.jsonl --out mine/thesis.txt/x.parquet", 3, "a file"),
    ("filter tiny sort --out x.jsonl", 2, "let its name end in .parquet"),
    (f"{FILTER} --pass-rate half", 2, "--pass-rate half: give two rates"),
    ("filter tiny /none.jsonl --out x.parquet", 2, "there is no data at /none.jsonl"),
    ("data check a.csv", 2, "convert it: python -c \"from pyarrow import csv, parquet; parquet.write_table("),
    ("data check mine.toml", 2, "trains on no data set: its environment is {here}/mine.py"),
    ("data check a.jsonl --set grader", 2, "expected OPTION=VALUE"),
    ("data check a.jsonl --set gradr=exact", 2, "did you mean 'grader'"),
    ("data check a.jsonl --set bad_rows=xyz", 2, "bad_rows is 'xyz'"),
    ("data check a.jsonl --set environment.optoins.x=1", 2, "--set environment.optoins.x=1: [environment] has no key"),
    ("data check sort", 2, "trains on no data set: its environment is sort"),
    ("data check a.jsonl --order 1 --set question=text", 2, "there is no column 'text' for the question"),
    ("data demos sort --out a.jsonl", 2, "give a file that is not there yet"),
    ("data demos sort --out x.jsonl --form 7", 2, "say with {answer} where the answer goes"),
    ("data demos sort --out x.jsonl --form 'It is {answer}' --set environment.train_size=20", 2,
        "none of the 20 tasks has an answer that, written as 'It is {answer}', is right"),
    (f"{SFT} --verify", 2, "--verify: there is no environment here; give one with --env"),
    (f"{SFT} --best 0.5", 2, "belong together"),
    (f"{SFT} --rank there", 2, "belong together"),
    (f"{SFT} --set trainer.loss=plain", 2, "trainer.loss means nothing to a warm start"),
    (f"{SFT} --set trainer.processes=2", 2, "trainer.processes means nothing to a warm start"),
    (f"{SFT} --set trainer.learning_rat=1", 2, "[trainer] has no key 'learning_rat'; did you mean 'learning_rate'?"),
    (f"{SFT} --set run.steps=3", 2, "run.steps means nothing to a warm start"),
    (f"{SFT} --set environment.options.max_digits=9", 2, "there is no environment here; give one with --env"),
    (f"{SFT} --require (", 2, "--require (: no regular expression"),
    (f"{SFT} --max-tokens 2", 2, "no demonstration is left: read 1; - readable 0; - length 1 e.g. row 0 (demos.jsonl"),
    ("sft tiny --data chat.jsonl --out out", 2, "demonstrations are messages, but the model has no chat template"),
    ("sft tiny --data no.jsonl --out out", 2, "there is no data at"),
    ("sft tiny --data empty.jsonl --out out", 2, "is empty: there is nothing to train on; check --data"),
    ("sft tiny --data demos.jsonl --out mine", 2, "is not an export of shoal"),
    ("sft tiny --data demos.jsonl --out begun", 2, "begun.work is there and is not of a warm start: move it away"),
    # planning
    ("plan TINY --set model.path=missing --memory 80", 2, "or say how large it is, and the GiB of each GPU: --param"),
    ("plan TINY --set 'trainer.lora.targets=[\"qproj\"]'", 2, "can have an adapter is called 'qproj'; there are: "),
    *((f"plan TINY {name} {value}", 2, f"'{name}': '{value}' is not a number from ")
      for name in ("--parameters", "--memory", "--gpu-hour-price") for value in ("inf", "nan", "-1")),
    *((f"plan TINY --assume {one}", 2, f"--assume {one.partition('=')[0]}") for one in ("speed=3", "token_s",
        "token_s=fast", "token_s=0", "token_s=inf", "length_share=-1", "length_share=5", "length_share=nan")),
    # a machine
    *((f"doctor {two}", 2, "three things: ask for one of them") for two in
        ("--selftest --calibrate", "--bench --selftest")),
    *((f"doctor {one} --json", 2, "leave it out here") for one in ("--calibrate", "--selftest")),
    ("doctor --selftest --against cuda", 2, "write device/format"),
    ("doctor --selftest --against cpu/float32 --against cpu/bfloat16", 2, "give --against once"),
    ("doctor --selftest --model no-such-folder", 2, "no-such-folder"),
    ("doctor --selftest --profile missing.toml", 2, "missing.toml"),
    ("doctor --calibrate http://127.0.0.1:1/", 2, "leave the URL away"),
    # broadcasts
    (f"{PUBLISH} missing", 2, "there is no file or folder missing to publish"),
    (f"{PUBLISH} empty.jsonl", 2, "empty.jsonl is empty: there is nothing to publish"),
    (f"{PUBLISH} zeros", 2, "zeros is empty: there is nothing to publish"),
    (f"{PUBLISH} hollow", 2, "holds no files to publish"),
    (f"{PUBLISH} pipe", 2, "pipe is neither a file nor a folder"),
    (f"{PUBLISH} linked", 2, "is a link to no file that can be read"),
    (f"{PUBLISH} piped", 2, "is no plain file"),
    (f"{PUBLISH} socketed", 2, "is no plain file"),
    (f"{PUBLISH} odd", 2, "cannot be printed"),
    (f"{PUBLISH} file --key www/key", 2, "would lie in www, which is served to everybody"),
    (f"{PUBLISH} .", 2, "lies in ., which is to be published; choose another --folder"),
    (f"{PUBLISH} mine --folder mine/www --key key", 2, "lies in mine, which is to be published"),
    (f"{PUBLISH} file --name a/b", 2, "a broadcast cannot be called 'a/b': it has a slash"),
    (f"{PUBLISH} file --folder zeros/a/www", 3, "a part of the path is a file, not a folder"),
    (PUBLISH, 2, "Missing argument"),
    (f"{FETCH} {DEAD}", 2, "Missing option"),
    (f"{FETCH} {KEYED} --out pipe", 2, "neither a file nor a folder"),
    (f"{FETCH} {KEYED} --out /", 2, "cannot be the output"),
    (f"{FETCH} {KEYED} --out file/out", 3, "a part of the path is a file, not a folder"),
    (f"{FETCH} {KEYED} --out out --wait 0", 1, "127.0.0.1:9 cannot be reached"),
    ("cast relay", 2, "Missing option"),
    ("cast relay --upstream host", 2, "is not a URL such as"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: TempPaths) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: Patch) -> Path:
    """The folder that commands are given in, full of odd things."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    names = "hollow/sub fresh zeros linked piped socketed odd mine begun.work/corpus free.parquet.work"
    for name in names.split():
        (tmp_path / name).mkdir(parents=True)
    names = "file linked/fine piped/fine mine/thesis.txt begun.work/corpus/precious free.parquet.work/thesis.txt"
    for name in (*names.split(), "odd/a\nb"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "fresh" / "recipe.toml").write_text("[run]\nname = 'fresh'\n")
    for name in ("empty.jsonl", "zeros/a"):
        (tmp_path / name).write_bytes(b"")
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(LEAKING)
    (tmp_path / "mine.toml").write_text('[environment]\nfile = "mine.py"\n')
    (tmp_path / "a.csv").write_text("question,answer\n1+1=,2\n")
    said = '{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}'
    (tmp_path / "chat.jsonl").write_text(f'{{"messages": [{said}]}}\n')
    (tmp_path / "demos.jsonl").write_text('{"prompt": "312=", "completion": "123"}\n')
    (tmp_path / "linked" / "nowhere").symlink_to("missing")
    os.mkfifo(tmp_path / "piped" / "pipe")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socketed/socket")
    return tmp_path


def contents(folder: Path) -> set[tuple[Path, bytes]]:
    paths = (path for path in folder.rglob("*") if path.name != "__pycache__" and path.suffix != ".pyc")
    return {(path, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.mark.parametrize(("command", "code", "words"), MISTAKES, ids=[command for command, *_ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(here, own_home, capsys, request, command, code, words):
    before = contents(here)
    if "WEB" in command:
        command = command.replace("WEB", request.getfixturevalue("lab").source(says(b"<html>", 404)).url)
    ended, said = main(shlex.split(command.replace("TINY", str(TINY)))), capsys.readouterr().err
    assert words.replace("{here}", str(here)) in said
    assert ended == code
    assert said.startswith("shoal: ")
    assert said.count("\n") == 1
    assert "<html>" not in said
    assert {path.name for path, _ in contents(here) ^ before} <= MAY_STAY
    assert not (command.startswith("join") and own_home.exists())
