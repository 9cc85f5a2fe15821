"""
The options of `dlrover-run`, as one table; `command_line` reads them.

torchrun's options are repeated here in our own words because asking torch for them would cost the launcher its whole
start (1.7 s and 219 MB); a test compares this table with `torch.distributed.run.get_args_parser()` of the installed
torch, so the two cannot drift apart.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from dlrover.agent.config import WatchConfig


class Kind(enum.Enum):
    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    LIST = "list"
    FLAG = "flag"


Value = str | int | float | bool | tuple[str, ...] | None


class Option(NamedTuple):
    names: tuple[str, ...]
    kind: Kind
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    short: str = ""
    group: str = "torchrun"
    unavailable: str = ""
    """Set: the option is known, its feature arrives later; this says what can be done until then."""
    metavar: str = ""
    harmless: tuple[str, ...] = ()
    """Of an option that is unavailable: values that ask for what happens anyway."""

    @property
    def dest(self) -> str:
        """The long name as torch's parser derives it: without dashes in front, underscores inside."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"

    @property
    def is_flag(self) -> bool:
        return self.kind is Kind.FLAG


def _both(name: str) -> tuple[str, ...]:
    """The dashed and the underscored spelling of a long option."""
    underscored = "--" + name.lstrip("-").replace("-", "_")
    return (name,) if underscored == name else (name, underscored)


def _option(
    name: str,
    kind: Kind,
    default: Value,
    text: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    short: str = "",
    group: str = "torchrun",
    unavailable: str = "",
    metavar: str = "",
    harmless: tuple[str, ...] = (),
) -> Option:
    names = _both(name) + tuple(spelling for alias in aliases for spelling in _both(alias))
    return Option(names, kind, default, text, choices, short, group, unavailable, metavar, harmless)


EVENT_LOG_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""torch's own. Others are plug-ins, which we cannot load."""

