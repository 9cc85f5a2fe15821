"""
The codes of refusals: one word for each reason, the same on the wire, in logs and in `docs/reference/error-codes.md`.

Programs compare codes and people read the message beside them, so a message may change and the value of a code never does.
A peer of another version may send a code that is not here: messages carry the code as plain text, and code that receives one
treats an unknown code as a refusal without a special meaning.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Each with its meaning and with what to do about it, for the people who read it in a log."""

    meaning: str
    remedy: str

    def __new__(cls, code: str, meaning: str, remedy: str) -> ErrorCode:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        return member

    # Any message.

    REJECTED = (
        "rejected",
        "The receiver rejected the request for the reason in the message.",
        "Read the message. The receiver will reject the same request again.",
    )
    UNAVAILABLE = (
        "unavailable",
        "The receiver cannot answer now. It is not known whether the request took effect.",
        "Nothing: the sender tries again. If it persists, check that the master runs and that its address is right.",
    )
    INTERNAL = (
        "internal",
        "The receiver failed on this request because of a bug or a fault of its machine. Nothing changed.",
        "Read the receiver's log. If it shows a traceback of DLRover, report it as a bug.",
    )
    MALFORMED = (
        "malformed",
        "The bytes are not a message, or a field breaks its rules. The text names the field and the value.",
        "Correct the named value. If you gave none, sender and receiver may be of different versions.",
    )
    UNKNOWN = (
        "unknown",
        "The receiver does not know this kind of message. The sender may be newer.",
        "Install the same version of DLRover on all machines.",
    )
    TOO_LARGE = (
        "too-large",
        "The message, or the answer to it, is longer than its limit.",
        "Send or ask for less at once. Keep large data in files.",
    )
    TOO_MANY_WAITING = (
        "too-many-waiting",
        "More requests wait for an answer than the master or the agent keeps.",
        "Use fewer threads that wait, or shorter waits.",
    )
    BAD_TOKEN = (
        "bad-token",
        "The sender does not know the job's token.",
        "Give the sender the job's token, or remove an agent of another job from this address.",
    )
    VERSION = (
        "version",
        "Sender and receiver speak different versions of the protocol.",
        "Install the same version of DLRover on all machines.",
    )
    NOT_A_MASTER = (
        "not-a-master",
        "The program that listens at the address is not a DLRover master.",
        "Check the address and the port.",
    )
    BLOCKED = (
        "blocked",
        "The master makes no decisions, because it cannot write its journal or because a node blocks the rendezvous.",
        "Free space for the journal, or wait for the end of the block. The message says which.",
    )

    # The streams of agents, and who may speak for a node.

    ATTACHED = (
        "attached",
        "Another node uses the stream already.",
        "Open another stream for another node.",
    )
    NOT_ATTACHED = (
        "not-attached",
        "The first command of a stream was not `Attach`.",
        "Nothing: an agent attaches again. Your own client must send `Attach` first.",
    )
    WRONG_SENDER = (
        "wrong-sender",
        "A node sent a command or a question in the name of another node, or of an earlier incarnation.",
        "Nothing: the agent sends it again under its present number.",
    )
    STALE_INCARNATION = (
        "stale-incarnation",
        "This incarnation of the node has ended: the master considered it lost, replaced it, or it left.",
        "Nothing: the agent attaches again as a new incarnation.",
    )
    TOO_OLD = (
        "too-old",
        "The command is older than the answers that the master keeps for its sender.",
        "Nothing: the agent continues with the master's present state.",
    )
    RANK_HELD = (
        "rank-held",
        "Two running nodes want the same node rank, and no greater `NODE_ID` decides between them.",
        "Give each node a `--node-rank` of its own, or none.",
    )
    TERMS_DIFFER = (
        "terms-differ",
        "The node was started with other options than the job. The message names the differences.",
        "Start all nodes with the same options.",
    )
    NODE_RELEASED = (
        "node-released",
        "The platform replaced or removed this node.",
        "Nothing: the agent on it exits.",
    )
    NODE_TYPE = (
        "node-type",
        "An agent runs on a node of a type that cannot join the all-reduce world.",
        "Run the program of such nodes without an agent.",
    )
    OLD_EPOCH = (
        "old-epoch",
        "Another master with a newer master epoch took over the job.",
        "Stop the older master.",
    )
    JOB_DIFFERS = (
        "job-differs",
        "The journal belongs to a job of another name.",
        "Give each job a journal of its own, or start the master with the name of the old job.",
    )
    NO_JOB = (
        "no-job",
        "The script runs outside a job, so the call has no effect.",
        "Start the script with `dlrover-run`.",
    )
    JOB_ENDED = (
        "job-ended",
        "The job has ended. The message says how.",
        "Start the job again if it must go on.",
    )

    # The rendezvous.

    UNKNOWN_RENDEZVOUS = (
        "unknown-rendezvous",
        "There is no rendezvous of this name.",
        "Use one of the names in the message.",
    )
    UNKNOWN_ROUND = (
        "unknown-round",
        "The round has not taken place yet. A master that lost its journal may know fewer rounds than its agents.",
        "Nothing: the agent joins the next round.",
    )
    STALE_ROUND = (
        "stale-round",
        "The round is over, or it is not open.",
        "Nothing: workers of that round stop, and the next round starts new ones.",
    )
    OFFER_USED = (
        "offer-used",
        "The offered port served an earlier round.",
        "Nothing: the agent offers another port.",
    )
    FINISHED = (
        "finished",
        "Workers that have finished are not started again.",
        "Nothing, or start the job again.",
    )
    DISMISSED = (
        "dismissed",
        "The master told this node to leave. The message says why.",
        "Nothing: the agent exits.",
    )
    NOT_BEGUN = (
        "not-begun",
        "No node has connected yet, and the first node sets the limits of the job.",
        "Start the first node, then try again.",
    )
    BAD_LIMITS = (
        "bad-limits",
        "The minimum and maximum number of nodes break a rule that the message names.",
        "Give other numbers.",
    )

    # Node checks and pre-checks.

    NOT_CHECKED = (
        "not-checked",
        "The node must pass the node check before it joins a round.",
        "Nothing: the agent runs the check first.",
    )
    NO_NODE_CHECK = (
        "no-node-check",
        "This job runs no node check.",
        "Start the job with `--network-check` if you want one.",
    )
    NOT_NEEDED = (
        "not-needed",
        "The node has passed its check already.",
        "Nothing: the agent joins the training.",
    )
    NOT_A_MEMBER = (
        "not-a-member",
        "The node takes no part in this round of the node check.",
        "Nothing: the agent follows the master to the round that it belongs to.",
    )
    TOO_LATE = (
        "too-late",
        "The report arrived after the decision that it was meant for.",
        "Nothing: the decision stands.",
    )

    # Keys and sync points.

    KV_TIMEOUT = (
        "kv-timeout",
        "The keys did not appear within the time limit. The message names them.",
        "Look at the log of the rank that sets them, or allow more time.",
    )
    KV_EMPTY = (
        "kv-empty",
        "The queue holds no value.",
        "Wait for a value, or push one first.",
    )
    KV_NOT_A_NUMBER = (
        "kv-not-a-number",
        "The key holds no decimal number, or the sum exceeds 64 bits. Nothing changed.",
        "Add only to keys that hold numbers.",
    )
    KV_TOO_LARGE = (
        "kv-too-large",
        "A key, a value or an answer exceeds its limit. Nothing changed.",
        "Ask for fewer keys at once, or keep the data in a file and its name in the store.",
    )
    KV_FULL = (
        "kv-full",
        "The key-value store has reached its limit. Nothing changed.",
        "Delete keys that you do not need, or keep large data in files.",
    )
    KV_BUSY = (
        "kv-busy",
        "Too many bytes of answers are on their way to this node. Nothing changed.",
        "Nothing: the client tries again. If it persists, pop fewer large values at once.",
    )
    SYNC_FULL = (
        "sync-full",
        "The job uses as many names of sync points and barriers as the master keeps.",
        "Reuse names instead of making new ones.",
    )
    WORLD_UNKNOWN = (
        "world-unknown",
        "A master that lost its journal does not know yet which workers are in this round.",
        "Nothing: workers join their sync point again until the master knows.",
    )

    # Data shards.

    UNKNOWN_DATASET = (
        "unknown-dataset",
        "No dataset of this name is registered.",
        "Register the dataset first, or correct the name. The message lists the known names.",
    )
    DATASET_DIFFERS = (
        "dataset-differs",
        "The dataset was registered with other parameters or other files. The message names the difference.",
        "Use the same parameters and files on every node and after a restart, or another name.",
    )
    DATA_FULL = (
        "data-full",
        "The job has as many datasets as the master keeps.",
        "Use fewer datasets.",
    )
    STALE_LEASE = (
        "stale-lease",
        "The sender does not hold this shard. Another worker may have it now.",
        "Nothing: the worker drops the shard and takes the next one.",
    )
    STREAM_OVER = (
        "stream-over",
        "The stream has ended, so its partitions cannot grow.",
        "Read later data as another dataset.",
    )
    RESTORE_DIFFERS = (
        "restore-differs",
        "The ranks of one round restored different steps.",
        "Check which checkpoint each rank found. All ranks must read the same storage.",
    )

    # Checkpoints.

    ATTEMPT_DIFFERS = (
        "attempt-differs",
        "Two nodes report one save with different steps, rounds, shards or targets.",
        "Let every rank call save with the same arguments.",
    )
    ATTEMPT_OVER = (
        "attempt-over",
        "The save was given up before this report arrived.",
        "Nothing: the next save is tried as usual. The master's events say why this save ended.",
    )
    ATTEMPT_COMMITTED = (
        "attempt-committed",
        "The save was committed before this report arrived.",
        "Nothing.",
    )
    NOT_COMPLETE = (
        "not-complete",
        "A node reports a commit that the master did not tell it to make.",
        "Nothing: the master tells a node when all shards are there.",
    )
    ALREADY_COMMITTED = (
        "already-committed",
        "The storage holds a checkpoint of this step and cannot replace it in one act.",
        "Save another step, or remove the old checkpoint first.",
    )
    ANOTHER_JOB = (
        "another-job",
        "Another job committed the same step to the same directory first.",
        "Give each job a directory of its own.",
    )
    NOT_A_CHECKPOINT = (
        "not-a-checkpoint",
        "The target path exists and is no checkpoint, so the agent does not replace it.",
        "Move the file or directory away, or save to another path.",
    )

    # Replicas of snapshots, between agents.

    NO_MEMBER = (
        "no-member",
        "The node asks where the peers of a round are, and it is not in that round.",
        "Nothing: the agent asks again in its next round.",
    )
    NOT_YET = (
        "not-yet",
        "The peer is in no round yet, or what is asked of it is not ready.",
        "Nothing: the agent tries again.",
    )
    BUSY = (
        "busy",
        "A copy of this shard is on its way to the peer already.",
        "Nothing: the agent tries again.",
    )
    HAVE_IT = (
        "have-it",
        "The peer holds these bytes already.",
        "Nothing.",
    )
    NOT_HERE = (
        "not-here",
        "The peer does not hold this snapshot or parity any more.",
        "Nothing: the agent asks another peer, or restores from storage.",
    )
    STALE_GENERATION = (
        "stale-generation",
        "The peer holds a newer snapshot of this shard.",
        "Nothing: the older copy is not needed.",
    )
    SUPERSEDED = (
        "superseded",
        "The group of nodes already protects a newer save.",
        "Nothing: the newer save is protected instead.",
    )
    CORRUPT = (
        "corrupt",
        "Bytes arrived with a different checksum.",
        "Nothing once: the agent sends or asks again. If it repeats, test the network and the memory of both machines.",
    )

    # The fleet: what people and platforms ask for.

    NO_PLATFORM = (
        "no-platform",
        "No platform starts the nodes of this job, so the master cannot start, end or replace nodes.",
        "Start the job with `dlrover local` or `dlrover master --fleet FILE`, or start and stop nodes by hand.",
    )
    UNKNOWN_NODE = (
        "unknown-node",
        "The job or the platform has no such node, or no longer has it.",
        "See `dlrover status` for the nodes of the job.",
    )
    BAD_FLEET = (
        "bad-fleet",
        "The description of the fleet breaks a rule that the message names.",
        "Correct the description.",
    )
    FLEET_DIFFERS = (
        "fleet-differs",
        "The job has a fleet already, and its description was another.",
        "Scale the job, or start another job.",
    )
    BAD_SCALE = (
        "bad-scale",
        "The job has no nodes of this type, or cannot have this number of them.",
        "Give a type and a number that the message allows.",
    )
    BAD_MIGRATION = (
        "bad-migration",
        "The node cannot be replaced now or in this way. The message says why.",
        "Choose another node or other resources, or wait until the present replacement is complete.",
    )
    BAD_RESTART = (
        "bad-restart",
        "Only a job whose workers form one world restarts as a whole.",
        "Restart single nodes instead.",
    )
    BAD_STAGE = (
        "bad-stage",
        "The job is not in the stage for this request: suspended, resumed, training or evaluation.",
        "See `dlrover status`, and ask again when the job is in the stage that the message names.",
    )
    NO_SERVERS = (
        "no-servers",
        "This job has no parameter servers.",
        "Leave the request out, or describe servers in the fleet.",
    )
    BAD_INTENT = (
        "bad-intent",
        "The master asked the platform for a node that no platform could start or remove.",
        "Correct the fleet: names, numbers and resources. The message names the value.",
    )
    OLD_MASTER = (
        "old-master",
        "A master that was replaced by a newer one sent an order to the platform.",
        "Stop the older master. The platform changed nothing.",
    )

    # Clusters.

    UNKNOWN_RESOURCE = (
        "unknown-resource",
        "The API server of the cluster does not know this kind of object.",
        "Install the definitions of `deploy/crds` in the cluster.",
    )
    THROTTLED = (
        "throttled",
        "The API server of the cluster asked for fewer requests.",
        "Nothing: the request is sent again after the time that the server gave.",
    )
    FORBIDDEN = (
        "forbidden",
        "The rights of the service account do not allow the request to the cluster.",
        "Give the account the right that the message names.",
    )
    BAD_NAME = (
        "bad-name",
        "The name is not allowed for an object in Kubernetes.",
        "Use lower-case letters, digits and hyphens.",
    )
    UNAUTHORIZED = (
        "unauthorized",
        "The API server of the cluster did not accept the token or the certificate.",
        "Renew the credentials of the kubeconfig or of the service account.",
    )
    TIMEOUT = (
        "timeout",
        "The API server of the cluster did not answer in time.",
        "Nothing: the request is sent again. If it persists, check the load of the server.",
    )
    BAD_CERTIFICATE = (
        "bad-certificate",
        "The certificate of the API server does not fit its name or its authority.",
        "Correct the address or the certificate authority in the kubeconfig.",
    )
    UNREACHABLE = (
        "unreachable",
        "No connection to the API server of the cluster could be opened.",
        "Check the address in the kubeconfig and the network.",
    )
    NO_JSON = (
        "no-json",
        "The server at this address answered, but it is not an API server.",
        "Check the address, and any proxy before the API server.",
    )
    NO_CLUSTER_TOKEN = (
        "no-cluster-token",
        "The token for the API server could not be read or made.",
        "Check the token file or the credential plug-in that the message names.",
    )
    NO_LIST = (
        "no-list",
        "The cluster has not answered the first list of objects yet.",
        "Nothing: the list is asked for again. The message says what failed.",
    )
    NO_PRIORITY_CLASS = (
        "no-priority-class",
        "The cluster has no PriorityClass of the name that the job gives.",
        "Create the PriorityClass, or give the name of an existing one.",
    )
    BAD_TEMPLATE = (
        "bad-template",
        "The cluster rejects the pod that the job's template leads to.",
        "Correct the template of the replica type. The message names the field.",
    )
