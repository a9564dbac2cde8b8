"""Every domain error has a status and a reason, and no text of anyone's goes with a fault."""

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from openbook import worker
from openbook.indexstore import errors as store
from openbook.server import errors
from openbook.server.errors import FAULT_TEXT, TABLE, ContextFailed, describe

# Roots and groups of the trees: nothing raises them to be answered by them.
GROUPS = {
    errors.ServerError, errors.RequestRefused, store.IndexStoreError, worker.WorkerError,
    worker.DocumentError, worker.AskError,
}  # fmt: skip


def tree(root):
    return {root}.union(*(tree(child) for child in root.__subclasses__()))


DOMAIN_ERRORS = (
    tree(errors.ServerError) | tree(store.IndexStoreError) | tree(worker.WorkerError)
) - GROUPS


def example(kind):
    """Make an error of a class with a value of each parameter's type."""
    made = {"int": 7, "str": "word", "float": 1.5, "tuple[str, ...]": ("word",)}
    values = []
    for parameter in inspect.signature(kind.__init__).parameters.values():
        name = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        is_needed = parameter.default is parameter.empty
        if is_needed and parameter.name not in ("self", "args", "kwargs"):
            values.append(made.get(str(parameter.annotation), made.get(name, "word")))
    return kind(*values)


def test_every_domain_error_has_its_own_row():
    missing = {kind.__name__ for kind in DOMAIN_ERRORS if kind not in TABLE}
    assert missing == set()
    assert len(DOMAIN_ERRORS) > 40  # the walk did find the trees


def test_the_table_knows_nothing_else():
    assert set(TABLE) <= DOMAIN_ERRORS


def test_a_reason_has_one_status():
    statuses = {}
    for row in TABLE.values():
        statuses.setdefault(row.reason, set()).add(row.code)
    # A field is a wrong argument, a method is not implemented: one reason for both.
    statuses.pop("NOT_SUPPORTED_YET")
    assert {reason for reason, codes in statuses.items() if len(codes) > 1} == set()


@pytest.mark.parametrize("kind", sorted(DOMAIN_ERRORS, key=lambda kind: kind.__name__))
def test_a_row_can_be_sent_for_a_real_error(kind):
    wire = describe(example(kind))
    assert wire.code is not grpc.StatusCode.OK and wire.text
    ((key, raw),) = wire.metadata()
    status = status_pb2.Status.FromString(raw)
    info = error_details_pb2.ErrorInfo()
    assert key == "grpc-status-details-bin" and status.details[0].Unpack(info)
    assert (status.code, status.message) == (wire.code.value[0], wire.text)
    assert (info.domain, info.reason) == ("openbook", wire.reason)


def test_the_store_s_paths_stay_on_this_machine():
    for error in (
        store.ContextMissing("/var/data/x"),
        store.ContextIncomplete("/var/data/x", "no manifest"),
        store.ContextInUse("/var/data/x"),
        store.StoreReadFailed("f", "[Errno 5] /var/data/x"),
        store.StoreWriteFailed("f", "[Errno 5] /var/data/x"),
    ):
        wire = describe(error)
        assert "/var" not in wire.text and "/var" not in str(wire.details)


def test_an_unknown_error_is_internal_and_says_nothing():
    class Surprise(RuntimeError):
        pass

    wire = describe(Surprise("the document says so"))
    assert (wire.code, wire.text) == (grpc.StatusCode.INTERNAL, FAULT_TEXT)


def test_a_failed_context_answers_with_the_status_of_what_it_failed_with():
    assert describe(ContextFailed("DOCUMENT_EMPTY", "x")).code is grpc.StatusCode.INVALID_ARGUMENT
    assert describe(ContextFailed("CONTEXT_CORRUPT", "x")).code is grpc.StatusCode.DATA_LOSS
    assert describe(ContextFailed("INTERNAL", "x")).code is grpc.StatusCode.INTERNAL
    assert describe(ContextFailed("OF_OLD", "x")).code is grpc.StatusCode.FAILED_PRECONDITION


def test_the_module_docstring_draws_every_class():
    for kind in tree(errors.ServerError):
        assert kind.__name__ in errors.__doc__
