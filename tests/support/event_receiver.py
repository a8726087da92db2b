"""A receiver of webhooks on loopback, which answers as a test says."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, RESET = "hang", "reset"


class Receiver:
    """Keeps what was posted. `answers`: for the first posts, a status, (status, headers), HANG or
    RESET; the last is that of all further ones.
    """

    def __init__(self, answers=(200,), port=0):
        self.answers = list(answers)
        self.posts = []  # (monotonic time, headers, body) of every post
        self.received = Counter()  # ids of events in posts that were answered with 2xx
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                receiver.answer(self)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def port(self):
        return self._server.server_address[1]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/events"

    def answer(self, request):
        body = request.rfile.read(int(request.headers["content-length"]))
        answer = self.answers[min(len(self.posts), len(self.answers) - 1)]
        self.posts.append((time.monotonic(), request.headers, body))
        if answer == HANG:
            self.over.wait(60)
            return
        if answer == RESET:
            request.connection.close()
            return
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        if 200 <= status < 300:
            self.received.update(event["id"] for event in json.loads(body)["events"])
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", "0")
        request.end_headers()

    def close(self):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
