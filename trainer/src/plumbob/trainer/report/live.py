"""`report --live`: serve the page on this machine alone, written anew whenever the runs have a new step."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.report.run_data import run_directories
from plumbob.trainer.report.write import page, read
from plumbob.trainer.run_files.run_directory import run_directory_of

HOST = "127.0.0.1"


def serve(paths: Sequence[Path], port: int, limit: int | None) -> ThreadingHTTPServer:
    """A server of the page of these runs, not yet started. Raises UserError if the port is taken, or a path is no run."""
    read(paths, limit=1)  # a mistake in a path is told before the browser asks
    held = _Held(paths, limit)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may point a name of its own at this address; only our own address is answered.
            if self.headers.get("Host") not in (f"{HOST}:{server.server_port}", f"localhost:{server.server_port}"):
                return self.send_error(403)
            if self.path == "/":
                return self._send("text/html; charset=utf-8", held.page())
            if self.path == "/state":
                return self._send("application/json", json.dumps({"state": held.state()}).encode())
            return self.send_error(404)

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not printed."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    server.daemon_threads = True
    return server


class _Held:
    """The page as it was last written, and the state of the runs that it shows."""

    def __init__(self, paths: Sequence[Path], limit: int | None) -> None:
        self.paths, self.limit = paths, limit
        self._lock = threading.Lock()
        self._page, self._state = b"", ""

    def state(self) -> str:
        """What changes when a run has a new step, evaluation or warning."""
        directories = [run_directory_of(path) for path in run_directories(self.paths)]
        files = [
            folder / name for folder in directories for name in ("metrics.jsonl", "warnings.jsonl", "summary.json")
        ]
        return " ".join(f"{file.stat().st_size}:{file.stat().st_mtime_ns}" if file.exists() else "-" for file in files)

    def page(self) -> bytes:
        with self._lock:
            state = self.state()
            if state != self._state:
                self._page = page(read(self.paths, self.limit), live=True).encode()
                self._state = state
            return self._page
