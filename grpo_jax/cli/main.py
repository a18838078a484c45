"""The command-line parser of `grpo-jax`: commands, arguments and help.

Modules that import jax are imported only when a command runs, so that help and usage errors are immediate.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from grpo_jax.cli.keys import GROUPS
from grpo_jax.config.settings import OTHER_NAMES
from grpo_jax.messages import nearest
from grpo_jax.run import distributed

COMMANDS = {
    "init": "Create a small example run to edit: a RUN.yaml, ten rows, a reward function and a tiny model.",
    "train": "Train a policy with GRPO as described in RUN.yaml, or resume from the last checkpoint.",
    "resume": "Resume a run with the RUN.yaml in its directory.",
    "plan": "Print the memory and FLOPs of a run. Does not need weights or accelerators.",
    "evaluate": "Sample completions for the rows of eval_data (or data) and print their mean rewards.",
    "chat": "Complete prompts from --say or standard input, one per line. An empty line starts a new conversation.",
    "export": "Write the policy of a run in Hugging Face's format, or its adapters in PEFT's format.",
    "report": "Rewrite report.png and report.html from the files of a run.",
    "from-trl": "Convert the YAML config of a TRL script to a RUN.yaml, and list the fields that cannot be converted.",
}
"""Descriptions of the commands. Each command is a function in `cli.commands`."""

_PACKAGE = Path(__file__).parents[1]
_WITH_KEYS = ("train", "resume", "plan", "evaluate", "chat", "export")
# Commands that accept the keys of RUN.yaml as options.


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors. Its help ends with the keys of RUN.yaml."""

    def __init__(self, prog: str, usage: str, about: str, keys: Sequence[str] = ()):
        formatter = functools.partial(argparse.HelpFormatter, max_help_position=30)
        usage = f"{prog} {usage}"
        super().__init__(prog, usage, about, formatter_class=formatter, add_help=False, allow_abbrev=False)
        self.keys = keys
        self._positionals.title, self._optionals = "arguments", self._positionals  # one group for both kinds
        self.add_argument("-h", "--help", action="help", help="show this help")
        for key in keys:
            names = dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}"))
            self.add_argument(*names, dest=f"keys.{key}", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Exit with a message that refers to `--help`."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def format_help(self) -> str:
        """Return the help text, followed by the keys of each group."""
        head = ["", "keys of RUN.yaml, also options: --KEY VALUE (see docs/cli.md, docs/reference/config.md)"]
        lines = head if self.keys else []
        for group in dict.fromkeys(GROUPS[key] for key in self.keys):
            names = " ".join(key for key in self.keys if GROUPS[key] == group)
            width = shutil.get_terminal_size().columns - 2  # the width that argparse uses
            lines += textwrap.wrap(f"{group}: {names}", width, initial_indent="  ", subsequent_indent="    ")
        return super().format_help() + "".join(f"{line}\n" for line in lines)


def make_parsers() -> tuple[_Parser, Mapping[str, _Parser]]:
    """Return the main parser, and the parsers of the commands, keyed by name."""
    about = "Train language models with GRPO in JAX. A run is described in a YAML file."
    parser = _Parser("grpo-jax", "COMMAND ..., and grpo-jax COMMAND --help", about)
    parser.add_argument("--version", action="version", version=_version(), help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser, required=True)

    def add(name: str, usage: str) -> _Parser:
        about, keys = COMMANDS[name], [*GROUPS] if name in _WITH_KEYS else []
        usage += " [--KEY VALUE ...]" * bool(keys)
        return commands.add_parser(name, prog=f"grpo-jax {name}", usage=usage, help=about, about=about, keys=keys)

    add("init", "DIR").add_argument("dir", metavar="DIR", help="a new directory")
    train = add("train", "RUN.yaml [OPTIONS]")
    train.add_argument("run", metavar="RUN.yaml", help="model, data, rewards and settings; see docs/cli.md")
    train.add_argument(
        "--dry-run", action="store_true", help="run one group and one update; print sizes, memory and likely mistakes"
    )
    modes = ["auto", "must", "never"]
    resume_help = f"whether to resume a run: {', '.join(modes)} (default auto); see docs/runs.md"
    train.add_argument("--resume", choices=modes, default="auto", metavar="MODE", help=resume_help)
    resume = add("resume", "RUN_DIR [OPTIONS]")
    resume.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run started by `grpo-jax train`")
    for command in (train, resume):
        distributed.add_flags(command)

    plan = add("plan", "[RUN.yaml] [OPTIONS]")
    plan_help = "the run; if omitted, --model and other keys describe it"
    plan.add_argument("run", metavar="RUN.yaml", nargs="?", help=plan_help)
    prompt_help = "prompt length in tokens; default max_prompt_length, or 256"
    plan.add_argument("--prompt-length", type=int, metavar="P", help=prompt_help)
    plan.add_argument("--device", help="H100, H100-8, A100, T4-2, v5e-8, v6e-8, v5p-4, … (default: this machine)")
    plan.add_argument("--memory", type=float, metavar="GB", help="memory per device, to check whether the run fits")
    evaluate = add("evaluate", "RUN [OPTIONS]")
    run_help = "a RUN.yaml, to evaluate its model before training, or a run directory"
    evaluate.add_argument("run", metavar="RUN", help=run_help)
    evaluate.add_argument("--out", metavar="FILE", help="write the completions to this file as JSON Lines")
    chat = add("chat", "MODEL [OPTIONS]")
    chat.add_argument("model", metavar="MODEL", help="a name on the hub, a model directory, or a run directory")
    chat.add_argument("--say", action="append", metavar="TEXT", help="a prompt; may be repeated")
    export = add("export", "RUN_DIR OUT [OPTIONS]")
    export.add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    export.add_argument("out", metavar="OUT", help="output directory")
    export.add_argument("--merge", action="store_true", help="write the whole model, with the adapters merged")
    for command in (evaluate, chat, export):
        command.add_argument("--checkpoint", type=int, metavar="STEP", help="step of a checkpoint; default the latest")

    add("report", "RUN_DIR").add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    from_trl = add("from-trl", "SCRIPT.yaml [OPTIONS]")
    script_help = "the file passed to `trl grpo --config`, or the fields of a GRPOConfig as YAML or JSON"
    from_trl.add_argument("script", metavar="SCRIPT.yaml", help=script_help)
    from_trl.add_argument("--out", metavar="RUN.yaml", help="output file; default standard output")
    return parser, commands.choices


def _version() -> str:
    try:
        return f"grpo_jax {version('grpo_jax')}"
    except PackageNotFoundError:
        return "unknown version: grpo_jax is not installed"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. In the result, `keys` maps RUN.yaml keys to their values as strings."""
    parser, parsers = make_parsers()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = parsers.get(argv[0], parser)
        close = nearest(unknown[0], command._option_string_actions) if unknown[0].startswith("--") else None
        hint = OTHER_NAMES.get(unknown[0].strip("-").replace("-", "_"), f"did you mean {close}?" if close else "")
        command.error(f"unrecognized arguments: {' '.join(unknown)}" + f"; {hint}" * bool(hint))
    values = {name.removeprefix("keys."): x for name, x in vars(arguments).items() if name.startswith("keys.")}
    arguments.keys = {name: value for name, value in values.items() if value is not None}
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. If this package raises an error, prints the error's message and exits with status 1."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    from grpo_jax.cli import commands
    from grpo_jax.rewards.contract import RewardError

    try:
        getattr(commands, arguments.command.replace("-", "_"))(arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, RewardError) and error.__cause__ is not None:  # an error in the user's function
            traceback.print_exception(error.__cause__)
        elif _PACKAGE not in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents:
            raise  # errors from dependencies and user code need a traceback
        distributed.end_by_error()
        raise SystemExit(f"grpo-jax {arguments.command}: {error}") from error
