"""Whole ingests by a tiny model, killed or refused by a disk that fails on purpose.

Runs with fault_shim.so in LD_PRELOAD as `ingest_process.py ROOT MODEL`, and reads commands:

    trace ROOT ingest TRACE DATA    one ingest into ROOT, with every call noted
    matrix ROOT ingest KIND N,N,…   for each N: an ingest into ROOT/KIND-N, a fault at its call N
    random ROOT ingest SEED COUNT   COUNT ingests, each killed at a random instant

The model is loaded once, and every ingest is a fork that makes its own threads and opens its own
files. An ingest saves a checkpoint after each layer and goes on from one that it finds. After each
fault a line says: N or the number of the try, what became of the writer, whether a context is there
(absent, there), the layer that the retry began with, and whether the retry ended with the same
bytes as an undisturbed ingest (whole). A line "done" ends what a command says.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
from fault_process import EXPECTED, FAILED, WHOLE, forked, is_clean, mark

from openbook.indexstore.errors import IndexStoreError
from openbook.indexstore.manifest import Manifest, StageSeconds
from openbook.indexstore.store import adopt, begin, open_context, publish, sweep
from openbook.worker.ingest import IngestProgress, IngestSettings, ingest
from openbook.worker.models import Model, load_model

CONTEXT_ID = "a" * 32
DOCUMENT = "".join(random.Random(7).choices("0123456789", k=700)).encode()  # 60 in the middle
SETTINGS = IngestSettings(layout="completion", kv_dtype="float32", checkpoint_every_s=0.0)


class Ingests:
    """Ingests of one document by one model into stores below `root`, which are made as needed."""

    def __init__(self, model: Model, root: Path) -> None:
        self.root = root
        self._model = model

    def read(self, store: Path) -> int:
        """Ingest and publish, from the last checkpoint on; return the layer it began with."""
        began: list[int] = []

        def tell(progress: IngestProgress) -> None:
            if progress.stage == "reading":
                began.append(progress.layers_done)

        seconds = count()
        with adopt(store, CONTEXT_ID) or begin(store) as draft:
            ingest(
                self._model,
                DOCUMENT,
                draft,
                context_id=CONTEXT_ID,
                settings=SETTINGS,
                on_progress=tell,
                is_cancelled=lambda: False,
                clock=lambda: float(next(seconds)),
                created_unix_s=1,
            )
            assert publish(draft, final(store))
        return began[0]

    def whole(self) -> int:
        """Ingest undisturbed: what all others are compared with."""
        assert self.read(self.root / "whole") == 0
        return WHOLE

    def faulty(self, store: Path, kind: str, number: int) -> int:
        os.environ.update(FAULT_KIND=kind, FAULT_AT=str(number))
        try:
            self.read(store)
        except IndexStoreError as error:
            assert type(error) in EXPECTED[kind], repr(error)
            assert is_clean(store)
            return FAILED
        return WHOLE

    def trace(self, store: Path, log: Path, data: Path) -> int:
        os.environ.update(FAULT_TRACE=str(log), FAULT_DATA=str(data))
        self.read(store)
        mark(log, "returned")
        return WHOLE

    def killed(self, store: Path, after_s: float) -> int:
        """Be killed by another thread, wherever the ingest is; return if it was done before."""
        killer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        self.read(store)
        return WHOLE

    def check(self, store: Path) -> int:
        """Find no context or the whole one, sweep, try again if need be, find the whole one."""
        found = final(store).exists()
        if found:
            assert self.is_whole(store)
        sweep(store, keep=lambda label: not found and label == CONTEXT_ID)
        assert len(list((store / ".tmp").glob("*"))) <= (0 if found else 1)
        began = "-" if found else self.read(store)
        print("there" if found else "absent", began, end=" ", flush=True)
        assert self.is_whole(store) and is_clean(store)
        return WHOLE

    def is_whole(self, store: Path) -> bool:
        """Say whether the context there is that of the undisturbed ingest, its seconds apart."""
        mine, whole = final(store), final(self.root / "whole")
        names = sorted(path.name for path in whole.iterdir())
        assert sorted(path.name for path in mine.iterdir()) == names
        same = all(
            (mine / name).read_bytes() == (whole / name).read_bytes()
            for name in names
            if name != "manifest.json"
        )
        return same and self.manifest(mine) == self.manifest(whole)

    def manifest(self, path: Path) -> Manifest:
        """Open a context, which verifies every byte, and return its manifest without seconds."""
        fingerprint = self._model.fingerprint_for(SETTINGS.layout, SETTINGS.kv_dtype)
        with open_context(path, model_fingerprint=fingerprint) as context:
            return replace(context.manifest, stages_s=StageSeconds(0, 0, 0, 0))


def final(store: Path) -> Path:
    return store / "local" / CONTEXT_ID


def tell_and_check(ingests: Ingests, store: Path, number: int, outcome: str) -> None:
    print(number, outcome, end=" ", flush=True)
    print(forked(partial(ingests.check, store)), flush=True)
    shutil.rmtree(store, ignore_errors=True)


def matrix(ingests: Ingests, kind: str, numbers: list[int]) -> None:
    for number in numbers:
        store = ingests.root / f"{kind}-{number}"
        outcome = forked(partial(ingests.faulty, store, kind, number))
        tell_and_check(ingests, store, number, outcome)


def random_kills(ingests: Ingests, seed: int, tries: int, *, whole_s: float) -> None:
    instants = random.Random(seed)
    for number in range(tries):
        store = ingests.root / f"random-{number}"
        outcome = forked(partial(ingests.killed, store, instants.uniform(0, whole_s)))
        tell_and_check(ingests, store, number, outcome)


def main(root: Path, model: str) -> None:
    torch.set_num_threads(1)  # no threads to lose in a fork
    ingests = Ingests(load_model(model), root)
    started = time.monotonic()
    assert forked(ingests.whole) == "whole"
    whole_s = time.monotonic() - started
    for line in sys.stdin:
        match line.split():
            case ["trace", store, "ingest", log, data]:
                traced = partial(ingests.trace, Path(store), Path(log), Path(data))
                assert forked(traced) == "whole"
            case ["matrix", _, "ingest", kind, numbers]:
                matrix(ingests, kind, [int(number) for number in numbers.split(",")])
            case ["random", _, "ingest", seed, tries]:
                random_kills(ingests, int(seed), int(tries), whole_s=whole_s)
            case _:
                sys.exit(__doc__)
        print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
