"""Serves the page of a running job, only on this machine's loopback."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from unbounded.errors import PlanError
from unbounded.observe.report.page import Report

_LOOPBACK = "127.0.0.1"
_OUR_NAMES = ("127.0.0.1", "localhost")


def open_server(read: Callable[[], Report], port: int = 0) -> ThreadingHTTPServer:
    """A server of the page that `read` returns at each request. `serve_forever` runs it; see `server_port`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in _OUR_NAMES:  # a page of another site, through a host name that points here
                self._answer(403, "not here")
            elif self.path == "/":
                self._answer(200, read().page(live=True))
            elif self.path == "/body":
                self._answer(200, read().body())
            else:
                self._answer(404, "there is nothing here")

        def _answer(self, code: int, page: str) -> None:
            content = page.encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: requests come every two seconds."""

    try:
        return ThreadingHTTPServer((_LOOPBACK, port), Handler)
    except OSError as error:
        raise PlanError(f"port {port} cannot be served: {error.strerror}. Choose another with --watch PORT.") from None
