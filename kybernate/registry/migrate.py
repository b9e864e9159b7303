"""Brings the registry's tables to this release's revision, under a lock, in one transaction.

Two agents that start concurrently wait for each other, and the second one finds nothing to do. There is no downgrade:
an older release refuses the newer tables, because it would lose what it does not know.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from sqlalchemy import Connection, inspect, text

from kybernate.node.failure import Failure
from kybernate.registry.failures import REGISTRY_TOO_NEW_ADVICE, RegistryDamaged
from kybernate.registry.schema import HEAD, METADATA

VERSION_TABLE = "alembic_version"


def revision_of(connection: Connection) -> str:
    """Return the revision of the tables, "" where there are none. Raises RegistryDamaged."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return ""
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    if len(found) != 1:
        raise RegistryDamaged(f"the registry has {len(found)} revisions instead of one")
    return str(found[0])


def migrate(connection: Connection) -> None:
    """Make or upgrade the tables. The caller holds the lock of all migrations, and commits.

    Raises Failure, and RegistryDamaged where other tables have our names.
    """
    found = revision_of(connection)
    if found == HEAD:
        return
    if not found and (taken := sorted(set(inspect(connection).get_table_names()) & METADATA.tables.keys())):
        raise RegistryDamaged(
            f"the database has tables {', '.join(taken)} of another program",
            advice="give the registry a database of its own",
        )
    from alembic import command  # rare: once for each release
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found and found not in known:
        raise Failure(
            f"the registry has the tables of a newer release (revision {found}); this one knows them up to {HEAD}",
            state="nothing was changed",
            advice=REGISTRY_TOO_NEW_ADVICE,
        )
    command.upgrade(config, "head")


def downgrade() -> NoReturn:
    """Refuse a downgrade; every revision has this."""
    raise Failure(
        "the registry's tables are never changed back to those of an older release", advice=REGISTRY_TOO_NEW_ADVICE
    )


def _scripts() -> Path:
    spec = find_spec("kybernate.registry.migrations")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
