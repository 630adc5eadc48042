"""The control socket between the coordinator and each rank: one JSON object a line, a secret in the first one."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

ADDRESS = "MOE_EP_CONTROL"  # host:port
SECRET = "MOE_EP_SECRET"  # only this user's processes can read it from the environment
CONNECT_TIMEOUT_S = 30.0
RECEIVE_BYTES = 1 << 16


class Channel:
    """Line-framed JSON over a stream socket. Any thread may call `send` while another one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._early: list[dict[str, Any]] = []  # came together with what `receive` returned
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, address: str, limit_s: float = CONNECT_TIMEOUT_S) -> Channel:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=limit_s)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the other side is gone."""
        with self._sending:
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive_ready(self) -> list[dict[str, Any]] | None:
        """What has arrived (at least one read, which blocks on an idle socket); None when the other side is gone."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [_message(line) for line in lines]

    def receive(self) -> dict[str, Any] | None:
        """One message; None when the other side is gone."""
        while True:
            messages = self.receive_ready()
            if messages is None:
                return None
            if messages:
                first, *self._early = messages
                return first

    def close(self) -> None:
        self.sock.close()


def _message(line: bytes) -> dict[str, Any]:
    """Raises ValueError on what is no message of ours: over several nodes strangers may speak here."""
    try:
        message = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def listen() -> socket.socket:
    """A listener on the loopback, its port chosen by the OS."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def listen_to_nodes(port: int = 0) -> socket.socket:
    """A listener on all interfaces: node 0's own name may stand for an address that no other node reaches."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def plain_address(address: str) -> str:
    """An IPv4 address as such, also where a dual-stack socket shows it as ::ffff:10.0.0.1."""
    return address.removeprefix("::ffff:") if "." in address else address


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"
