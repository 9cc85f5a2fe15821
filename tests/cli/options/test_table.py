"""The table of options against torch's own parser, and the parser against its own contract."""

from __future__ import annotations

import argparse
import random

import pytest

from dlrover.cli.options.help_page import COMMON, describe_all, describe_common
from dlrover.cli.options.parser import ValueOrigin, parse, unavailable
from dlrover.cli.options.table import OPTIONS, OUR_OPTIONS, TORCHRUN_OPTIONS, Kind
from dlrover.protocol.errors import ConfigError

torch_run = pytest.importorskip("torch.distributed.run")

_TYPES = {Kind.TEXT: str, Kind.INTEGER: int, Kind.NUMBER: float}


@pytest.fixture(scope="module")
def torch_actions() -> dict[str, argparse.Action]:
    actions = torch_run.get_args_parser()._actions
    return {action.dest: action for action in actions if action.option_strings and action.dest != "help"}


@pytest.mark.peer
def test_the_table_has_exactly_torchruns_options(torch_actions: dict[str, argparse.Action]) -> None:
    assert {option.dest for option in TORCHRUN_OPTIONS} == set(torch_actions)


@pytest.mark.peer
@pytest.mark.parametrize("option", TORCHRUN_OPTIONS, ids=lambda option: option.dest)
def test_an_option_of_torchrun_has_torchs_names_default_and_type(
    option: object, torch_actions: dict[str, argparse.Action]
) -> None:
    from dlrover.cli.options.table import Option

    assert isinstance(option, Option)
    action = torch_actions[option.dest]
    ours = {*option.names, option.short} - {""}
    assert ours == set(action.option_strings)
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    assert default == action.default
    if option.is_flag:
        assert action.nargs == 0
    else:
        assert action.nargs is None
    if option.kind is Kind.LIST:
        assert callable(action.type)
        assert list(parse([option.names[0], "a,,b,c", "x.py"], {}).texts(option.dest)) == action.type("a,,b,c")
    elif not option.is_flag:
        assert action.type is _TYPES[option.kind]
    assert list(option.choices) == list(action.choices or ())


class Refused(Exception):
    """torch's parser ends the process instead."""


class Helped(Exception):
    """It prints its help."""


def refuse(message: str) -> None:
    raise Refused(message)


def help_() -> None:
    raise Helped


@pytest.fixture(scope="module")
def torch_parser() -> argparse.ArgumentParser:
    parser = torch_run.get_args_parser()
    parser.error = refuse
    parser.print_help = help_
    return parser


def told_by_torch(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, object] | str:
    """What the parser understood, "help", or what is wrong."""
    try:
        return vars(parser.parse_args(argv))
    except Refused as refused:
        return str(refused)
    except Helped:
        return "help"


def told_by_us(argv: list[str]) -> dict[str, object] | str:
    try:
        parsed = parse(argv, {})
    except ConfigError as error:
        return str(error)
    if parsed.immediate:
        return "help"
    values = {option.dest: parsed.values[option.dest] for option in TORCHRUN_OPTIONS}
    told = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return told | {"training_script": parsed.script, "training_script_args": list(parsed.script_args)}


GOOD_VALUES = {Kind.TEXT: "0:1", Kind.INTEGER: "3", Kind.NUMBER: "1.5", Kind.LIST: "a,b", Kind.FLAG: None}


@pytest.mark.peer
def test_each_abbreviation_means_what_it_means_under_torchrun(torch_parser: argparse.ArgumentParser) -> None:
    """
    Our own options make none ambiguous. Up to Python 3.11 torchrun refuses one that fits both spellings of one option; later ones
    accept it, and so do we.
    """
    num_clear = 0
    for option in TORCHRUN_OPTIONS:
        value = option.choices[0] if option.choices else GOOD_VALUES[option.kind]
        for name in option.names:
            for length in range(3, len(name) + 1):
                given = name[:length]
                meant = {each.dest for each in TORCHRUN_OPTIONS if any(full.startswith(given) for full in each.names)}
                meant |= {"help"} if "--help".startswith(given) else set()
                meant = {option.dest} if given in option.names else meant
                for argv in ([given], [f"{given}={value}"], [given, str(value)]):
                    if (value is None) != (len(argv) == 1 and "=" not in argv[0]):
                        continue
                    ours, theirs = told_by_us([*argv, "x.py"]), told_by_torch(torch_parser, [*argv, "x.py"])
                    if len(meant) > 1:
                        assert isinstance(ours, str), argv
                        assert all(f"--{dest.replace('_', '-')}" in ours for dest in meant), ours
                        continue
                    num_clear += 1
                    full = [option.names[0] + argv[0][length:], *argv[1:], "x.py"]
                    assert ours == told_by_torch(torch_parser, full), argv
                    if not isinstance(theirs, str):
                        assert ours == theirs
    assert num_clear > 500


