"""The connection: options, credentials and the token that goes with every call.

Knows: gRPC channels. Does not know: what is called on them.
"""

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

MESSAGE_BYTES_MAX = 4 << 20  # gRPC's own default, said aloud: the service has the same limit
KEEPALIVE_MS = 10_000  # a long prefill is silent; the service permits a ping each 10 s


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of an encrypted connection, each a path.

    `ca` signs the server's certificate (None: the system's authorities); `certificate` and `key`
    are the client's own, given together, where the server asks for them.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; ValueError for one that is no PEM file, or a certificate without key."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls: a client certificate and its key are given together")
        certificate = Path(self.certificate).read_bytes() if self.certificate else None
        key = Path(self.key).read_bytes() if self.key else None
        if self.certificate and self.key:
            _check_pair(Path(self.certificate), Path(self.key))
        return grpc.ssl_channel_credentials(
            root_certificates=_authorities(Path(self.ca)) if self.ca else None,
            private_key=key,
            certificate_chain=certificate,
        )


def _authorities(ca: Path) -> bytes:
    """Return a file's certificates; ValueError where gRPC would call the server away for them."""
    content = ca.read_bytes()
    text = content.decode("latin-1").encode("ascii", "replace").decode()  # comments may be UTF-8
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"tls: {ca} is no PEM file of certificates, or is damaged") from error
    return content


def _check_pair(certificate: Path, key: Path) -> None:
    """Raise ValueError unless the files are a certificate and its key, which is not encrypted."""
    if not (certificate.is_file() and key.is_file()):
        return  # a pipe, say, can be read once only
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"tls: {certificate} and {key} must be a PEM certificate and its unencrypted key"
        ) from error


def open_channel(address: str, *, tls: Tls | None, service_config: str) -> grpc.Channel:
    """Return a channel to `address`; it connects at the first call.

    `service_config` says which calls gRPC repeats. Raises ValueError for an empty address.
    """
    options = _options(address, service_config)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def open_async_channel(address: str, *, tls: Tls | None, service_config: str) -> grpc.aio.Channel:
    """Return what `open_channel` does for the running event loop."""
    options = _options(address, service_config)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def check_address(address: str) -> None:
    """Raise ValueError for an empty address: gRPC would complain on stderr, in many lines."""
    if not address:
        raise ValueError("the server's address is empty; it is host:port")


def _options(address: str, service_config: str) -> list[tuple[str, int | str]]:
    """Return the options of a channel to `address`."""
    check_address(address)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", service_config),
    ]
    if is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))  # no proxy can reach this machine's loopback
    return options


def call_metadata(address: str, *, token: str | None, tls: Tls | None) -> Sequence[tuple[str, str]]:
    """Return what goes with every call; ValueError for a token that would travel in the clear."""
    if token is None:
        return ()
    if not token.isascii() or not token.isprintable() or not token:
        raise ValueError("the token must be printable ASCII")
    if tls is None and not is_loopback(address):
        raise ValueError(f"a token is only sent over TLS or to this machine, not to {address}")
    return (("authorization", f"Bearer {token}"),)


def is_loopback(address: str) -> bool:
    """Tell whether `address` (host:port, or unix:path) is on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("dns:///").strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
