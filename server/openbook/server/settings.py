"""What a person may decide about a server, read once and checked before anything starts.

Owns names, defaults and ranges of the settings. It knows nothing of how they are used. A value
comes from the command line, else from the environment (`OPENBOOK_` and the name in capitals).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from openbook.server.cores import usable_cores
from openbook.server.lives import TTL_S_MAX

MIB = 1 << 20
GIB = 1 << 30
DAY_S = 86_400
ENV_PREFIX = "OPENBOOK_"
# These may well be set in the same shell.
CLIENT_VARIABLES = {"OPENBOOK_SERVER", "OPENBOOK_TOKEN", "OPENBOOK_TLS_CA"}
ROLES_SERVED = ("all",)
ROLES_PLANNED = ("gateway", "ingest", "decode")


Deadline = Annotated[float, Field(ge=0.1, le=DAY_S, allow_inf_nan=False)]


class SettingsInvalid(Exception):
    """The settings cannot be served; the text is one line for a person."""


class Settings(BaseSettings):
    """The settings of one server process.

    `ask_deadline_s` ends an answer wherever it is; what came before has been sent. An answer of
    2,048 tokens on a machine that takes 200 ms for each needs 410 s: raise it with
    `answer_tokens_max`, or where tokens are slow. `answer_tokens_max` bounds what one answer that
    nobody reads keeps in memory, at some hundred bytes a token. `uploads_max` documents may arrive
    at once, each up to `document_bytes_max` on disk. The limits of one caller are by default lower
    than those of all, so that none takes every place (gate.py says who counts as one). A context is
    removed `context_ttl_s` after its last use, unless its ingest or an update said otherwise; by
    default never. `store_bytes_max` bounds the contexts on disk: over it, those with a time to live
    go, the longest unused first, and no document is taken while it cannot be met.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    role: str = "all"
    listen: str = "127.0.0.1:50051"
    data: Path
    model: str = Field(min_length=1)
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    rope_scale: Annotated[float, Field(ge=1, le=64, allow_inf_nan=False)] = 1.0
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(default_factory=usable_cores)
    redis_url: SecretStr | None = None
    token_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    kv_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    plan: Literal["clusters", "scan", "graph"] | None = None

    document_bytes_max: Annotated[int, Field(ge=1, le=GIB)] = 64 * MIB
    question_tokens_max: Annotated[int, Field(ge=1)] = 4096
    answer_tokens_max: Annotated[int, Field(ge=1, le=32_768)] = 2048
    sequences_max: Annotated[int, Field(ge=1, le=256)] = 8
    asks_waiting_max: Annotated[int, Field(ge=0, le=4096)] = 24
    asks_per_caller_max: Annotated[int, Field(ge=1, le=4352)] = 24
    ingests_waiting_max: Annotated[int, Field(ge=1, le=4096)] = 24
    ingests_per_caller_max: Annotated[int, Field(ge=1, le=4096)] = 16
    calls_per_caller_max: Annotated[int, Field(ge=1, le=8192)] = 128
    uploads_max: Annotated[int, Field(ge=1, le=256)] = 24
    context_ttl_s: Annotated[float, Field(gt=0, le=TTL_S_MAX, allow_inf_nan=False)] | None = None
    store_bytes_max: Annotated[int, Field(ge=1)] | None = None
    opened_bytes_max: Annotated[int, Field(ge=1)] = 16 * GIB
    ask_deadline_s: Deadline = 120.0
    call_deadline_s: Deadline = 30.0
    ingest_deadline_s: Deadline = 1800.0
    drain_s: Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)] = 60.0
    lease_ttl_s: Annotated[float, Field(ge=1, le=DAY_S, allow_inf_nan=False)] = 15.0

    @field_validator("data", mode="before")
    @classmethod
    def _check_data(cls, data: object) -> object:
        if data == "":
            raise ValueError("must not be empty")  # as a path it would be the current directory
        return data

    @field_validator("role")
    @classmethod
    def _check_role(cls, role: str) -> str:
        if role in ROLES_PLANNED:
            raise ValueError(f"the role {role!r} is not served yet; use 'all'")
        if role not in ROLES_SERVED:
            raise ValueError("the role must be 'all'")
        return role

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        return address_of(listen)

    @model_validator(mode="after")
    def _check_access(self) -> Settings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        given = {
            "--tls-certificate": self.tls_certificate,
            "--tls-key": self.tls_key,
            "--token-file": self.token_file,
        }
        missing = [name for name, value in given.items() if value is None]
        if missing and not is_loopback(self.listen):
            raise ValueError(
                f"--listen: an address that others can reach needs {' and '.join(missing)}; "
                "without them only loopback is served, such as 127.0.0.1"
            )
        return self

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr | None) -> SecretStr | None:
        schemes = ("redis://", "rediss://", "unix://")
        if url is not None and not url.get_secret_value().startswith(schemes):
            raise ValueError("must start with redis://, rediss:// or unix://")
        if url is not None:
            _check_redis(url.get_secret_value())
        return url


def _check_redis(url: str) -> None:
    """Raise ValueError unless redis-py can make a connection of `url`; it connects to nothing."""
    from redis.asyncio import ConnectionPool  # only who names a Redis waits for it

    try:
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
    except Exception:  # redis-py lets out whatever the parts of a URL make it stumble over
        raise ValueError("is not a URL of a Redis") from None


def load_settings(given: Mapping[str, object]) -> Settings:
    """Return the settings from `given` and the environment.

    `given` has every option of the command line; None means not given. Raises SettingsInvalid with
    one line that names the first wrong setting, as an option only if it is one. A value is never
    part of that line: a Redis URL may hold a password.
    """
    try:
        named = {name: value for name, value in given.items() if value is not None}
        return Settings.model_validate(named)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ").replace("\n", " ")
        if not name:  # it is about several
            raise SettingsInvalid(f"invalid settings: {text}") from error
        variable = ENV_PREFIX + name.upper()
        setting = f"--{name.replace('_', '-')} (or {variable})" if name in given else variable
        raise SettingsInvalid(f"invalid setting {setting}: {text}") from error


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names in `environ` that look like settings and are none."""
    known = CLIENT_VARIABLES | {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


def address_of(listen: str) -> str:
    """Return `listen` as HOST:PORT with a numeric host. Raises ValueError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port from 0 to 65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if bare == "localhost":
        bare = "127.0.0.1"
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError("the host must be a numeric address, such as 127.0.0.1") from None
    return f"[{address}]:{int(port)}" if address.version == 6 else f"{address}:{int(port)}"


def is_loopback(listen: str) -> bool:
    """Tell whether only this machine can reach HOST:PORT, as `address_of` gives it."""
    return ipaddress.ip_address(listen.rpartition(":")[0].strip("[]")).is_loopback
