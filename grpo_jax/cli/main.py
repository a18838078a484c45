"""The parser of `grpo-jax`: commands, arguments and help.

Modules that import jax are imported when a command runs, so that help and errors of the command line are immediate.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from grpo_jax.cli.keys import GROUPS, explain
from grpo_jax.messages import nearest

COMMANDS = {
    "init": "Write a run that works at once, to be edited: a RUN.yaml, ten rows, a reward function and a tiny model.",
    "train": "Train a policy by GRPO as RUN.yaml says; called again, resume from the last checkpoint.",
    "resume": "Resume a run, by the RUN.yaml in its directory.",
    "plan": "Print the memory and FLOPs of a run; neither weights nor devices are needed.",
    "evaluate": "Complete the rows of eval_data (or data) and score them by the rewards, as evaluations of a run do.",
    "chat": "Complete prompts from --say or standard input, one per line; an empty line starts a new conversation.",
    "export": "Write the policy of a run in Hugging Face's layout, adapters in PEFT's.",
    "report": "Draw report.png and report.html of a run again, from its files.",
    "from-trl": "Convert the YAML config of a TRL script to a RUN.yaml, and list the fields that cannot be converted.",
}
"""Name of a command → its description; `cli.commands` has a function of that name."""

_PACKAGE = Path(__file__).parents[1]
_MODEL_KEYS = ("model", "lora", "quantize", "quantize_embeddings", "param_dtype", "folder")
_SAMPLING_KEYS = [name for name, group in GROUPS.items() if group in ("Sampling", "Text")]
KEYS: Mapping[str, Sequence[str]] = {
    **{name: [*GROUPS] for name in ("train", "resume", "plan", "evaluate")},
    "chat": [*_MODEL_KEYS, *_SAMPLING_KEYS, "seed", "compute_dtype"],
    "export": _MODEL_KEYS,
}
"""Name of a command → the keys of RUN.yaml that it takes as options."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help ends with the keys of RUN.yaml."""

    def __init__(self, prog: str, usage: str, about: str, keys: Sequence[str] = ()):
        formatter = functools.partial(argparse.HelpFormatter, max_help_position=30)
        usage = f"{prog} {usage}"
        super().__init__(prog, usage, about, formatter_class=formatter, add_help=False, allow_abbrev=False)
        self.keys = keys
        self._positionals.title, self._optionals = "arguments", self._positionals  # one list

    def error(self, message: str) -> NoReturn:
        """Exit with a message that refers to `--help`."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def format_help(self) -> str:
        """Return the help, with the keys by group."""
        lines = ["", "keys of RUN.yaml, each as --KEY VALUE too; what one is: --help KEY"] * bool(self.keys)
        for group in dict.fromkeys(GROUPS[key] for key in self.keys):
            names = " ".join(key for key in self.keys if GROUPS[key] == group)
            width = shutil.get_terminal_size().columns - 2  # as argparse
            lines += textwrap.wrap(f"{group}: {names}", width, initial_indent="  ", subsequent_indent="    ")
        return super().format_help() + "".join(f"{line}\n" for line in lines)


def make_parsers() -> tuple[_Parser, Mapping[str, _Parser]]:
    """Return the parser of all commands and each command's by name. Keys of RUN.yaml are split off by `split_keys`."""
    about = "GRPO in JAX: the Python API from a shell, with a run written down in a file."
    parser = _Parser("grpo-jax", "COMMAND ..., and grpo-jax COMMAND --help", about)
    parser.add_argument("-h", "--help", action="store_true", help="show this; --help KEY: what a key is")
    parser.add_argument("--version", action="version", version=_version(), help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, usage: str) -> _Parser:
        about, keys = COMMANDS[name], KEYS.get(name, ())
        usage += " [--KEY VALUE ...]" * bool(keys)
        return commands.add_parser(name, prog=f"grpo-jax {name}", usage=usage, help=about, about=about, keys=keys)

    add("init", "DIR").add_argument("dir", metavar="DIR", help="a new directory to write into")
    train = add("train", "RUN.yaml [OPTIONS]")
    train.add_argument("run", metavar="RUN.yaml", help="the model, data, rewards and settings; see docs/cli.md")
    train.add_argument(
        "--dry-run", action="store_true", help="try one group and one update; print sizes, memory and likely mistakes"
    )
    ways = ["auto", "must", "never", "changed"]
    resume_help = f"whether to resume a run: {', '.join(ways)} (default auto); see docs/runs.md"
    train.add_argument("--resume", choices=ways, default="auto", metavar="WAY", help=resume_help)
    resume = add("resume", "RUN_DIR [OPTIONS]")
    resume.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run that `grpo-jax train` has started")
    for one in (train, resume):
        _add_processes(one)

    plan = add("plan", "[RUN.yaml] [OPTIONS]")
    plan_help = "the run; without it, --model and fields describe the run"
    plan.add_argument("run", metavar="RUN.yaml", nargs="?", help=plan_help)
    plan.add_argument("--prompt-length", type=int, metavar="P", help="tokens; default max_prompt_length, or 256")
    plan.add_argument("--device", help="H100, H100-8, A100, T4-2, v5e-8, v6e-8, v5p-4, … (default: this machine)")
    plan.add_argument("--memory", type=float, metavar="GB", help="of one device (default: its own): does the run fit?")
    evaluate = add("evaluate", "RUN [OPTIONS]")
    run_help = "a RUN.yaml (its model, untrained), or the directory of a run (its newest checkpoint)"
    evaluate.add_argument("run", metavar="RUN", help=run_help)
    evaluate.add_argument("--out", metavar="FILE", help="write the completions there, as JSON lines")
    chat = add("chat", "MODEL [OPTIONS]")
    chat.add_argument("model", metavar="MODEL", help="a name on the hub, a directory, or the directory of a run")
    chat.add_argument("--say", action="append", metavar="TEXT", help="a prompt; may be given several times")
    export = add("export", "RUN_DIR OUT [OPTIONS]")
    export.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run")
    export.add_argument("out", metavar="OUT", help="the directory to write")
    export.add_argument("--merge", action="store_true", help="write the whole model, with the adapters in its weights")
    for one in (evaluate, chat, export):
        one.add_argument("--checkpoint", type=int, metavar="STEP", help="the step of a checkpoint; default the newest")

    add("report", "RUN_DIR").add_argument("run_dir", metavar="RUN_DIR", help="the directory of any run")
    from_trl = add("from-trl", "SCRIPT.yaml [OPTIONS]")
    script_help = "of `trl grpo --config`, or the fields of a GRPOConfig (JSON is YAML, too)"
    from_trl.add_argument("script", metavar="SCRIPT.yaml", help=script_help)
    from_trl.add_argument("--out", metavar="RUN.yaml", help="the file to write; default standard output")
    return parser, commands.choices