VALUES = (
    "1", "2:3", "0:1,1:2", "x=y", "-1", "-1.5", "-", "", "a b", "-a b", "--nnodes", "spawn", "node", "-r", "1e3", " 3", "0x10",
    "1_0", "--unknown", "--foo bar", "default", "host:1", "=", "-m",
)  # fmt: skip


@pytest.mark.peer
def test_thousands_of_command_lines_mean_the_same_as_under_torchrun(torch_parser: argparse.ArgumentParser) -> None:
    """
    Drawn from a seed. Not compared: what torch calls ambiguous (see above; it looks even at the script's own arguments), and a
    wrong option before --help, of which we tell first.
    """
    rng = random.Random(0)
    names = [name for option in TORCHRUN_OPTIONS for name in (*option.names, option.short) if name] + ["-h", "--help"]

    def words() -> list[str]:
        if rng.random() < 0.4:
            return [rng.choice((*VALUES, "--"))]
        name = rng.choice(names)
        if name.startswith("--") and rng.random() < 0.4:
            name = name[: rng.randint(3, len(name))]
        name += rng.choice(("", "", "", "=" + rng.choice(VALUES), rng.choice(VALUES) if rng.random() < 0.3 else ""))
        return [name, rng.choice(VALUES)] if rng.random() < 0.5 else [name]

    num_understood = 0
    for _ in range(3000):
        argv = [word for _ in range(rng.randint(0, 3)) for word in words()]
        argv += ["x.py"] if rng.random() < 0.8 else []
        argv += [word for _ in range(rng.randint(0, 2)) for word in words()]
        theirs, ours = told_by_torch(torch_parser, argv), told_by_us(argv)
        if isinstance(theirs, str) and (theirs.startswith("ambiguous") or theirs == "help" != ours):
            continue
        if isinstance(theirs, str) and theirs != "help":
            assert isinstance(ours, str), (argv, theirs)
            continue
        assert ours == theirs, argv
        num_understood += 1
    assert num_understood > 400


@pytest.mark.peer
@pytest.mark.parametrize(
    "argv",
    [
        ["train.py"],
        ["--nnodes", "1:2", "--nproc_per_node=4", "train.py", "--lr", "0.1", "--nnodes", "9"],
        ["-m", "pkg.module", "-x", "--", "y"],
        ["-r3", "-t", "0:1,1:2", "train.py"],
        ["--node-rank", "-1", "train.py", "-"],
        ["--", "train.py", "--help"],
        ["--standalone", "--max-restarts=2", "--duplicate-stdout-filters", "a,b", "./prog", "-h"],
    ],
    ids=" ".join,
)
def test_a_command_line_means_the_same_as_under_torchrun(argv: list[str]) -> None:
    theirs = vars(torch_run.parse_args(argv))
    ours = parse(argv, {})
    assert (ours.script, list(ours.script_args)) == (theirs["training_script"], theirs["training_script_args"])
    for option in TORCHRUN_OPTIONS:
        value = ours.values[option.dest]
        assert (list(value) if isinstance(value, tuple) else value) == theirs[option.dest], option.dest


def test_all_names_are_distinct_and_come_in_both_spellings() -> None:
    names = [name for option in OPTIONS for name in (*option.names, option.short) if name]
    assert len(names) == len(set(names))
    for option in OPTIONS:
        for name in option.names:
            assert "--" + name[2:].replace("-", "_") in option.names
            assert "--" + name[2:].replace("_", "-") in option.names


@pytest.mark.parametrize(
    "name",
    [
        "network-check", "precheck", "comm-perf-test", "node-unit", "auto-config", "auto-tunning", "auto-tuning",
        "exclude-straggler", "save-at-breakpoint", "accelerator", "training-port", "numa-affinity", "membind-policy",
        "ucp-device-type",
    ],
)  # fmt: skip
def test_every_option_of_the_original_is_known(name: str) -> None:
    known = {spelling for option in OUR_OPTIONS for spelling in option.names}
    assert {f"--{name}", "--" + name.replace("-", "_")} <= known


