"""A quota on CPU time counts, at the process's own control group and at those above it."""

import os

import pytest

from openbook.server.cores import usable_cores

ALL = 8


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALL)), raising=False)


def tree(root, **files):
    """Make files; in their names, `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", ALL),
     ("6400000 100000", ALL), ("", ALL), ("-5 100000", ALL), ("100000 0", ALL)],
)  # fmt: skip
def test_a_quota_of_version_2_is_rounded_up(tmp_path, limit, cores):
    root = tree(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_max=limit + "\n")
    assert usable_cores(root) == cores


def test_the_least_quota_above_the_process_counts(tmp_path):
    files = {
        "proc__self__cgroup": "0::/pod/box\n",
        "sys__fs__cgroup__pod__cpu_max": "300000 100000\n",
        "sys__fs__cgroup__pod__box__cpu_max": "max 100000\n",
    }
    assert usable_cores(tree(tmp_path, **files)) == 3


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", ALL)])
def test_a_quota_of_version_1_is_found_where_the_group_has_the_host_s_name(
    tmp_path, mount, quota, cores
):
    folder = f"sys__fs__cgroup__{mount}__cpu_cfs"
    files = {
        "proc__self__cgroup": "4:cpu,cpuacct:/docker/ab12\n3:memory:/\n",
        f"{folder}_quota_us": quota + "\n",
        f"{folder}_period_us": "100000\n",
    }
    assert usable_cores(tree(tmp_path, **files)) == cores


def test_without_control_groups_every_core_counts(tmp_path):
    assert usable_cores(tmp_path) == ALL
