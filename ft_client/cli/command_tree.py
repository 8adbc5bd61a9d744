"""The command tree of ``ft``: commands are built when called; a group on its own lists; mistyped options get a suggestion.

Commands over the API come with this package. Those of the local stack and of operators are there if the platform is installed.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name, get_group, solve_typer_info_help

from core.errors import FtError
from ft_client.cli.output import Exit, exit_code, show_error
from ft_client.cli.session import chosen

HELP = """Fine-tune language models: check a dataset, submit a job, watch it, and talk to the result.

On one machine: `ft up`, then `ft admin tenants create NAME --tier standard`, `ft login`, `ft submit FILE --wait`.
"""
MODULES = {
    "deploy.local.stack_commands": ("up", "down", "status", "env"),
    "ft_client.cli.data_commands": (
        "demo-data", "check", "upload", "preview", "datasets", "files", "contamination", "suites", "scored-suites",
    ),
    "ft_client.cli.submission_commands": ("submit", "estimate", "compare", "sweep"),
    "ft_client.cli.job_commands": ("jobs", "job", "logs", "metrics", "checkpoints", "cancel", "pause", "resume", "queue", "recipes"),
    "ft_client.cli.evaluation_commands": ("eval",),
    "ft_client.cli.model_commands": ("promote", "rollback", "deletions", "chat", "models", "adapters", "routes", "manifest"),
    "ft_client.cli.export_commands": ("export", "export-data"),
    "ft_client.cli.account_commands": ("login", "whoami", "quota", "audit", "keys", "members", "wandb", "webhooks"),
    "ft_client.cli.billing_commands": ("usage", "cost", "invoice", "invoices", "budgets"),
    "control_plane.cli.admin_commands": ("admin",),
}  # fmt: skip
"""Commands by the module that is imported when one of them is called, in the order of ``ft --help``."""
OWN = "ft_client."
JSON, LIST, HYPERPARAMETER = "--json", "list", "--hp"
CLOSE = 0.7
"""Similarity (difflib, 0 to 1) from which an option is suggested: one or two wrong letters."""
BEFORE_THE_COMMAND = ("--url", "--api-key", "--version")
"""Options of ``ft`` itself."""


def build() -> typer.Typer:
    app = typer.Typer(
        cls=Root,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ft {version('ft-platform')}")
        raise typer.Exit


def root(
    url: Annotated[str | None, typer.Option("--url", help="Address of the API [env: FT_API_URL].")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key [env: FT_API_KEY].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout; also allowed after the command.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    del as_json, version  # the command gets the first; the second has ended the call
    chosen.url, chosen.api_key = url, api_key


def run() -> None:
    """Run this process's command line and exit with its code."""
    try:
        build()()
    except FtError as e:
        show_error(e, as_json="--json" in sys.argv)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has closed it (`ft jobs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The help of a command or group in ``ft --help``."""

    name: str
    help: str
    panel: str


class CommandsByName(Mapping[str, TyperCommand | TyperGroup]):
    """Commands by name, each built when first looked up, from a module with ``register(app)``."""

    def __init__(self, modules: Mapping[str, tuple[str, ...]]) -> None:
        self._modules = modules
        self._module_of = {name: module for module, names in modules.items() for name in names}
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self._built:
            self._built |= get_group(_registered(self._module_of[name])).commands
        return self._built[name]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._module_of)

    def __len__(self) -> int:
        return len(self._module_of)

    def described(self) -> Iterator[About]:
        """Return every command name without building commands; imports all modules."""
        for module in self._modules:
            app = _registered(module)
            for command in app.registered_commands:
                assert command.callback is not None
                name = command.name or get_command_name(command.callback.__name__)
                yield About(name=name, help=inspect.getdoc(command.callback) or "", panel=str(command.rich_help_panel))
            for group in app.registered_groups:
                yield About(name=str(group.name), help=solve_typer_info_help(group), panel=str(group.rich_help_panel))


def _registered(module: str) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    import_module(module).register(app)
    _use_own_classes(app)
    return app


def _use_own_classes(app: typer.Typer) -> None:
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        group.cls = Group
        assert group.typer_instance is not None
        _use_own_classes(group.typer_instance)


class Command(TyperCommand):
    """A command that suggests the intended option for an unknown one."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments without the braces that typer writes: in other tools these mean a choice."""
        return [piece.replace("{", "").replace("}", "").upper() for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return _suggesting(super().parse_args, ctx, args)


class Group(TyperGroup):
    """A group that runs its ``list`` command when called on its own; ``--json`` before the command is the same as after it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        if LIST in self.commands:
            self.subcommand_metavar = "[COMMAND] [ARGS]..."
            self.epilog = f"Without a command: {LIST}."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before = list(takewhile(lambda arg: arg == JSON, args))
        args = args[len(before) :]
        if LIST in self.commands and not ctx.resilient_parsing and (not args or _is_option_of_list(args[0], ctx)):
            args = [LIST, *args]
        if args and not args[0].startswith("-"):
            args = [args[0], *before, *args[1:]]
        return _suggesting(super().parse_args, ctx, args)


class Root(TyperGroup):
    """``ft`` itself: commands are imported one by one, when called; only ``--help`` reads about all of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        is_platform = find_spec("control_plane") is not None
        modules = {module: names for module, names in MODULES.items() if is_platform or module.startswith(OWN)}
        self.commands = CommandsByName(modules)  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return _suggesting(super().parse_args, ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, [JSON, *rest] if ctx.params.get("as_json") else rest

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        sections: dict[str, list[tuple[str, str]]] = {}
        limit = formatter.width - 6 - max(map(len, self.commands))
        assert isinstance(self.commands, CommandsByName)
        for about in self.commands.described():
            sections.setdefault(about.panel, []).append((about.name, TyperCommand(None, help=about.help).get_short_help_str(limit)))
        for panel, rows in sections.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _is_option_of_list(arg: str, ctx: Any) -> bool:
    return arg.startswith("-") and arg not in ctx.help_option_names


def _suggesting(parse: Callable[[Any, list[str]], list[str]], ctx: Any, args: list[str]) -> list[str]:
    """Run `parse(ctx, args)`; an unknown option's error suggests the intended one."""
    try:
        return parse(ctx, args)
    except typer.TyperException as error:
        if hasattr(error, "possibilities"):  # click's NoSuchOption, which typer does not export
            error.message = f"No such option: {error.option_name}{_hint(error.option_name, ctx)}"  # type: ignore[attr-defined]
            error.possibilities = None
        raise


def _hint(option: str, ctx: Any) -> str:
    known = [name for param in ctx.command.get_params(ctx) for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    of_ft = BEFORE_THE_COMMAND if ctx.parent is not None else ()
    begin_so = [name for name in known if name.startswith(option)]
    meant = begin_so or get_close_matches(option, [*known, *of_ft], n=2, cutoff=CLOSE)
    if meant and meant[0] in of_ft:
        return f". {meant[0]} goes before the command: `ft {meant[0]} ... {ctx.info_name}`"
    if not meant and HYPERPARAMETER in known:
        return f". A hyperparameter is written {HYPERPARAMETER} n_epochs=3"
    return f". Did you mean {' or '.join(meant)}?" if meant else ""
