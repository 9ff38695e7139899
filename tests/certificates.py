"""An authority for certificates, and a server's certificate for this machine, made anew for a test."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """Files: the authority's certificate; the server's, and its key."""

    authority: Path
    server: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """For a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server, self.key)
        return context


def make_certificates(folder: Path, *addresses: str) -> Certificates:
    """For a server at these IP addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    signing, mine = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of these tests")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of these tests")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(x)) for x in addresses])
    found.authority.write_bytes(
        _certificate(issuer, issuer, signing, signing, x509.BasicConstraints(ca=True, path_length=0))
    )
    found.server.write_bytes(_certificate(subject, issuer, mine, signing, names))
    found.key.write_bytes(
        mine.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return found


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> bytes:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=True)
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
    return builder.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
