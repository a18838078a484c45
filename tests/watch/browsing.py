"""A headless Chromium, by its driver, for the pages of runs."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request


def request(method, url, /, **body):
    data = json.dumps(body).encode() if method == "POST" else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:  # what went wrong stands in its body
        with error:
            raise AssertionError(f"{method} {url}: {error.read().decode()}") from None


@contextlib.contextmanager
def browser(tmp_path):
    """A session with a headless Chromium by chromedriver's HTTP interface: `session(method, path, **body)`."""
    log = tmp_path / "driver.log"
    with open(log, "w") as file:
        process = subprocess.Popen(["chromedriver", "--port=0"], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while "successfully on port" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        port = log.read_text().split("successfully on port ")[1].split(".")[0]
        arguments = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
        arguments += f" disable-component-update disable-sync user-data-dir={tmp_path / 'profile'}"
        chrome = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": [f"--{argument}" for argument in arguments.split()]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        base = f"http://127.0.0.1:{port}/session"
        name = request("POST", base, capabilities={"alwaysMatch": chrome})["sessionId"]
        try:
            yield lambda method, path, /, **body: request(method, f"{base}/{name}/{path}", **body)
        finally:
            request("DELETE", f"{base}/{name}")
    finally:
        process.terminate()
        process.wait()


BROWSERS = ("chromium", "google-chrome", "chrome")
no_browser = not (shutil.which("chromedriver") and any(map(shutil.which, BROWSERS)))
