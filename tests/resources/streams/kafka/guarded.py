"""A broker that asks for a login over TLS, or for a token; and what gives its clients the token."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.kafka import KafkaServer, start_kafka

USER, PASSWORD = "alice", "correct-horse-battery"
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_BEARER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


@contextmanager
def guarded_broker(folder: Path) -> Iterator[KafkaServer]:
    """A broker with the listeners GUARDED (a password, TLS by `ca.pem` in the folder) and TOKENS
    (OAUTHBEARER).
    """
    _certificates(folder)
    guarded, tokens = "listener.name.guarded", "listener.name.tokens"
    extra = {
        f"{guarded}.sasl.enabled.mechanisms": "PLAIN",
        f"{guarded}.plain.sasl.jaas.config": f'{_PLAIN} required user_{USER}="{PASSWORD}";',
        f"{guarded}.ssl.keystore.type": "PEM",
        f"{guarded}.ssl.keystore.location": str(folder / "broker.pem"),
        f"{tokens}.sasl.enabled.mechanisms": "OAUTHBEARER",
        # Without a validator of its own, Kafka takes tokens that nobody has signed.
        f"{tokens}.oauthbearer.sasl.jaas.config": (
            f'{_BEARER} required unsecuredLoginStringClaim_sub="broker";'
        ),
    }
    with start_kafka(
        folder, extra, listeners={"GUARDED": "SASL_SSL", "TOKENS": "SASL_PLAINTEXT"}
    ) as server:
        yield server


def token_settings() -> dict[str, Any]:
    """A client factory: clients ask its callback for a token."""
    return {"oauth_cb": _token}


def no_token_settings() -> dict[str, Any]:
    """A client factory whose callback has no token to give."""
    return {"oauth_cb": _no_token}


def login_settings() -> dict[str, Any]:
    """A client factory that looks the password up where it runs."""
    return {"sasl.password": os.environ["ANOTHER_PLACE"]}


def not_settings() -> list[str]:
    return ["sasl.password"]


def group_settings() -> dict[str, Any]:
    return {"group.id": "mine"}


def _token(config: str) -> tuple[str, float]:
    until = time.time() + 600
    parts = {"alg": "none"}, {"sub": "alice", "iat": time.time() - 5, "exp": until}
    head, claims = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    )
    return f"{head}.{claims}.", until


def _no_token(config: str) -> tuple[str, float]:
    raise OSError("the token service is away")


def _certificates(folder: Path) -> None:
    """Write `ca.pem`, an authority of our own, and `broker.pem`, a key and a certificate for
    127.0.0.1 of it.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = dt.datetime.now(dt.UTC)

    def certificate(name: str, key: Any, issuer: str, signer: Any, extension: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(extension, critical=False)
            .sign(signer, hashes.SHA256())
        )

    authority, own = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    ca = certificate(
        "test authority", authority, "test authority", authority, x509.BasicConstraints(True, None)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    broker = certificate("broker", own, "test authority", authority, address)
    pem = serialization.Encoding.PEM
    secret = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "broker.pem").write_bytes(secret + broker.public_bytes(pem) + ca.public_bytes(pem))
