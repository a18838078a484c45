"""A stand-in for the Hugging Face hub on this machine: repositories, and commits of small files."""

import base64
import contextlib
import http.server
import json
import threading


class Hub:
    """What was asked of it: requests as (method, path, content), commits as (repository, revision, message, files).

    Attributes:
      broken: refuse every commit.
    """

    def __init__(self):
        self.url, self.requests, self.commits, self.broken = "", [], [], False
        self.private: dict[str, bool | None] = {}

    def answer(self, path: str, body: bytes) -> tuple[int, object]:
        lines = [json.loads(line) for line in body.splitlines()] or [{}]
        parts = path.split("?")[0].strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            return 200, {"name": "me", "type": "user", "auth": {}}
        if parts == ["api", "repos", "create"]:
            name = f"{lines[0].get('organization') or 'me'}/{lines[0]['name']}"
            if name.startswith("other/"):
                return 403, {"error": "not yours"}
            visibility = {"private": True, "public": False}.get(lines[0].get("visibility"))
            self.private[name] = lines[0].get("private", visibility)  # of older and newer clients
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": "1"}
        if parts[4:5] == ["preupload"]:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines[0]["files"]]
            return 200, {"files": files}
        if parts[4:5] == ["commit"] and not self.broken:
            head = next(line["value"] for line in lines if line["key"] == "header")
            files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            content = {name: base64.b64decode(text) for name, text in files.items()}
            self.commits.append(("/".join(parts[2:4]), parts[5], head["summary"], content))
            url = f"{self.url}/{'/'.join(parts[2:4])}/commit/{len(self.commits)}"
            return 200, {"commitUrl": url, "commitOid": f"{len(self.commits):040x}", "success": True}
        return 404, {"error": f"nothing at {path}"}


@contextlib.contextmanager
def serving(monkeypatch):
    """Serve a hub, and have huggingface_hub and this library turn to it, with a token."""
    from huggingface_hub import constants

    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append((self.command, self.path, self.headers.get("Authorization"), body))
            status, content = hub.answer(self.path, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
