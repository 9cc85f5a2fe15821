"""
`dlrover checkpoint`: look at checkpoints, check, compare, convert and clear away.

The commands work on our checkpoints, on those of the original DLRover and on plain files of torch and safetensors, in a directory or behind a
URL that fsspec reads. Exit code 0: all is well; 1: something is damaged or different; 2: the question cannot be answered as it is put.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dlrover.cli.tables import echo, plain_console, table_console
from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dlrover.cli.checkpoint.diff import Comparison
    from dlrover.cli.checkpoint.gc import Choice
    from dlrover.cli.checkpoint.listing import Found, Listing
    from dlrover.cli.checkpoint.verify import CheckpointVerdict

EXIT_DIFFERENT = 1
Result = TypeVar("Result")

app = typer.Typer(name="checkpoint", help="List, check, compare, convert and delete checkpoints.", no_args_is_help=True)

Location = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of checkpoints; a path or a URL.")
]
Json = Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Unpickle whole files. Unpickling can run code, so give it only for files whose author you trust.",
    ),
]


@app.command()
def ls(path: Location, is_json: Json = False) -> None:
    """List the checkpoints, and tell which of them are complete."""
    from dlrover.cli.checkpoint.listing import list_checkpoints, open_place

    listing = _readable(lambda: list_checkpoints(open_place(path)))
    if is_json:
        _print_json(listing)
        return
    console = table_console()
    console.print(_table(listing, time.time()))
    for name in listing.dangling:
        console.print(
            f"The tracker {name} names {listing.trackers[name]!r}, but no such checkpoint exists.",
            style="bold red",
            markup=False,
        )
    if listing.untracked is not None:
        console.print(
            f"dlrover_latest.txt is missing. A restore takes the newest complete checkpoint: step {listing.untracked}.",
            style="bold red",
            markup=False,
        )


@app.command()
def verify(
    path: Location,
    step: Annotated[int | None, typer.Option("--step", help="Check only the checkpoint of this step.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare only sizes and manifests; do not read the data.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Read every file and compare it with its checksum. Exit code 1: at least one file is damaged."""
    from dlrover.cli.checkpoint import verify as checkpoint_verify
    from dlrover.cli.checkpoint.listing import list_checkpoints, open_place

    place = _readable(lambda: open_place(path))
    listing = _readable(lambda: list_checkpoints(place))
    chosen = [each for each in listing.checkpoints if step is None or each.step == step]
    if not chosen:
        steps = sorted({each.step for each in listing.checkpoints if each.step is not None})
        raise ConfigError(
            f"{path} holds no checkpoint of step {step}. It holds checkpoints of the steps {steps or 'none'}."
        )
    total = sum(checkpoint_verify.bytes_to_read(place, each, is_quick=quick) for each in chosen)
    verdicts = []
    with _progress(total, is_shown=not is_json and not quick) as on_bytes:
        for each in chosen:
            verdict = checkpoint_verify.verify(place, each, is_quick=quick, on_bytes=on_bytes)
            verdicts.append(verdict)
    damage = checkpoint_verify.tracker_damage(listing) if step is None else []
    if is_json:
        _print_json({"verdicts": verdicts, "trackers": damage})
    else:
        _show_verdicts(table_console(), verdicts, damage, is_quick=quick)
    if damage or not all(verdict.is_good for verdict in verdicts):
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a directory of checkpoints.")],
    other: Annotated[
        str, typer.Argument(metavar="B", help="The checkpoint, or directory of checkpoints, to compare A with.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step in A, if A is a directory of several checkpoints.")
    ] = None,
    other_step: Annotated[
        int | None, typer.Option("--other-step", help="Step in B, if B is a directory of several checkpoints.")
    ] = None,
    manifest_only: Annotated[
        bool,
        typer.Option(
            "--manifest-only", help="Compare only names, shapes and checksums from the manifests. Needs no torch."
        ),
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Show at most this many differences; 0: all.", min=0)] = 50,
    trust_pickle: TrustPickle = False,
    is_json: Json = False,
) -> None:
    """Show which tensors were added, removed, or changed in shape or values. Exit code 1: there are differences."""
    from dlrover.cli.checkpoint.diff import compare, compare_manifests
    from dlrover.cli.checkpoint.tensors import has_torch

    if manifest_only or not has_torch():
        found = _readable(lambda: compare_manifests(one, other, steps=(step, other_step)))
    else:
        found = _readable(lambda: compare(one, other, steps=(step, other_step), trusts_pickle=trust_pickle))
    if is_json:
        _print_json(found)
    else:
        _show_differences(table_console(), found, limit)
    if found.differences:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Torch file, safetensors file, or checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="File or directory to write. It must not exist.")],
    to: Annotated[
        str,
        typer.Option("--to", help="Form of TARGET: torch, safetensors or dcp. Not given: the name of TARGET says it."),
    ] = "",
    step: Annotated[
        int | None, typer.Option("--step", help="Step in SOURCE, if it is a directory of several checkpoints.")
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out all values that are not tensors.")
    ] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Write a checkpoint in another form: torch file, safetensors, or torch's distributed checkpoint (DCP)."""
    from rich.filesize import decimal

    from dlrover.cli.checkpoint import convert as checkpoint_convert
    from dlrover.cli.checkpoint.tensors import has_torch

    if not has_torch():
        raise ConfigError("Converting needs torch. Install it with: pip install torch")
    forms = [form.value for form in checkpoint_convert.Form]
    if to and to not in forms:
        raise ConfigError(f"--to {to}: give one of {', '.join(forms)}.")
    form = checkpoint_convert.Form(to) if to else checkpoint_convert.form_of(target)
    size = _readable(
        lambda: checkpoint_convert.convert(
            source, target, form, step=step, trusts_pickle=trust_pickle, is_tensors_only=tensors_only
        )
    )
    echo(f"{target}: {form}, {decimal(size)}")


