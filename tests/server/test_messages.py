"""A context is shown whatever its manifest says of its age."""

import pytest

from openbook.server.catalog import Entry, State
from openbook.server.messages import context_message


@pytest.mark.parametrize(
    ("created_unix_s", "shown_s"),
    [(12.0, 12), (-1.0, 0), (253_402_300_800.0, 253_402_300_799), (2.0**53, 253_402_300_799)],
)
def test_a_time_that_no_message_can_hold_is_shown_as_the_nearest(created_unix_s, shown_s):
    entry = Entry("a" * 32, "m", "chat", State.ACTIVE, created_unix_s)
    assert context_message(entry).create_time.seconds == shown_s
