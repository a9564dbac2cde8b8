"""The faults of a Redis, each begun, kept up and ended from outside.

`answers` tells whether a write can still succeed meanwhile; `is_slow` keeps one to the long run.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import redis

BIG = b"x" * 10_000_000


class Harm:
    """A fault that does nothing yet."""

    answers = False
    is_slow = True

    def begin(self, server, lease_keys):
        """Strike; `lease_keys` are held leases."""

    def go_on(self, server):
        """Keep it up; called every 50 ms or so."""

    def end(self, server):
        """Let the server be well again."""


class Frozen(Harm):
    is_slow = False

    def begin(self, server, lease_keys):
        server.freeze()

    def end(self, server):
        server.thaw()


class Killed(Harm):
    """Killed, and started anew, empty and with another run id."""

    is_slow = False

    def begin(self, server, lease_keys):
        with server.client() as client:
            self.run_id = client.info("server")["run_id"]
        server.kill()

    def end(self, server):
        server.start()
        with server.client() as client:
            assert client.info("server")["run_id"] != self.run_id


class Flushed(Harm):
    answers = True
    is_slow = False

    def begin(self, server, lease_keys):
        self.go_on(server)

    def go_on(self, server):
        with server.client() as client:
            client.flushall()

    def end(self, server):
        self.go_on(server)


class Evicting(Harm):
    """Too small, with others' keys pushed in, so that live leases are evicted."""

    answers = True
    is_slow = False

    def begin(self, server, lease_keys):
        self.keys = lease_keys
        self.pushed = 0
        with server.client() as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used + 2_000_000)
            client.config_set("maxmemory-policy", "allkeys-lru")
        self.go_on(server)

    def go_on(self, server):
        with server.client() as client:
            pushing = client.pipeline(transaction=False)
            for _ in range(50):
                pushing.set(f"other:{self.pushed}", os.urandom(50_000))
                self.pushed += 1
            with suppress(redis.RedisError):
                pushing.execute()

    def end(self, server):
        with server.client() as client:
            assert client.info("stats")["evicted_keys"] > 100
            client.delete(*self.keys)  # had luck spared them


class ReadOnly(Harm):
    def begin(self, server, lease_keys):
        with server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")

    def end(self, server):
        with server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")


class Full(Harm):
    def begin(self, server, lease_keys):
        with server.client() as client:
            self.maxmemory = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)

    def end(self, server):
        with server.client() as client:
            client.config_set("maxmemory", self.maxmemory)


class Busy(Harm):
    """A script without end of another's, until it is killed."""

    def begin(self, server, lease_keys):
        with server.client() as client:
            client.config_set("busy-reply-threshold", 100)
        self.script = threading.Thread(target=self._run, args=(server,))
        self.script.start()
        time.sleep(0.2)

    def _run(self, server):
        with server.client() as client, suppress(redis.RedisError):
            client.execute_command("EVAL", "while true do end", 0)

    def end(self, server):
        with server.client() as client:
            client.script_kill()
        self.script.join(10)


class Loading(Harm):
    """Restarted with much on its disk, and loading it slowly: LOADING until it is done."""

    def begin(self, server, lease_keys):
        with server.client() as client:
            client.execute_command(
                "EVAL", "for i = 1, 8000 do redis.call('SET', 'k' .. i, i) end", 0
            )
            client.execute_command("SAVE")
        server.kill()
        server.options = "--key-load-delay 500 --loading-process-events-interval-bytes 1024"
        self.start = threading.Thread(target=server.start)
        self.start.start()  # returns when it has loaded
        self.saw_loading = False

    def go_on(self, server):
        with suppress(redis.RedisError), server.client() as client:
            self.saw_loading |= client.info("persistence")["loading"] == 1

    def end(self, server):
        self.start.join(20)
        assert self.saw_loading


class LockedOut(Harm):
    """Its password was changed and everybody thrown out."""

    def begin(self, server, lease_keys):
        with server.client() as client:
            client.config_set("requirepass", "another")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def end(self, server):
        with server.client(password="another") as client:
            client.config_set("requirepass", "")


class WrongTypes(Harm):
    """Our keys hold something else, time and again."""

    answers = True
    words = ("RPUSH", b"x")

    def begin(self, server, lease_keys):
        self.keys = lease_keys
        self.go_on(server)

    def go_on(self, server):
        with server.client() as client:
            streams = list(client.scan_iter("openbook:*:ingest"))
            for key in [*self.keys, *streams, *client.scan_iter("openbook:progress:*")]:
                client.delete(key)
                client.execute_command(self.words[0], key, *self.words[1:])

    def end(self, server):
        self.go_on(server)


class Big(WrongTypes):
    """Our keys hold 10 MB each; there is no room for many at once."""

    words = ("SET", BIG)

    def begin(self, server, lease_keys):
        with server.client() as client:
            client.config_set("maxmemory", 0)
        super().begin(server, lease_keys)


class WithoutEnd(WrongTypes):
    """Our leases are others', and have no end."""

    words = ("SET", b"dead 1")


HARMS = {
    "frozen": Frozen, "killed": Killed, "flushed": Flushed, "evicting": Evicting,
    "read only": ReadOnly, "full": Full, "busy": Busy, "loading": Loading,
    "locked out": LockedOut, "wrong types": WrongTypes, "10 MB": Big, "without end": WithoutEnd,
}  # fmt: skip