TORCHRUN_OPTIONS: tuple[Option, ...] = (
    _option("--nnodes", Kind.TEXT, "1:1", "How many nodes: N, or MIN:MAX for an elastic job.", metavar="N|MIN:MAX"),
    _option(
        "--nproc-per-node",
        Kind.TEXT,
        "1",
        "Workers on this node: a number, or auto (accelerators, else CPUs), gpu, xpu, cpu, or the name of a custom device of torch.",
        metavar="N|auto|gpu|xpu|cpu",
    ),
    _option(
        "--rdzv-backend",
        Kind.TEXT,
        "static",
        "No effect; accepted for torchrun's sake. The nodes always meet at the master.",
    ),
    _option(
        "--rdzv-endpoint",
        Kind.TEXT,
        "",
        "Address of the master, HOST[:PORT] (29400). The launcher on that host starts the master; the other "
        "launchers connect to it.",
        metavar="HOST[:PORT]",
    ),
    _option(
        "--rdzv-id",
        Kind.TEXT,
        "none",
        "Name of the job, the same on all nodes. If you give no job token, the token is derived from this "
        "name. Then the token is only as hard to guess as the name.",
    ),
    _option(
        "--rdzv-conf",
        Kind.TEXT,
        "",
        "Time limits of the rendezvous in seconds: join_timeout=600,lastcall_timeout=30,pend_timeout=inf.",
        metavar="KEY=VALUE,...",
    ),
    _option(
        "--standalone",
        Kind.FLAG,
        False,
        "Run a job of one node, with its own master on a free loopback port. --rdzv-endpoint has no effect then.",
    ),
    _option(
        "--max-restarts",
        Kind.INTEGER,
        0,
        "Number of times that the workers restart after a failure before the job fails. Not given: no limit "
        "while the job makes progress, and at most 3 restarts in a row without progress.",
    ),
    _option(
        "--monitor-interval",
        Kind.NUMBER,
        0.1,
        "No effect; accepted for torchrun's sake. The kernel reports each exit of a worker at once.",
    ),
    _option(
        "--start-method",
        Kind.TEXT,
        "spawn",
        "No effect; accepted for torchrun's sake. Workers are forked from a warm process, or started cold.",
        choices=("spawn", "fork", "forkserver"),
    ),
    _option(
        "--event-log-handler",
        Kind.TEXT,
        "null",
        "No effect; accepted for torchrun's sake (null, console or dynamic_rendezvous). `dlrover events` shows "
        "what happens in the job.",
    ),
    _option("--role", Kind.TEXT, "default", "Role of the workers; they see it as the variable ROLE_NAME."),
    _option("--module", Kind.FLAG, False, "Run the script as a module, like `python -m`.", short="-m"),
    _option("--no-python", Kind.FLAG, False, "Run the script as a program, without Python in front of it."),
    _option(
        "--run-path",
        Kind.FLAG,
        False,
        "Run the script with runpy.run_path in the worker's own interpreter. Takes precedence over --no-python.",
    ),
    _option(
        "--log-dir",
        Kind.TEXT,
        None,
        "Directory for the workers' log files, one sub-directory per run; /dev/null: keep none.",
        metavar="DIR",
    ),
    _option(
        "--redirects",
        Kind.TEXT,
        "0",
        "Output that goes to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or per local "
        "rank: 0:1,1:2.",
        short="-r",
        metavar="N|RANK:N,...",
    ),
    _option(
        "--tee",
        Kind.TEXT,
        "0",
        "Output that goes both to files and to the console; same form as --redirects.",
        short="-t",
        metavar="N|RANK:N,...",
    ),
    _option(
        "--local-ranks-filter",
        Kind.TEXT,
        "",
        "Only these local ranks write to the console. Log files are not affected.",
        metavar="RANK,...",
    ),
    _option(
        "--duplicate-stdout-filters",
        Kind.LIST,
        (),
        "Copy stdout lines that contain one of these texts (separated by commas) to one more file. Write a "
        "comma in a text as two commas.",
        metavar="TEXT,...",
    ),
    _option(
        "--duplicate-stderr-filters",
        Kind.LIST,
        (),
        "Copy stderr lines that contain one of these texts (separated by commas) to one more file. Write a "
        "comma in a text as two commas.",
        metavar="TEXT,...",
    ),
    _option(
        "--node-rank",
        Kind.INTEGER,
        0,
        "Rank of this node. Not given: NODE_RANK, or a rank that the master assigns. A variable that the "
        "platform sets takes precedence.",
    ),
    _option(
        "--master-addr",
        Kind.TEXT,
        "127.0.0.1",
        "Host of the master, if --rdzv-endpoint is not given; IPv6 in brackets.",
        metavar="HOST",
    ),
    _option(
        "--master-port",
        Kind.INTEGER,
        None,
        "Port at which the workers meet (29500). With several nodes and without --rdzv-endpoint, the job's "
        "master listens at the next higher port.",
        metavar="PORT",
    ),
    _option(
        "--local-addr",
        Kind.TEXT,
        None,
        "Address at which the other nodes reach this node. Not given: POD_IP, or the address of the interface "
        "towards the master.",
        metavar="HOST",
    ),
    _option(
        "--logs-specs",
        Kind.TEXT,
        None,
        "torchrun's plug-in for log files; only default is available.",
        unavailable="use --log-dir, --redirects and --tee",
        harmless=("default",),
    ),
    _option(
        "--numa-binding",
        Kind.TEXT,
        None,
        "Bind workers to the CPUs near their device.",
        choices=("node", "socket", "exclusive", "core-complex"),
        unavailable="start the workers through numactl with --no-python if you need it now",
    ),
    _option(
        "--signals-to-handle",
        Kind.TEXT,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals at which the launcher ends the job in an orderly way. Workers get the same signal, e.g. "
        "SIGUSR1 where a batch system warns with it.",
        metavar="SIGNAL,...",
    ),
    _option(
        "--shutdown-timeout",
        Kind.INTEGER,
        None,
        "Seconds that workers have to end after SIGTERM. Not given: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30.",
        metavar="SECONDS",
    ),
    _option(
        "--virtual-local-rank",
        Kind.FLAG,
        False,
        "LOCAL_RANK is 0 for every worker and CUDA_VISIBLE_DEVICES names its device.",
    ),
)

