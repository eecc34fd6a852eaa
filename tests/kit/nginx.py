"""A web server for tests: the command that starts nginx as one process, and a certificate that signs itself."""

import datetime
import shutil
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

MAIN = """
daemon off;
master_process off;
pid {scratch}/nginx.pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    sendfile on;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    {servers}
}}
"""


def nginx_command(scratch: Path, servers: str) -> list[str]:
    """Or a skip with the reason. `scratch` is made; it will hold the configuration and `error.log`."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.skip("nginx is not installed: install it (Debian: apt-get install nginx-light) to run this test")
    scratch.mkdir(parents=True, exist_ok=True)
    configuration = scratch / "nginx.conf"
    configuration.write_text(MAIN.format(scratch=scratch, servers=servers))
    return [program, "-p", str(scratch), "-e", str(scratch / "error.log"), "-c", str(configuration)]


def certificate_of(folder: Path, server: str) -> Path:
    """A certificate for a name or an address of IPv4 that signs itself, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server)])
    asked = x509.IPAddress(IPv4Address(server)) if server[0].isdigit() else x509.DNSName(server)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([asked]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / "certificate.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path
