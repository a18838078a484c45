"""The report page embeds the data in the run's files, works in a browser and is not broken by untrusted text."""

import base64
import html
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from grpo_jax import GRPOConfig
from grpo_jax.watch.page import COMPLETION_BYTES, STEPS, TEXT, _data_url, html_report, write_report
from grpo_jax.watch.plots import POINTS
from grpo_jax.watch.writer import RunWriter, read_lines

pytestmark = pytest.mark.quick
BROWSERS = ("chromium", "google-chrome", "chrome")
NASTY = "</script><script>document.title='broken'</script><!-- <b>&amp; \u2028 \ud800 \x00 \u202e %TITLE% %DATA% 数字"
SHOWN = NASTY.replace("\ud800", "\\ud800").replace("\x00", "\\x00").replace("\u202e", "\\u202e")


def embedded(run_dir):
    found = re.search('<script type="application/json" id="data">(.*?)</script>', html_report(run_dir), flags=re.S)
    return json.loads(found[1])


def completion(i, **more):
    return {
        "prompt": f"prompt {i // 2}", "completion": f"completion {i}",
        "rewards": {"right": float(i % 2), "short": None if i == 3 else i / 8}, "advantage": i % 2 - 0.5,
        "ended": i != 5, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with three logged steps, two groups of two completions per step, and texts that try to inject markup."""
    writer = RunWriter(tmp_path_factory.mktemp("runs") / "run <i>&")
    writer.config(GRPOConfig(num_generations=2, per_device_train_batch_size=4, beta=0.125), note=NASTY)
    writer.metrics(0, {"eval/right": 0.25})
    for step in (1, 2, 3):
        kl = {"kl": None if step == 2 else step / 100}
        times = {"seconds/rollout": 2.0 * step, "seconds/update": 1.0, "seconds/total": 2.0 * step + 1.5}
        writer.metrics(
            step, {"reward": step / 4, "rewards/right/mean": step / 8, **kl, "num_tokens": 9 * step, **times}
        )
        rows = [completion(i, verdict=f"v{i}") for i in range(4)]
        rows[2]["completion"], rows[3]["completion"] = NASTY, [{"role": "assistant", "content": NASTY}]
        writer.completions(step, rows)
    writer.warning(2, "UserWarning", NASTY)
    return writer.run_dir


def test_headline_and_settings(run_dir):
    assert "Right on held-out prompts 0.25 in 3 steps.</p>" in html_report(run_dir)
    about = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    (_, config, changed), (_, versions, _) = embedded(run_dir)["settings"]
    assert (config, versions) == (about["config"], about["versions"])
    assert {"num_generations", "per_device_train_batch_size", "beta"} <= set(changed)
    assert "epsilon" not in changed


def test_data_adds_no_markup_and_no_requests(run_dir):
    page = html_report(run_dir)
    markup, scripts = re.subn(r"<script.*?</script>", "", page, flags=re.S)
    assert scripts == 2
    assert not {"script", "i", "b", "link", "img", "iframe"} & {*re.findall(r"<(\w+)", markup)}
    assert not re.search(r"\b(src|href|action|data)=", markup)
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; ' in page


def dialogue(*texts):
    who = ("policy", "environment")
    return [{"by": who[i % 2], "text": text} for i, text in enumerate(texts)]


def test_consecutive_groups_with_equal_prompts_are_separate(tmp_path):
    writer = RunWriter(tmp_path)
    writer.config(GRPOConfig(num_generations=2, per_device_train_batch_size=4))
    writer.completions(1, [completion(i, prompt="same") for i in range(4)])
    assert [len(group["rows"]) for group in embedded(tmp_path)["steps"][0]["groups"]] == [2, 2]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Completions for an image in a message, given by path, a PIL image, and no image; then with several turns.

    The prompts with images have equal text. The environment's text tries to inject markup.
    """
    writer = RunWriter(tmp_path_factory.mktemp("shown"))
    writer.config(GRPOConfig(num_generations=2, per_device_train_batch_size=6))
    path, wide = str(writer.path("digit.png")), Image.new("RGB", (400, 200), "blue")
    Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(path)
    parts = [{"type": "image", "image": path}, {"type": "text", "text": "Which digit?"}]
    rows = [completion(i, prompt=[{"role": "user", "content": parts}], images=[path]) for i in range(2)]
    rows.append(completion(2, prompt="Which color?", images=[wide, wide]))
    rows += [completion(i, prompt="Which color?") for i in range(2)]
    played = [completion(i, turns=dialogue(f"{i} is first", NASTY, "the last")) for i in range(2)]
    played[0]["completion"] = [{"role": "tool", "content": NASTY}]
    played[1]["turn_rewards"] = {"near": [0.5, 1.0]}
    writer.completions(1, [*rows, *played])
    return writer.run_dir


def test_images_are_thumbnails_next_to_their_prompts(shown):
    lines = list(read_lines(shown / "completions.jsonl"))
    assert lines[0]["images"] == [{"source": str(shown / "digit.png"), "thumbnail": lines[1]["images"][0]["thumbnail"]}]
    assert lines[2]["images"][0]["source"] == "<PIL.Image.Image image mode=RGB size=400x200>"
    groups = embedded(shown)["steps"][0]["groups"]
    assert [len(group["rows"]) for group in groups] == [2, 1, 2, 2]
    assert all("images" not in row for group in groups for row in group["rows"])
    urls = [group["images"] for group in groups]
    sizes = [[Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).size for url in found] for found in urls]
    assert sizes == [[(8, 8)], [(96, 48), (96, 48)], [], []]
    assert len(list((shown / "images").iterdir())) == 2
    (shown / "outside.jpg").write_bytes(b"secret")
    assert _data_url(shown, {"thumbnail": "../outside.jpg"}) == ""


