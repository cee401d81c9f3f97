"""A Chromium driven through a pipe by the standard library alone: open a page, run JavaScript, press keys, look.

Source: the Chrome DevTools Protocol over ``--remote-debugging-pipe`` (messages of JSON, each ended by a zero byte).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

LOOKS = Path(__file__).with_name("looks.js")
NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """Path of a Chromium, or None: ``$CHROMIUM``, or one on the path."""
    own = os.environ.get("CHROMIUM")
    return own or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One headless browser with one page.

    Attributes:
        problems: errors and exceptions of the page's console, requests that were made.
    """

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        found = executable()
        assert found is not None, "no Chromium is installed"
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the browser may still write
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            found,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={self.folder.name}",
            "about:blank",
        ]

        def place() -> None:  # the protocol's pipes are descriptors 3 and 4
            os.dup2(to_browser, 200), os.dup2(from_browser, 201)
            os.dup2(200, 3), os.dup2(201, 4)
            os.set_inheritable(3, True), os.set_inheritable(4, True)

        self.process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser), os.close(from_browser)
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self._pages() if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _pages(self) -> list[dict[str, Any]]:
        for _ in range(100):
            targets = self.call("Target.getTargets")["targetInfos"]
            if any(t["type"] == "page" for t in targets):
                return targets
            time.sleep(0.05)
        raise TimeoutError("the browser opened no page")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        number = self._next
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._event(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser went away")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _event(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(message)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"request: {params['request']['url']}")

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it has run."""
        self.events.clear()
        self.call("Page.navigate", url="about:blank")  # a new fragment alone would not load the page again
        self.call("Page.navigate", url=path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        for _ in range(400):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                self.run(LOOKS.read_text())
                return
            time.sleep(0.025)
        raise TimeoutError(f"{path} did not load")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited)."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "exception"))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, by its name in JavaScript."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move(self, selector: str, x: float = 0.5, y: float = 0.5, click: bool = False) -> None:
        """Move the pointer into an element, to a fraction of its box; and click there."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); "
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for what in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=what, button="left", clickCount=1, **at)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Size of the window in CSS pixels, and how many device pixels each has."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def dark(self, on: bool) -> None:
        """What the page is told the user prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def shot(self, path: Path, whole: bool = True) -> None:
        """A picture of the (whole) page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser and remove its folder."""
        self.process.terminate()
        self.process.wait(timeout=10)
        os.close(self._in), os.close(self._out)
        self.folder.cleanup()
