"""A local substitute for the Hugging Face hub: repositories with branches, commits, large files and downloads."""

import base64
import contextlib
import hashlib
import http.server
import json
import tempfile
import threading
import urllib.parse


class Hub:
    """The requests that the server received, and its repositories."""

    def __init__(self):
        self.url, self.broken = "", False  # broken: whether to refuse every commit
        self.requests = []  # (method, path, authorization, content)
        self.commits = []  # (repository, revision, message, files by name)
        self.large: tuple[str, ...] = ()  # name suffixes of files in LFS
        self.private: dict[str, bool | None] = {}
        self.heads: dict[tuple[str, str], str] = {}  # (repository, branch): commit
        self.trees: dict[str, dict[str, bytes]] = {}  # commit: files
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object, dict[str, str]]:
        """Return (status, content, headers); the content is bytes or a JSON object."""
        path = urllib.parse.unquote(path.split("?")[0]).strip("/")
        lines = [] if method == "PUT" else [json.loads(line) for line in body.splitlines()] or [{}]
        answer: tuple[int, object, dict[str, str]] = (404, {"error": f"nothing at {path}"}, {})
        match path.split("/"):
            case ["store", name] if method == "PUT":
                self.stored[name], answer = body, (200, {}, {})
            case ["api", "models", owner, name, what, *rest] if rest:
                answer = self._of_repository(f"{owner}/{name}", what, "/".join(rest), lines)
            case [owner, name, "resolve", revision, *file] if file:
                answer = self._resolve(f"{owner}/{name}", revision, "/".join(file))
            case ["api", "whoami-v2"]:
                answer = 200, {"name": "me", "type": "user", "auth": {}}, {}
            case ["api", "validate-yaml"]:
                answer = 200, {"errors": [], "warnings": []}, {}
            case ["api", "repos", "create"]:
                answer = self._create(lines[0])
            case [*_, "info", "lfs", "objects", "batch"]:
                objects = [{**item, "actions": self._upload_of(item["oid"])} for item in lines[0]["objects"]]
                answer = 200, {"transfer": "basic", "objects": objects}, {}
        return answer

    def _create(self, asked):
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name.startswith("other/"):
            return 403, {"error": "not yours"}, {}
        visibility = {"private": True, "public": False}.get(asked.get("visibility"))
        self.private.setdefault(name, asked.get("private", visibility))  # for older and newer clients
        self.heads.setdefault((name, "main"), "0" * 40)
        self.trees.setdefault("0" * 40, {})
        return 200, {"url": f"{self.url}/{name}", "name": name, "id": "1"}, {}

    def _upload_of(self, oid):
        return {} if oid in self.stored else {"upload": {"href": f"{self.url}/store/{oid}"}}

    def _of_repository(self, name, what, revision, lines):
        revision, _, folder = revision.partition("/") if what == "tree" else (revision, "", "")
        commit = self.heads.get((name, revision), revision)
        if commit not in self.trees and what != "branch":
            code = "RevisionNotFound" if (name, "main") in self.heads else "RepoNotFound"
            return 404, {"error": code}, {"X-Error-Code": code}
        if what == "commit":
            return (404, {"error": "broken"}, {}) if self.broken else self._commit(name, revision, lines)
        if what == "branch":
            known = (name, revision) in self.heads
            self.heads.setdefault((name, revision), self.heads[name, "main"])
            return (409, {"error": "it is there"}, {}) if known else (200, {}, {})
        return getattr(self, f"_{what}")(name, commit, folder, lines)

    def _revision(self, name, commit, *_):
        return 200, {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in self.trees[commit]]}, {}

    def _tree(self, name, commit, folder, _):
        found = {path: content for path, content in self.trees[commit].items() if path.startswith(folder)}
        files = [{"type": "file", "path": path, "size": len(content), "oid": "0"} for path, content in found.items()]
        return (200, files, {}) if files else (404, {"error": folder}, {"X-Error-Code": "EntryNotFound"})

    def _preupload(self, name, commit, folder, lines):
        paths = [file["path"] for file in lines[0]["files"]]
        modes = {path: "lfs" if path.endswith(self.large or ("/",)) else "regular" for path in paths}
        return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}, {}

    def _commit(self, name, revision, lines):
        head = next(line["value"] for line in lines if line["key"] == "header")
        files = {v["path"]: base64.b64decode(v["content"]) for v in (x["value"] for x in lines if x["key"] == "file")}
        files |= {v["path"]: self.stored[v["oid"]] for v in (x["value"] for x in lines if x["key"] == "lfsFile")}
        self.commits.append((name, revision, head["summary"], files))
        commit = f"{len(self.commits):040x}"
        self.trees[commit] = self.trees[self.heads[name, revision]] | files
        self.heads[name, revision] = commit
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit, "success": True}, {}

    def _resolve(self, name, revision, file):
        commit = self.heads.get((name, revision), revision)
        if file not in self.trees.get(commit, {}):
            code = "EntryNotFound" if commit in self.trees else "RevisionNotFound"
            return 404, {"error": code}, {"X-Error-Code": code}
        content = self.trees[commit][file]
        tag = hashlib.sha256(content).hexdigest()
        return 200, content, {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Content-Type": "application/octet-stream"}


@contextlib.contextmanager
def serving(monkeypatch):
    """Serve a hub, and make huggingface_hub and this library use it with a token."""
    from huggingface_hub import constants

    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append((self.command, self.path, self.headers.get("Authorization"), body))
            status, content, headers = hub.answer(self.command, self.path, body)
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        do_GET = do_HEAD = do_PUT = do_POST

        def log_message(self, *_):
            pass

    cache = tempfile.TemporaryDirectory()  # commits have the same ids in each test
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache.name)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet uses its own protocol
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        cache.cleanup()
