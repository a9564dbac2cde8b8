"""The methods over a real gRPC connection, with the model faked: names, pages, refusals."""

import grpc
import pytest

from openbook.server.asks import NOT_SERVED, SERVED
from openbook.v1 import contexts_pb2 as pb

from .running import UNKNOWN, active, ask, refusal


@pytest.mark.parametrize(
    "name",
    [
        "", "contexts/", "contexts/" + "a" * 600, "contexts/../../etc/passwd",
        "contexts/..%2f..%2fetc", "/etc/passwd", "contexts/a\x00b", "contexts/\U0001f4d6",
        "contexts/.tmp/" + "a" * 32, "x" * 10240, "contexts/" + "a" * 32 + "\n",
        "contexts/\x1b[31m" + "a" * 27, "contexts/" + "A" * 32, "contexts/" + "\u0430" * 32,
        "contexts/" + "\u0661" * 32, "a" * 32,
    ],
)  # fmt: skip
def test_case_b35_a_hostile_name_is_refused_by_every_method(server, name):
    calls = [
        lambda: server.stub.GetContext(pb.GetContextRequest(name=name)),
        lambda: server.stub.DeleteContext(pb.DeleteContextRequest(name=name)),
        lambda: server.stub.WatchContext(pb.WatchContextRequest(name=name)),
        lambda: ask(server, name),
    ]
    for call in calls:
        status, reason, details = refusal(call)
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID")
        assert details == {}


def test_an_unknown_context_is_not_found_by_every_method(server):
    calls = [
        lambda: server.stub.GetContext(pb.GetContextRequest(name=UNKNOWN)),
        lambda: server.stub.DeleteContext(pb.DeleteContextRequest(name=UNKNOWN)),
        lambda: server.stub.WatchContext(pb.WatchContextRequest(name=UNKNOWN)),
        lambda: ask(server, UNKNOWN),
    ]
    for call in calls:
        assert refusal(call)[:2] == (grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN")


def test_lists_page_by_page_newest_first_without_loss(server):
    names = [active(server, b"document %d" % i).name for i in range(5)]
    listed, token = [], ""
    while True:
        page = server.stub.ListContexts(pb.ListContextsRequest(page_size=2, page_token=token))
        listed += [context.name for context in page.contexts]
        token = page.next_page_token
        if not token:
            break
        assert len(page.contexts) == 2
    assert sorted(listed) == sorted(names) and len(set(listed)) == 5


def test_a_wrong_page_token_or_size_is_refused(server):
    for token in ("x", "\u00e9", "AAAA", "a" * 5000):
        request = pb.ListContextsRequest(page_token=token)
        assert refusal(lambda r=request: server.stub.ListContexts(r))[1] == "PAGE_TOKEN_INVALID"
    request = pb.ListContextsRequest(page_size=-1)
    assert refusal(lambda: server.stub.ListContexts(request))[1] == "ARGUMENT_INVALID"


def test_every_field_of_an_ask_is_served_or_refused_by_name(server):
    context = active(server)
    fields = {field.name for field in pb.AskRequest.DESCRIPTOR.fields}
    assert fields == SERVED | NOT_SERVED and not SERVED & NOT_SERVED
    values = {"group_union": True, "evidence": True, "session": "s",
              "question_budget": pb.Budget(exact=pb.Budget.Exact())}  # fmt: skip
    assert set(values) == NOT_SERVED
    for name, value in values.items():
        status, reason, details = refusal(
            lambda n=name, v=value: ask(server, context.name, **{n: v})
        )
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_SUPPORTED_YET")
        assert details == {"field": name}
    mass = pb.Budget(mass=pb.Budget.Mass(share=0.9))
    assert refusal(lambda: ask(server, context.name, budget=mass))[2] == {"field": "budget.mass"}


def test_a_field_of_a_newer_client_is_refused_not_ignored(server):
    newer = b"\x9a\x06\x01x"  # field 99, a string
    request = pb.GetContextRequest.FromString(
        pb.GetContextRequest(name=UNKNOWN).SerializeToString() + newer
    )
    assert refusal(lambda: server.stub.GetContext(request))[1:] == (
        "NOT_SUPPORTED_YET", {"field": "field 99"},
    )  # fmt: skip


def test_the_model_is_listed_with_its_shape_and_layouts(server):
    (model,) = server.stub.ListModels(pb.ListModelsRequest()).models
    assert model.name == "fake/model" and model.layers == 2 and model.positions_max == 4096
    assert set(model.prompt_layouts) == {pb.PROMPT_LAYOUT_CHAT, pb.PROMPT_LAYOUT_COMPLETION}
