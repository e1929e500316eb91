"""A small HTTP server that predicts with a sparse model: one file, no framework.

    python examples/server.py simplicit-quickstart/model.safetensors --port 8000
    curl -s localhost:8000/predict -H 'Content-Type: application/json' -d '{"inputs": [[0, 0, 0]]}'

Inputs are raw values as the model's preprocessing expects them (pixels 0 to 255 for the quick start's model); one sample a
row, images as nested lists or flat. ``application/octet-stream`` takes a ``.npy`` file and returns one. GET / says what is
served. For a trusted network: there is no authentication and no encryption, and the body of a request is limited.
"""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from simplicit import ImplicitModel

LARGEST_BODY = 64 << 20


class Refused(Exception):
    """A request that is answered with 4xx and a line that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Every request has a thread of its own; prediction releases the interpreter's lock."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: ImplicitModel, threads: int) -> None:
        super().__init__(address, Handler)
        self.model, self.threads = model, threads
        self.served, self.lock = 0, threading.Lock()

    def about(self) -> dict:
        model = self.model
        return {"inputs": model.n_inputs, "outputs": model.n_outputs, "sparsity": model.sparsity().sparsity, "served": self.served}

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        if inputs.ndim < 2 or not np.issubdtype(inputs.dtype, np.number):
            raise Refused(400, f"inputs: expected numbers, one sample a row, got {inputs.dtype} of shape {inputs.shape}")
        if not np.isfinite(inputs).all():
            raise Refused(400, "inputs: expected finite numbers")
        try:
            outputs = self.model.predict(inputs, threads=self.threads)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        with self.lock:
            self.served += len(inputs)
        return outputs


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply(200, self.server.about())
        else:
            self.reply(404, {"error": "expected / or /predict"})

    def do_POST(self) -> None:
        try:
            if self.path != "/predict":
                raise Refused(404, "expected /predict")
            body = self.body()
            if self.headers.get_content_type() == "application/octet-stream":
                # No pickles: an array from outside is numbers or it is refused.
                outputs = io.BytesIO()
                np.save(outputs, self.server.predict(self.array(body)))
                self.send(200, "application/octet-stream", outputs.getvalue())
                return
            begin = time.perf_counter()
            outputs = self.server.predict(self.nested(body))
            seconds = time.perf_counter() - begin
            self.reply(200, {"outputs": outputs.tolist(), "classes": outputs.argmax(axis=1).tolist(), "seconds": seconds})
        except Refused as refused:
            # What was not read would be taken for the next request.
            self.close_connection = True
            self.reply(refused.status, {"error": str(refused)})

    def body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise Refused(411, "expected a Content-Length")
        if int(length) > LARGEST_BODY:
            raise Refused(413, f"expected at most {LARGEST_BODY} bytes, got {length}")
        return self.rfile.read(int(length))

    @staticmethod
    def array(body: bytes) -> np.ndarray:
        try:
            return np.load(io.BytesIO(body), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise Refused(400, f"expected a .npy file: {error}") from error

    @staticmethod
    def nested(body: bytes) -> np.ndarray:
        try:
            return np.asarray(json.loads(body)["inputs"], dtype=np.float32)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(400, 'expected {"inputs": [[…], …]} with numbers, all samples of one length') from error

    def reply(self, status: int, what: dict) -> None:
        self.send(status, "application/json", json.dumps(what).encode())

    def send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing a line: put a proxy in front for logs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model file, as simplicit train writes it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--threads", type=int, default=1, help="per request")
    args = parser.parse_args()
    server = Server((args.host, args.port), ImplicitModel.load(args.model), args.threads)
    print(f"http://{args.host}:{server.server_port} {json.dumps(server.about())}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
