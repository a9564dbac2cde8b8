"""Contexts are shown whatever their age, and take the names that files have."""

import pytest

from openbook.server.catalog import Entry, State
from openbook.server.errors import ArgumentInvalid
from openbook.server.messages import check_metadata, context_message
from openbook.v1 import contexts_pb2 as pb

from .fakes import FakeModel


@pytest.mark.parametrize(
    ("created_unix_s", "shown_s"),
    [(12.0, 12), (-1.0, 0), (253_402_300_800.0, 253_402_300_799), (2.0**53, 253_402_300_799)],
)
def test_a_time_that_no_message_can_hold_is_shown_as_the_nearest(created_unix_s, shown_s):
    entry = Entry("a" * 32, "m", "chat", State.ACTIVE, created_unix_s)
    assert context_message(entry, None).create_time.seconds == shown_s


@pytest.mark.parametrize(
    "name",
    [
        "報告\u3000書.txt",
        "a\u00a0b",
        "👩\u200d👩\u200d👧.txt",
        "\u202fx",
        "e\u0301",
        "\u200fשלום",
        "\ue000",
    ],
)
def test_a_name_that_a_file_may_well_have_is_taken(name):
    assert check_metadata(pb.IngestContextRequest.Metadata(display_name=name), FakeModel())


@pytest.mark.parametrize(
    "character",
    [
        "\0",
        "\n",
        "\t",
        "\x1b",
        "\x7f",
        "\x9b",
        "\u2028",
        "\u2029",
        "\u202a",
        "\u202e",
        "\u2066",
        "\u2069",
    ],
)
def test_a_name_that_would_change_its_reader_s_line_is_refused(character):
    metadata = pb.IngestContextRequest.Metadata(display_name=f"a{character}b")
    with pytest.raises(ArgumentInvalid) as refused:
        check_metadata(metadata, FakeModel())
    assert refused.value.field == "display_name"
