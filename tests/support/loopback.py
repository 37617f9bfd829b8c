"""A server on loopback in a thread: a subclass answers requests; what was asked is kept."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass
class Request:
    """method, path with its query, and headers in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Answer:
    """What is sent: status, headers and body.

    cut: send no more than this many bytes of the body, then close the connection.
    pause: seconds before the body; chunk: bytes sent between two pauses, 0 for all at once.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    pause: float = 0.0
    chunk: int = 0


class _Listener(ThreadingHTTPServer):
    # The default, 5, lets most of 64 simultaneous connections wait seconds to be repeated.
    request_queue_size = 128


class Server:
    """`with Server(answer) as server`: `server.url`, and `server.requests` in their order."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self.answer, self.requests = answer, list[Request]()
        self.stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers)
                outer.requests.append(request)
                outer.send(self, outer.answer(request))

            do_GET = do_HEAD = do_POST = respond

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.httpd = _Listener(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.httpd.handle_error = lambda *_: None  # type: ignore[method-assign]  clients leave
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def paths(self, method: str = "GET") -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body = answer.body
        try:
            handler.send_response(answer.status)
            for name, value in ({"Content-Length": str(len(body))} | answer.headers).items():
                handler.send_header(name, value)
            handler.end_headers()
            if handler.command == "HEAD":
                return
            body = body if answer.cut is None else body[: answer.cut]
            step = answer.chunk or max(len(body), 1)
            for start in range(0, max(len(body), 1), step):
                if answer.pause and self.stopped.wait(answer.pause):
                    break
                handler.wfile.write(body[start : start + step])
                handler.wfile.flush()
        except OSError:  # the client left
            handler.close_connection = True
        handler.close_connection = handler.close_connection or answer.cut is not None

    def __enter__(self) -> "Server":
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopped.set()
        self.httpd.shutdown()
        self.httpd.server_close()
