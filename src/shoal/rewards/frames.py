"""Messages between a scoring process and its parent: length-prefixed msgpack over two pipes.

    parent ── Setup ──► child              once
    parent ◄─ Ready ──                     once the environment is built, or cannot be
    parent ── Work ──► child               completions
    parent ◄─ Allows, JobAnswer ───        the answer of each, in order

Text travels as bytes: a completion may contain surrogates.
"""

import os
import select
import struct
from dataclasses import dataclass, field

import msgspec

from shoal.errors import CodecError, DeadlineExceeded
from shoal.runtime import Clock, StopToken, SystemClock

HEAD = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
LOOK_S = 0.25  # between two looks at the stop token
READ_BYTES = 1 << 20
EXIT_MEMORY = 77  # of a child without memory for a message


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The [environment] section as JSON, and the limits of one job; 0: none."""

    settings: bytes
    seconds: float
    memory_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The environment is built, unless there is a `problem`. `unlimited`: limits that do not work here."""

    digest: str = ""
    unlimited: str = ""
    problem: str = ""


SentJob = tuple[str, bytes, tuple[int, ...] | None]  # task, completion, and its tokens if they are known


class Jobs(msgspec.Struct, frozen=True, tag=True):
    jobs: list[SentJob]


class Allows(msgspec.Struct, frozen=True, tag=True):
    """Sent before an answer: the task's grader may take so many more seconds of clock time."""

    seconds: float


class JobAnswer(msgspec.Struct, frozen=True, tag=True):
    value: float = 0.0
    parts: dict[str, float] = {}
    notes: bytes = b""
    failure: str | None = None
    needs_memory: bool = False


ToChild = Setup | Jobs
FromChild = Ready | Allows | JobAnswer

_to_child = msgspec.msgpack.Decoder(ToChild)
_from_child = msgspec.msgpack.Decoder(FromChild)


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def frame_of(message: ToChild | FromChild) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise CodecError(f"a message of {len(body)} bytes is too large for a scoring process")
    return HEAD.pack(len(body)) + body


class ChannelClosed(Exception): ...


@dataclass
class Channel:
    """The parent's end. Every wait has a limit (`within_s`) and ends when `stop` is set. One look counts at most
    `LOOK_S`, so time in which this process or the machine sleeps does not count."""

    source: int
    sink: int
    stop: StopToken
    clock: Clock = field(default_factory=SystemClock)
    _received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        os.set_blocking(self.source, False)
        os.set_blocking(self.sink, False)

    def send(self, message: ToChild, within_s: float) -> None:
        rest = memoryview(frame_of(message))
        while rest:
            within_s = self._await(self.sink, select.POLLOUT, within_s)
            try:
                rest = rest[os.write(self.sink, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChannelClosed from None

    def receive(self, within_s: float) -> FromChild:
        left_s = self._fill(HEAD.size, within_s)
        size = HEAD.size + HEAD.unpack_from(self._received)[0]
        if size > HEAD.size + MAX_FRAME_BYTES:
            raise ChannelClosed
        self._fill(size, left_s)
        body = bytes(self._received[HEAD.size : size])
        del self._received[:size]
        try:
            message: FromChild = _from_child.decode(body)
        except msgspec.DecodeError:
            raise ChannelClosed from None
        return message

    def _fill(self, size: int, left_s: float) -> float:
        while len(self._received) < size:
            left_s = self._await(self.source, select.POLLIN, left_s)
            try:
                data = os.read(self.source, READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                raise ChannelClosed
            self._received += data
        return left_s

    def _await(self, descriptor: int, event: int, left_s: float) -> float:
        waiter = select.poll()
        waiter.register(descriptor, event)
        while True:
            if self.stop.is_set():
                raise DeadlineExceeded(f"scoring was given up: {self.stop.reason}")
            began_s = self.clock.monotonic_s()
            found = waiter.poll(1000 * min(max(left_s, 0.0), LOOK_S))
            left_s -= min(self.clock.monotonic_s() - began_s, LOOK_S)
            if found:
                return left_s
            if left_s <= 0:
                raise TimeoutError


def read_message(source: int) -> ToChild | None:
    """The child's end: the next message, None at the end of the pipe."""
    data, size = bytearray(), HEAD.size
    while len(data) < size:
        more = os.read(source, min(READ_BYTES, size - len(data)))
        if not more:
            return None
        data += more
        if size == HEAD.size == len(data):
            size += min(HEAD.unpack(data)[0], MAX_FRAME_BYTES)
    message: ToChild = _to_child.decode(data[HEAD.size :])
    return message


def write_message(sink: int, message: FromChild) -> None:
    rest = memoryview(frame_of(message))
    while rest:
        rest = rest[os.write(sink, rest) :]
