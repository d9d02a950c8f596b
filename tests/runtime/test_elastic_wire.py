"""What agents say to one another, and what becomes of those who do not know the run's token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy.runtime.elastic.agent import Agent
from argosy.runtime.elastic.claims import AgentAddress, Claims
from argosy.runtime.elastic.copies import BlockHeader, BlockRegion, BlockSource, Store
from argosy.runtime.elastic.snapshot import AgentPlace, Copier, Reading
from argosy.runtime.elastic.wire import Line, LostError, Message, asking, hear, report_in_a_line

TOKEN = "0123456789abcdef"
PATIENCE = 20.0
"""Seconds of silence that the agent allows."""


class Aborted:
    """A writer of a connection that can only be aborted."""

    transport = SimpleNamespace(abort=lambda: None)


def with_agent(talk: Callable[[int], Awaitable[bytes]]) -> bytes:
    """Serve as an agent does, without the job around it."""
    agent: Any = Agent.__new__(Agent)
    agent.spec, agent.token = SimpleNamespace(lost_after=PATIENCE), TOKEN
    agent.address, agent.leader, agent.store = "127.0.0.1", None, Store()

    async def main() -> bytes:
        async with await agent.listen() as server:
            return await talk(server.sockets[0].getsockname()[1])

    return asyncio.run(main())


async def answer_to(port: int, said: bytes, token: str | None = None) -> bytes:
    """What is answered before the connection ends, which is to be long before the agent's patience
    does.

    ``token``: what to prove first, as RFC 2104 has it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    challenge = json.loads(await reader.readline())["challenge"]
    if token is not None:
        digest = hmac.digest(token.encode(), challenge.encode(), "sha256").hex()
        writer.write(json.dumps({"proof": digest}).encode() + b"\n")
    writer.write(said)
    try:
        async with asyncio.timeout(PATIENCE / 4):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


PING = b'{"kind": "ping"}\n'
"""What is answered where the token was right."""


