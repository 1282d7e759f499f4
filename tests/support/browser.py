"""Drive Chromium without a window over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
WAIT = 20.0  # seconds until a condition or an answer is given up


def chromium() -> str | None:
    """Return the path of the browser; None: there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser with one page, for use in a ``with`` statement.

    Args:
        executable: path of the browser.
        folder: an empty folder for the browser's files.

    Attributes:
        complaints: errors and warnings of the page: uncaught exceptions, the console's, violations of the CSP.
    """

    def __init__(self, executable: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._folder = folder
        self._open = ExitStack()
        self._calls = 0
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        from websockets.sync.client import connect  # of an extra; conftest.py imports this file

        port, path = self.until(self._port)
        self._socket = self._open.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
        found = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in found if target["type"] == "page")
        address = f"ws://127.0.0.1:{port}/devtools/page/{page}"
        self._socket = self._open.enter_context(connect(address, max_size=None))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait()

    def _port(self) -> list[str]:
        """Return the lines of the file in which the browser says where it listens; none before it is written."""
        file = self._folder / "DevToolsActivePort"
        lines = file.read_text().splitlines() if file.exists() else []
        return lines if len(lines) == 2 else []

    @staticmethod
    def until(condition: Callable[[], Any]) -> Any:
        """Call ``condition`` until it returns a true value; return the value.

        Raises:
            TimeoutError: it returned no true value for `WAIT` seconds.
        """
        end = time.monotonic() + WAIT
        while not (value := condition()):
            if time.monotonic() > end:
                raise TimeoutError(f"expected a true value within {WAIT} s, got {value!r}")
            time.sleep(0.02)
        return value

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; collect complaints that arrive before it.

        Raises:
            RuntimeError: the browser answers with an error.
        """
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT))
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])

    def open(self, address: str) -> None:
        """Load an address and wait for its load event."""
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def eval(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression; a promise is awaited.

        Raises:
            RuntimeError: the expression throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression has a true value.

        Raises:
            TimeoutError: it was not true for `WAIT` seconds.
        """
        self.until(lambda: self.eval(f"!!({expression})"))

    def press(self, key: str, **more: Any) -> None:
        """Press and release a key, such as "ArrowLeft", "Enter" or "w", with the page's focus."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=codes.get(key, 0))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes.get(key, 0))

    def type(self, text: str) -> None:
        """Enter text at the page's focus."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that a CSS selector finds, with the mouse."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.eval(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.eval(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({where}.getClientRects()[0])")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the page's size in pixels, and whether it prefers dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the page's visible part, or of the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
