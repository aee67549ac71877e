"""The page served on this machine while runs go on: it asks every few seconds for what is new.

Only the loopback address is listened on, and only requests that name it are answered, so that no
other machine and no foreign web page can read along.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedproto.errors import ConfigError, FedprotoError, StoreError
from fedproto.report.html import page_content, render
from fedproto.report.panels import DataPanels, Followers

ADDRESS = "127.0.0.1"
IDLE_FOR = 20.0
"""Seconds until a connection on which nothing comes, or nobody reads, is closed."""

MOST_CONNECTIONS = 64
_WATCHED = ("run.json", "rounds.jsonl", "analysis/*.json", "analysis/maps")


class LiveReport:
    """What the server answers with; made anew only when a file has changed."""

    def __init__(
        self,
        paths: Sequence[Path],
        title: str,
        *,
        metric: str | None = None,
        target: float | None = None,
        panels: DataPanels | None = None,
    ) -> None:
        for path in paths:
            if not path.exists():
                raise StoreError(f"{path} does not exist; name a folder that runs are written to")
        self._followers = Followers(paths)
        self._title, self._metric, self._target = title, metric, target
        self._panels = panels
        self._methods: list[str] = []
        self._lock = threading.Lock()
        self._seen: object = None
        self._news = b"{}"
        self._tag = ""

    def page(self) -> str:
        """The whole page."""
        with self._lock:
            return render(self._content(pictures=True), self._title, live=True)

    def news(self) -> tuple[bytes, str]:
        """What the page shows but for the pictures, as JSON, and a tag that tells it apart."""
        with self._lock:
            seen = list(self._files())
            if seen != self._seen:
                self._seen = seen
                self._news = json.dumps(self._content(pictures=False), allow_nan=False).encode()
                self._tag = f'"{hashlib.sha256(repr(seen).encode()).hexdigest()[:16]}"'
            return self._news, self._tag

    def _content(self, *, pictures: bool) -> dict[str, Any]:
        try:
            runs, problems = self._followers.update(forgiving=True)
            content = page_content(
                runs,
                metric=self._metric,
                target=self._target,
                panels=self._panels,
                problems=problems,
                pictures=pictures,
                known=self._methods,
            )
        except FedprotoError as error:
            return page_content([], problems=[str(error)], pictures=pictures)
        seen = [*self._methods, *(method["title"] for method in content["methods"])]
        self._methods = list(dict.fromkeys(seen))
        return content

    def _files(self) -> Iterator[tuple[str, int, int]]:
        for path in self._followers.paths:
            for run in sorted(path.rglob("run.json")):
                for pattern in _WATCHED:
                    for file in sorted(run.parent.glob(pattern)):
                        try:
                            status = file.stat()
                        except FileNotFoundError:  # gone since it was listed
                            continue
                        yield str(file), status.st_size, status.st_mtime_ns


class LiveServer(ThreadingHTTPServer):
    """Serves a live report on the loopback address."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, report: LiveReport, port: int) -> None:
        self.report = report
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._changing = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"port {port} cannot be used ({reason}); choose another with --port, or --port 0"
                " for any free one"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; of too many connections at once the oldest is closed.

        So whoever sends a request byte by byte keeps nobody else out.
        """
        with self._changing:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Forgets the connection when it is closed."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changing:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves out what a browser that went away in the middle of an answer would print."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = IDLE_FOR

    def do_GET(self) -> None:
        """Answers with the page or with news."""
        if self.headers.get("Host", "").rpartition(":")[0] not in (ADDRESS, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "ask by the loopback address")
            return
        answers: dict[str, Callable[[], None]] = {"/": self._page, "/data.json": self._news}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the terminal quiet."""

    def _page(self) -> None:
        self._send(self.server.report.page().encode(), "text/html; charset=utf-8")

    def _news(self) -> None:
        content, tag = self.server.report.news()
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
        else:
            self._send(content, "application/json", tag)

    def _send(self, content: bytes, kind: str, tag: str = "") -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)