@pytest.mark.parametrize(
    "opening",
    [
        b"x" * 2**20,
        json.dumps({"proof": TOKEN, "more": "x" * 2**20}).encode() + b"\n" + PING,
        json.dumps({"token": TOKEN, "proof": TOKEN}).encode() + b"\n" + PING,
        b'{"proof": "\\ud800"}\n' + PING,
        b"[]\n" + PING,
        PING,
    ],
    ids=["no end", "too long", "the token itself", "no text", "no message", "no proof"],
)
def test_whoever_does_not_know_the_token_is_sent_away_at_once(
    opening: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert with_agent(lambda port: answer_to(port, opening)) == b""
    assert not caplog.records


def test_whoever_knows_the_token_is_answered() -> None:
    assert with_agent(lambda port: answer_to(port, PING, TOKEN)) == b'{"kind": "here"}\n'
    assert with_agent(lambda port: answer_to(port, PING, "another")) == b""


def test_an_answer_that_was_overheard_opens_no_other_connection() -> None:
    """What a host of the run sends, word for word, a second time."""

    async def talk(port: int) -> bytes:
        heard = bytearray()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_agent, to_agent = await asyncio.open_connection("127.0.0.1", port)
            writer.write(await from_agent.readline())
            for _ in range(2):
                heard.extend(await reader.readline())
            to_agent.write(heard)
            writer.write(await from_agent.readline())
            to_agent.close()
            writer.close()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
            place = between.sockets[0].getsockname()[1]
            line = await Line.open("127.0.0.1", place, TOKEN, {"kind": "ping"}, patience=PATIENCE)
            assert await line.receive(patience=PATIENCE) == {"kind": "here"}
            line.close()
        assert TOKEN.encode() not in heard, "the token is not sent"
        return await answer_to(port, bytes(heard))

    assert with_agent(talk) == b""


def test_a_block_larger_than_what_a_reader_holds_comes_back() -> None:
    """With a header of more than 64 KiB, as that of a rank with many tensors."""
    block = bytes(range(256)) * 2**12
    piece = {
        "entry": "model." + "x" * 2**17,
        "first": [0],
        "sizes": [len(block)],
        "whole": [len(block)],
        "dtype": "uint8",
    }
    pieces = [{**piece, "begin": 0, "end": len(block)}]
    counts = {
        "generation": 1,
        "step": 2,
        "rank": 3,
        "scale": 1.0,
        "entries": 1,
        "elements": len(block),
    }
    put: Message = {
        "kind": "put",
        "keep_from": [0, 0],
        "size": len(block),
        "header": {**counts, "pieces": pieces},
    }
    get: Message = {"kind": "get", "moment": [1, 2], "rank": 3, "ranges": [[1, len(block)]]}

    def talk(port: int) -> bytes:
        with asking("127.0.0.1", port, TOKEN, put, patience=PATIENCE) as file:
            file.write(block)
            file.flush()
            assert hear(file) == {"kind": "kept"}
        with asking("127.0.0.1", port, TOKEN, get, patience=PATIENCE) as file:
            return file.read(len(block) - 1)

    assert with_agent(lambda port: asyncio.to_thread(talk, port)) == block[1:]


def test_a_long_message_arrives_whole_and_one_without_end_is_a_loss() -> None:
    async def talk() -> Message:
        reader = asyncio.StreamReader()
        line = Line(reader, Aborted())  # type: ignore[arg-type]
        for size in (2**16 - 11, 2**20):
            reader.feed_data(json.dumps({"what": "x" * size}).encode() + b"\n")
        assert len((await line.receive(patience=PATIENCE))["what"]) == 2**16 - 11
        message = await line.receive(patience=PATIENCE)
        reader.feed_data(b"x" * 2**20)
        with pytest.raises(LostError, match="more than 1000 bytes"):
            await line.receive(patience=PATIENCE, longest=1000)
        return message

    assert len(asyncio.run(talk())["what"]) == 2**20


def test_what_is_no_message_or_ends_early_is_a_loss() -> None:
    async def talk() -> None:
        reader = asyncio.StreamReader()
        line = Line(reader, Aborted())  # type: ignore[arg-type]
        for data in (b"[" * 10**5 + b"\n", b"{\n", b"\xff\n", b"3\n"):
            reader.feed_data(data)
            with pytest.raises(LostError, match=r"^a line that is no message$"):
                await line.receive(patience=PATIENCE)
        reader.feed_data(b"half")
        reader.feed_eof()
        with pytest.raises(LostError, match="closed within a block"):
            await line.receive_block(8)
        with pytest.raises(LostError, match="the connection was closed"):
            await line.receive(patience=PATIENCE)

    asyncio.run(talk())
    with pytest.raises(ConnectionError, match="the agent closed the connection"):
        hear(io.BytesIO())  # type: ignore[arg-type]


def test_whoever_comes_later_finds_a_leader_that_has_claimed_nothing_yet(tmp_path: Path) -> None:
    """Whichever of them is first in the cluster's order."""

    async def main() -> list[bool]:
        agents: list[Any] = []
        async with contextlib.AsyncExitStack() as stack:
            for name in ("a", "b", "c"):
                agent: Any = Agent.__new__(Agent)
                agent.spec, agent.node = SimpleNamespace(lost_after=PATIENCE), name
                agent.token, agent.leader, agent.is_leaving, agent.devices = TOKEN, None, False, ()
                agent.address, agent.facts = "127.0.0.1", {}
                agent.claims, agent.replanner = (
                    Claims(tmp_path),
                    SimpleNamespace(order=["a", "b", "c"]),
                )
                server = await stack.enter_async_context(await agent.listen())
                agent.here = AgentAddress(
                    name=name, address="127.0.0.1", port=server.sockets[0].getsockname()[1]
                )
                agent.claims.register(agent.here)
                agents.append(agent)
            before = await agents[0]._find_leader()
            admitted = asyncio.Event()

            async def admit(line: Line, hello: Message) -> None:
                assert hello["host"]["name"] == "a"
                admitted.set()

            agents[1].leader = SimpleNamespace(admit=admit)
            line = await agents[0]._find_leader()
            await admitted.wait()
            line.close()
            return [before is None, line is not None]

    assert asyncio.run(main()) == [True, True]


@pytest.mark.parametrize("answer", [b"", b'{"kind": "ke'])
def test_a_copy_whose_receipt_breaks_off_has_failed(answer: bytes) -> None:
    piece = BlockRegion(
        entry="model.w", first=(0,), sizes=(4,), whole=(4,), dtype="uint8", begin=0, end=4
    )
    header = BlockHeader(
        generation=1, step=2, rank=3, scale=1.0, entries=1, elements=4, pieces=(piece,)
    )
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_once() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as file:
                file.write(b'{"challenge": "7"}\n')
                file.flush()
                file.readline()
                size = json.loads(file.readline())["size"]
                file.read(size)
                file.write(answer)

        agent = threading.Thread(target=answer_once)
        agent.start()
        copies: Any = Copier.__new__(Copier)
        copies.token, copies.patience, copies.failed = TOKEN, PATIENCE, False
        copies._send(
            [(AgentPlace(*server.getsockname()), header, torch.zeros(4, dtype=torch.uint8))], (1, 2)
        )
        agent.join()
    assert copies.failed


def test_a_copy_that_breaks_off_is_told_and_one_that_cannot_be_sent_is_known() -> None:
    piece = BlockRegion(
        entry="model.w", first=(0,), sizes=(4,), whole=(4,), dtype="float64", begin=0, end=32
    )
    header = BlockHeader(
        generation=1, step=2, rank=3, scale=1.0, entries=1, elements=4, pieces=(piece,)
    )

    def talk(port: int) -> bytes:
        source = BlockSource(address="127.0.0.1", port=port, header=header)
        reading = Reading({"model.w": [(source, piece)]}, token="another", patience=PATIENCE)
        with pytest.raises(
            OSError, match=rf"127.0.0.1:{port} closed the connection within a copy|reset by peer"
        ):
            reading.fill({"model.w": torch.empty(4, dtype=torch.float64)})
        copies: Any = Copier.__new__(Copier)
        copies.token, copies.patience, copies.failed = "another", PATIENCE, False
        copies._send(
            [(AgentPlace("127.0.0.1", port), header, torch.zeros(32, dtype=torch.uint8))], (1, 2)
        )
        assert copies.failed
        return b"done"

    assert with_agent(lambda port: asyncio.to_thread(talk, port)) == b"done"


def test_a_flood_of_connections_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    """Connections that say nothing: the oldest are ended, and a host of the run is answered among
    them."""

    async def talk(port: int) -> bytes:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        answer = await answer_to(port, PING, TOKEN)
        reader, _ = silent[0]
        await reader.readline()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE / 4):
                assert await reader.read() == b"", "the oldest was ended"
        for _, writer in silent:
            writer.transport.abort()
        return answer

    assert json.loads(with_agent(talk)) == {"kind": "here"}
    assert not caplog.records


