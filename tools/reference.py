"""
Pages of docs/reference that are made from the code, so that they say what it does.

    python -m tools.reference    # writes commands.md, python-api.md and settings.md

A test compares them with what this makes. Texts come from the help of commands and from docstrings: improve those, and write the pages anew.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import dlrover
from dlrover.cli.help.tree import CommandEntry, OptionEntry, all_commands
from dlrover.cli.main import app
from dlrover.cli.options.table import OPTIONS, Option
from dlrover.protocol.messages.fleet import FleetSpec, ReplicaSpec, Resource
from dlrover.trainer.older_names import older_names_of

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "`python -m tools.reference` writes this page."
FRONT_ENDS = "dlrover.trainer.torch.flash_checkpoint"
MODULES = (
    ("dlrover.trainer.data_sources", "Where records come from"),
    (f"{FRONT_ENDS}.ddp", "Checkpoints of whole states"),
    (f"{FRONT_ENDS}.fsdp", "Checkpoints of sharded states"),
    (f"{FRONT_ENDS}.deepspeed", "Checkpoints of DeepSpeed"),
    (f"{FRONT_ENDS}.megatron_sharded", "Checkpoints of Megatron-Core"),
    (f"{FRONT_ENDS}.hf_trainer", "Checkpoints of the Trainer of transformers"),
    ("dlrover.trainer.torch.transformers_callback", "A callback for the Trainer of transformers"),
    ("dlrover.trainer.torch.lightning_callback", "A callback for the Trainer of Lightning"),
    ("dlrover.trainer.events", "Events of training scripts"),
    ("dlrover.unified", "Multi-role jobs on Ray"),
)
"""Beside `dlrover` itself: what scripts import when they need more than it offers."""
FILES = (
    (FleetSpec, "The nodes of a job", "What `dlrover master --fleet FILE` reads, as JSON."),
    (ReplicaSpec, "Nodes of one type", "A value of `replicas`."),
    (Resource, "Resources", "What a node gets, and what `limits` bounds."),
)


# Commands.


def commands_page() -> str:
    commands = list(all_commands(app))
    shown = [command for command in commands if not command.is_hidden]
    lines = [
        "# Commands",
        "",
        f"Every command with every option. {MADE} The help of each command shows the same.",
        "",
        (
            "A job is found by its name among the jobs of this host, by `--addr`, or by `--ray`. `dlrover completion bash`, `zsh` or `fish` prints a script "
            "that lets your shell complete all of it. [dlrover-run](dlrover-run.md) explains what its options do together."
        ),
        "",
        "| Command | What it does |",
        "|---|---|",
        *(f"| [`{each.name}`](#{_anchor(each.name)}) | {_cell(each.text)} |" for each in shown),
    ]
    for command in shown:
        lines += ["", f"## {command.name}", "", command.text, "", *_usage(command)]
        lines += _options(command)
    short = ", ".join(f"`{each.name}`" for each in commands if each.is_hidden)
    lines += [
        "",
        "## Short forms",
        "",
        f"These older or shorter names do the same as the command of the group `dlrover job`: {short}.",
    ]
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    return title.replace(" ", "-")


def _usage(command: CommandEntry) -> Iterator[str]:
    words = [command.name, "[OPTIONS]"] if command.options else [command.name]
    words += ["COMMAND"] if command.commands else [name for name, _ in command.arguments]
    yield f"    {' '.join(words)}"
    if command.arguments:
        yield ""
        yield from (f"* `{name}`: {text}" for name, text in command.arguments)


def _options(command: CommandEntry) -> Iterator[str]:
    own = [option for option in command.options if option.names[0] != "--help"]
    if own:
        yield from ("", "| Option | What it does |", "|---|---|")
        yield from (f"| {_spelled(option)} | {_cell(option.text)} |" for option in own)


def _spelled(option: OptionEntry) -> str:
    value = f" {option.value}" if option.value else ""
    return ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in option.names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# The Python API.


def api_page() -> str:
    lines = [
        "# Python API",
        "",
        (
            f"What scripts import. {MADE} Names that are not here may change; scripts of the original DLRover find theirs in "
            "[compatibility](compatibility.md)."
        ),
        "",
        "`import dlrover` imports nothing else until a name is used.",
        "",
        "## dlrover",
        "",
        "| Name | What it is |",
        "|---|---|",
        *(
            f"| [`{name}`](#{_anchor(f'dlrover{name}'.lower())}) | {_cell(_first(_text_of(getattr(dlrover, name))))} |"
            for name in dlrover.__all__
        ),
    ]
    for name in dlrover.__all__:
        lines += _described(f"dlrover.{name}", getattr(dlrover, name), "###")
    for path, title in MODULES:
        module = importlib.import_module(path)
        lines += ["", f"## {title}", "", f"`{path}`"]
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == path and name[0] != "_"
        ]
        for name in sorted(names):
            lines += _described(name, getattr(module, name), "###")
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any, mark: str) -> Iterator[str]:
    yield from ("", f"{mark} {name}", "")
    if _is_enum(value):
        text = _own_text(value)
        if text:
            yield from (text, "")
        yield "One of " + ", ".join(f"`{member}`" for member in value.__members__) + "."
        return
    if not callable(value):
        yield f"Constant: `{value!r}`."
        return
    yield f"    {name}{_signature(value)}"
    if text := _text_of(value):
        yield from ("", text)
    yield from _older(value.__init__ if inspect.isclass(value) else value)
    if inspect.isclass(value):
        for method, member in _members(value):
            is_property = isinstance(member, property)
            taken = "" if is_property else _signature(getattr(value, method))
            text = inspect.getdoc(member.fget if is_property else getattr(value, method)) or ""
            yield from ("", f"**`{method}{taken}`**")
            if text:
                yield from ("", text)
            yield from _older(member)


def _older(function: Any) -> Iterator[str]:
    if names := older_names_of(function):
        accepted = ", ".join(f"`{older}` for `{name}`" for older, name in sorted(names.items()))
        yield from ("", f"Also accepted, by name: {accepted}.")


def _is_enum(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, enum.Enum)


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Public ones that we define, those of a base class of ours after its own."""
    seen: set[str] = set()
    for owner in value.__mro__:
        if not owner.__module__.startswith("dlrover") or issubclass(owner, BaseException):
            continue
        for name, member in vars(owner).items():
            is_ours = isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member)
            if is_ours and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _text_of(value: Any) -> str:
    """Its docstring; of a class that has none, what its construction says, and the module that is about it alone."""
    own = _own_text(value)
    if not inspect.isclass(value):
        return own
    made = inspect.cleandoc(vars(value).get("__init__").__doc__ or "") if "__init__" in vars(value) else ""
    module = inspect.getmodule(value)
    about = inspect.cleandoc(module.__doc__ or "") if module is not None and not own else ""
    return "\n\n".join(part for part in (own or about, made) if part)


