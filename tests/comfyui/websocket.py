"""As much of a WebSocket client (RFC 6455) as listening to a server takes; the standard library has none."""

from __future__ import annotations

import base64
import os
import socket
import struct

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class WebSocket:
    """A connection that receives text messages; binary ones (previews) are passed over."""

    def __init__(self, port: int, path: str, timeout_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        key = base64.b64encode(os.urandom(16)).decode()
        asked = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self._socket.sendall(asked.encode())
        self._buffer = b""
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._some()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(head.decode(errors="replace"))

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def receive(self) -> str:
        """The next text message; TimeoutError where none comes in time."""
        message = b""
        while True:
            is_last, kind, payload = self._frame()
            if kind == PING:
                self._send(PONG, payload)
            elif kind == CLOSE:
                raise ConnectionError("the server closed the connection")
            elif kind in (0, TEXT, BINARY):
                if kind:
                    text = kind == TEXT
                message += payload
                if is_last:
                    if text:
                        return message.decode()
                    message = b""

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._exactly(2)
        n = second & 127
        if n == 126:
            (n,) = struct.unpack(">H", self._exactly(2))
        elif n == 127:
            (n,) = struct.unpack(">Q", self._exactly(8))
        return bool(first & 128), first & 15, self._exactly(n)

    def _send(self, kind: int, payload: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(b ^ mask[i % 4] for i, b in enumerate(payload))
        self._socket.sendall(bytes([128 | kind, 128 | len(payload)]) + mask + masked)

    def _exactly(self, n: int) -> bytes:
        while len(self._buffer) < n:
            self._buffer += self._some()
        part, self._buffer = self._buffer[:n], self._buffer[n:]
        return part

    def _some(self) -> bytes:
        part = self._socket.recv(65536)
        if not part:
            raise ConnectionError("the server went away")
        return part
