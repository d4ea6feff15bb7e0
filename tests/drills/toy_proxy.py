"""A reverse proxy before a real S3 server that breaks some of the requests: `toy_proxy.py UPSTREAM_PORT JSON`, prints its port, then a line
for each fault. The Host header goes through untouched, so signatures still hold.

Faults, by their share of requests: `slow_down` (503 without doing it), `reset` (connection reset without doing it), `lost` (done, but the
answer is thrown away), `flip` (one bit of an object that is read by ranges). `first` lists methods whose first request loses its answer.
"""

from __future__ import annotations

import json
import random
import socket
import socketserver
import struct
import sys
import threading

UPSTREAM = ("127.0.0.1", int(sys.argv[1]))
WISHES = json.loads(sys.argv[2])
CHANCE = random.Random(WISHES.get("seed", 0))
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_lock = threading.Lock()


def choose(method: str) -> str:
    with _lock:
        if method in WISHES.get("first", []):
            WISHES["first"].remove(method)
            fault = "lost"
        else:
            drawn, fault = CHANCE.random(), ""
            for name in ("slow_down", "reset", "lost", "flip"):
                if 0 <= drawn < WISHES.get(name, 0.0) and (name != "flip" or method == "GET"):
                    fault = name
                    break
                drawn -= WISHES.get(name, 0.0)
        if fault:
            print(fault, method, flush=True)
        return fault


def read_head(stream: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = stream.recv(65536)
        if not piece:
            return b"", b""
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def reset(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


class Proxied(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        client: socket.socket = self.request
        head, body = read_head(client)
        if not head:
            return
        method = head.split(b" ", 1)[0].decode()
        fault = choose(method)
        if fault == "reset":
            return reset(client)
        if header(head, b"expect").lower() == b"100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        missing = int(header(head, b"content-length") or b"0") - len(body)
        while missing > 0:
            piece = client.recv(min(missing, 1 << 16))
            if not piece:
                return None
            body += piece
            missing -= len(piece)
        if fault == "slow_down":
            answer = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            return client.sendall(answer % len(SLOW_DOWN) + SLOW_DOWN)
        answer = forwarded(head, body)
        if fault == "lost":
            return reset(client)
        if fault == "flip":
            answer_head, _, content = answer.partition(b"\r\n\r\n")
            if content and header(head, b"range"):
                content = bytes([content[0] ^ 1]) + content[1:]
            answer = answer_head + b"\r\n\r\n" + content
        return client.sendall(answer)


def forwarded(head: bytes, body: bytes) -> bytes:
    lines = [line for line in head.rstrip(b"\r\n").split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
    answer = bytearray()
    with socket.create_connection(UPSTREAM) as upstream:
        upstream.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
        while piece := upstream.recv(1 << 20):
            answer += piece
    return bytes(answer)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this is about."""


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Proxied) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
