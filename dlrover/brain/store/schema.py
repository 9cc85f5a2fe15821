"""
The tables. `migrations` makes them; here are their columns, for the statements.

Instants are seconds since 1970 by Brain's clock. What only the core reads is one MessagePack value in a column `data`; what statements select by has a column of its own.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()
NAME = String(128)
NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only where the type is spelled INTEGER."""

TENANT = Table(
    "tenant",
    METADATA,
    Column("name", NAME, primary_key=True),
    Column("row_limit", BigInteger, nullable=False),
    Column("made_at", Float(53), nullable=False),
)
TOKEN = Table(
    "token",
    METADATA,
    Column("hash", String(64), primary_key=True),
    Column("tenant", NAME, ForeignKey("tenant.name"), nullable=False),
    Column("role", String(16), nullable=False),
    Column("made_at", Float(53), nullable=False),
)
JOB = Table(
    "job",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("tenant", NAME, nullable=False),
    Column("uid", NAME, nullable=False),
    Column("secret_hash", String(64), nullable=False),
    Column("name", NAME, nullable=False),
    Column("user_name", NAME, nullable=False),
    Column("cluster", NAME, nullable=False),
    Column("namespace", NAME, nullable=False),
    Column("app", NAME, nullable=False),
    Column("strategy", String(64), nullable=False),
    Column("recipe_name", NAME, nullable=False),
    Column("script_hash", NAME, nullable=False),
    Column("script_name", NAME, nullable=False),
    Column("dataset_hash", NAME, nullable=False),
    Column("model_size", BigInteger, nullable=False),
    Column("key_parts", String(512), nullable=False),
    Column("key_script", String(512), nullable=False),
    Column("key_size", String(512), nullable=False),
    Column("bounds", LargeBinary, nullable=False),
    Column("facts", LargeBinary, nullable=False),
    Column("began_at", Float(53), nullable=False),
    Column("heard_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("end_reason", String(64), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("core_hours", Float(53), nullable=False),
    Column("newest_run", BigInteger, nullable=False),
    Column("newest_decision", BigInteger, nullable=False),
)
RUN = Table(
    "run",
    METADATA,
    Column("job_id", NUMBER, ForeignKey("job.id"), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("at", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("step_time", Float(53), nullable=False),
    Column("records_per_second", Float(53), nullable=False),
    Column("workers", Integer, nullable=False),
    Column("servers", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
NODE_EVENT = Table(
    "node_event",
    METADATA,
    Column("job_id", NUMBER, ForeignKey("job.id"), primary_key=True),
    Column("node", BigInteger, primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("node_type", String(16), nullable=False),
    Column("at", Float(53), nullable=False),
    Column("cpu", Float(53), nullable=False),
    Column("memory_mb", BigInteger, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("used_memory_mb", Float(53), nullable=False),
)
PLAN = Table(
    "plan",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("job_id", NUMBER, ForeignKey("job.id"), nullable=False),
    Column("number", BigInteger),
    Column("at", Float(53), nullable=False),
    Column("algorithm", NAME, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("expected", Float(53), nullable=False),
    Column("came", Float(53), nullable=False),
    Column("is_taken_back", Boolean, nullable=False),
)
SETTING = Table(
    "setting",
    METADATA,
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("include", Text, nullable=False),
    Column("exclude", Text, nullable=False),
    Column("vals", Text, nullable=False),
)
CLUSTER = Table(
    "cluster",
    METADATA,
    Column("tenant", NAME, primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("at", Float(53), nullable=False),
    Column("data", LargeBinary, nullable=False),
)
