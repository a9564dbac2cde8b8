"""The parts of one server and what each is told of the others.

Owns the wiring alone: one place to read what a server consists of. When parts start and stop is
app.py's, and what they do their own.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from openbook.server.broker import Broker
from openbook.server.callers import Callers
from openbook.server.catalog import Catalog
from openbook.server.collector import Collector
from openbook.server.decode_worker import DecodeWorker
from openbook.server.directory import TENANT_ROOT
from openbook.server.documents import Documents
from openbook.server.gate import Gate
from openbook.server.health import Health, part_checks
from openbook.server.ingest_queue import IngestQueue
from openbook.server.ingest_worker import IngestWorker, ReadDocument
from openbook.server.ingests import Ingests
from openbook.server.leases import LeaseKeeper, Leases
from openbook.server.lives import Lives
from openbook.server.logs import Log
from openbook.server.naming import ContextNaming
from openbook.server.opened import OpenedContexts, contexts_max
from openbook.server.service import ContextService, Limits
from openbook.server.settings import Settings
from openbook.server.start import Prepared
from openbook.server.upkeep import Upkeep
from openbook.server.valkey import EmbeddedValkey
from openbook.worker import Engine, IngestSettings, Model


class Parts:
    """The parts of a server over one loaded model, none of them started."""

    def __init__(
        self,
        settings: Settings,
        held: Prepared,
        model: Model,
        engine: Engine,
        *,
        valkey: EmbeddedValkey | None,
        read: ReadDocument,
        log: Log,
    ) -> None:
        self._settings = settings
        self._log = log
        worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.broker = Broker(_redis_url(settings, valkey), log=log, embedded=valkey)
        leases = Leases(self.broker, worker_id=worker_id, ttl_s=settings.lease_ttl_s)
        self.keeper = LeaseKeeper(leases, renew_every_s=settings.lease_ttl_s / 3)
        self.catalog = Catalog()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.opened = OpenedContexts(
            engine,
            self.keeper,
            bytes_max=settings.opened_bytes_max,
            contexts_max=contexts_max(descriptors, layers=model.shape.layers),
        )
        asks_max = settings.sequences_max + settings.asks_waiting_max
        self.decode = DecodeWorker(engine, self.opened, asks_max=asks_max, log=log)
        self._wire_ingest(held.secret, model, read, worker_id)
        self.service = ContextService(
            model,
            self.catalog,
            self.documents,
            self.ingests,
            self.decode,
            upkeep=Upkeep(
                self.catalog,
                self.ingests,
                tenant_root=settings.data / TENANT_ROOT,
                threads=settings.threads,
                log=log,
            ),
            lives=self.lives,
            tenant_root=settings.data / TENANT_ROOT,
            limits=_limits(settings),
            gate=Gate(held.tokens),
            callers=_callers(settings),
            log=log,
        )
        self.health_threads = ThreadPoolExecutor(2, thread_name_prefix="health")
        checks = part_checks(settings.data, self.broker.answers, self.health_threads)
        self.health = Health(self.decode.is_alive, checks)
        self._tasks: list[asyncio.Task[None]] = []

    def _wire_ingest(self, secret: bytes, model: Model, read: ReadDocument, worker_id: str) -> None:
        """Make what takes documents in, reads them, and lets contexts go."""
        settings, log, tenant_root = self._settings, self._log, self._settings.data / TENANT_ROOT
        store = hmac.digest(secret, b"store", "sha256").hex()[:16]
        queue = IngestQueue(self.broker, store=store, worker_id=worker_id)
        self.documents = Documents(settings.data, bytes_max=settings.document_bytes_max)
        self.lives = Lives(
            settings.data, ttl_s=settings.context_ttl_s, calendar=time.time, steady=time.monotonic
        )
        self.ingest_worker = IngestWorker(
            model,
            self.catalog,
            self.documents,
            queue,
            tenant_root=tenant_root,
            settings_for=self._ingest_settings,
            read=read,
            log=log,
        )
        self.ingests = Ingests(
            ContextNaming(secret, model.fingerprint_for, kv_dtype=settings.kv_dtype),
            self.catalog,
            self.documents,
            queue,
            self.ingest_worker,
            opened=self.opened,
            lives=self.lives,
            tenant_root=tenant_root,
            model_name=model.name,
            waiting_max=settings.ingests_waiting_max,
            per_caller_max=settings.ingests_per_caller_max,
            uploads_max=settings.uploads_max,
            store_bytes_max=settings.store_bytes_max,
            log=log,
        )
        self.collector = Collector(
            self.catalog,
            self.lives,
            delete=self.ingests.collect,
            sweep=self.ingests.sweep,
            bytes_max=settings.store_bytes_max,
            log=log,
        )

    def _ingest_settings(self, layout: str) -> IngestSettings:
        return IngestSettings(
            layout=layout,
            kv_dtype=self._settings.kv_dtype,
            threads=self._settings.threads,
            plan=self._settings.plan,
        )


def _redis_url(settings: Settings, valkey: EmbeddedValkey | None) -> str:
    if valkey is not None:
        return valkey.url
    if settings.redis_url is None:
        raise ValueError("without an embedded Valkey a Redis URL is needed")
    return settings.redis_url.get_secret_value()


def _callers(settings: Settings) -> Callers:
    return Callers(
        calls_max=settings.calls_per_caller_max,
        most={
            "Ask": settings.asks_per_caller_max,
            "IngestContext": settings.ingests_per_caller_max,
        },
    )


def _limits(settings: Settings) -> Limits:
    return Limits(
        answer_tokens_max=settings.answer_tokens_max,
        ask_deadline_s=settings.ask_deadline_s,
        call_deadline_s=settings.call_deadline_s,
        ingest_deadline_s=settings.ingest_deadline_s,
    )