def test_files_that_run_out_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        context = {
            "message": "socket.accept() out of system resource",
            "exception": OSError(24, "Too many open files"),
        }
        report_in_a_line(asyncio.get_running_loop(), context)

    asyncio.run(main())
    assert capsys.readouterr().err == "cannot accept connections: [Errno 24] Too many open files\n"


class Silent:
    """A server that accepts connections, sends a first line if it has one, and then nothing."""

    def __init__(self, first: bytes) -> None:
        self.first, self.writers = first, list[asyncio.StreamWriter]()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(self.first)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("first", [b"", b'{"challenge": "1"}\n'], ids=["at once", "after a line"])
@pytest.mark.parametrize("call", ["_ping", "_join"])
def test_hosts_that_fall_silent_leave_no_open_files(first: bytes, call: str) -> None:
    agent: Any = Agent.__new__(Agent)
    agent.spec, agent.token = SimpleNamespace(lost_after=0.6), TOKEN
    agent.here = AgentAddress(name="a", address="127.0.0.1", port=1)
    agent.devices, agent.is_leaving, agent.facts = ("a.0",), False, {}

    async def main() -> tuple[int, int]:
        silent = Silent(first)
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        host = AgentAddress(name="b", address="127.0.0.1", port=server.sockets[0].getsockname()[1])
        before = open_files()
        for _ in range(10):
            assert not await getattr(agent, call)(host)
        async with asyncio.timeout(30):
            while len(silent.writers) < 10:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        server_ends = sum(not writer.is_closing() for writer in silent.writers)
        after = open_files() - server_ends
        for writer in silent.writers:
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0.05)
        return before, after

    before, after = asyncio.run(main())
    assert after <= before + 2  # ten connections were made; the last may be about to close


def test_an_agent_ends_the_connection_of_a_host_that_reads_nothing() -> None:
    """A worker that was frozen while it fetched a copy must not keep the agent's file open."""
    agent: Any = Agent.__new__(Agent)
    agent.spec, agent.token = SimpleNamespace(lost_after=0.3), TOKEN
    agent.address, agent.leader, agent.store = "127.0.0.1", None, Store()
    agent.store.get = lambda *_: memoryview(bytes(2**24))

    async def main() -> int:
        async with await agent.listen() as server:
            port = server.sockets[0].getsockname()[1]
            before = open_files()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            challenge = json.loads(await reader.readline())["challenge"]
            digest = hmac.digest(TOKEN.encode(), challenge.encode(), "sha256").hex()
            writer.write(json.dumps({"proof": digest}).encode() + b"\n")
            hello = {"kind": "get", "moment": [0, 0], "rank": 0, "ranges": [[0, 1]]}
            writer.write(json.dumps(hello).encode() + b"\n")
            await asyncio.sleep(1.5)
            left = open_files() - before - 1  # this end of the connection
            writer.transport.abort()
            return left

    assert asyncio.run(main()) <= 0
