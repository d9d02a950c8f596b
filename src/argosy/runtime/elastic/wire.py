"""What agents and workers say to one another over TCP: a line of JSON, sometimes with a block of bytes after it.

Every connection opens with the run's token, which only those know who can read the run's folder. Agents wait for many
things at once (asyncio); workers ask for one thing at a time (plain sockets). Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from io import BufferedRWPair
from typing import Any

Message = dict[str, Any]
LONGEST = 2**28
"""Bytes of a line."""


class LostError(Exception):
    """The other side has gone away or says nothing."""


class Line:
    """One end of a connection between agents."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def open(address: str, port: int, greeting: Message, *, patience: float) -> Line:
        try:
            async with asyncio.timeout(patience):
                line = Line(*await asyncio.open_connection(address, port, limit=LONGEST))
        except (OSError, TimeoutError) as error:
            raise LostError(f"{address}:{port} cannot be reached ({error or 'no answer'})") from None
        line.send(greeting)
        return line

    def send(self, message: Message) -> None:
        """Without waiting; what cannot be sent shows when something is to be received."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, *, patience: float | None = None) -> Message:
        try:
            async with asyncio.timeout(patience):
                data = await self.reader.readline()
        except (OSError, TimeoutError, ValueError) as error:  # the last for a line without end
            raise LostError(str(error) or f"nothing heard for {patience:g} s") from None
        if not data.endswith(b"\n"):
            raise LostError("the connection was closed")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise LostError("a line that is no message")
        return message

    async def receive_block(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            raise LostError("the connection was closed within a block") from None

    async def send_block(self, block: memoryview) -> None:
        self.writer.write(block)
        with contextlib.suppress(OSError):
            await self.writer.drain()

    def close(self) -> None:
        self.writer.close()


@contextlib.contextmanager
def asking(address: str, port: int, greeting: Message, *, patience: float) -> Iterator[BufferedRWPair]:
    """A worker's connection to an agent, as a file."""
    with socket.create_connection((address, port), patience) as connection, connection.makefile("rwb") as file:
        say(file, greeting)
        yield file


def say(file: BufferedRWPair, message: Message) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def hear(file: BufferedRWPair) -> Message:
    line = file.readline()
    if not line:
        raise ConnectionError("the agent closed the connection")
    message: Message = json.loads(line)
    return message
