"""Receivers of alerts on loopback: real HTTP and SMTP over real sockets, which keep what they were sent."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpReceiver:
    """`messages` in the order of their arrival. `status` is what it answers; only a 2xx counts as taken."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.messages: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.status < 300:
                    receiver.messages.append(json.loads(body))
                self.send_response(receiver.status)
                if receiver.status in (301, 302):
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook-with-a-secret"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def http_receiver(port: int = 0) -> Iterator[HttpReceiver]:
    receiver = HttpReceiver(port)
    try:
        yield receiver
    finally:
        receiver.close()


class _SmtpSession(socketserver.StreamRequestHandler):
    """The part of RFC 5321 that a client needs to hand over a message, and AUTH PLAIN (RFC 4954)."""

    server: SmtpReceiver

    def handle(self) -> None:
        self._say("220 receiver")
        self._envelope: dict[str, Any] = {"to": []}
        while line := self.rfile.readline().decode().strip():
            verb = line.partition(" ")[0].upper()
            if verb == "DATA":
                self._take()
            elif verb in ("EHLO", "HELO"):
                self._say("250-receiver\r\n250 AUTH PLAIN" if self.server.asks_password else "250 receiver")
            elif verb == "AUTH":
                self.server.passwords.append(line.split()[-1])
                self._say("235 welcome")
            elif verb == "MAIL":
                self._envelope["from"] = line.partition(":")[2].split()[0].strip("<>")
                self._say("250 ok")
            elif verb == "RCPT":
                self._recipient(line.partition(":")[2].strip().strip("<>"))
            elif verb == "QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 ok")

    def _recipient(self, address: str) -> None:
        refused = address in self.server.refused
        if not refused:
            self._envelope["to"].append(address)
        self._say("550 nobody of that name" if refused else "250 ok")

    def _take(self) -> None:
        self._say("354 go on")
        lines = []
        while (line := self.rfile.readline().decode().rstrip("\r\n")) != ".":
            lines.append(line)
        self.server.mails.append({**self._envelope, "text": "\n".join(lines)})
        self._say("250 taken")

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


class SmtpReceiver(socketserver.ThreadingTCPServer):
    """`mails` are {from, to, text}; whoever is `refused` gets none."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, *, asks_password: bool = False, refused: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _SmtpSession)
        self.mails: list[dict[str, Any]] = []
        self.passwords: list[str] = []
        self.asks_password, self.refused = asks_password, refused
        self.address = f"127.0.0.1:{self.server_address[1]}"


@contextmanager
def smtp_receiver(*, asks_password: bool = False, refused: frozenset[str] = frozenset()) -> Iterator[SmtpReceiver]:
    server = SmtpReceiver(asks_password=asks_password, refused=refused)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
