"""Groups and commands of ``ft``: built when called; a group on its own lists; mistyped options get a suggestion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name, get_group, solve_typer_info_help

JSON, LIST, HYPERPARAMETER = "--json", "list", "--hp"
CLOSE = 0.7
"""Similarity (difflib, 0 to 1) from which an option is suggested: one or two wrong letters."""
BEFORE_THE_COMMAND = ("--url", "--api-key", "--version")
"""Options of ``ft`` itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The help of a command or group in ``ft --help``."""

    name: str
    help: str
    panel: str


class Commands(Mapping[str, TyperCommand | TyperGroup]):
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

    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of commands by the module that defines them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands(self.modules)  # type: ignore[assignment]

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
        assert isinstance(self.commands, Commands)
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
