"""The control socket between the coordinator and each rank: one JSON object a line, a secret in the first one."""

from __future__ import annotations

import json
import socket
from typing import Any

ADDRESS = "MOE_EP_CONTROL"  # host:port
SECRET = "MOE_EP_SECRET"  # only this user's processes can read it from the environment
CONNECT_TIMEOUT_S = 30.0
RECEIVE_BYTES = 1 << 16


class Channel:
    """Line-framed JSON over a stream socket. `send` may be called from one thread while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    @classmethod
    def connect(cls, address: str) -> Channel:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the other side is gone."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive_ready(self) -> list[dict[str, Any]] | None:
        """What has arrived (at least one read, which blocks on an idle socket); None when the other side is gone."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive(self) -> dict[str, Any] | None:
        """One message, for the side that never gets two at once; None when the other side is gone."""
        while True:
            messages = self.receive_ready()
            if messages is None:
                return None
            if messages:
                (message,) = messages
                return message

    def close(self) -> None:
        self.sock.close()


def listen() -> socket.socket:
    """A listener on the loopback, its port chosen by the OS."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"
