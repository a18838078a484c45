"""A fake vLLM server: it answers the requests of `engines.vllm` with a tiny model and produces faults on demand.

It behaves like vLLM 0.32: `reload_weights` leaves a tied head unchanged unless the file stores it under its own name,
an adapter must be loaded before it is requested, and a restarted server has its initial weights.
"""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax import from_pretrained, load_lora
from grpo_jax.maths.sampling import Sampling, process_logits
from grpo_jax.types import as_jit_argument

LENGTH = 96


@jax.jit
def _logits(model, params, head, tokens):
    hidden, _ = model.apply({"params": params}, tokens[:, None], method="hidden")
    return model.apply({"params": head}, hidden[:, 0], method="unembed")


class StandIn:
    """A fake server: `with StandIn(policy) as server:` serves at `server.url`; `requests` lists all (path, body).

    Attributes:
      fault: `fault(path, body, n)` returns the fault for the n-th request: None, a status, "hang", "drop" (close the
        connection), "abort" or "early" (end a completion without a reason).
      late: number of tokens drawn after a stop string.
      deaf_head: whether a reload leaves the head unchanged.
      drawn: (weight version, body) of each completion, in request order.
    """

    def __init__(self, base, *, key=None):
        self.base, self.key, self.room, self.raw = base, key, LENGTH, False
        self.deaf_head, self.says_version = False, True
        self.requests, self.fault, self.port, self.most = [], lambda path, body, n: None, 0, 0
        self.drawn, self.late, self.max_logprobs = [], 0, 20
        self._at_once, self._lock = 0, threading.Lock()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Start serving the initial weights; a restart keeps the port."""
        self.params = self.head = self.base.params
        self.adapters, self.version, self.paused, self._open = {}, "default", False, set()
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self._server.daemon_threads, self.port = True, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        """Stop at once and close all open connections."""
        self._server.shutdown()
        self._server.server_close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def posts(self, path):
        return [body for asked, body in self.requests if asked.split("?")[0] == path]

    def answer(self, path, body):
        """Return (status, content) for a request."""
        path = path.split("?")[0]
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            names = [("base", None), *((name, "base") for name in self.adapters)]
            return 200, {"data": [{"id": n, "root": "base", "parent": p, "max_model_len": self.room} for n, p in names]}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/weight_info" and self.says_version:
            return 200, {"weight_version": self.version}
        return self.change(path, body), {}

    def change(self, path, body):
        """Apply a request that changes the server's state, and return the status."""
        if path == "/v1/load_lora_adapter":
            loaded = load_lora(body["lora_path"], self.base)
            self.adapters[body["lora_name"]] = loaded.model, loaded.params
        elif path == "/v1/unload_lora_adapter":
            return 404 if self.adapters.pop(body["lora_name"], None) is None else 200
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/collective_rpc":
            assert self.paused, "the weights were changed without a pause"
            self.reload(body["kwargs"]["weights_path"])
        elif path == "/update_weight_version" and self.says_version:
            self.version = body["new_version"]
        elif path != "/reset_prefix_cache":
            return 404
        return 200

    def reload(self, directory):
        loaded = from_pretrained(directory).params
        written = {name for file in Path(directory).glob("*.safetensors") for name in load_file(file)}
        if "lm_head.weight" in written and not self.deaf_head:
            self.head = loaded
        self.params = loaded

    def complete(self, body):
        name = body["model"]
        if name != "base" and name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        model, params = self.adapters.get(name, (self.base.model, self.params))
        head = params if name != "base" else self.head
        ids, drawn, log_probs = list(body["prompt"]), [], []
        if (asked := body.get("prompt_logprobs", 0)) > self.max_logprobs:
            said = f"Requested prompt logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            return 400, {"error": {"message": said}}
        with self._lock:
            self._at_once += 1
            self.most = max(self.most, self._at_once)
            self.drawn.append((self.version if name == "base" else name, body))
        rng = np.random.default_rng(body.get("seed", 0))
        sampling = Sampling(body.get("temperature", 1.0), body.get("top_k", 0), body.get("top_p", 1.0))
        given = self.logits(model, params, head, ids) if "prompt_logprobs" in body else None
        found = None
        while len(drawn) < body["max_tokens"] and (found is None or len(drawn) < found + self.late):
            logits = self.logits(model, params, head, ids + drawn)[len(ids) + len(drawn) - 1]
            cut = np.asarray(process_logits(jnp.asarray(logits), sampling))
            p = np.exp(cut - cut.max())
            token = int(cut.argmax()) if sampling.temperature == 0 else int(rng.choice(len(p), p=p / p.sum()))
            drawn.append(token)
            log_probs.append(float(jax.nn.log_softmax(jnp.asarray(logits if self.raw else cut))[token]))
            if token in body.get("stop_token_ids", ()):
                break
            # Like vLLM, search the text of complete characters without special tokens.
            text = self.base.tokenizer.decode(drawn, skip_special_tokens=True).rstrip("\ufffd")
            if found is None and any(one in text for one in body.get("stop", ())):
                found = len(drawn)
        with self._lock:
            self._at_once -= 1
        ended = found is not None or drawn[-1] in body.get("stop_token_ids", ())
        choice = {"token_ids": drawn, "finish_reason": "stop" if ended else "length"}
        choice["logprobs"] = {"token_logprobs": log_probs}
        if given is not None:
            l, k = np.asarray(jax.nn.log_softmax(jnp.asarray(given), axis=-1)), body["prompt_logprobs"]
            told = [[t, *np.argsort(-l[i])[:k].tolist()] for i, t in enumerate(ids[1:])]  # the prompt token first
            choice["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": float(l[i, t])} for t in tokens} for i, tokens in enumerate(told)),
            ]
        return 200, {"choices": [choice]}

    def logits(self, model, params, head, ids):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(_logits(as_jit_argument(model), params, head, tokens))[0]


def serving(policy, **how):
    """Return a fixture that serves the policy."""

    @pytest.fixture
    def server():
        with StandIn(policy, **how) as one:
            yield one

    return server


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with the default of 5, some of many simultaneous connections wait for a second


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: StandIn

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.server_of._open.add(self.connection)

    def do_GET(self):
        self.handle_one(None)

    def do_POST(self):
        self.handle_one(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def handle_one(self, body):
        server = self.server_of
        with server._lock:
            n = len(server.requests)
            server.requests.append((self.path, body))
        if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.send(401, {"error": "Unauthorized"})
        fault = server.fault(self.path, body, n)
        if isinstance(fault, int):
            return self.send(fault, {"error": {"message": f"told to answer {fault}"}})
        if fault == "hang":
            time.sleep(3)
        if fault == "drop":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        status, content = server.answer(self.path, body)
        if fault == "abort":
            content["choices"][0]["finish_reason"] = "abort"
        if fault == "early":
            choice = content["choices"][0]
            choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:1], "stop"
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:1]
        return self.send(status, content)

    def send(self, status, content):
        data = json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
