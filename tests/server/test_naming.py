"""Names are exact; what a published context was stored under decides whose it is."""

import pytest

from openbook.server.catalog import Entry, State
from openbook.server.errors import NameInvalid
from openbook.server.naming import ContextNaming, name_of, parse_name


def naming(model="model"):
    return ContextNaming(
        b"s" * 32, lambda layout, kind: f"{model}/{layout}/{kind}", kv_dtype="float16"
    )


def test_a_name_and_an_id_are_inverse():
    assert parse_name(name_of("0123456789abcdef" * 2)) == "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "name",
    ["", "contexts/", "contexts/..", "contexts/" + "g" * 32, "contexts/" + "a" * 33,
     "contexts/" + "a" * 31, "contexts/" + "a" * 32 + "/", "Contexts/" + "a" * 32],
)  # fmt: skip
def test_case_b35_a_wrong_name_is_refused_and_not_repeated(name):
    with pytest.raises(NameInvalid) as refused:
        parse_name(name)
    assert str(refused.value) == str(NameInvalid())


def test_a_context_stored_in_a_wider_number_type_is_still_ours():
    entry = Entry("a" * 32, "m", "chat", State.ACTIVE, 0.0, fingerprint="model/chat/bfloat16")
    assert naming().is_ours(entry)
    assert not naming("other").is_ours(entry)


def test_an_id_names_model_and_layout():
    digest = b"d" * 32
    ids = {naming().id_of("chat", digest), naming().id_of("completion", digest)}
    assert len(ids | {naming("other").id_of("chat", digest)}) == 3
