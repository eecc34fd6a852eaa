"""compose.yaml without containers: its commands as processes of this machine, other addresses and paths put in.

worker ── TLS ──► nginx ──► hub ──► PostgreSQL, an S3 server          trainer ─► origin ─► relay
"""

import re
import shlex
import shutil
import ssl
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from kit import eventually
from kit.deploy import compose, nginx_in_front
from kit.fork import clean_environment, free_port
from kit.run import REWARD, end
from kit.s3 import KEYS, Shop

RECIPE = """
run = { name = "deployed", steps = 50, groups_per_step = 2, group_size = 4, max_new_tokens = 8 }
environment.file = "reward.py"
trainer = { evaluate_every = 0, guards.divergence.action = "off" }
worker.engine = "scripted"
"""


@pytest.mark.slow
def test_commands_of_compose_run_until_a_group_is_accepted(tmp_path: Path, database_url: str, shop: Shop) -> None:
    run, tasks, logs = tmp_path / "run", tmp_path / "tasks", tmp_path / "logs"
    for folder in (run, tasks, logs):
        folder.mkdir()
    (tasks / "recipe.toml").write_text(RECIPE)
    (tasks / "reward.py").write_text(REWARD)
    hub, origin, relay, tls = (str(free_port()) for _ in range(4))
    proxy, certificate = nginx_in_front(tmp_path / "nginx", int(hub), int(tls))
    here = {
        "postgresql://shoal@postgres:5432/shoal": database_url, "s3://shoal/run": shop.url,
        "http://s3:9000": shop.endpoint, "/var/lib/shoal": str(tmp_path / "home"),
        "/srv/shoal/run": str(run), "/srv/shoal/tasks": str(tasks),
        "https://127.0.0.1": f"https://127.0.0.1:{tls}", "//hub:": "//127.0.0.1:", "//origin:": "//127.0.0.1:",
        "172.30.84.2": "127.0.0.1", "0.0.0.0": "127.0.0.1", "8470": hub, "8471": origin, "8472": relay,
    }  # fmt: skip
    variables = {"SHOAL_HOST": "127.0.0.1", "SHOAL_RUN": "/srv/shoal/run", "POSTGRES_PASSWORD": "x"}
    variables |= {"S3_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "S3_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
    env = clean_environment() | {"SSL_CERT_FILE": str(certificate), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"

    def command(name: str) -> list[str]:
        service = compose(variables)["services"][name]
        words = [*service.get("entrypoint", ["shoal"]), *service["command"]]
        return [re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], word) for word in words]

    prepared = subprocess.run(command("prepare"), env=env, capture_output=True, text=True, timeout=120)
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    join = shlex.split(next(line for line in prepared.stdout.splitlines() if "to contribute: " in line))[-1]
    assert join.startswith(f"https://127.0.0.1:{tls}/#")
    variables["SHOAL_ROOT"] = join.partition("#")[2]
    assert subprocess.run(command("no-root-key"), env=env).returncode == 1, "it would lie on a server"
    (run / "keys" / "root.key").rename(tmp_path / "root.key")
    assert subprocess.run(command("no-root-key"), env=env).returncode == 0

    def accepted() -> bool:
        text = ""
        with suppress(httpx2.HTTPError):
            text = http.get("/metrics").text
        return re.search(r'^shoal_hub_submissions\{state="accepted"\} [1-9]', text, re.M) is not None

    alone = tmp_path / "validator"  # what compose mounts for it is enough
    for volume in compose(variables)["services"]["validator"]["volumes"][1:]:
        name = volume.partition(":")[0].removeprefix("/srv/shoal/run/")
        (alone / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (run / name).is_dir() else shutil.copy2)(run / name, alone / name)

    with ExitStack() as stack:
        trusting = ssl.create_default_context(cafile=certificate)
        http = stack.enter_context(httpx2.Client(base_url=f"https://127.0.0.1:{tls}", verify=trusting))
        processes = {name: command(name) for name in ("hub", "origin", "trainer", "relay", "validator")}
        processes["validator"] = [word.replace(str(run), str(alone)) for word in processes["validator"]]
        processes |= {"proxy": proxy, "worker": ["shoal", "join", join, "--engine", "scripted", "--wait", "120"]}
        for name, words in processes.items():
            log = stack.enter_context((logs / name).open("wb"))
            own = env | compose(variables)["services"].get(name, {}).get("environment", {})
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=own)
            stack.callback(end, process, tmp_path)
        eventually(accepted, 240, lambda: [f"{log.name}: {log.read_text()[-1500:]}" for log in logs.iterdir()])
        status = http.get("/status").json()
    assert [key for key in shop.keys() if key.startswith("runs/one/blobs/")]  # noqa: SIM118
    assert not (run / "hub" / "hub.db").exists(), "rows are in PostgreSQL"
    assert {node["role"] for node in status["nodes"]} >= {"trainer", "validator", "worker"}
