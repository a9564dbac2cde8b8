"""A store in a process whose file system fails on purpose, and the trace of its calls.

Owns the running of fault_process.py under fault_shim.so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PROCESS = Path(__file__).with_name("fault_process.py")


@dataclass(frozen=True)
class Call:
    """One line of a trace; `number` counts the calls that can be made to fail, 0 the others."""

    number: int
    op: str
    path: Path
    to: Path
    offset: int
    bytes: int
    data_at: int


class Shimmed:
    """Runs fault_process.py under the shim, for stores below `root`."""

    def __init__(self, root: Path, shim: Path) -> None:
        self.root = root
        self._shim = shim

    def run(self, *arguments: object) -> str:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self._shim),
            "FAULT_ROOT": str(self.root),
            "PYTHONPATH": str(PROCESS.parent),
            "OPENBLAS_NUM_THREADS": "1",  # no threads to lose in a fork
        }
        command = [sys.executable, str(PROCESS), *map(str, arguments)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0 and not run.stderr, run.stderr
        return run.stdout

    def trace(self, verb: str = "publish") -> list[Call]:
        """Do `verb` once and return every call, with marks "prepared" and "returned"."""
        log = self.root.parent / "trace"
        self.run("trace", self.root / "traced", verb, log, self.data)
        calls = []
        for line in log.read_text().splitlines():
            number, op, path, to, _, *sizes = line.split("\t")
            calls.append(Call(int(number), op, Path(path), Path(to), *map(int, sizes)))
        return calls

    @property
    def data(self) -> Path:
        """Where `trace` left the bytes that were written."""
        return self.root.parent / "data"

    def matrix(self, kind: str, numbers: list[int], verb: str = "publish") -> Counter[str]:
        """Count the outcomes of a fault at each of these calls: the writer's end, what is there."""
        listed = ",".join(map(str, numbers))
        lines = self.run("matrix", self.root, verb, kind, listed).splitlines()
        assert [int(line.split()[0]) for line in lines] == numbers
        return Counter(line.partition(" ")[2] for line in lines)
