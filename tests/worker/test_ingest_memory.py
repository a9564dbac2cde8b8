"""An ingest takes little more memory than a forward, and none that is not there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openbook.indexstore.build import IndexParams
from openbook.indexstore.store import begin
from openbook.worker.errors import MemoryShort
from openbook.worker.ingest import IngestSettings, ingest
from openbook.worker.memory import host_left_bytes, refuse_without_room
from openbook.worker.models import Model

PROCESS = Path(__file__).with_name("memory_process.py")
ESTHER = Path(__file__).parents[2] / "examples" / "esther.txt"
Tiny = Callable[..., Model]
Digits = Callable[[int], bytes]


def measured(model: Path, text: Path, tokens: int, *, threads: int) -> dict[str, int]:
    """Return the sizes that memory_process.py prints."""
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",  # no threads to lose in a fork
        "TOKENIZERS_PARALLELISM": "false",
    }
    # -P: the helpers of this folder are not wanted, and bench has a module of its own names
    command = [sys.executable, "-P", str(PROCESS), str(model), str(text), str(tokens), str(threads)]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    sizes: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return sizes


def check_peak(sizes: dict[str, int]) -> None:
    assert 0 < sizes["forward"] and sizes["ingest"] <= sizes["forward"] + sizes["allowance"], sizes
    # What it is refused without is what it takes, and not much more.
    assert sizes["ingest"] <= sizes["needed"] <= 2 * sizes["ingest"] + (32 << 20), sizes


@pytest.mark.parametrize(
    ("tokens", "threads"),
    [(5000, 1), pytest.param(16_000, 2, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(900)
def test_an_ingest_peaks_near_a_bare_forward(
    tiny_directory: Callable[..., Path], tmp_path: Path, tokens: int, threads: int
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(random.Random(1).choices("0123456789", k=tokens)))
    model = tiny_directory("llama", 4, 2, max_position_embeddings=1 << 16)
    check_peak(measured(model, text, tokens, threads=threads))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ingest_of_the_demo_model_peaks_near_a_bare_forward(smollm2_gguf: Path) -> None:
    check_peak(measured(smollm2_gguf, ESTHER, 4000, threads=2))


def read(model: Model, document: bytes, root: Path, left: int | None) -> list[str]:
    """Ingest with so much memory left; return the files of the draft as it then is."""
    with begin(root) as draft:
        try:
            ingest(
                model,
                document,
                draft,
                context_id="a" * 32,
                settings=IngestSettings("completion"),
                on_progress=lambda _: None,
                is_cancelled=lambda: False,
                left_bytes=lambda _: left,
            )
        finally:
            files = sorted(path.name for path in draft.path.iterdir())
    return files


def test_a_document_that_memory_cannot_hold_is_refused_before_the_model_runs(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    model, document = tiny_model(), digits(700)
    with pytest.raises(MemoryShort) as caught:
        read(model, document, tmp_path, 1000)
    needed = caught.value.needed_bytes
    assert needed is not None and needed > 1000
    before = model.tokens_forwarded
    with pytest.raises(MemoryShort) as caught:
        read(model, document, tmp_path, needed - 1)
    assert model.tokens_forwarded == before
    assert (caught.value.needed_bytes, caught.value.left_bytes) == (needed, needed - 1)
    assert f"{needed} bytes" in str(caught.value) and f"{needed - 1} are left" in str(caught.value)
    assert (caught.value.tokens, caught.value.limit) == (700, 699)
    assert "manifest.json" in read(model, document, tmp_path, needed)
    assert "manifest.json" in read(model, document, tmp_path, None)  # nobody knows: it is tried


def refused(model: Model, tokens: int, left: int) -> MemoryShort | None:
    try:
        refuse_without_room(
            model,
            tokens,
            kv_dtype="float16",
            params=IndexParams(),
            has_graph=False,
            threads=2,
            left_bytes=lambda _: left,
        )
    except MemoryShort as error:
        return error
    return None


@pytest.mark.parametrize("left", [0, 48 << 20, 64 << 20, 200 << 20])
def test_the_refusal_says_how_many_tokens_there_is_room_for(tiny_model: Tiny, left: int) -> None:
    model = tiny_model()
    error = refused(model, 200_000, left)
    assert error is not None and (error.limit > 0) is (left > 45 << 20)
    assert refused(model, error.limit + 1, left) is not None
    assert error.limit == 0 or refused(model, error.limit, left) is None


def test_activations_and_the_index_are_counted(tiny_model: Tiny) -> None:
    def needed(model: Model, threads: int) -> int:
        with pytest.raises(MemoryShort) as caught:
            refuse_without_room(
                model,
                100_000,
                kv_dtype="float16",
                params=IndexParams(),
                has_graph=False,
                threads=threads,
                left_bytes=lambda _: 0,
            )
        return caught.value.needed_bytes

    plain, wide = tiny_model(), tiny_model(intermediate_size=4096)
    assert needed(wide, 1) > 3 * 4096 * 4 * 100_000 > needed(plain, 1)
    assert needed(plain, 2) > needed(plain, 1)
    assert needed(plain, 2) == needed(plain, 64)  # there are two heads to build


def test_memory_left_on_a_device_is_asked_for_by_its_name(tiny_model: Tiny) -> None:
    asked: list[torch.device] = []

    def left(device: torch.device) -> None:
        asked.append(device)

    refuse_without_room(
        tiny_model(),
        1000,
        kv_dtype="float16",
        params=IndexParams(),
        has_graph=False,
        threads=1,
        left_bytes=left,
    )
    assert asked == [torch.device("cpu")]


def system(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


MEMINFO = (
    "MemTotal:       9000 kB\nMemFree:  1000 kB\nMemAvailable:       5000 kB\nHugePages_Total: 0"
)
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
STAT = "anon 1\ninactive_file 100\nactive_file 20"
STAT_V1 = "cache 1\ntotal_inactive_file 100\ntotal_active_file 20"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 5000 * 1024),
        ({"proc/self/cgroup": "0::/"}, 5000 * 1024),
        ({"proc/self/cgroup": "0::/a/b", f"{V2}/a/memory.max": "max"}, 5000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/memory.max": 9000,
                f"{V2}/a/memory.current": 8000,
                f"{V2}/a/memory.stat": STAT,
                f"{V2}/a/b/memory.max": "max",
                f"{V2}/a/b/memory.current": 7000,
                f"{V2}/a/b/memory.stat": STAT,
            },
            9000 - 8000 + 120,
        ),
        (  # a container that sees its own group at the top, by a path of the host's
            {
                "proc/self/cgroup": "0::/kubepods/pod/x",
                f"{V2}/memory.max": 9000,
                f"{V2}/memory.current": 8999,
                f"{V2}/memory.stat": STAT,
            },
            121,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n0::/",
                f"{V1}/a/memory.limit_in_bytes": 9000,
                f"{V1}/a/memory.usage_in_bytes": 8000,
                f"{V1}/a/memory.stat": STAT_V1,
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 8000,
                f"{V1}/memory.stat": STAT_V1,
            },
            9000 - 8000 + 120,
        ),
        (  # more is used than a limit that was lowered
            {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 1000,
                f"{V1}/memory.usage_in_bytes": 8000,
                f"{V1}/memory.stat": STAT_V1,
            },
            0,
        ),
    ],
    ids=["none", "no-limit", "max", "v2", "container", "v1", "over"],
)
def test_the_smallest_limit_above_a_process_counts(
    tmp_path: Path, files: dict[str, object], left: int
) -> None:
    assert host_left_bytes(system(tmp_path, {"proc/meminfo": MEMINFO, **files})) == left


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert host_left_bytes(tmp_path) is None


def test_this_machine_tells_how_much_is_left() -> None:
    left = host_left_bytes()
    assert left is not None and 1 << 20 < left < 1 << 50
