"""The files under `deploy/` as their programs read them: compose with its variables, nginx with other addresses."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kit.nginx import certificate_of, nginx_command

DEPLOY = Path(__file__).parents[2] / "deploy"


def compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """compose.yaml; with variables as `docker compose` fills them in: `${NAME}`, `${NAME:-default}`, `${NAME:?why}`."""
    text = (DEPLOY / "compose.yaml").read_text()
    if variables is not None:
        text = re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda m: variables.get(m[1]) or m[2] or "", text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def nginx_in_front(scratch: Path, hub_port: int, port: int) -> tuple[list[str], Path]:
    """The command that starts nginx with the site of `deploy/`, and the certificate of 127.0.0.1 that it shows."""
    scratch.mkdir(exist_ok=True)
    site, certificate = (DEPLOY / "nginx" / "shoal.conf").read_text(), certificate_of(scratch, "127.0.0.1")
    changes = {"hub:8470;": f"127.0.0.1:{hub_port};", "listen 443": f"listen 127.0.0.1:{port}"}
    tls = ("/etc/nginx/tls/fullchain.pem", "/etc/nginx/tls/privkey.pem")
    for ours, here in (changes | dict.fromkeys(tls, str(certificate))).items():
        assert ours in site
        site = site.replace(ours, here)
    return nginx_command(scratch, site), certificate
