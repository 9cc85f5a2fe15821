"""
Reads the command line of `dlrover-run` and the environment.

Written by hand for three reasons: it must know which values were given and from where (flag, environment, default), it must name the nearest option for a misspelt
one, and `argparse` is not needed for the rest.

Every option also reads `PET_<NAME>`, as under torchrun, and can be abbreviated, as there: to the beginning of its name, if no other
option begins so. The options that torchrun does not have never make an abbreviation ambiguous that is clear there.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dlrover.cli.options.table import (
    EVENT_LOG_HANDLERS,
    OPTIONS,
    OUR_OPTIONS,
    TORCHRUN_OPTIONS,
    Kind,
    Option,
    Value,
)
from dlrover.protocol.errors import ConfigError

PROGRAM = "dlrover-run"

_BY_NAME = {name: option for option in OPTIONS for name in (*option.names, option.short) if name}
_HELP = ("-h", "--help")
_HELP_ALL = ("--help-all", "--help_all")
_CHECK_ENV = ("--check-env", "--check_env")
OPTION_NAMES = (*_BY_NAME, *_HELP, *_HELP_ALL, *_CHECK_ENV)
"""Each spelling of each option."""
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_TORCHRUN_NAMES = {name: option.names[0] for option in TORCHRUN_OPTIONS for name in option.names} | {"--help": "--help"}
_OUR_NAMES = {name: option.names[0] for option in OUR_OPTIONS for name in option.names} | {
    name: names[0] for names in (_HELP_ALL, _CHECK_ENV) for name in names
}


class ValueOrigin(enum.StrEnum):
    """Where a value came from."""

    FLAG = "flag"
    ENVIRONMENT = "env"
    DEFAULT = "default"


class Parsed(NamedTuple):
    """
    The command line and the environment, read and converted; whether the values make sense is the matter of
    `settings`.
    """

    values: Mapping[str, Value]
    origins: Mapping[str, ValueOrigin]
    script: str
    script_args: tuple[str, ...]
    immediate: str = ""
    """`--help`, `--help-all` or `--check-env`: do that and nothing else."""

    def text(self, dest: str) -> str:
        value = self.values[dest]
        return "" if value is None else str(value)

    def integer(self, dest: str) -> int:
        value = self.values[dest]
        assert isinstance(value, int), f"{dest} is no integer option"
        return value

    def number(self, dest: str) -> float:
        value = self.values[dest]
        assert isinstance(value, int | float), f"{dest} is no number option"
        return float(value)

    def flag(self, dest: str) -> bool:
        return self.values[dest] is True

    def texts(self, dest: str) -> tuple[str, ...]:
        value = self.values[dest]
        assert isinstance(value, tuple), f"{dest} is no list option"
        return value

    def is_given(self, dest: str) -> bool:
        """The user chose this value, by flag or by variable."""
        return self.origins[dest] is not ValueOrigin.DEFAULT


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Options up to the script; what follows the script belongs to it, as under torchrun."""
    values: dict[str, Value] = {option.dest: option.default for option in OPTIONS}
    origins = {option.dest: ValueOrigin.DEFAULT for option in OPTIONS}
    for option in OPTIONS:
        text = environ.get(option.variable)
        if text is not None:
            values[option.dest] = convert(option, text, f"the variable {option.variable}={text}")
            origins[option.dest] = ValueOrigin.ENVIRONMENT

    index = 0
    is_closed = False
    while index < len(argv):
        token = argv[index]
        index += 1
        if token == "--":
            is_closed = True
            break
        if not _looks_like_option(token):
            index -= 1
            break
        given, inline = _split(token)
        name = _full_name(given)
        if name in (*_HELP, *_HELP_ALL, *_CHECK_ENV):
            if inline is not None:
                raise ConfigError(f"{name} takes no value, but {token!r} gives it one. Leave the value out.")
            return Parsed(values, origins, "", (), immediate=name.replace("_", "-"))
        option = _BY_NAME[name]
        if option.is_flag:
            if inline is not None:
                raise ConfigError(
                    f"{name} is a flag and takes no value, but {token!r} gives it one. Leave the value out."
                )
            values[option.dest] = True
        else:
            if inline is None:
                if index == len(argv) or _looks_like_option(argv[index]):
                    raise ConfigError(f"{name} needs a value{_form(option)}, but none follows it.")
                inline = argv[index]
                index += 1
            values[option.dest] = convert(option, inline, f"{name} {inline}")
        origins[option.dest] = ValueOrigin.FLAG

    if index >= len(argv):
        raise ConfigError(
            f"No training script is given. Use: {PROGRAM} [options] SCRIPT [arguments of the script]; {PROGRAM} "
            "--help-all lists the options."
        )
    script, *rest = argv[index:]
    if rest and rest[0] == "--" and not is_closed:
        # torchrun's parser swallows this one as the end of *its* options; scripts written for it never see it.
        rest = rest[1:]
    return Parsed(values, origins, script, tuple(rest))


