"""A headless Chromium on its debugging pipe: opens a page from disk, runs script in it, takes pictures of it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 60.0
FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions
    --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe
""".split()


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `errors`: console errors and uncaught exceptions, policy violations included, of all pages opened."""

    def __init__(self, program: str, folder: Path) -> None:
        to_it, our_end = os.pipe()
        our_ear, from_it = os.pipe()
        command = ["bash", "-c", 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"', "-", str(to_it), str(from_it)]
        self.process = subprocess.Popen(
            [*command, program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "LC_ALL": "C"},
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        self._out, self._in, self._rest, self._number = our_end, our_ear, b"", 0
        self.errors: list[str] = []
        self.loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._ask("Browser.close")
            self.process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.loaded = False
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self._hear()

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, whole: bool = False) -> None:
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._ask(method, self._session, **parameters)

    def _ask(self, method: str, session: str = "", **parameters: object) -> dict[str, Any]:
        self._number += 1
        words = {"id": self._number, "method": method, "params": parameters}
        if session:
            words["sessionId"] = session
        os.write(self._out, json.dumps(words).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                return dict(heard["result"])

    def _hear(self) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {ANSWER_S:g} s"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(json.dumps(told["args"]))
        return message
