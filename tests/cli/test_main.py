"""The command line: light to ask for help, the same names as the config, completion, and errors that are messages."""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_files import run, write_run

from grpo_jax.cli.keys import GROUPS, OWN, explain
from grpo_jax.cli.main import _parse, keys_of, main, make_parser
from grpo_jax.devices import distributed

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 100, 45


KEYS = "\n\nkeys of RUN.yaml, each as --KEY VALUE too"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    return next(action for action in make_parser()._actions if action.dest == "command").choices


COMMANDS = [*parsers()]


def help_of(command: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        return parsers()[command].format_help() if command else make_parser().format_help()


@pytest.mark.quick
def test_help_completion_and_wrong_options_import_no_jax():
    asked = [["--help"], *([name, "--help"] for name in COMMANDS), ["train", "--help", "beta"], ["train", "--halp"]]
    asked += [["--version"], ["--print-completion", "bash"], []]
    code = (
        "import contextlib, io, sys\n"
        "from grpo_jax.cli.main import main\n"
        f"for argv in {asked!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main(argv)\n"
        "loaded = {'jax', 'numpy', 'transformers', 'yaml'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("usage: grpo-jax") == len(COMMANDS) + 2


@pytest.mark.quick
def test_the_package_itself_runs_as_the_command():
    command = [sys.executable, "-X", "importtime", "-m", "grpo_jax", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: grpo-jax COMMAND")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "grpo_jax.cli.main" in imported
    assert not imported & {"jax", "numpy", "yaml"}


@pytest.mark.quick
def test_the_entry_point_is_this_main():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"grpo-jax": "grpo_jax.cli.main:main"}


@pytest.mark.quick
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_says_all(command):
    lines = help_of(command).splitlines()
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    if command:
        parser, text = parsers()[command], " ".join(" ".join(lines).split())
        assert " ".join(parser.description.split()) in text
        for action in parser._actions:
            if action.help is not argparse.SUPPRESS:
                assert f"{action.option_strings[0] if action.option_strings else action.metavar} " in text
                assert action.help in text
        if command in ("train", "resume", "plan", "evaluate"):
            named = [name for line in lines for name in re.findall(r"\w+", line)]
            assert not GROUPS.keys() - set(named)


@pytest.mark.quick
def test_the_groups_are_shown_in_their_order():
    shown = re.findall(r"^  ([A-Z][\w, ]+): ", help_of("train"), flags=re.M)
    assert shown == list(dict.fromkeys(GROUPS.values()))


@pytest.mark.quick
def test_every_command_has_its_function():
    from grpo_jax.cli.commands import COMMANDS as FUNCTIONS

    assert list(FUNCTIONS) == COMMANDS


@pytest.mark.quick
def test_the_page_has_the_help_of_every_command():
    page = (ROOT / "docs" / "cli.md").read_text()
    every = help_of("train").partition(KEYS)[2]
    for command in COMMANDS:
        own, head, keys = help_of(command).partition(KEYS)
        shown = own.rstrip() if command != "train" and keys == every else (own + head + keys).rstrip()
        assert f"```text\n{shown}\n```" in page, f"put the output of grpo-jax {command} --help there"
    assert page.count(every) == 1, "the list of all keys stands there once"
    for name, about in OWN.items():
        assert f"| `{name}` | {about} |" in page


@pytest.mark.quick
def test_help_of_a_key_says_what_it_is(capsys):
    for asked in ("learning_rate", "learning-rate"):
        with pytest.raises(SystemExit) as ended:
            run("train", "--help", asked)
        assert ended.value.code in (None, 0)
    assert explain("learning_rate") == "learning_rate (default 1e-06)\n  Peak of the schedule, for AdamW."
    for argv, shown in ((["--help", "beta"], explain("beta")), (["--help", "train"], parsers()["train"].format_help())):
        with pytest.raises(SystemExit):
            main(argv)
        assert capsys.readouterr().out.strip() == shown.strip()


@pytest.mark.quick
def test_an_interrupt_before_a_run_begins_is_no_traceback(monkeypatch, capsys):
    from grpo_jax.cli import commands

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "train", interrupted)
    with pytest.raises(SystemExit) as ended:
        run("train", "a.yaml")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "grpo-jax train: interrupted\n"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "grpo-jax train: the following arguments are required: RUN.yaml; see grpo-jax train --help\n"),
        (
            ["train", "a.yaml", "--bta", "1"],
            "grpo-jax: unrecognized arguments: --bta 1; did you mean --beta?; see grpo-jax --help\n",
        ),
        (["--help", "xyz"], "grpo-jax: --help xyz: there is no such key; see grpo-jax --help\n"),
        (["train", "a.yaml", "--xyz"], "grpo-jax: unrecognized arguments: --xyz; see grpo-jax --help\n"),
        (["export", "a", "b", "--beta=1"], "grpo-jax: unrecognized arguments: --beta=1; see grpo-jax --help\n"),
        (["trian"], "grpo-jax: argument COMMAND: invalid choice: 'trian'"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1


@pytest.mark.quick
def test_fields_may_be_spelt_with_hyphens_and_values_are_texts():
    argv = ["train", "a.yaml", "--learning-rate", "1e-5", "--max_steps=3", "--run-dir", "x", "--dry-run"]
    arguments = _parse(make_parser(), argv)
    assert keys_of(arguments) == {"learning_rate": "1e-5", "max_steps": "3", "run_dir": "x"}
    assert arguments.dry_run
    arguments = _parse(make_parser(), ["chat", "runs/x", "--model", "y"])
    assert (arguments.model, keys_of(arguments)) == ("runs/x", {"model": "y"})
    assert keys_of(_parse(make_parser(), ["report", "runs/x"])) == {}


@pytest.mark.quick
def test_several_processes_have_the_flags_of_the_api():
    parser = argparse.ArgumentParser(add_help=False)
    distributed.add_flags(parser)
    ours = {tuple(action.option_strings): action for action in parsers()["train"]._actions}
    for action in parser._actions:
        mine = ours[tuple(action.option_strings)]
        assert (mine.dest, mine.type, mine.choices) == (action.dest, action.type, action.choices)


@pytest.mark.quick
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_field(shell, capsys):
    pytest.importorskip("shtab")
    script = run("--print-completion", shell)
    for name in [*COMMANDS, "learning_rate", "loss_type", "dr_grpo", "dry-run"]:
        assert name in script


@pytest.mark.quick
@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ex"], ["export"]),
        (["train", "--loss_"], ["--loss_type"]),
        (["train", "--loss_type", "dr"], ["dr_grpo"]),
        (["resume", "--use_b"], ["--use_bias_correction_kl"]),
    ],
)
def test_bash_completes(words, completed, tmp_path):
    pytest.importorskip("shtab")
    (tmp_path / "script").write_text(run("--print-completion", "bash"))
    line = ["grpo-jax", *words]
    code = (
        f"source {tmp_path / 'script'}; COMP_WORDS=({' '.join(line)}); COMP_CWORD={len(line) - 1}; "
        '$(complete -p grpo-jax | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
    )
    code = code.replace("$(complete", "f=$(complete").replace("; \n", "; ") + '$f; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["/bin/bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == completed, done.stderr


