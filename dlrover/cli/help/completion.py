"""
`dlrover completion SHELL`: a script that completes commands and options of `dlrover` and `dlrover-run`.

The script holds all words. Pressing Tab therefore starts no Python, which would take a quarter of a second each time.
After an update of the package, print it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import typer

from dlrover.cli.help.tree import CommandEntry, all_commands
from dlrover.protocol.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of dlrover and dlrover-run for bash: `source <(dlrover completion bash)`, for instance in ~/.bashrc.
_dlrover_words() {{
  case "$1" in
{cases}
  esac
}}
_dlrover_complete() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" path="${{COMP_WORDS[0]##*/}}" word index
  for ((index = 1; index < COMP_CWORD; index++)); do
    word="${{COMP_WORDS[index]}}"
    [[ "$word" == -* ]] && continue
    [[ " $(_dlrover_words "$path") " == *" $word "* ]] && path="$path $word"
  done
  COMPREPLY=($(compgen -W "$(_dlrover_words "$path")" -- "$current"))
}}
complete -o default -F _dlrover_complete dlrover dlrover-run
"""
_ZSH_HEAD = """\
# Completion of dlrover and dlrover-run for zsh: `source <(dlrover completion zsh)`, in ~/.zshrc after compinit.
autoload -U +X bashcompinit && bashcompinit
"""
_FISH_HEAD = """\
# Completion of dlrover and dlrover-run for fish: `dlrover completion fish > ~/.config/fish/completions/dlrover.fish`.
function __dlrover_at
    set -l path
    for word in (commandline -opc)
        string match -q -- '-*' $word; or set -a path (string replace -r '.*/' '' -- $word)
    end
    test "$path" = "$argv"; or string match -q -- "$argv *" "$path"
end
"""


def script_for(shell: str, app: typer.Typer) -> str:
    """Raises `ConfigError` for a shell that is not known."""
    if shell not in SHELLS:
        raise ConfigError(f"No completion for {shell}. Give one of {', '.join(SHELLS)}.")
    commands = [command for command in all_commands(app) if not command.is_hidden]
    if shell == "fish":
        return _FISH_HEAD + "".join(f"{line}\n" for command in commands for line in _fish_lines(command))
    cases = "\n".join(
        f"    {_quoted(command.name)}) echo {_quoted(' '.join(_words(command)))};;" for command in commands
    )
    script = _BASH.format(cases=cases)
    return script if shell == "bash" else _ZSH_HEAD + script.partition("\n")[2]


def _words(command: CommandEntry) -> Iterable[str]:
    """What may come next. Of an option with several spellings only the first: they mean the same."""
    return (*command.commands, *(option.names[0] for option in command.options))


def _fish_lines(command: CommandEntry) -> Iterable[str]:
    program = command.words[0]
    at = f"complete -c {program} -n {_quoted('__dlrover_at ' + command.name)}"
    for name in command.commands:
        yield f"{at} -f -a {name}"
    for option in command.options:
        name = option.names[0]
        spelled = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
        needs = "" if not option.value else (f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r")
        yield f"{at} {spelled}{needs} -d {_quoted(option.text.partition('. ')[0])}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
