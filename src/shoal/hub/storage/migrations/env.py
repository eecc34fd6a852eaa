"""What Alembic runs: the migrations, on the connection and in the transaction that `schema` has open."""

from __future__ import annotations

from alembic import context

if hasattr(context, "config"):  # it is, while Alembic runs; whoever merely imports this finds nothing to do
    context.configure(connection=context.config.attributes["connection"], transaction_per_migration=False)
    context.run_migrations()
