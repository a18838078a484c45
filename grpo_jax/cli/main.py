"""The parsers of `grpo-jax`: commands, their options and help. What the commands do is imported when one is run."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from grpo_jax.cli import keys

MODEL_KEYS = ("model", "lora", "quantize", "quantize_embeddings", "param_dtype", "folder")

# Command → what it does, its positionals, its options, and the keys of RUN.yaml that it takes ("all", or some).
_RUN = ("RUN.yaml", "what to train, on what, by which rewards; see docs/cli.md")
_DIR = ("RUN_DIR", "the directory of a run that `grpo-jax train` has started")
_STEP = ("--checkpoint", {"type": int, "metavar": "STEP", "help": "of the run; default the newest"})
_DRY = ("--dry-run", {"action": "store_true", "help": "everything once, on copies: sizes, memory, what looks wrong"})
_PROCESSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--distributed", {"choices": ["auto"], "help": "several processes, found by Slurm, TPU pod, Kubernetes or MPI"}),
    ("--coordinator", {"metavar": "HOST:PORT", "help": "several processes: where process 0 listens"}),
    ("--num-processes", {"type": int, "metavar": "N", "help": "with --coordinator: how many there are"}),
    ("--process-id", {"type": int, "metavar": "I", "help": "with --coordinator: this one, from 0 to N - 1"}),
)
_RESUME = ("--resume", {"choices": ["auto", "must", "never"], "default": "auto", "help": "whether to resume a run"})
_ROWS = ("--out", {"metavar": "FILE", "help": "where the completions are written, as JSON lines"})

COMMANDS: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, dict[str, Any]], ...], Any]] = {
    "train": (
        "Train a policy by GRPO as RUN.yaml says; called again, the run goes on where it stopped.",
        (_RUN,),
        (_DRY, _RESUME, *_PROCESSES),
        "all",
    ),
    "resume": ("Go on with a run, by the RUN.yaml that its directory keeps.", (_DIR,), _PROCESSES, "all"),
    "plan": (
        "Say what a run will need, before there are weights or devices.",
        (("[RUN.yaml]", "the run; without it, --model and fields say what is planned"),),
        (
            ("--prompt-length", {"type": int, "metavar": "P", "help": "tokens; default max_prompt_length, or 256"}),
            ("--device", {"help": "whose compiler is asked: H100, H100-8, A100, v5e-8, v6e-8, v5p-4, …"}),
            ("--memory", {"type": float, "metavar": "GB", "help": "of one device; the plan then says what fits"}),
        ),
        "all",
    ),
    "evaluate": (
        "Complete the rows of eval_data (or data) and score them by the rewards, with the settings of evaluation.",
        (("RUN", "a RUN.yaml (its model as it is), or the directory of a run (its newest checkpoint)"),),
        (_STEP, _ROWS),
        "all",
    ),
    "chat": (
        "Complete prompts: those of --say, or line by line from standard input; an empty line begins anew.",
        (("MODEL", "a name on the hub, a directory, or the directory of a run"),),
        (
            ("--say", {"action": "append", "metavar": "TEXT", "help": "a prompt; may be given several times"}),
            ("--samples", {"type": int, "default": 1, "metavar": "N", "help": "completions of each prompt; default 1"}),
            _STEP,
        ),
        (*MODEL_KEYS, "@Sampling", "seed", "compute_dtype"),
    ),
    "report": ("Draw report.png and report.html of a run anew, from its files.", (("RUN_DIR", "of any run"),), (), ()),
    "export": (
        "Write the policy of a run in Hugging Face's layout, adapters in PEFT's.",
        (_DIR, ("OUT", "the directory to write")),
        (
            ("--merge", {"action": "store_true", "help": "write the whole model, with the adapters in its weights"}),
            _STEP,
        ),
        MODEL_KEYS,
    ),
    "from-trl": (
        "Print the RUN.yaml that says what the YAML config of a TRL script says, and what cannot be said here.",
        (("SCRIPT.yaml", "of `trl grpo --config`, or the fields of a GRPOConfig (JSON is YAML, too)"),),
        (("--out", {"metavar": "RUN.yaml", "help": "where to write it; default standard output"}),),
        (),
    ),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose help has the keys of RUN.yaml in few lines, by their groups."""

    taken: Sequence[str] = ()
    listed: Sequence[tuple[str, str]] = ()

    def format_help(self) -> str:
        """Usage, what the command does, its own arguments a line each, and the names of the keys."""
        width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
        lines = [f"usage: {self.usage}", "", *textwrap.wrap(self.description or "", width), ""]
        column = max((len(name) for name, _ in self.listed), default=0) + 2
        for name, about in self.listed:
            lines += textwrap.wrap(
                f"{name.ljust(column)}{about}", width, initial_indent="  ", subsequent_indent=" " * (column + 2)
            )
        if self.taken:
            lines += ["", "keys of RUN.yaml, each as --KEY VALUE too; what one is: --help KEY"]
            for group, names in _grouped(self.taken).items():
                text = f"{group}: {' '.join(names)}"
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"

    def error(self, message: str) -> NoReturn:
        """One line, and where to read on."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Help(argparse.Action):
    """`--help`, or of one key `--help KEY`."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> NoReturn:
        if value is not None and value.replace("-", "_") in {*keys.OWN, *keys.fields()}:
            print(keys.explain(value.replace("-", "_")))
        else:
            parser.print_help()
        raise SystemExit(0)


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Group → its names, in the order of `GRPOConfig`; what is no field comes first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("The run" if name in keys.OWN else keys.fields()[name].group, []).append(name)
    return groups


