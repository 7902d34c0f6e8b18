"""A Chromium without a window, driven by the DevTools protocol over a pair of pipes: no driver, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

DEADLINE: Final = 60.0


class Chromium:
    """A browser with one page open. It ends with the ``with`` statement."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
            *("--no-first-run", "--hide-scrollbars", "--disable-extensions", "--disable-component-update"),
            f"--user-data-dir={profile}",
            # a request that leaves the machine finds no address
            "--host-resolver-rules=MAP * ~NOTFOUND",
        )
        # Chromium reads commands from file 3 and writes answers to file 4
        redirected = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", program, *options],  # noqa: S607 - the bash of the PATH
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._left = b""
        self._number = 0
        self._session = ""
        self.requested: list[str] = []
        """The address of each request of the page."""
        self._loaded = False

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # its own group: the processes that it started end with it
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE)
        os.close(self._write)
        os.close(self._read)

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Open a page in a window of a ``width``, as high as the page, in the scheme ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._resize(width, 800)
        self.requested.clear()
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + DEADLINE
        while not self._loaded:
            self._take(until)

    def grow(self, width: int) -> None:
        """Make the window as high as the page."""
        self._resize(width, int(self.run("document.documentElement.scrollHeight")))

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key and let it go."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, file: Path) -> None:
        """Write what the window shows as a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the browser's answer to a command."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + DEADLINE
        while True:
            message = self._take(until)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def _resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _take(self, until: float) -> dict[str, Any]:
        """Return the next message, an answer or an event."""
        while b"\0" not in self._left:
            readable, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            assert readable, f"Chromium did not answer within {DEADLINE:.0f} s"
            got = os.read(self._read, 1 << 16)
            assert got, "Chromium has ended"
            self._left += got
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        if message.get("method") == "Page.loadEventFired":
            self._loaded = True
        return message
