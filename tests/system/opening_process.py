"""A process of its own that opens a context and says what it costs.

opening_process.py MODEL CONTEXT    prints its private bytes before and after, ends with stdin
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from openbook.worker.models import load_model
from openbook.worker.opened import OpenContexts


def private_bytes(process: int | str) -> int:
    """Return the bytes of a process that no other one has mapped."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, path = load_model(sys.argv[1]), Path(sys.argv[2])
    before = private_bytes("self")
    claim = OpenContexts(model, clock=time.monotonic).open(path, path.name)
    print(before, private_bytes("self"), claim.bytes_mapped, flush=True)
    sys.stdin.read()
