"""The command line: help without importing JAX, RUN.yaml keys as options, and one-line errors."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_files import run, write_run

from grpo_jax.cli import commands
from grpo_jax.cli.keys import GROUPS, RUN_KEYS
from grpo_jax.cli.main import _WITH_KEYS, COMMANDS, main, make_parsers, parse
from grpo_jax.cli.named import find
from grpo_jax.rewards import compute_rewards

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 100, 45


def help_of(command: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        parser, parsers = make_parsers()
        return (parsers[command] if command else parser).format_help()


def test_help_and_wrong_options_do_not_import_jax():
    argvs = [["--help"], *([name, "--help"] for name in COMMANDS), ["train", "--halp"]]
    argvs += [["--version"], ["trian"], []]
    code = (
        "import contextlib, io, sys\n"
        "from grpo_jax.__main__ import main\n"
        f"for argv in {argvs!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main(argv)\n"
        "loaded = {'jax', 'numpy', 'transformers', 'yaml'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("usage: grpo-jax") == len(COMMANDS) + 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"grpo-jax": "grpo_jax.cli.main:main"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_lists_all_keys_and_is_in_the_docs(command):
    lines = help_of(command).splitlines()
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    text, page = " ".join(" ".join(lines).split()), (ROOT / "docs" / "cli.md").read_text()
    if command in _WITH_KEYS:
        assert {*GROUPS} <= {name for line in lines for name in re.findall(r"\w+", line)}
    if command:
        assert COMMANDS[command] in text
        assert callable(getattr(commands, command.replace("-", "_")))
        shown = help_of(command).partition("\n\nkeys of RUN.yaml")[0].rstrip()
        assert f"```text\n{shown}\n```" in page, f"update it with grpo-jax {command} --help"
    else:
        assert all(about in text for about in COMMANDS.values())
        assert all(f"| `{name}` | {about} |" in page for name, about in RUN_KEYS.items())


@pytest.mark.parametrize(("argv", "message"), [
    (["train"], "grpo-jax train: the following arguments are required: RUN.yaml; see grpo-jax train --help\n"),
    (["train", "a", "--bta", "1"], "grpo-jax train: unrecognized arguments: --bta 1; did you mean --beta?; see"),
    (["train", "a", "--beta"], "grpo-jax train: argument --beta: expected one argument; see"),
    (["train", "a", "--lr", "1"], "grpo-jax train: unrecognized arguments: --lr 1; use learning_rate; see"),
    (["train", "a", "--xyz"], "grpo-jax train: unrecognized arguments: --xyz; see grpo-jax train --help\n"),
    (["trian"], "grpo-jax: argument COMMAND: invalid choice: 'trian'"),
    ([], "grpo-jax: the following arguments are required: COMMAND; see grpo-jax --help\n"),
])  # fmt: skip
def test_wrong_command_line_gives_a_one_line_error(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_keys_may_have_hyphens_and_negative_values():
    argv = ["train", "a.yaml", "--learning-rate", "-1", "--max_steps=3", "--run-dir", "x", "--dry-run"]
    arguments = parse(argv)
    assert arguments.keys == {"learning_rate": "-1", "max_steps": "3", "run_dir": "x"}
    assert (arguments.dry_run, arguments.resume) == (True, "auto")
    arguments = parse(["chat", "runs/x", "--model", "y", "--say", "a", "--say", "b"])
    assert (arguments.model, arguments.keys) == ("runs/x", {"model": "y"})
    assert (arguments.say, arguments.checkpoint) == (["a", "b"], None)
    assert parse(["train", "--max_steps", "3", "a.yaml"]).run == "a.yaml"


def test_error_in_a_user_function_shows_its_traceback(tmp_path, capsys, monkeypatch):
    write_run(tmp_path)
    broken = find("judging.py:broken", tmp_path)
    given = {"prompts": ["a"], "completions": ["b"], "completion_ids": [[1]], "num_generations": 1}
    monkeypatch.setattr("grpo_jax.cli.commands.train", lambda arguments: compute_rewards([broken], **given))
    with pytest.raises(SystemExit, match=r"grpo-jax train: reward function 'broken' raised KeyError.*Fix the error"):
        run("train", "a.yaml")
    error = capsys.readouterr().err
    assert Path(re.findall(r'File "(.*)", line', error)[-1]).name == "judging.py"
