"""Whatever is the last thing an ingest does: no context is there or all of it; a retry goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shimmed
from shimmed import Call, Shimmed

PROCESS = Path(__file__).with_name("ingest_process.py")
LAYERS = 3
SEED = 20261130


class ShimmedIngests(Shimmed):
    """Has one ingest_process.py, which loaded its model once, do what is to be run."""

    def __init__(self, root: Path, shim: Path, model: Path) -> None:
        super().__init__(root, shim)
        self._errors = root.parent / "stderr"
        helpers = Path(shimmed.__file__).parent
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                # -P: else the conftest of this folder would be taken for that of the helpers
                [sys.executable, "-P", str(PROCESS), str(root), str(model)],
                env={
                    **os.environ,
                    "LD_PRELOAD": str(shim),
                    "FAULT_ROOT": str(root),
                    "PYTHONPATH": str(helpers),
                    "OPENBLAS_NUM_THREADS": "1",  # no threads to lose in a fork
                    "TOKENIZERS_PARALLELISM": "false",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, *arguments: object) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line == "done\n":
                break
            lines.append(line)
        else:
            pytest.fail(f"the process ended: {self._errors.read_text()}")
        assert self._errors.read_text() == ""
        return "".join(lines)

    def random(self, seed: int, tries: int) -> Counter[str]:
        """Count the outcomes of kills at random instants."""
        lines = self.run("random", self.root, "ingest", seed, tries).splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(tries))
        return Counter(line.partition(" ")[2] for line in lines)

    def close(self) -> None:
        with self._process:  # its input is closed: it ends by itself
            pass


@pytest.fixture(scope="module")
def ingests(
    tmp_path_factory: pytest.TempPathFactory, tiny_directory: Callable[..., Path]
) -> Iterator[ShimmedIngests]:
    directory = tmp_path_factory.mktemp("ingests")
    (directory / "stores").mkdir()
    source = Path(shimmed.__file__).with_name("fault_shim.c")
    shim = directory / "fault_shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    model = tiny_directory("llama", 2, 1, num_hidden_layers=LAYERS)
    process = ShimmedIngests(directory / "stores", shim, model)
    yield process
    process.close()


@pytest.fixture(scope="module")
def calls(ingests: ShimmedIngests) -> list[Call]:
    """Every call of one whole ingest and its publish."""
    return ingests.trace("ingest")


def named(calls: list[Call], op: str, name: str) -> list[int]:
    """Return where in the trace the calls of a kind are, by the last part of their path."""
    return [at for at, call in enumerate(calls) if (call.op, call.path.name) == (op, name)]


def outcome_of_a_kill(calls: list[Call], number: int) -> str:
    """Say what must be there after a kill at a call, and which layer a retry begins with."""
    *saved, published = [call.number for call in calls if call.op == "rename"]
    if number > published:
        return "SIGKILL there - whole"
    draft = calls[named(calls, "fsync", "tokens.mdb")[0]].path.parent
    sealed = calls[
        named(calls, "fsync", draft.name)[0]
    ].number  # its checkpoint is gone just before
    layer = sum(at < number for at in saved) if number < sealed else 0
    return f"SIGKILL absent {layer} whole"


def check_kills(ingests: ShimmedIngests, calls: list[Call], numbers: list[int]) -> None:
    outcomes = ingests.matrix("kill", numbers, "ingest")
    assert outcomes == Counter(outcome_of_a_kill(calls, number) for number in numbers)


def test_an_ingest_killed_at_a_call_leaves_nothing_or_all_and_is_gone_on_with(
    ingests: ShimmedIngests, calls: list[Call]
) -> None:
    others = [call.number for call in calls if call.op in ("rename", "fsync") and call.number]
    writes = [call.number for call in calls if call.op == "write"]
    check_kills(ingests, calls, sorted([*others[2::3], others[-1], *writes[5::50]]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_ingest_killed_at_every_call_leaves_nothing_or_all_and_is_gone_on_with(
    ingests: ShimmedIngests, calls: list[Call]
) -> None:
    numbers = [call.number for call in calls if call.number]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 200
    check_kills(ingests, calls, numbers)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["eio", "enospc", "short"])
def test_an_ingest_that_the_disk_fails_leaves_nothing_or_all(
    ingests: ShimmedIngests, calls: list[Call], kind: str
) -> None:
    numbers = [call.number for call in calls if call.number]
    if kind == "short":
        numbers = [call.number for call in calls if call.op == "write"]
    outcomes = ingests.matrix(kind, numbers, "ingest")
    # A failed draft is gone: a retry reads all. Python finishes the short writes of its own files.
    allowed = {"failed absent 0 whole", "failed there - whole"}
    if kind == "short":
        allowed = {"failed absent 0 whole", "whole there - whole"}
    assert set(outcomes) == allowed, outcomes
    assert outcomes.total() == len(numbers)
    assert kind == "short" or outcomes["failed there - whole"] == 1  # the sync after the rename


@pytest.mark.parametrize("tries", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_an_ingest_killed_at_random_instants_leaves_nothing_or_all(
    ingests: ShimmedIngests, tries: int
) -> None:
    outcomes = ingests.random(SEED, tries)
    absent = {f"SIGKILL absent {layer} whole" for layer in range(LAYERS)}
    assert set(outcomes) <= absent | {"SIGKILL there - whole", "whole there - whole"}, outcomes
    assert outcomes.total() == tries


def test_an_ingest_syncs_in_the_order_that_makes_it_durable(calls: list[Call]) -> None:
    layers = [f"layer-{layer:03d}.mdb" for layer in range(LAYERS)]
    stored = ["tokens.mdb", *layers, "manifest.json"]
    *_, published = [at for at, call in enumerate(calls) if call.op == "rename"]
    draft, final = calls[published].path, calls[published].to
    synced = {}
    for name in stored:
        (synced[name],) = named(calls, "fsync", name)
        assert calls[synced[name]].path == draft / name
        assert max(named(calls, "write", name)) < synced[name] < published, name
    assert max(at for name, at in synced.items() if name != "manifest.json") < min(
        named(calls, "create", "manifest.json")
    )
    (names_synced,) = named(calls, "fsync", draft.name)
    assert synced["manifest.json"] < names_synced < published
    (made,) = named(calls, "mkdir", final.parent.name)
    store_synced, *_ = [at for at in named(calls, "fsync", final.parents[1].name) if at > made]
    (renamed_synced,) = named(calls, "fsync", final.parent.name)
    assert made < store_synced < published < renamed_synced
    assert calls[-1].op == "returned"


def test_a_checkpoint_comes_after_all_that_it_names(calls: list[Call]) -> None:
    *saved, _ = [at for at, call in enumerate(calls) if call.op == "rename"]
    assert [calls[at].to.name for at in saved] == ["checkpoint.json"] * (LAYERS - 1)
    for number, at in enumerate(saved):
        done = ["tokens.mdb", *(f"layer-{layer:03d}.mdb" for layer in range(number + 1))]
        for name in (*done, f"state-{number}.bin"):
            writes = named(calls, "write", name)
            assert writes and max(writes) < at, name
        parts = [part for part in named(calls, "write", "checkpoint.part") if part < at]
        assert max(parts) > max(named(calls, "write", f"state-{number}.bin"))
        assert at < min(named(calls, "create", f"layer-{number + 1:03d}.mdb"))