def test_page_of_a_long_run_is_small_and_keeps_both_ends(tmp_path):
    assert (embedded(tmp_path)["panels"], embedded(tmp_path)["steps"]) == ([], [])
    writer = RunWriter(tmp_path)
    for step in range(1, 5001):
        writer.metrics(step, {"reward": step / 5000})
    for step in range(1, 31):
        text = "数" * (TEXT + 100_000 if step == 1 else 300)  # six bytes each once escaped in the page
        writer.completions(step, [completion(i, completion=text) for i in range(200 if step > 1 else 6)])
    with open(tmp_path / "completions.jsonl", "ab") as file:  # cut short by a kill
        file.write(b'{"step": 31, "prom')
    page, data = html_report(tmp_path), embedded(tmp_path)
    assert len(page) < COMPLETION_BYTES + 300_000
    ((reward,),) = (panel["curves"] for panel in data["panels"])
    assert 100 < len(reward["y"]) == len(reward["smooth"]) <= POINTS
    assert sum(reward["y"]) / len(reward["y"]) == pytest.approx(0.5, abs=1e-3)  # means of neighbors, none left out
    kept = [step["step"] for step in data["steps"]]
    assert (kept[0], kept[-1], len(kept)) == (1, 30, STEPS)
    assert len(data["steps"][0]["groups"][0]["rows"][0]["completion"]) < TEXT + 100
    assert 0 < sum(len(group["rows"]) for group in data["steps"][1]["groups"]) < 200
    assert data["totals"] == "completions.jsonl contains 5,806 completions from 30 steps"


no_browser = not any(map(shutil.which, BROWSERS))
COLUMN = """const column = name => {
  const at = [...document.querySelectorAll("#rows th")].findIndex(th => th.dataset.column === name);
  return [...document.querySelectorAll("#rows tbody tr")].map(tr => tr.cells[at].textContent);
};
const texts = query => [...document.querySelectorAll(query)].map(node => node.textContent);
const click = name => document.querySelector(`#rows th[data-column="${name}"]`).click();
"""