def test_an_explicit_option_wins_over_the_variable_and_the_variable_over_the_default() -> None:
    environ = {"PET_NNODES": "2", "PET_STANDALONE": "1", "PET_NO_PYTHON": "0"}
    from_variable = parse(["x.py"], environ)
    assert from_variable.text("nnodes") == "2"
    assert from_variable.origins["nnodes"] is ValueOrigin.ENVIRONMENT
    assert from_variable.flag("standalone")
    assert not from_variable.flag("no_python")
    from_flag = parse(["--nnodes", "3", "x.py"], environ)
    assert from_flag.text("nnodes") == "3"
    assert from_flag.origins["nnodes"] is ValueOrigin.FLAG
    assert parse(["x.py"], {}).origins["nnodes"] is ValueOrigin.DEFAULT


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--nodes", "2", "x.py"], {}, "Did you mean --nnodes"),
        (["--nnodez=2", "x.py"], {}, "Did you mean --nnodes"),
        (["--log=2", "x.py"], {}, "--log fits several options: --log-dir, --logs-specs."),
        (["--no", "x.py"], {}, "--no fits several options: --no-python, --node-rank."),
        (
            ["--snapshot", "1", "x.py"],
            {},
            "--snapshot fits several options: --snapshot-write-limit, --snapshot-replicas, ",
        ),
        (["--help=1"], {}, "takes no value"),
        (["-q", "x.py"], {}, "-q is not an option"),
        (["--standalone=1", "x.py"], {}, "takes no value"),
        (["--standal=1", "x.py"], {}, "--standalone is a flag"),
        (["--nnodes"], {}, "needs a value"),
        (["--nnodes", "--standalone", "x.py"], {}, "needs a value"),
        (["--max-restarts", "many", "x.py"], {}, "an integer"),
        (["--start-method", "thread", "x.py"], {}, "one of spawn, fork, forkserver"),
        ([], {}, "No training script"),
        (["--standalone"], {}, "No training script"),
        (["x.py"], {"PET_MAX_RESTARTS": "many"}, "PET_MAX_RESTARTS=many"),
        (["x.py"], {"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes"),
        (["x.py"], {"PET_EXIT_CODE": "two"}, "PET_EXIT_CODE=two"),
    ],
)
def test_a_bad_command_line_is_answered_with_what_is_wrong(
    argv: list[str], environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(argv, environ)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--numa-affinity"], ["--membind-policy",
        "bind"], ["--training-port", "6"], ["--ucp_device_type", "cuda"],
        ["--numa-binding", "node"], ["--logs-specs", "mine"], ["--event-log-handler", "mine"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_option_whose_feature_arrives_later_is_refused(argv: list[str]) -> None:
    error = unavailable(parse([*argv, "x.py"], {}))
    assert error is not None
    assert "not yet available" in str(error)


@pytest.mark.parametrize(
    "argv",
    [["--training-port", "60000"], ["--standby=0"], ["--logs-specs=default"], ["--event-log-handler=console"], []],
)
def test_an_option_of_the_future_at_its_default_is_harmless(argv: list[str]) -> None:
    assert unavailable(parse([*argv, "x.py"], {})) is None


def test_a_variable_that_asks_for_the_future_is_named() -> None:
    assert "PET_NUMA_AFFINITY" in str(unavailable(parse(["x.py"], {"PET_NUMA_AFFINITY": "1"})))


def test_help_names_every_option() -> None:
    text = describe_all()
    for option in OPTIONS:
        assert option.names[0] in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_short_help_shows_what_most_jobs_need_and_where_the_rest_is() -> None:
    dests = [dest for _, group in COMMON for dest in group]
    assert len(dests) == len(set(dests))
    assert 18 <= len(dests) <= 24, "about twenty"
    text = describe_common()
    by_dest = {option.dest: option for option in OPTIONS}
    assert [dest for dest in dests if f"{by_dest[dest].names[0]}" not in text] == []
    assert not [dest for dest in dests if by_dest[dest].unavailable]
    assert "--help-all" in text
    assert "--rdzv-backend" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_each_help_is_asked_for_by_its_name_or_its_beginning() -> None:
    for given in ("-h", "--help", "--he"):
        assert parse([given], {}).immediate in ("-h", "--help")
    for given in ("--help-all", "--help_all", "--help-"):
        assert parse([given], {}).immediate == "--help-all"