@app.command()
def gc(
    path: Location,
    keep_latest: Annotated[
        int | None, typer.Option("--keep-latest", help="Keep the newest N complete checkpoints.")
    ] = None,
    keep_interval: Annotated[
        int | None, typer.Option("--keep-interval", help="Keep checkpoints whose step is a multiple of N.")
    ] = None,
    older_than: Annotated[
        float,
        typer.Option("--older-than", help="Seconds without a change after which an unfinished save counts as failed."),
    ] = 3600.0,
    foreign: Annotated[
        bool,
        typer.Option(
            "--foreign",
            help="Apply the rules to checkpoints without a DLRover manifest too, such as those of the original DLRover.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the files. Without it the command only lists them.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Delete checkpoints that none of your rules keeps, and leftovers of unfinished saves. Without --yes it only lists them."""
    from rich.filesize import decimal

    from dlrover.cli.checkpoint import gc as checkpoint_gc
    from dlrover.cli.checkpoint.listing import list_checkpoints, open_place

    rules = checkpoint_gc.Rules(
        keep_latest=keep_latest, keep_interval=keep_interval, leftover_age=older_than, has_foreign=foreign
    )
    place = _readable(lambda: open_place(path))
    if not place.is_directory(place.location):
        raise ConfigError(f"{path} is not a directory. Give the directory of the checkpoints.")
    choices = checkpoint_gc.choose(_readable(lambda: list_checkpoints(place)), rules, time.time())
    if is_json:
        _print_json(choices)
    else:
        table_console().print(_choices_table(choices))
    going = [choice for choice in choices if choice.is_going]
    total = sum(choice.found.size_bytes for choice in going)
    if not yes:
        echo(f"{len(going)} would be deleted ({decimal(total)}). Give --yes to delete them.", err=is_json)
        return
    freed = checkpoint_gc.delete(place, choices)
    echo(f"deleted {decimal(freed)}", err=is_json)


def _table(listing: Listing, now: float) -> object:
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "step", "name", "state", "shards", "files", "size", "saved", "age", "tracker", title=listing.directory
    )
    for found in listing.checkpoints:
        table.add_row(
            "-" if found.step is None else str(found.step),
            Text(found.name),
            Text(found.state, style=_style(found)),
            "-" if found.num_shards is None else str(found.num_shards),
            str(found.num_files),
            decimal(found.size_bytes),
            "-" if found.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.saved_at)),
            "-" if found.saved_at is None else _age(now - found.saved_at),
            Text(", ".join(found.trackers)),
        )
    return table


def _style(found: Found) -> str:
    from dlrover.cli.checkpoint.listing import State

    return {State.COMPLETE: "green", State.DAMAGED: "bold red", State.FOREIGN: "", State.FILE: ""}.get(
        found.state, "yellow"
    )


def _age(seconds: float) -> str:
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def _show_verdicts(console: Console, verdicts: list[CheckpointVerdict], damage: list[str], *, is_quick: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "verdict", "files checked", "note")
    for verdict in verdicts:
        word = "good" if verdict.num_checked or (is_quick and not verdict.note) else "not checked"
        unchecked = f"{len(verdict.unchecked)} files without a checksum" if verdict.unchecked else ""
        note = "; ".join(text for text in (verdict.note, unchecked) if text)
        state = Text("DAMAGED", style="bold red") if not verdict.is_good else Text(word)
        table.add_row(Text(verdict.name), state, str(verdict.num_checked), Text(note))
    console.print(table)
    for sentence in (*damage, *(each for verdict in verdicts for each in verdict.damage)):
        console.print(f"damaged: {sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def _show_differences(console: Console, found: Comparison, limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    if found.is_by_manifest:
        console.print(
            "Compared by manifest: names, shapes and checksums of files, but not the values.", highlight=False
        )
    shown = found.differences[: limit or None]
    if shown:
        table = Table("change", "name", "A", "B", "largest difference")
        for each in shown:
            largest = "" if each.max_abs is None else f"{each.max_abs:.3g}"
            table.add_row(each.change, Text(each.name), Text(each.was), Text(each.now), largest)
        console.print(table)
    if len(found.differences) > len(shown):
        console.print(f"and {len(found.differences) - len(shown)} more; --limit 0 shows all", highlight=False)
    console.print(f"{len(found.differences)} different, {found.num_same} the same", highlight=False)


def _choices_table(choices: list[Choice]) -> object:
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "step", "state", "size", "", "because")
    for choice in choices:
        found = choice.found
        word = Text("delete", style="red") if choice.is_going else Text("keep")
        step = "-" if found.step is None else str(found.step)
        table.add_row(Text(found.name), step, found.state, decimal(found.size_bytes), word, Text(choice.reason))
    return table


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, in a terminal only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = plain_console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count)


def _readable(work: Callable[[], Result]) -> Result:
    """What the operating system has to say about a given path is an answer, not a traceback."""
    try:
        return work()
    except OSError as error:
        raise ConfigError(f"{error.filename or 'The checkpoint'} cannot be read: {error.strerror or error}.") from error


def _print_json(value: object) -> None:
    import msgspec

    echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
