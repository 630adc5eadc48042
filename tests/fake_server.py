"""An OpenAI-compatible server for the end-to-end gate's tests: answers sums, or misbehaves as it is told."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SUM = re.compile(r"How much is (\d+) and (\d+)\?(?!.*How much)", re.S)
Trouble = Callable[["Handler", int], bool]  # (handler, times that this prompt was asked before) -> has it answered?


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    prompt = ""

    def log_message(self, *words: object) -> None:
        """Quiet."""

    def send(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, told: Any, code: int = 200, **headers: str) -> None:
        self.send(code, json.dumps(told).encode(), **headers)

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.send_json({"error": "no key"}, 401)
            return
        self.send_json({"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        with self.server.lock:
            before = self.server.asked[prompt]
            self.server.asked[prompt] += 1
            self.server.bodies.append(body)
        self.prompt = prompt
        if self.server.trouble(self, before):
            return
        self.answer(self.server.answer(prompt), chat)

    def answer(self, text: str, chat: bool = False, finish: str = "stop") -> None:
        tokens = re.findall(r"\S+\s*", text) if self.server.tells_tokens else None
        if chat:
            logprobs = {"content": [{"token": token} for token in tokens]} if tokens else None
            choice: dict[str, Any] = {"message": {"content": text}}
        else:
            logprobs = {"tokens": tokens} if tokens else None  # type: ignore[dict-item]
            choice = {"text": text}
        self.send_json({"choices": [choice | {"logprobs": logprobs, "finish_reason": finish}]})


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, model: str, wrong: int, every: int, trouble: Trouble, tells_tokens: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.wrong, self.every, self.trouble, self.tells_tokens = model, wrong, every, trouble, tells_tokens
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.key = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is part of the tests; its traceback would land in the next test's stderr."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, prompt: str) -> str:
        """Right, but for `wrong` of each `every` questions by their first number."""
        found = SUM.search(prompt)
        assert found, prompt
        first, second = int(found[1]), int(found[2])
        total = first + second + (1 if first % self.every < self.wrong else 0)
        return f" {first} and {second} make {total}.\n#### {total}"


def well(handler: Handler, before: int) -> bool:
    return False


@contextmanager
def serving(
    model: str = "tiny",
    wrong: int = 0,
    every: int = 100,
    trouble: Trouble = well,
    tells_tokens: bool = True,
    key: str = "",
) -> Iterator[FakeServer]:
    """`wrong` of each `every` answers are off by one."""
    server = FakeServer(model, wrong, every, trouble, tells_tokens)
    server.key = key
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


# --- troubles ---------------------------------------------------------------------------------------------------------


def busy_at_first(handler: Handler, before: int) -> bool:
    if before == 0:
        handler.send_json({"error": "slow down"}, 429, Retry_After="0.05")
    return before == 0


def busy_until_a_date(handler: Handler, before: int) -> bool:
    if before == 0:
        handler.send_json({"error": "slow down"}, 503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")
    return before == 0


def always_broken(handler: Handler, before: int) -> bool:
    handler.send_json({"error": {"message": "CUDA error: an illegal memory access"}}, 500)
    return True


def forbidden(handler: Handler, before: int) -> bool:
    handler.send_json({"error": "model not found"}, 404)
    return True


def drops_at_first(handler: Handler, before: int) -> bool:
    if before == 0:
        handler.close_connection = True
        handler.connection.close()
    return before == 0


def no_json_at_first(handler: Handler, before: int) -> bool:
    if before == 0:
        handler.send(200, b"<html>a proxy's page</html>")
    return before == 0


def other_json(handler: Handler, before: int) -> bool:
    handler.send_json({"answer": 42})
    return True


def slow_at_first(handler: Handler, before: int) -> bool:
    if before == 0:
        time.sleep(2.5)
    return False


def cuts_off(handler: Handler, before: int) -> bool:
    handler.answer(" First I think about", finish="length")
    return True


def one_lasting(handler: Handler, before: int) -> bool:
    """A request that takes long, while the others are quick."""
    if " 3 and " in handler.prompt:
        time.sleep(20)
    return False