def unavailable(parsed: Parsed) -> ConfigError | None:
    """The error for an option whose feature arrives later, if one was asked for with a value that would need it."""
    for option in OPTIONS:
        value = parsed.values[option.dest]
        if option.unavailable and parsed.is_given(option.dest) and value not in (option.default, *option.harmless):
            shown = "" if option.is_flag else f" {value}"
            return ConfigError(
                f"{option.names[0]}{shown} is not yet available in this version ({_where(option, parsed)}). Until "
                f"then: {option.unavailable}."
            )
    handler = parsed.text("event_log_handler")
    if handler not in EVENT_LOG_HANDLERS:
        return ConfigError(
            f"--event-log-handler {handler} is not yet available in this version. Until then: leave it out; `dlrover events` shows "
            "what happens in the job."
        )
    return None


def _where(option: Option, parsed: Parsed) -> str:
    is_variable = parsed.origins[option.dest] is ValueOrigin.ENVIRONMENT
    return f"from the variable {option.variable}" if is_variable else "given on the command line"


def nearest(word: str, known: Sequence[str]) -> str:
    """ " Did you mean X?", or nothing."""
    import difflib

    matches = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def split_list(text: str) -> tuple[str, ...]:
    """Commas separate, a double comma is one; the rule of torchrun's filter options."""
    return tuple(item.replace("\0", ",") for item in text.replace(",,", "\0").split(","))


_CONVERTERS: dict[Kind, tuple[Callable[[str], Value], str]] = {
    Kind.TEXT: (str, "a text"),
    Kind.INTEGER: (int, "an integer"),
    Kind.NUMBER: (float, "a number"),
    Kind.LIST: (split_list, "a list"),
    Kind.FLAG: (lambda text: bool(int(text)), "0 or 1"),
}


def convert(option: Option, text: str, shown: str) -> Value:
    convert, wanted = _CONVERTERS[option.kind]
    try:
        value = convert(text)
    except ValueError as error:
        raise ConfigError(f"{shown}: {option.names[0]} needs {wanted}.") from error
    if option.choices and value not in option.choices:
        raise ConfigError(f"{shown}: {option.names[0]} needs one of {', '.join(option.choices)}.")
    return value


def _split(token: str) -> tuple[str, str | None]:
    """An option token as (name, attached value): `--a=b`, and `-r3` or `-r=3` for the short ones."""
    if token.startswith("--"):
        name, equals, value = token.partition("=")
        return name, value if equals else None
    if len(token) > 2 and token[:2] in OPTION_NAMES:
        return token[:2], token[2:].removeprefix("=")
    return token, None


def _full_name(given: str) -> str:
    """Of an option, which may be abbreviated. Raises `ConfigError`."""
    if given in OPTION_NAMES:
        return given
    for names in (_TORCHRUN_NAMES, _OUR_NAMES) if given.startswith("--") else ():
        candidates = {full: None for name, full in names.items() if name.startswith(given)}
        if len(candidates) == 1:
            return next(iter(candidates))
        if candidates:
            raise ConfigError(f"{given} fits several options: {', '.join(candidates)}. Write the option in full.")
    hint = nearest(given, OPTION_NAMES)
    raise ConfigError(
        f"{given} is not an option of {PROGRAM}.{hint} Options of the training script go after the script. "
        f"`{PROGRAM} --help-all` lists the options of {PROGRAM}."
    )


def _looks_like_option(token: str) -> bool:
    """As torchrun's parser sees it: neither a negative number is an option, nor a text with a blank that begins like none."""
    if len(token) < 2 or token[0] != "-" or _NEGATIVE_NUMBER.match(token):
        return False
    if " " not in token:
        return True
    name, inline = _split(token)
    return name in OPTION_NAMES or (inline is not None and any(known.startswith(name) for known in OPTION_NAMES))


def _form(option: Option) -> str:
    if option.choices:
        return f" ({', '.join(option.choices)})"
    return f" ({option.metavar})" if option.metavar else ""
