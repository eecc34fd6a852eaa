"""Schema 4: for tasks of all kinds. What a group solved of its task, how each task did of late, and evaluations.

What was accepted before has no pass rate: difficulty counts from here on.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Float, Integer, String, Text

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("submissions", Column("pass_rate", Float()))
    op.create_table(
        "tasks",
        Column("task", String, primary_key=True),
        Column("groups", Integer, nullable=False),
        Column("rate", Float, nullable=False),
        Column("solved", Integer, nullable=False),
        Column("pool", String, nullable=False),
        Column("last_unit", BigInteger, nullable=False),
    )
    op.create_index("tasks_by_pool", "tasks", ["pool"])
    op.create_table(
        "evaluations",
        Column("incarnation", Integer, primary_key=True, autoincrement=False),
        Column("version", Integer, primary_key=True, autoincrement=False),
        Column("first", Integer, primary_key=True, autoincrement=False),
        Column("digest", String, nullable=False),
        Column("tasks", Integer, nullable=False),
        Column("state", String, nullable=False),
        Column("validator", String),
        Column("claimed_until_ms", BigInteger),
        Column("tries", Integer, nullable=False),
        Column("scores", Text, nullable=False),
        Column("document", Text, nullable=False),
        Column("decided_at_ms", BigInteger),
    )
    op.create_index("evaluations_by_state", "evaluations", ["state"])
