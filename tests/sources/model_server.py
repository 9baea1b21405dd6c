"""A model server that misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def model_bytes(size: int = 200_000, seed: int = 1) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


@dataclass
class Blob:
    """What the server does with one path. Lists hold one value a request; the last one stays in force."""

    data: bytes
    cut: list[int | None] = field(default_factory=lambda: [None])  # close the connection after that many body bytes
    status: list[int] = field(default_factory=lambda: [200])
    ranges: bool = True  # honours Range
    chunked: bool = False  # states no length; a cut then looks like a complete body
    content_range: str | None = None  # a lie
    headers: dict[str, str] = field(default_factory=dict)


class ModelServer:
    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.auth: list[str | None] = []
        self.sent = 0  # body bytes
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: object) -> None:
                pass  # a client that was killed is part of the tests

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def gets(self, path: str) -> list[str | None]:
        """The Range of every request for a path."""
        return [r for p, r in self.requests if p == path]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            blob = self.blobs.get(handler.path.partition("?")[0])
            wanted = handler.headers.get("Range")
            self.requests.append((handler.path.partition("?")[0], wanted))
            self.auth.append(handler.headers.get("Authorization"))
            if blob is None:
                blob = Blob(b"not here", status=[404])
            status = blob.status.pop(0) if len(blob.status) > 1 else blob.status[0]
            cut = blob.cut.pop(0) if len(blob.cut) > 1 else blob.cut[0]
        body, start = blob.data, 0
        if wanted and blob.ranges and status == 200:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            body, status = blob.data[start:], 206
        handler.send_response(status)
        if status == 206:
            stated = f"bytes {start}-{len(blob.data) - 1}/{len(blob.data)}"
            handler.send_header("Content-Range", blob.content_range or stated)
        for name, value in blob.headers.items():
            handler.send_header(name, value)
        handler.send_header(*(("Transfer-Encoding", "chunked") if blob.chunked else ("Content-Length", str(len(body)))))
        handler.end_headers()
        part = body if cut is None else body[:cut]
        with self._lock:
            self.sent += len(part)
        try:
            if blob.chunked:
                handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part) if part else b"0\r\n\r\n")
            else:
                handler.wfile.write(part)
            handler.wfile.flush()
            if cut is not None and not blob.chunked:
                handler.connection.shutdown(socket.SHUT_RDWR)
                handler.close_connection = True
        except OSError:
            handler.close_connection = True

    # The Ollama registry's two paths.
    def ollama(self, data: bytes, name: str = "library/tiny", tag: str = "latest", **how: object) -> Blob:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        layers = [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64, "size": 3},
            {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": len(data)},
        ]
        self.manifest({"schemaVersion": 2, "layers": layers}, name, tag)
        blob = self.blobs[f"/v2/{name}/blobs/{digest}"] = Blob(data, **how)
        return blob

    def manifest(self, content: object, name: str = "library/tiny", tag: str = "latest") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.blobs[f"/v2/{name}/manifests/{tag}"] = Blob(data)
