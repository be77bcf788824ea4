"""A certificate that the server makes and signs itself, for `--https-self-signed`.

Browsers give cameras to pages on https only, and a phone in the same house reaches the server by an address for which
nobody else would sign. The certificate is kept, so that a device that was told once to trust it is not asked again;
it is made anew when it is about to expire or when this machine has an address that it does not name.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil

from server.options.option import SettingsError
from server.settings import Settings

if TYPE_CHECKING:
    from cryptography import x509

LIFETIME: Final = datetime.timedelta(days=397)
"""Apple's devices trust none that lives longer than 398 days."""
RENEW_BEFORE: Final = datetime.timedelta(days=14)
_CLOCK_SKEW: Final = datetime.timedelta(days=1)
_NAME: Final = "Beholder (signed by itself)"


def with_certificate(settings: Settings) -> Settings:
    """The same settings with absolute paths of a certificate that can be used, if https is asked for.

    Raises:
        SettingsError: It cannot be read, is no certificate, or is not the key's; or half of what is needed was given.
    """
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        raise SettingsError("--tls-certificate and --tls-key: expected both or none of them")
    if settings.https_self_signed and settings.tls_certificate:
        raise SettingsError("--https-self-signed: expected no --tls-certificate beside it")
    if settings.https_self_signed:
        certificate, key = self_signed(names_of(settings), certificate_folder())
    elif settings.tls_certificate:
        certificate, key = Path(settings.tls_certificate).absolute(), Path(settings.tls_key).absolute()
    else:
        return settings
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"--tls-certificate {certificate} and --tls-key {key}: {reason}") from None
    return msgspec.structs.replace(settings, tls_certificate=str(certificate), tls_key=str(key))


def _refuse_password() -> str:
    raise ValueError("the key has a password; expected one without")


def certificate_folder() -> Path:
    """Where this user's certificate is kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "beholder"


def names_of(settings: Settings) -> list[str]:
    """Host names and addresses by which clients may reach the server."""
    names = {"localhost", socket.gethostname(), *settings.allowed_hosts, "127.0.0.1", "::1"}
    if settings.host in {"0.0.0.0", "::"}:
        for addresses in psutil.net_if_addrs().values():
            families = (socket.AF_INET, socket.AF_INET6)
            names.update(each.address.partition("%")[0] for each in addresses if each.family in families)
    else:
        names.add(settings.host.strip("[]"))
    return sorted(names - {"*", ""})


def self_signed(names: list[str], folder: Path) -> tuple[Path, Path]:
    """Paths of a certificate for `names` and of its key (PEM), made if there is no good one in `folder`.

    Raises:
        SettingsError: The library is missing, or the folder cannot be written.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise SettingsError("--https-self-signed needs the package cryptography: pip install 'beholder[ui]'") from None
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    if not (key.exists() and _is_good(certificate, names)):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make(names, certificate, key)
        except OSError as error:
            raise SettingsError(f"--https-self-signed: cannot write to {folder} ({error.strerror})") from None
    return certificate, key


def _is_good(path: Path, names: list[str]) -> bool:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    named = {*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))}
    return named >= set(names) and certificate.not_valid_after_utc > _now() + RENEW_BEFORE


def _make(names: list[str], certificate: Path, key: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = _now()
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now - _CLOCK_SKEW + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(private, hashes.SHA256())
    )
    _write(
        key,
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
    _write(certificate, signed.public_bytes(serialization.Encoding.PEM))


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, data: bytes) -> None:
    """In one step, and for nobody else to read."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
