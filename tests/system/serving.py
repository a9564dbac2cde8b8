"""One `openbook serve` process, and the calls that its tests make."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

START_S = 120.0  # importing the model libraries on a busy machine
DOCUMENT = " ".join(
    f"On day {day} the keeper of the light counted {day * 7919 % 997} ships." for day in range(120)
).encode()
COMMAND = "import typer; from openbook.server.commands import serve; typer.run(serve)"


class Served:
    """One `openbook serve` process and a channel to it."""

    def __init__(
        self,
        model: Path,
        data: Path,
        log: Path,
        *,
        within: Sequence[str] = (),
        script: Path | None = None,
    ) -> None:
        """Start by the command line `within`, if any, and run `script` in place of `serve`."""
        self.data = data
        self.log = log
        serve = ["-c", COMMAND] if script is None else [str(script)]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*within, sys.executable, *serve, "--listen", "127.0.0.1:0", "--data", str(data),
                 "--model", str(model), "--threads", "1"],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self._connect()

    def _connect(self) -> None:
        """Wait until the process says that it serves, and make a channel to it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.fullmatch(r"openbook ready on (\S+)\n", line)
        assert match is not None, (line, self.log.read_text())
        self.address = match[1]
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpcs.ContextServiceStub(self.channel)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.channel.close()
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def upload(self, document: bytes = DOCUMENT) -> str:
        """Send a document and return its context's name."""

        def messages() -> Iterator[pb.IngestContextRequest]:
            metadata = pb.IngestContextRequest.Metadata(
                display_name="Light", prompt_layout=pb.PROMPT_LAYOUT_COMPLETION
            )
            yield pb.IngestContextRequest(metadata=metadata)
            yield pb.IngestContextRequest(chunk=document)

        return self.stub.IngestContext(messages(), timeout=60).context.name

    def watch(self, name: str) -> Iterator[pb.Context]:
        """Yield a context at each step of its reading."""
        request = pb.WatchContextRequest(name=name)
        for response in self.stub.WatchContext(request, timeout=120):
            yield response.context

    def ingest(self, document: bytes = DOCUMENT) -> pb.Context:
        """Ingest and wait for the end."""
        *_, last = self.watch(self.upload(document))
        return last

    def ask(self, name: str, **fields: object) -> tuple[str, pb.AskFinal]:
        """Ask and return the whole answer."""
        fields = {"question": "How many ships?", "max_tokens": 12, **fields}
        *deltas, last = self.stub.Ask(pb.AskRequest(context=name, **fields), timeout=120)
        return "".join(delta.delta for delta in deltas), last.final

    def tokens_forwarded(self) -> int:
        """Return the model's own count."""
        (model,) = self.stub.ListModels(pb.ListModelsRequest()).models
        return model.tokens_forwarded

    def refusal(self, name: str) -> tuple[grpc.StatusCode, str]:
        """Return status and reason of an ask that must fail before its first token."""
        with pytest.raises(grpc.RpcError) as raised:
            self.ask(name)
        status = rpc_status.from_call(raised.value)
        info = error_details_pb2.ErrorInfo()
        assert status is not None and status.details[0].Unpack(info)
        return raised.value.code(), info.reason
