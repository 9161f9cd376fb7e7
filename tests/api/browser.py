"""A headless Chromium for tests, by its DevTools protocol over two pipes: no port, and no package for it."""

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
from typing import Any, Self

import pytest

__all__ = ["Browser", "find_browser"]

_ANSWER_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Its path; skips the test where there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome on the PATH to open the page with (Debian: apt install chromium)")
    return found


class Browser:
    """One tab. `complaints` is what the console said of errors, `asked` every URL that was asked for."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 860) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        flags = (*options, f"--window-size={width},{height}", f"--user-data-dir={folder}", "--remote-debugging-pipe")
        # The browser wants the pipes as descriptors 3 and 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser} && exec "$@" 2>/dev/null'
        command = ["bash", "-c", script, "bash", find_browser(), *flags, "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank", newWindow=True, width=width, height=height)[
            "targetId"
        ]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write_fd)
        os.close(self._read_fd)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def eval(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it becomes."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, timeout_s: float = 30.0) -> Any:
        """Until the expression is true."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.eval(script)):
            page = self.eval("document.body.innerText")
            assert time.monotonic() < deadline_s, f"did not come true: {script}\n{page}\n{self.complaints}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self._ask("Input.dispatchKeyEvent", **event, **(text if kind == "keyDown" else {}))

    def point_at(self, selector: str, *, clicks: bool = False) -> None:
        """Move the pointer to the middle of an element's first line."""
        box = self.eval(f"(e => {{ const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2] }})"
                        f"(document.querySelector({json.dumps(selector)}))")  # fmt: skip
        at = {"x": box[0], "y": box[1]}
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased") if clicks else ():
            self._ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def click(self, selector: str) -> None:
        self.point_at(selector, clicks=True)

    def prefer(self, scheme: str) -> None:
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def names(self) -> list[tuple[str, str]]:
        """Role and name of everything that assistive technology is told of."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        shown = [one for one in nodes if not one.get("ignored")]
        return [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in shown]

    # --- inside

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            answer = self._receive(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read_fd, 1 << 20)
            assert data, f"the browser has ended, status {self._process.poll()}"
            self._rest += data
        first, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(first))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case _:
                pass
