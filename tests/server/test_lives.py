"""A context expires after its last use, however the calendar jumps, and across a restart."""

import json

import pytest

from openbook.server.lives import SAVE_EVERY_S, Lives, check_ttl

A = "a" * 32

ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
HOUR = 3600.0


class Clocks:
    """A calendar and a steady clock that a test turns."""

    def __init__(self):
        self.calendar = 1_700_000_000.0
        self.steady = 50.0

    def pass_s(self, seconds):
        self.calendar += seconds
        self.steady += seconds


@pytest.fixture
def clocks():
    return Clocks()


def lives_of(path, clocks, ttl_s=None):
    return Lives(path, ttl_s=ttl_s, calendar=lambda: clocks.calendar, steady=lambda: clocks.steady)


def set_and_save(lives, context_id, ttl_s):
    lives.set_ttl(context_id, ttl_s)
    lives.save(context_id)


def test_without_a_time_to_live_nothing_expires(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks)
    clocks.pass_s(1e9)
    assert lives.expired([ONE]) == [] and lives.expire_unix_s(ONE) is None


def test_a_use_counts_from_now_again(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks, ttl_s=100)
    assert lives.expire_unix_s(ONE) == clocks.calendar + 100
    clocks.pass_s(99)
    lives.use(ONE)
    clocks.pass_s(99)
    assert lives.expired([ONE]) == []
    clocks.pass_s(1)
    assert lives.expired([ONE]) == [ONE]


@pytest.mark.parametrize("jump_s", [HOUR, -HOUR, 30 * 24 * HOUR])
def test_a_jump_of_the_calendar_changes_nothing(tmp_path, clocks, jump_s):
    lives = lives_of(tmp_path, clocks, ttl_s=100)
    lives.use(ONE)
    clocks.calendar += jump_s
    assert lives.expired([ONE]) == [] and lives.expire_unix_s(ONE) == clocks.calendar + 100
    clocks.pass_s(100)
    assert lives.expired([ONE]) == [ONE]


@pytest.mark.parametrize(("away_s", "left_s"), [(30, 70), (99, 1), (101, -1), (-HOUR, 100)])
def test_a_life_goes_on_where_it_was_after_a_restart(tmp_path, clocks, away_s, left_s):
    set_and_save(lives_of(tmp_path, clocks), ONE, 100)
    clocks.calendar += away_s
    clocks.steady = 3.0  # a machine started anew
    lives = lives_of(tmp_path, clocks)
    assert lives.load({ONE}) == 0
    assert lives.ttl_s(ONE) == 100
    assert lives.expire_unix_s(ONE) == pytest.approx(clocks.calendar + left_s)
    assert lives.expired([ONE]) == ([ONE] if left_s < 0 else [])


def test_uses_are_saved_now_and_then(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks)
    lives.set_ttl(ONE, None)
    assert not lives.use(ONE)
    clocks.pass_s(SAVE_EVERY_S)
    assert lives.use(ONE) and not lives.use(ONE)
    lives.set_ttl(ONE, 50)
    clocks.pass_s(5)
    assert lives.use(ONE), "a tenth of a short life"


def test_the_longest_unused_come_first(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks)
    for each in (TWO, ONE, THREE):
        lives.use(each)
        clocks.pass_s(1)
    lives.use(TWO)
    assert lives.by_use([ONE, TWO, THREE]) == [ONE, THREE, TWO]


def test_what_belongs_to_no_context_is_removed(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks)
    set_and_save(lives, ONE, 7)
    set_and_save(lives, TWO, 7)
    (tmp_path / "lives" / "stranger").write_text("x")
    assert lives_of(tmp_path, clocks).load({ONE}) == 2
    assert [path.name for path in (tmp_path / "lives").iterdir()] == [f"{ONE}.json"]
    lives.remove(ONE)
    lives.save(ONE)
    assert not list((tmp_path / "lives").iterdir())


@pytest.mark.parametrize(
    "content", ["", "[]", '{"ttl_s":-1,"used_unix_s":1}', '{"ttl_s":1,"used_unix_s":1e999}']
)
def test_a_damaged_life_counts_as_none(tmp_path, clocks, content):
    set_and_save(lives_of(tmp_path, clocks), ONE, 5)
    (tmp_path / "lives" / f"{ONE}.json").write_text(content)
    lives = lives_of(tmp_path, clocks, ttl_s=100)
    lives.load({ONE})
    assert lives.ttl_s(ONE) == 100
    set_and_save(lives, ONE, 9)
    saved = json.loads((tmp_path / "lives" / f"{ONE}.json").read_text())
    assert saved == {"ttl_s": 9.0, "used_unix_s": clocks.calendar}


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_time_to_live_out_of_range_is_refused(ttl_s):
    with pytest.raises(ValueError):
        check_ttl(ttl_s)


def test_a_folder_in_a_life_s_place_is_nothing_that_stays(tmp_path, clocks):
    lives = lives_of(tmp_path, clocks)
    for name in (f"{A}.json", "stranger"):
        (tmp_path / "lives" / name / "within").mkdir(parents=True)
    set_and_save(lives, A, 60.0)
    assert lives_of(tmp_path, clocks).load({A}) == 1  # the stranger
    assert [path.name for path in (tmp_path / "lives").iterdir()] == [f"{A}.json"]
    (tmp_path / "lives" / f"{A}.json").unlink()
    (tmp_path / "lives" / f"{A}.json").mkdir()
    lives.remove(A)
    assert not list((tmp_path / "lives").iterdir())
