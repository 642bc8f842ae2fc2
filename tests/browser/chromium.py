"""A headless Chromium, driven over its DevTools protocol: JSON between NUL bytes, through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CODES = {" ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
PATIENCE = 30.0  # seconds until a browser that does not answer is given up


def find_chromium() -> str | None:
    """The browser to use: `$CHROMIUM`, or the first of the usual names that is on the path."""
    return os.environ.get("CHROMIUM") or next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One page of a browser with nothing in its profile. A context manager.

    Args:
        path: Of the program.
        profile: An empty folder.

    Attributes:
        complaints: Exceptions, console errors and anything else that the page logged as an error.
        requests: Addresses that the page asked for.
    """

    def __init__(self, path: str, profile: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._last = 0
        self._buffer = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [path, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # which root cannot have
        # The protocol is spoken on descriptors 3 and 4, whatever numbers the pipes have here.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "browser", *command, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """The next message; events among them are noted."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE} s"
            more = os.read(self._read, 1 << 20)
            assert more, f"the browser ended (exit code {self._process.poll()})"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        said = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = said["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console: {[each.get('value') for each in said['args']]}")
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(said["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
        return message

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def settle(self) -> None:
        """Wait until everything that is due has been drawn."""
        frame = "new Promise((done) => requestAnimationFrame(() => done(1)))"
        self.evaluate(f"{frame}.then(() => {frame})")

    def wait(self, condition: str) -> None:
        """Wait until a condition of the page holds."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"in {PATIENCE} s it did not come about that {condition}"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        found = json.dumps(selector)
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({found}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str) -> None:
        """Press a key, by its DOM name."""
        text = {"text": key} if len(key) == 1 else {}
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": CODES[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Write what the page looks like as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))