OURS = "dlrover"
_DUMP_SIGNAL = WatchConfig().dump_signal
OUR_OPTIONS: tuple[Option, ...] = (
    _option(
        "--job-name",
        Kind.TEXT,
        "",
        "Name of the job, for `dlrover status NAME` and others; equal on all nodes. Not given: ELASTIC_JOB_NAME, --rdzv-id, or "
        "the name of the script with a number.",
        group=OURS,
        metavar="NAME",
    ),
    _option(
        "--node-unit",
        Kind.INTEGER,
        1,
        "The number of nodes of a world is a multiple of this.",
        group=OURS,
        metavar="N",
    ),
    _option(
        "--auto-config",
        Kind.FLAG,
        False,
        "Without --nnodes take the number of nodes from NODE_NUM, and without --nproc-per-node start one "
        "worker for each device.",
        group=OURS,
    ),
    _option("--no-warm", Kind.FLAG, False, "Start every worker cold, with its own imports.", group=OURS),
    _option(
        "--framework",
        Kind.TEXT,
        "torch",
        "Framework of the script. tensorflow: TensorFlow is imported once for all workers of a node, and "
        "TF_CONFIG names the workers of each round, for MultiWorkerMirroredStrategy.",
        group=OURS,
        choices=("torch", "tensorflow"),
        metavar="NAME",
    ),
    _option(
        "--preload",
        Kind.TEXT,
        "",
        "Modules to import once before workers are forked, besides torch. They may not start a thread or touch "
        "a device. A minus leaves out a module that is imported by default: -torch._dynamo, for scripts "
        "without an optimizer, and -dlrover.trainer.torch.flash_checkpoint.",
        group=OURS,
        metavar="MODULE,...",
    ),
    _option(
        "--no-progress-hooks",
        Kind.FLAG,
        False,
        "Do not hook into torch to find out what workers are doing. DLRover then knows only what scripts report.",
        group=OURS,
    ),
    _option(
        "--dump-signal",
        Kind.INTEGER,
        _DUMP_SIGNAL,
        "Signal at which a worker writes down its stacks when the job seems to hang; 0: none.",
        group=OURS,
        metavar="NUMBER",
    ),
    _option(
        "--canary",
        Kind.INTEGER,
        0,
        "Every N steps, compare a digest of the parameters that all workers should have alike, and name the "
        "worker that differs. 0: never.",
        group=OURS,
        metavar="STEPS",
    ),
    _option(
        "--master-grace",
        Kind.NUMBER,
        600.0,
        "Seconds that workers keep training without a master before they stop.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--exit-code",
        Kind.TEXT,
        "one",
        "Exit code after a failed training: one (always 1, as torchrun does) or that of the first failed worker.",
        choices=("one", "worker"),
        group=OURS,
    ),
    _option(
        "--job-token-file",
        Kind.TEXT,
        "",
        "File that holds the job token, the secret that lets a node join the job. Not given: DLROVER_JOB_TOKEN.",
        group=OURS,
        metavar="FILE",
    ),
    _option(
        "--tls-ca",
        Kind.TEXT,
        "",
        "CA certificates (PEM) that the other side's certificate must come from. Giving it switches TLS on.",
        group=OURS,
        metavar="FILE",
    ),
    _option("--tls-cert", Kind.TEXT, "", "This node's certificate (PEM).", group=OURS, metavar="FILE"),
    _option("--tls-key", Kind.TEXT, "", "The key of this node's certificate (PEM).", group=OURS, metavar="FILE"),
    _option(
        "--journal",
        Kind.TEXT,
        "",
        "Keep the master's journal in this directory, for `dlrover replay`. Not given: the journal is removed "
        "when the job ends.",
        group=OURS,
        metavar="DIR",
    ),
    _option(
        "--enable-dashboard",
        Kind.FLAG,
        False,
        "Let the job's master serve a page about it; `dlrover dashboard` prints a link to it. Needs the extra dashboard.",
        group=OURS,
    ),
    _option(
        "--dashboard-port",
        Kind.INTEGER,
        8080,
        "Port of the page; any free port if it is taken, or with 0. Giving a port also enables the page.",
        group=OURS,
        metavar="PORT",
    ),
    _option(
        "--dashboard-host",
        Kind.TEXT,
        "127.0.0.1",
        "Address of the page; 0.0.0.0 or :: for all. From other machines, read the page through TLS or a tunnel.",
        group=OURS,
        metavar="HOST",
    ),
    _option(
        "--dashboard-url",
        Kind.TEXT,
        "",
        "URL under which a reverse proxy shows the page, such as https://jobs.example.com; separate several by "
        "commas. The page rejects requests under any other name.",
        group=OURS,
        metavar="URL",
    ),
    _option(
        "--metrics-port",
        Kind.INTEGER,
        None,
        "Port on which the master serves /metrics for Prometheus. Not given: only on the page's port.",
        group=OURS,
        metavar="PORT",
    ),
    _option(
        "--metrics-host",
        Kind.TEXT,
        "127.0.0.1",
        "Address on which /metrics is served.",
        group=OURS,
        metavar="HOST",
    ),
    _option(
        "--network-check",
        Kind.FLAG,
        False,
        "Check nodes and network before training; bad nodes leave the job.",
        group=OURS,
    ),
    _option(
        "--precheck",
        Kind.TEXT,
        "0",
        "Checks before training: 0 none, 1 the node check (as --network-check), 2 also a communication test "
        "(as --comm-perf-test).",
        choices=("0", "1", "2"),
        group=OURS,
    ),
    _option(
        "--comm-perf-test",
        Kind.FLAG,
        False,
        "Run the node check, then measure the bandwidth of a collective over all nodes. `dlrover status` shows "
        "the result.",
        group=OURS,
    ),
    _option(
        "--exclude-straggler",
        Kind.FLAG,
        False,
        "Remove a node from the job if the node check finds it slow.",
        group=OURS,
    ),
    _option(
        "--straggler-ratio",
        Kind.NUMBER,
        2.0,
        "A node counts as slow if its node check took longer than this factor times the median.",
        group=OURS,
    ),
    _option(
        "--check-fresh-for",
        Kind.NUMBER,
        600.0,
        "Seconds for which a passed node check stays valid, so that it is not repeated before a restart of the "
        "workers; 0: check before every restart.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--save-at-breakpoint",
        Kind.FLAG,
        False,
        "Write the newest snapshot in memory to storage when workers fail or when this node must leave.",
        group=OURS,
    ),
    _option(
        "--snapshot-write-limit",
        Kind.NUMBER,
        0.0,
        "Megabytes per second with which this node's agent writes snapshots to storage while workers train; 0: no limit.",
        group=OURS,
        metavar="MB",
    ),
    _option(
        "--snapshot-replicas",
        Kind.INTEGER,
        0,
        (
            "Number of other nodes that keep a copy of each node's snapshots in memory. The replacement of "
            "a lost node starts from it."
        ),
        group=OURS,
        metavar="R",
    ),
    _option(
        "--snapshot-parity",
        Kind.TEXT,
        "",
        "Keep parity instead of whole copies: of a group of K+M nodes, any M may be lost, and their snapshots "
        "are computed from the rest.",
        group=OURS,
        metavar="K+M",
    ),
    _option(
        "--snapshot-bandwidth",
        Kind.NUMBER,
        0.0,
        "Megabytes per second that a node may send in the background for copies and parity; 0: no limit.",
        group=OURS,
        metavar="MB",
    ),
    _option(
        "--auto-tunning",
        Kind.FLAG,
        False,
        "Tune the batch size and the data loader of the workers while they train. The total batch size stays the same.",
        aliases=("--auto-tuning",),
        group=OURS,
    ),
    _option(
        "--tuner",
        Kind.TEXT,
        "",
        "Method of --auto-tuning: memory (the default), historical (as in the original DLRover), off.",
        group=OURS,
        metavar="off|memory|historical",
    ),
    _option(
        "--accelerator",
        Kind.TEXT,
        "nvidia.com/gpu",
        "Kind of device that the node check tests: nvidia.com/gpu (on a node without one, its CPU), ascend-npu, "
        "mthreads.com/gpu, metax-tech.com/gpu, cpu, or what an installed package adds.",
        group=OURS,
        metavar="KIND",
    ),
    _option(
        "--training-port",
        Kind.INTEGER,
        60000,
        "First port to try for HCCL, on Ascend devices.",
        group=OURS,
        unavailable="set HCCL_IF_BASE_PORT yourself",
        metavar="PORT",
    ),
    _option(
        "--numa-affinity",
        Kind.FLAG,
        False,
        "Bind workers to the CPUs near their device.",
        group=OURS,
        unavailable="start the workers through numactl with --no-python if you need it now",
    ),
    _option(
        "--membind-policy",
        Kind.TEXT,
        "preferred",
        "Memory policy that goes with --numa-affinity.",
        group=OURS,
        unavailable="start the workers through numactl with --no-python if you need it now",
    ),
    _option(
        "--ucp-device-type",
        Kind.TEXT,
        "cpu",
        "Device for the conversion of universal checkpoints.",
        group=OURS,
        unavailable="leave it out",
    ),
    _option(
        "--standby",
        Kind.INTEGER,
        0,
        "Number of extra nodes, beyond MAX of --nnodes, that wait warm and replace a lost node at once.",
        group=OURS,
        metavar="N",
    ),
    _option(
        "--platform",
        Kind.TEXT,
        "local",
        "Platform of the nodes. local: this machine is one of them. ray: start the whole job on a Ray cluster, "
        "as `dlrover ray run` does.",
        choices=("local", "ray"),
        group=OURS,
        metavar="local|ray",
    ),
    _option(
        "--strategy",
        Kind.TEXT,
        "allreduce",
        "How nodes train together: allreduce (one world), or ps (a TensorFlow cluster with parameter servers; `dlrover local --ps` sets it).",
        choices=("allreduce", "ps"),
        group=OURS,
        metavar="NAME",
    ),
    _option(
        "--heartbeat",
        Kind.NUMBER,
        5.0,
        "Seconds between two heartbeats of a node.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--node-silence",
        Kind.NUMBER,
        40.0,
        "Seconds without a heartbeat after which the master considers a node lost; at least two heartbeats.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--node-suspicion",
        Kind.NUMBER,
        None,
        "The same limit for a node whose neighbours lost their connection to it. Not given: 12, or a value "
        "that fits --heartbeat and --node-silence.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--node-grace",
        Kind.NUMBER,
        5.0,
        "Seconds that a node has to reconnect after its connection was closed; at most 1 if a standby node waits.",
        group=OURS,
        metavar="SECONDS",
    ),
    _option(
        "--preemption-file",
        Kind.TEXT,
        "",
        "When this file appears, this machine will be taken away soon: the node saves and leaves. Not given: "
        "DLROVER_PREEMPTION_FILE.",
        group=OURS,
        metavar="FILE",
    ),
    _option(
        "--hang-detection",
        Kind.INTEGER,
        2,
        "What the master does when workers hang: 0 writes a line to its log, 1 reports the hang, 2 restarts the workers.",
        group=OURS,
        metavar="0|1|2",
    ),
    _option(
        "--hang-downtime",
        Kind.NUMBER,
        5.0,
        "Minutes without progress until the workers restart, if nothing proves that they hang. With proof they "
        "restart after seconds.",
        group=OURS,
        metavar="MINUTES",
    ),
    _option(
        "--max-hang-downtime",
        Kind.NUMBER,
        120.0,
        "The same limit for the first step, for compiling, for evaluating, and for ranks that compute.",
        group=OURS,
        metavar="MINUTES",
    ),
    _option(
        "--dynamic-failover-extension",
        Kind.TEXT,
        "",
        "Plug-in that decides what the job does after a failure. Not given: DLROVER_EXTENSION_DYNAMIC_FAILOVER.",
        group=OURS,
        metavar="MODULE::CLASS",
    ),
    _option(
        "--log-patterns",
        Kind.TEXT,
        "",
        "JSON file with patterns for log lines of a failed worker, each with the action to take: "
        '[{"pattern": "REGULAR EXPRESSION", "action": "restart|relaunch|abort"}, ...].',
        group=OURS,
        metavar="FILE",
    ),
    _option(
        "--scrape",
        Kind.TEXT,
        "",
        "HTTP addresses on this node with metrics in Prometheus format. The agent reads them every minute for "
        "the diagnosis.",
        group=OURS,
        metavar="URL,...",
    ),
    _option(
        "--pre-check-ops",
        Kind.TEXT,
        "",
        "Checks that the master runs before training begins: MODULE::CLASS,... (with ? it only reports a failure), "
        "or a list of tuples "
        "(module, class, bypass).",
        group=OURS,
        metavar="OPERATORS",
    ),
    _option(
        "--topology-querier",
        Kind.TEXT,
        "",
        "Plug-in of the master that tells the network switches above a host. Not given: DLROVER_TOPOLOGY_QUERIER.",
        group=OURS,
        metavar="MODULE::CLASS",
    ),
    _option(
        "--topology-sorter",
        Kind.TEXT,
        "",
        "Plug-in of the master that orders the nodes of a world. Not given: DLROVER_TOPOLOGY_SORTER.",
        group=OURS,
        metavar="MODULE::CLASS",
    ),
)

OPTIONS = TORCHRUN_OPTIONS + OUR_OPTIONS