@pytest.fixture
def browse(tmp_path):
    """Return `browse(page, code)`, which returns the result of JavaScript in a Chromium page; errors fail the test."""
    if no_browser:
        pytest.skip("no Chromium (Debian: chromium)")

    def browse(page, code):
        path, faults = tmp_path / "report.html", "<script>faults = []; onerror = text => faults.push(text)</script>"
        script = f"<script>document.title = JSON.stringify([faults, (() => {{ {COLUMN}{code} }})()])</script>"
        path.write_bytes((faults + page + script).encode("utf-8", "backslashreplace"))
        command = [next(filter(None, map(shutil.which, BROWSERS))), "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        errors, found = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown, flags=re.S)[1]))
        assert errors == []
        return found

    return browse


def test_page_in_a_browser(run_dir, shown, browse):
    """In a browser the report page draws curves, sorts completions and shows untrusted text as plain text."""
    found = browse(
        html_report(run_dir),
        """const found = {titles: [...document.querySelectorAll(".panel h3")].map(node => node.firstChild.data)};
        found.curves = [...document.querySelectorAll(".panel path.curve")].map(node => node.getAttribute("d"));
        found.times = texts("#times td");
        found.texts = [column("prompt").slice(0, 4), column("completion")[2], texts(".warning")[0]];
        found.advantages = [column("advantage")];
        for (let i = 0; i < 3; i++) { click("advantage"); found.advantages.push(column("advantage")); }
        click("rewards/short");
        return {...found, short: column("rewards/short")};""",
    )
    assert found["titles"] == ["Reward", "Held-out prompts", "KL divergence"]
    assert len(found["curves"]) == 2 + 1 + 1
    assert "NaN" not in "".join(found["curves"])
    heights = [float(point.split(",")[1]) for point in found["curves"][0][1:].split("L")]
    assert len(heights) == 3
    assert heights[0] > heights[1] > heights[2], "the reward increases at each step, and y points downwards"
    assert found["times"] == ["rollout", "12.0 s", "72.7%", "update", "3.0 s", "18.2%", "other", "1.5 s", "9.1%"]
    # Run order, then descending, ascending and run order again; missing values are last.
    as_run = ["-0.5", "0.5"] * 6
    assert found["advantages"] == [as_run, ["0.5"] * 6 + ["-0.5"] * 6, ["-0.5"] * 6 + ["0.5"] * 6, as_run]
    assert found["short"] == ["0.25"] * 3 + ["0.125"] * 3 + ["0"] * 3 + ["–"] * 3
    assert found["texts"][:2] == [["prompt 0", "", "prompt 1", ""], SHOWN]
    assert SHOWN in found["texts"][2]
    found = browse(
        html_report(shown),
        """const rows = [...document.querySelectorAll("#rows tbody tr")];
        const turn = node => [node.className, node.querySelector("b").textContent, node.lastChild.data];
        return {prompts: column("prompt"), images: rows.map(tr => tr.querySelectorAll("img").length),
                turns: rows.map(tr => [...tr.querySelectorAll(".turn")].map(turn))};""",
    )
    assert found["prompts"] == ["user: [image] Which digit?", "", "Which color?", "Which color?", "", "prompt 0", ""]
    assert found["images"] == [1, 0, 2, 0, 0, 0, 0]
    assert found["turns"][:5] == [[]] * 5
    kinds, names, texts = zip(*found["turns"][5], strict=True)
    assert kinds == ("turn sampled", "turn given", "turn sampled")
    assert (names, texts) == (("policy", "environment", "policy"), ("0 is first", SHOWN, "the last"))
    assert [name for _, name, _ in found["turns"][6]] == ["policy · near 0.5", "environment", "policy · near 1"]


def test_png_is_written_atomically_and_failures_warn(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path)
    writer.metrics(1, {"reward": 1.0})
    write_report(tmp_path)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "report.png").read_bytes()

    def fail(figure, file):
        file.write(b"half")
        raise RuntimeError("no font")

    monkeypatch.setattr("grpo_jax.watch.page.save_figure", fail)
    with pytest.warns(RuntimeWarning, match=r"could not write report.png: RuntimeError: no font"):
        write_report(tmp_path)
    assert (tmp_path / "report.png").read_bytes() == before
