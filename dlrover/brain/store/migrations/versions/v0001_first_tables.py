"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(128)
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _make_tenants()
    _make_jobs()
    _make_facts_of_jobs()
    _make_the_rest()


def _make_tenants() -> None:
    op.create_table(
        "tenant",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("row_limit", sa.BigInteger, nullable=False),
        sa.Column("made_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "token",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("tenant", _NAME, sa.ForeignKey("tenant.name"), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("made_at", sa.Float(53), nullable=False),
    )


def _make_jobs() -> None:
    names = ("name", "user_name", "cluster", "namespace", "app")
    recipe = ("recipe_name", "script_hash", "script_name", "dataset_hash")
    keys = ("key_parts", "key_script", "key_size")
    op.create_table(
        "job",
        sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("tenant", _NAME, nullable=False),
        sa.Column("uid", _NAME, nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        *(sa.Column(name, _NAME, nullable=False) for name in names),
        sa.Column("strategy", sa.String(64), nullable=False),
        *(sa.Column(name, _NAME, nullable=False) for name in recipe),
        sa.Column("model_size", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String(512), nullable=False) for name in keys),
        sa.Column("bounds", sa.LargeBinary, nullable=False),
        sa.Column("facts", sa.LargeBinary, nullable=False),
        sa.Column("began_at", sa.Float(53), nullable=False),
        sa.Column("heard_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53)),
        sa.Column("end_reason", sa.String(64), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("core_hours", sa.Float(53), nullable=False),
        sa.Column("newest_run", sa.BigInteger, nullable=False),
        sa.Column("newest_decision", sa.BigInteger, nullable=False),
    )
    op.create_index("job_of_tenant", "job", ["tenant", "uid"], unique=True)
    op.create_index("job_by_heard_at", "job", ["heard_at"])
    op.create_index("job_by_began_at", "job", ["tenant", "began_at"])
    op.create_index("job_by_name", "job", ["tenant", "name", "began_at"])
    for column in ("recipe_name", *keys):
        op.create_index(f"job_by_{column}", "job", ["tenant", column, "began_at"])


def _make_facts_of_jobs() -> None:
    op.create_table(
        "run",
        sa.Column("job_id", _NUMBER, sa.ForeignKey("job.id"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("step_time", sa.Float(53), nullable=False),
        sa.Column("records_per_second", sa.Float(53), nullable=False),
        sa.Column("workers", sa.Integer, nullable=False),
        sa.Column("servers", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("run_by_at", "run", ["at"])
    op.create_table(
        "node_event",
        sa.Column("job_id", _NUMBER, sa.ForeignKey("job.id"), primary_key=True),
        sa.Column("node", sa.BigInteger, primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("node_type", sa.String(16), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("cpu", sa.Float(53), nullable=False),
        sa.Column("memory_mb", sa.BigInteger, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("used_memory_mb", sa.Float(53), nullable=False),
    )
    op.create_index("node_event_by_at", "node_event", ["at"])
    op.create_table(
        "plan",
        sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("job_id", _NUMBER, sa.ForeignKey("job.id"), nullable=False),
        sa.Column("number", sa.BigInteger),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("algorithm", _NAME, nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("sentence", sa.Text, nullable=False),
        sa.Column("expected", sa.Float(53), nullable=False),
        sa.Column("came", sa.Float(53), nullable=False),
        sa.Column("is_taken_back", sa.Boolean, nullable=False),
    )
    op.create_index("plan_of_job", "plan", ["job_id", "number"], unique=True)
    op.create_index("plan_by_at", "plan", ["at"])


def _make_the_rest() -> None:
    op.create_table(
        "setting",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("include", sa.Text, nullable=False),
        sa.Column("exclude", sa.Text, nullable=False),
        sa.Column("vals", sa.Text, nullable=False),
    )
    op.create_table(
        "cluster",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