def _taken(which: Any) -> list[str]:
    """The names of keys that a command takes; "@Group" stands for those of a group."""
    if which == "all":
        return [*keys.OWN, *keys.fields()]
    of = {name: field.group for name, field in keys.fields().items()}
    every = [[name for name in of if of[name] == item[1:]] if item[0] == "@" else [item] for item in which]
    return [name for names in every for name in names]


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each puts the keys that it sets, as texts, into a dict `keys`."""
    parser = _Parser(prog="grpo-jax", add_help=False, allow_abbrev=False)
    parser.usage = "grpo-jax COMMAND ..., and grpo-jax COMMAND --help"
    parser.description = "GRPO in JAX: the Python API from a shell, with a run written down in a file."
    parser.add_argument("-h", "--help", action="help", help="show this help")
    parser.add_argument("--version", action="version", version=_version(), help="show the version")
    parser.add_argument("--print-completion", choices=SHELLS, help="print the completion script of a shell")
    parser.listed = [*((name, about) for name, (about, *_) in COMMANDS.items())]
    parser.listed += [
        ("--version", "show the version"),
        ("--print-completion SHELL", f"the script of completion for {', '.join(SHELLS)}"),
    ]
    every = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (about, positionals, options, which) in COMMANDS.items():
        own = every.add_parser(
            name, prog=f"grpo-jax {name}", help=about, description=about, add_help=False, allow_abbrev=False
        )
        _fill(own, positionals, options, _taken(which))
    return parser


SHELLS = ("bash", "zsh", "tcsh", "fish")


def _fill(
    own: Any, positionals: Sequence[tuple[str, str]], options: Sequence[tuple[str, Mapping[str, Any]]], taken: list[str]
) -> None:
    """Give a command's parser its arguments."""
    listed = [(name.strip("[]"), about) for name, about in positionals]
    for name, about in positionals:
        optional = name.startswith("[")
        dest = name.strip("[]").split(".")[0].lower()
        added = own.add_argument(dest, nargs="?" if optional else None, metavar=name.strip("[]"), help=about)
        added.complete = FILES
    own.add_argument("-h", "--help", action=_Help, nargs="?", metavar="KEY", help="show this help, or what KEY is")
    for name, settings in options:
        added = own.add_argument(name, **settings)
        if name == "--out":
            added.complete = FILES
        words = settings.get("metavar", "|".join(settings.get("choices", ())))
        words = words or ("" if "action" in settings else name.strip("-").upper())
        listed.append((f"{name} {words}".strip(), str(settings["help"])))
    for name in taken:
        added = own.add_argument(f"--{name}", action=_Set, metavar="VALUE", help=name)
        if name in keys.OWN:
            added.complete = FILES
    own.usage = " ".join([own.prog, *(name for name, _ in positionals)])
    own.usage += " [OPTIONS]" * bool(options) + " [--KEY VALUE ...]" * bool(taken)
    own.taken, own.listed = taken, listed
    own.set_defaults(keys={})


FILES: Any = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f", "fish": "__fish_complete_path"}
"""Of shtab: what completes names of files."""


class _Set(argparse.Action):
    """Put a key of RUN.yaml into `keys`."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        namespace.keys = {**namespace.keys, self.dest: value}


def _version() -> str:
    try:
        return f"grpo_jax {version('grpo_jax')}"
    except PackageNotFoundError:  # a clone that is not installed
        return "unknown: grpo_jax is not installed"


def _spelt(argument: str) -> str:
    """An option with the hyphens or underscores that it is known by: --learning-rate is --learning_rate."""
    found = re.match(r"--([\w-]+)", argument)
    name = found[1].replace("-", "_") if found else ""
    return f"--{name}{argument[len(name) + 2 :]}" if name in keys.OWN or name in keys.fields() else argument


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; the errors of the library end it with the status 1 and their own message."""
    parser = make_parser()
    arguments = parser.parse_args([_spelt(argument) for argument in (sys.argv[1:] if argv is None else argv)])
    if arguments.print_completion:
        return _print_completion(parser, arguments.print_completion)
    if arguments.command is None:
        parser.print_help()
        raise SystemExit(2)
    from grpo_jax.cli import commands
    from grpo_jax.devices import distributed

    command = getattr(commands, arguments.command.replace("-", "_"))
    try:
        command(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        if not _is_ours(error):
            raise
        distributed.end_by_error()
        raise SystemExit(f"grpo-jax {arguments.command}: {error}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether this package itself refused, and no function of the user's failed: then the message says all."""
    from grpo_jax.rewards.contract import RewardError

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = Path(keys.__file__).parent.parent
    here = trace is not None and package in Path(trace.tb_frame.f_code.co_filename).parents
    return here and not isinstance(error, RewardError)


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    import shtab

    commands: Any = next(action for action in parser._actions if action.dest == "command")
    for own in commands.choices.values():
        for action in own._actions:
            if isinstance(action, _Set) and action.dest in keys.fields():
                # Only here: what a field takes is for `GRPOConfig` to say.
                action.choices = keys.fields()[action.dest].choices or None
    print(shtab.complete(parser, shell))
