"""A headless Chromium, driven by its DevTools protocol over two pipes: no other package is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from support.patience import PATIENCE

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_KEY_CODES = {"ArrowRight": 39, "ArrowDown": 40, "Enter": 13}


class Browser:
    """One page. What the page writes to the console, and errors in it, are in `messages`."""

    def __init__(self, profile: Path) -> None:
        """Start the browser; skip the test where there is none."""
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            pytest.skip("no Chromium is installed (apt-get install chromium)")
        (self._read, to_write), (to_read, self._write) = os.pipe(), os.pipe()
        command = [found, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1280,1600"]
        self._process = subprocess.Popen(
            # The protocol is spoken on the descriptors 3 and 4.
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._pending = b""
        self._number = 0
        self.messages: list[str] = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self.block_network()

    _session: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def block_network(self) -> None:
        """Nothing but files can be fetched."""
        conditions = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._send("Network.emulateNetworkConditions", conditions)

    def open(self, page: Path) -> float:
        """Load a file; returns the seconds until its script is done."""
        started = time.monotonic()
        self._send("Page.navigate", {"url": page.as_uri()})
        while self.run("document.body && document.body.dataset.ready") != "yes":
            if time.monotonic() - started > PATIENCE or self.messages:
                raise AssertionError(f"the page is not ready: {self.messages}")
            time.sleep(0.02)
        return time.monotonic() - started

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self._send("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression, as soon as it is true."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """Press a key, in the element that has the focus."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            code = _KEY_CODES.get(key, ord(key[0]))
            event = {"type": kind, "key": key, "windowsVirtualKeyCode": code, **(text if kind == "keyDown" else {})}
            self._send("Input.dispatchKeyEvent", event)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", event)

    def wheel(self, x: float, y: float, delta: float) -> None:
        """Turn the wheel; negative zooms in."""
        self._send("Input.dispatchMouseEvent", {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": delta})

    def emulate(self, *, media: str = "", scheme: str = "light", width: int = 1280) -> None:
        """Show the page as it is printed ("print"), in another color scheme, or in a window of this width."""
        size = {"width": width, "height": 1600, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def _send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._answers():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise AssertionError("the browser has ended")

    def _answers(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._pending:
                one, _, self._pending = self._pending.partition(b"\0")
                yield json.loads(one)
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            if not piece:
                return
            self._pending += piece

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.messages.append(json.dumps(event["params"])[:500])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder."""
    with Browser(folder / "profile") as one:
        yield one