def test_an_error_of_the_library_is_its_message_and_one_of_the_users_has_the_users_lines(tmp_path, capsys):
    path = write_run(tmp_path, max_steps=0)
    with pytest.raises(SystemExit) as ended:
        run("train", path)
    assert str(ended.value) == (
        f"grpo-jax train: {path} has 1 error:\n  max_steps = 0: nothing would be learnt; use a number of optimizer"
        " steps, or -1 to train by num_train_epochs"
    )
    path = write_run(tmp_path, rewards="judging.py:broken")
    with pytest.raises(SystemExit, match=r"grpo-jax train: reward function 'broken' raised KeyError.*Fix it"):
        run("train", path)
    told = capsys.readouterr().err
    frames = re.findall(r'File "(.*)", line', told[told.index("Traceback") :])
    assert [Path(frame).name for frame in frames] == ["judging.py"], "no frame of the library"
    assert (tmp_path / "run" / "run.yaml").exists(), "the run had begun"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "a.yaml", "--learning_rat", "1e-5"], "did you mean --learning_rate?"),
        (["train", "a.yaml", "--dry-rnu"], "did you mean --dry-run?"),
        (["train", "--help", "betta"], "--help betta: there is no such key; did you mean beta?"),
        (["train", "a.yaml", "--beta"], "argument --beta: expected one argument"),
    ],
)
def test_a_mistyped_option_brings_the_nearest(argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        _parse(make_parser(), argv)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.quick
def test_a_negative_number_is_a_value_and_a_wrong_one_is_the_flags(tmp_path):
    assert keys_of(_parse(make_parser(), ["train", "a.yaml", "--learning-rate", "-1e-5"])) == {"learning_rate": "-1e-5"}
    path = write_run(tmp_path)
    with pytest.raises(
        SystemExit, match=r"my_run.yaml with --learning_rate has 1 error:\n  learning_rate = -1e-05: must"
    ):
        run("train", path, "--learning_rate", "-1e-5")
    with pytest.raises(SystemExit, match=r"wandb cannot be imported .*: pip install") as ended:
        run("train", path, "--report_to", "wandb")
    assert str(ended.value).startswith("grpo-jax train: ")
