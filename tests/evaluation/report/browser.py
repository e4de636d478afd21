"""A page in a real Chromium, driven over its DevTools protocol through two pipes: no port, no driver, no
other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
]


def find_chromium() -> str | None:
    """The browser's program, if one is installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
        None,
    )


class Browser:
    """One tab. Attributes: `requests` (URLs that the page asked for), `messages` (of its console, and
    exceptions)."""

    def __init__(self, program: str):
        self.requests: list[str] = []
        self.messages: list[str] = []
        self._number, self._session = 0, None
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            program,
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # Chromium reads commands from descriptor 3, and answers on 4. The shell moves ours there, by way of
        # numbers that are free.
        move = f'exec 8<&{theirs_in} 9>&{theirs_out}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", move, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def show(self, path: Path, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Load a file at a width in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            event = self._read()
            self._events.append(event)
            self._note(event)
        self.run(
            "Promise.all([document.fonts.ready, new Promise(done => requestAnimationFrame(() => "
            "requestAnimationFrame(done)))])"
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        )

    def printed(self) -> bytes:
        """The page as PDF, as a reader with the color scheme of the last `show` prints it."""
        self.call("Emulation.setEmulatedMedia", media="")
        return base64.b64decode(
            self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
        )

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(parameters))