def _own_text(value: Any) -> str:
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return inspect.cleandoc(text or "")


def _first(text: str) -> str:
    """The first sentence, without the name in front of it."""
    sentence = re.split(r"(?<=\.)\s|:\s*\n", text.partition("\n\n")[0], maxsplit=1)[0]
    said = re.sub(r"^`[\w.]+`: ", "", " ".join(sentence.split())).rstrip(":")
    return said[:1].upper() + said[1:]


def _signature(value: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    shown, is_keyword_only = [], False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not is_keyword_only:
            if not any(other.kind is each.VAR_POSITIONAL for other in signature.parameters.values()):
                shown.append("*")
            is_keyword_only = True
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(f"{star}{each.name}" + ("" if each.default is each.empty else f"={_default(each.default)}"))
    return f"({', '.join(shown)})"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    return re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>", "…", repr(value))


# Settings.


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        f"Every setting of a node, and the files that set up a job by hand. {MADE}",
        "",
        (
            "An option wins over its variable, and the variable over the default. With `DLROVER_LOG_LEVEL=INFO` the launcher logs the effective values and "
            "where each came from. Other variables are in [environment](environment.md)."
        ),
        "",
        "## Of dlrover-run",
        "",
        "Dashes and underscores are the same in an option. A flag is set by 1 in its variable.",
        "",
        "| Option | Variable | Kind | Default |",
        "|---|---|---|---|",
        *(f"| `{option.names[0]}` | `{option.variable}` | {_kind(option)} | {_shown(option)} |" for option in OPTIONS),
    ]
    for struct, title, text in FILES:
        lines += ["", f"## {title}", "", text, "", "| Key | Default | What it says |", "|---|---|---|"]
        texts = _field_texts(struct)
        for field in msgspec.structs.fields(struct):
            lines.append(f"| `{field.encode_name}` | {_field_default(field)} | {_cell(texts.get(field.name, ''))} |")
    return "\n".join(lines) + "\n"


def _kind(option: Option) -> str:
    return ", ".join(f"`{choice}`" for choice in option.choices) if option.choices else option.kind.value


def _shown(option: Option) -> str:
    if option.is_flag:
        return "off"
    if option.default in (None, "", ()):
        return "not given"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


def _field_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT:
        value = field.default_factory() if callable(field.default_factory) else None
        return "empty" if value in ({}, (), [], "") or isinstance(value, msgspec.Struct) else f"`{value}`"
    if isinstance(field.default, msgspec.Struct) or field.default in ({}, (), ""):
        return "empty"
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return f"`{msgspec.json.encode(value).decode()}`"


def _field_texts(struct: type) -> dict[str, str]:
    """The strings below the fields, as they stand in the source."""
    import ast
    import textwrap

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(tree, ast.ClassDef), "a struct is a class"
    found, name = {}, ""
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = " ".join(text.split())
            case _:
                name = ""
    return found


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "python-api.md": api_page,
    "settings.md": settings_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
