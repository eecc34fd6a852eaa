"""The files under `deploy/` as their programs read them: compose with its variables, nginx with other addresses."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = """
daemon off;
master_process off;
pid {scratch}/nginx.pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    {site}
}}
"""


def compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """compose.yaml; with variables as `docker compose` fills them in: `${NAME}`, `${NAME:-default}`, `${NAME:?why}`."""
    text = (DEPLOY / "compose.yaml").read_text()
    if variables is not None:
        text = re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda m: variables.get(m[1]) or m[2] or "", text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def nginx_in_front(scratch: Path, hub_port: int, port: int) -> tuple[list[str], Path]:
    """The command that starts nginx with the site of `deploy/`, and the certificate of 127.0.0.1 that signs itself."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed (Debian: apt-get install nginx-light openssl)")
    (tls := scratch / "tls").mkdir(parents=True)
    made = [
        *(
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ),
        *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(tls / "privkey.pem"), "-out", str(tls / "fullchain.pem")),
    ]
    subprocess.run(made, check=True, capture_output=True)
    site = (DEPLOY / "nginx" / "shoal.conf").read_text()
    changes = {
        "hub:8470;": f"127.0.0.1:{hub_port};",
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/nginx/tls": str(tls),
    }
    for ours, here in changes.items():
        assert ours in site
        site = site.replace(ours, here)
    (scratch / "nginx.conf").write_text(NGINX.format(scratch=scratch, site=site))
    command = [program, "-p", str(scratch), "-e", str(scratch / "error.log"), "-c", str(scratch / "nginx.conf")]
    return command, tls / "fullchain.pem"