def _add_processes(parser: _Parser) -> None:
    """Add the flags of `run.distributed.add_flags`, whose module imports jax."""
    found = "several processes, found by Slurm, TPU pod, Kubernetes or MPI"
    parser.add_argument("--distributed", choices=["auto"], help=found)
    address = "several processes: the address of process 0"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=address)
    parser.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: the number of processes")
    of_this = "with --coordinator: this process, from 0 to N - 1"
    parser.add_argument("--process-id", type=int, metavar="I", help=of_this)


def _version() -> str:
    try:
        return f"grpo_jax {version('grpo_jax')}"
    except PackageNotFoundError:  # a clone that is not installed
        return "unknown: grpo_jax is not installed"


def split_keys(argv: Sequence[str], keys: Collection[str], parser: _Parser) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the keys of RUN.yaml with their values as texts, and the arguments of the parser."""
    values, rest, parts = dict[str, str](), list[str](), iter(argv)
    for part in parts:
        option, equals, value = part.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or key not in keys:
            rest.append(part)
            continue
        if not equals and (value := next(parts, "--")).startswith("--"):
            parser.error(f"{option}: a value is missing")
        values[key] = value
    return values, rest


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; errors name the nearest command or option. `keys` maps keys of RUN.yaml to texts."""
    parser, parsers = make_parsers()
    for i, part in enumerate(argv):
        if part in ("-h", "--help"):
            _show_help(parsers.get(argv[0], parser), parsers, argv[i + 1] if i + 1 < len(argv) else None)
    if argv and argv[0][:1] != "-" and argv[0] not in COMMANDS:
        close = nearest(argv[0], COMMANDS)
        parser.error(f"no command {argv[0]}; " + (f"did you mean {close}?" if close else f"use {', '.join(COMMANDS)}"))
    own = parsers.get(argv[0], parser) if argv else parser
    keys, rest = split_keys(argv, own.keys, own)
    arguments, unknown = parser.parse_known_args(rest)
    if unknown:
        options = [*own._option_string_actions, *(f"--{key}" for key in own.keys)]
        close = nearest(unknown[0], options) if unknown[0].startswith("--") else None
        hint = f"; did you mean {close}?" if close else ""
        own.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if arguments.command is None:
        parser.print_help()
        raise SystemExit(2)
    arguments.keys = keys
    return arguments


def _show_help(parser: _Parser, parsers: Mapping[str, _Parser], topic: str | None) -> NoReturn:
    """Print the help of a parser, or of a command or key that follows `--help`, and exit."""
    key = (topic or "").lstrip("-").replace("-", "_")
    if key in GROUPS:
        print(explain(key))
    elif topic is None or topic in parsers:
        print((parsers[topic] if topic else parser).format_help().rstrip())
    else:
        close = nearest(key, [*GROUPS, *parsers])
        parser.error(f"--help {topic}: no such key" + (f"; did you mean {close}?" if close else ""))
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; an error of the library exits with status 1 and its message."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        _run(arguments)
    except KeyboardInterrupt:  # before a run has started, which handles it, or the second one of a run
        print(f"grpo-jax {arguments.command}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _run(arguments: argparse.Namespace) -> None:
    """Run the function of a command."""
    from grpo_jax.cli import commands
    from grpo_jax.rewards.contract import RewardError
    from grpo_jax.run import distributed

    try:
        getattr(commands, arguments.command.replace("-", "_"))(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, RewardError) and error.__cause__ is not None:  # the frames of the user's function
            cause = traceback.TracebackException.from_exception(error.__cause__)
            own = [frame for frame in cause.stack if _PACKAGE not in Path(frame.filename).parents]
            cause.stack = traceback.StackSummary.from_list(own)
            print("".join(cause.format()), end="", file=sys.stderr)
        elif not _is_ours(error):
            raise
        distributed.end_by_error()
        raise SystemExit(f"grpo-jax {arguments.command}: {error}") from error


def _is_ours(error: BaseException) -> bool:
    """Return whether this package raised the error itself, so that its message needs no traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _PACKAGE in Path(trace.tb_frame.f_code.co_filename).parents
