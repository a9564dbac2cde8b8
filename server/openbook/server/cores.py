"""How many cores this process may use: those it may run on, or fewer under a quota.

Owns the reading of Linux's control groups, of version 2 and 1. A container given two CPUs of
sixty-four still sees sixty-four; as many threads would only wait for each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

V1_MOUNTS = ("cpu", "cpu,cpuacct")  # below sys/fs/cgroup; the second is the usual one


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, at least one; `root` is where proc and sys are mounted."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in cores, of each control group that this process is in."""
    for line in _words(root / "proc/self/cgroup", "\n"):
        number, _, named = line.partition(":")
        controllers, _, group = named.partition(":")
        if number == "0" and not controllers:
            for folder in _upward(root / "sys/fs/cgroup", group):
                yield from _cores_of(_words(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in V1_MOUNTS:
                for folder in _upward(root / "sys/fs/cgroup" / mount, group):
                    quota = _words(folder / "cpu.cfs_quota_us")
                    yield from _cores_of(quota + _words(folder / "cpu.cfs_period_us"))


def _upward(mount: Path, group: str) -> Iterator[Path]:
    """Yield a group's folder and those above it: the least quota counts.

    Inside a container the group's name may be the host's, and only the mount itself be there.
    """
    folder = mount / group.lstrip("/")
    yield from (path for path in (folder, *folder.parents) if path.is_relative_to(mount))


def _cores_of(quota_and_period: list[str]) -> Iterator[float]:
    """Yield what two numbers of microseconds allow; none without a quota ("max", or -1)."""
    if len(quota_and_period) == 2 and all(word.isdigit() for word in quota_and_period):
        quota_us, period_us = (int(word) for word in quota_and_period)
        if period_us > 0:
            yield quota_us / period_us


def _words(path: Path, separator: str | None = None) -> list[str]:
    """Return the parts of a small file; none when it cannot be read."""
    try:
        return path.read_text("ascii").split(separator)
    except (OSError, UnicodeDecodeError):
        return []
