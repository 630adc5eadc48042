"""Questions to an OpenAI-compatible server: one greedy answer each, asked again where the server could not."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LONGEST_ASKED_S = 600.0  # of a Retry-After: who asks for more is asked again after this
DENIED = (401, 403)
POLL_S = 0.2  # how soon an interrupt is seen
BODY_SHOWN = 160  # characters of an answer that is none
CUT_OFF = "length"  # finish_reason of an answer that max_tokens ended


class EndpointError(Exception):
    """One sentence: the address, what it said, and what to do."""


@dataclass(frozen=True)
class Endpoint:
    """`url` up to and with /v1. `api`: `completions` (the prompt as it is) or `chat` (the server's own template)."""

    url: str
    model: str
    api: str = "completions"
    key: str = field(default="", repr=False)
    timeout_s: float = 300.0
    tries: int = 5


@dataclass(frozen=True)
class Answer:
    """`tokens`: texts of the tokens, None where the server does not tell. `error`: why there is no answer, else ""."""

    text: str = ""
    tokens: list[str] | None = None
    finish: str = ""
    tries: int = 1
    seconds: float = 0.0
    error: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)


def request(endpoint: Endpoint, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request; the answer's JSON. Raises OSError, ValueError or http.client.HTTPException as the library does."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    )
    asked = urllib.request.Request(f"{endpoint.url.rstrip('/')}/{path}", data, headers)
    with urllib.request.urlopen(asked, timeout=endpoint.timeout_s) as answer:
        return json.loads(answer.read())


def model_served(endpoint: Endpoint) -> str:
    """The endpoint's model, or what the server names first. Raises EndpointError, also where nobody listens."""
    try:
        told = request(endpoint, "models")
        return endpoint.model or str(told["data"][0]["id"])
    except urllib.error.HTTPError as error:
        if endpoint.model and error.code not in DENIED:
            return endpoint.model  # somebody is there, and need not list models
        remedy = "name its key by --key-variable" if error.code in DENIED else "does the address end in /v1?"
        raise EndpointError(f"{endpoint.url}/models: HTTP {error.code}: {_body(error)}; {remedy}") from error
    except (OSError, http.client.HTTPException) as error:
        raise EndpointError(
            f"{endpoint.url}: is not reachable ({_words(error)}); is the server up, and does it end in /v1?"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        if endpoint.model:
            return endpoint.model
        remedy = "give it by --reference-model or --candidate-model"
        raise EndpointError(f"{endpoint.url}/models: names no model; {remedy}") from error


def ask(endpoint: Endpoint, prompt: str, max_tokens: int, stop: list[str], stopped: threading.Event) -> Answer:
    """Greedy. Busy servers (429, 5xx), lost connections and time-outs are asked again, after a pause that doubles."""
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
    if stop:
        body["stop"] = stop
    if endpoint.api == "chat":
        path = "chat/completions"
        body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
    else:
        path = "completions"
        body |= {"prompt": prompt, "logprobs": 1}
    start, pause, error = time.monotonic(), FIRST_PAUSE_S, "it was not asked"
    for number in range(1, endpoint.tries + 1):
        asked_for = 0.0
        try:
            answer = _answer(request(endpoint, path, body), endpoint.api)
            return Answer(*answer, tries=number, seconds=round(time.monotonic() - start, 3))
        except urllib.error.HTTPError as refused:
            error = f"HTTP {refused.code}: {_body(refused)}"
            if refused.code not in RETRIED:
                break
            asked_for = _retry_after(refused)
        except (OSError, http.client.HTTPException) as lost:
            error = _words(lost)
        except (ValueError, LookupError, TypeError) as wrong:
            error = f"no answer in its JSON ({_words(wrong)})"
        if number < endpoint.tries and stopped.wait(max(min(pause, LONGEST_PAUSE_S), asked_for)):
            break
        pause *= 2
    return Answer(tries=number, seconds=round(time.monotonic() - start, 3), error=error)


def _answer(told: Any, api: str) -> tuple[str, list[str] | None, str]:
    choice = told["choices"][0]
    text = choice["message"]["content"] if api == "chat" else choice["text"]
    if text is None and choice.get("finish_reason") == CUT_OFF:
        text = ""  # a model that was cut off while still reasoning has said nothing
    if not isinstance(text, str):
        raise TypeError("its text is no text")
    logprobs = choice.get("logprobs") or {}
    tokens = [each["token"] for each in logprobs.get("content") or []] if api == "chat" else logprobs.get("tokens")
    return text, [str(token) for token in tokens] if tokens else None, str(choice.get("finish_reason") or "")


def _retry_after(refused: urllib.error.HTTPError) -> float:
    """Seconds, from a number of them or a date (RFC 9110, 10.2.3); 0 where there is neither."""
    told = refused.headers.get("Retry-After", "").strip()
    try:
        if told.isdecimal() or "." in told:
            seconds = float(told)
        else:
            seconds = (parsedate_to_datetime(told) - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_ASKED_S)


def _body(refused: urllib.error.HTTPError) -> str:
    try:
        text = refused.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join(text.split())[:BODY_SHOWN] or str(refused.reason)


def _words(error: BaseException) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError | socket.timeout):
        return "no answer in time"
    return (str(reason) or type(reason).__name__).splitlines()[0]


def ask_all(
    endpoint: Endpoint,
    prompts: Iterable[tuple[int, str]],
    max_tokens: int,
    stop: list[str],
    concurrency: int,
    stopped: threading.Event,
) -> Generator[tuple[int, Answer], None, None]:
    """(number, answer) as they come, `concurrency` at once. A set `stopped` ends it without what is still under way."""
    waiting = iter(prompts)
    under_way: dict[Future[Answer], int] = {}
    pool = ThreadPoolExecutor(concurrency)

    def start(count: int) -> None:
        for number, prompt in itertools.islice(waiting, count):
            under_way[pool.submit(ask, endpoint, prompt, max_tokens, stop, stopped)] = number

    try:
        start(concurrency)
        while under_way and not stopped.is_set():
            for done in wait(under_way, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(done), done.result()
                start(1)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
