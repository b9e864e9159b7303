"""What Alembic executes to migrate: it is given the connection, whose transaction and lock migrate.py holds."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
