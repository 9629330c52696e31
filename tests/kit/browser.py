"""A headless Chromium, driven by chromedriver (https://www.w3.org/TR/webdriver2/), and `eschedule ui` for it."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.servers import Server, free_port, wait_until

ARGUMENTS = (
    *('--headless=new', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync'),
    *('--disable-background-networking', '--disable-component-update', '--hide-scrollbars', '--disable-dev-shm-usage'),
)
# Keys of WebDriver.
ESCAPE, TAB, ENTER, LEFT, UP, RIGHT, DOWN = '\ue00c', '\ue004', '\ue007', '\ue012', '\ue013', '\ue014', '\ue015'


class Ui(Server):
    name = 'ui'

    def __init__(self, config: Path, directory: Path) -> None:
        super().__init__(directory)
        self._config = config

    def command(self) -> list[str]:
        return [sys.executable, '-m', 'ecomp.schedule', 'ui']

    def environment(self) -> dict[str, str]:
        # Commands in the page then need no --config.
        return {**super().environment(), 'ECOMP_CONFIG': str(self._config.parent)}

    def is_ready(self) -> bool:
        return bool(self.find_url())

    def find_url(self) -> str:
        return next(iter(re.findall('^http://.*/$', self.log.read_text(), re.MULTILINE)), '')


class Browser(Server):
    name = 'chromedriver'

    def __init__(self) -> None:
        super().__init__()  # pytest's own directories are too long for Chromium's socket
        self._port, self._session = free_port(), ''

    def command(self) -> list[str]:
        return ['chromedriver', f'--port={self._port}']

    def environment(self) -> dict[str, str]:
        return {**super().environment(), 'TMPDIR': str(self.directory), 'HOME': str(self.directory)}

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._call('GET', '/status')['ready'])
        return False

    def close(self) -> None:
        if self._session and self.is_running:
            self._call('DELETE', self._session)  # chromedriver ends Chromium
        super().close()

    def open(self, url: str, width: int = 1280, height: int = 800, scheme: str = 'light') -> None:
        if not self._session:
            options = {'args': [*ARGUMENTS, f'--user-data-dir={self.directory}/profile']}
            wanted = {'capabilities': {'alwaysMatch': {'browserName': 'chrome', 'goog:chromeOptions': options}}}
            self._session = f'/session/{self._call("POST", "/session", wanted)["sessionId"]}'
        self.emulate(width, height, scheme)
        self._call('POST', f'{self._session}/url', {'url': url})

    def emulate(self, width: int, height: int, scheme: str = 'light') -> None:
        size = {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': False}
        self.send('Emulation.setDeviceMetricsOverride', **size)
        features = [{'name': 'prefers-color-scheme', 'value': scheme}]
        self.send('Emulation.setEmulatedMedia', features=features)

    def send(self, command: str, **parameters: Any) -> Any:
        """Send a command of the Chrome DevTools Protocol."""
        return self._call('POST', f'{self._session}/goog/cdp/execute', {'cmd': command, 'params': parameters})

    def run(self, script: str, *arguments: object) -> Any:
        """Return what the body of a function returns in the page."""
        return self._call('POST', f'{self._session}/execute/sync', {'script': script, 'args': arguments})

    def press(self, *keys: str) -> None:
        actions = [{'type': kind, 'value': key} for key in keys for kind in ('keyDown', 'keyUp')]
        body = {'actions': [{'type': 'key', 'id': 'keyboard', 'actions': actions}]}
        self._call('POST', f'{self._session}/actions', body)

    def wait(self, script: str, description: str, seconds: float = 5) -> Any:
        return wait_until(lambda: self.run(script), seconds, description)

    def take_picture(self) -> bytes:
        return base64.b64decode(self._call('GET', f'{self._session}/screenshot'))

    def list_messages(self) -> Sequence[str]:
        """Return the errors and warnings of the page since the last call."""
        logged = self._call('POST', f'{self._session}/se/log', {'type': 'browser'})
        return [entry['message'] for entry in logged]

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f'http://127.0.0.1:{self._port}{path}'
        request = urllib.request.Request(url, data, {'Content-Type': 'application/json'}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)['value']
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)['value']['message']) from error
