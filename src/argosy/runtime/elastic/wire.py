"""Exchange messages between agents and workers over TCP: a line of JSON, sometimes followed by a
block of bytes.

An agent opens every connection with a random number, and the other side answers with a hash (HMAC)
of that number and of the run's token, a secret that only processes have that can read the run's
folder. So the token itself is never sent, and an answer that was overheard opens no other
connection. From a side that has not answered so, at most that one line is buffered. Agents wait for
many things at once (asyncio); workers make one request at a time (plain sockets). Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import sys
from collections.abc import Iterator
from io import BufferedRWPair

from argosy.document import JsonObject
from argosy.units import MIB

Message = JsonObject
"""A message as a JSON object."""
# Bytes that a line may have.
_LONGEST = 2**28
# Connections without proof of the token that are open at a time.
_MOST_STRANGERS = 128
# Bytes that the line with the proof may have.
_LONGEST_OPENING = 2**10
# Bytes of a block that are sent before waiting for the peer to take them.
_CHUNK = MIB


class LostError(Exception):
    """An error that is raised if the other side has gone away or sends nothing."""


def proof(token: str, challenge: str) -> str:
    """Return the answer to a challenge, which only a side with the token can compute."""
    return hmac.new(token.encode(), challenge.encode(errors="replace"), hashlib.sha256).hexdigest()


class Strangers:
    """The newest connections that have not proved the run's token yet; older ones are closed.

    A host of the run proves the token at once, so that a flood of other connections neither keeps
    it out nor uses up the agent's file descriptors.
    """

    def __init__(self) -> None:
        self.writers: dict[asyncio.StreamWriter, None] = {}

    @contextlib.contextmanager
    def among(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count a connection as unproved in the context."""
        while len(self.writers) >= _MOST_STRANGERS:
            oldest = next(iter(self.writers))
            del self.writers[oldest]
            oldest.transport.abort()
        self.writers[writer] = None
        try:
            yield
        finally:
            self.writers.pop(writer, None)


def report_in_a_line(loop: asyncio.AbstractEventLoop, context: JsonObject) -> None:
    """Handle an exception of an event loop; one that others cause, by connecting too often, is
    written as one line."""
    if str(context.get("message")).startswith("socket.accept()"):
        sys.stderr.write(f"cannot accept connections: {context.get('exception')}\n")
    else:
        loop.default_exception_handler(context)


class Line:
    """One end of a connection that is open between agents.

    A line that raises ``LostError`` is aborted, so that a frozen or unreachable peer leaves no open
    file behind.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def open(
        address: str, port: int, token: str, greeting: Message, *, patience: float
    ) -> Line:
        try:
            async with asyncio.timeout(patience):
                line = Line(*await asyncio.open_connection(address, port))
        except (OSError, TimeoutError) as error:
            raise LostError(
                f"{address}:{port} cannot be reached ({error or 'no answer'})"
            ) from None
        opening = await line.receive(patience=patience, longest=_LONGEST_OPENING)
        line.send({"proof": proof(token, str(opening.get("challenge")))})
        line.send(greeting)
        return line

    async def beat(self, interval: float) -> None:
        """Send a heartbeat every ``interval`` seconds, permanently."""
        while True:
            self.send({"kind": "beat"})
            await asyncio.sleep(interval)

    async def opens_with(self, token: str, *, patience: float) -> bool:
        """Return whether the other side has the run's token."""
        challenge = secrets.token_hex(16)
        self.send({"challenge": challenge})
        opening = await self.receive(patience=patience, longest=_LONGEST_OPENING)
        given = str(opening.get("proof")).encode(errors="replace")
        return hmac.compare_digest(given, proof(token, challenge).encode())

    def send(self, message: Message) -> None:
        """Send without waiting; a failure shows when a message is to be received."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, *, patience: float, longest: int = _LONGEST) -> Message:
        try:
            async with asyncio.timeout(patience):
                data = await self._line(longest)
        except (OSError, TimeoutError) as error:
            raise self._lost(str(error) or f"nothing received for {patience:g} s") from None
        except asyncio.IncompleteReadError:
            raise self._lost("the connection was closed") from None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self._lost("a line that is no message")
        return message

    def _lost(self, reason: str) -> LostError:
        """Close the connection at once, and return the error to raise."""
        self.abort()
        return LostError(reason)

    async def _line(self, longest: int) -> bytearray:
        """Read a line from the reader part by part; the reader buffers little (64 KiB) before it
        makes the other side wait."""
        line = bytearray()
        while not line.endswith(b"\n"):
            try:
                line += await self.reader.readuntil()
            except asyncio.LimitOverrunError as error:
                line += await self.reader.readexactly(error.consumed)
            if len(line) > longest:
                raise self._lost(f"a line of more than {longest} bytes")
        return line

    async def receive_block(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            raise self._lost("the connection was closed within a block") from None

    async def send_block(self, block: memoryview, *, patience: float) -> None:
        """Send bytes; raise ``LostError`` if the peer takes none for ``patience`` seconds."""
        for begin in range(0, len(block), _CHUNK):
            self.writer.write(block[begin : begin + _CHUNK])
            try:
                async with asyncio.timeout(patience):
                    await self.writer.drain()
            except (OSError, TimeoutError) as error:
                raise self._lost(str(error) or f"nothing taken for {patience:g} s") from None

    def close(self) -> None:
        """Close the connection as soon as everything has been sent."""
        self.writer.close()

    def abort(self) -> None:
        """Close the connection now, without sending what is still buffered."""
        self.writer.transport.abort()

    async def end(self, *, patience: float) -> None:
        """Send what is buffered and close; abort after ``patience`` seconds."""
        self.close()
        try:
            async with asyncio.timeout(patience):
                await self.writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()


@contextlib.contextmanager
def asking(
    address: str, port: int, token: str, greeting: Message, *, patience: float
) -> Iterator[BufferedRWPair]:
    """Open a worker's connection to an agent, as a file."""
    with (
        socket.create_connection((address, port), patience) as connection,
        connection.makefile("rwb") as file,
    ):
        try:
            challenge = str(hear(file)["challenge"])
        except (KeyError, TypeError, ValueError):
            raise ConnectionError("the process that listens there is not an agent") from None
        say(file, {"proof": proof(token, challenge)})
        say(file, greeting)
        yield file


def say(file: BufferedRWPair, message: Message) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def hear(file: BufferedRWPair) -> Message:
    line = file.readline()
    if not line:
        raise ConnectionError("the agent closed the connection")
    return json.loads(line)
