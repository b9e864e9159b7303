"""Revisions and sums of annotations, by which a rebuild knows the newest ones; indexes of lists."""

from __future__ import annotations

import json
from hashlib import sha256

import sqlalchemy as sa
from alembic import op

from kybernate.registry.migrate import downgrade as downgrade

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    """Add the columns, and take over what the annotations of each row say."""
    op.add_column("image", sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("image", sa.Column("sum", sa.String(64), nullable=False, server_default=""))
    op.add_column("replica", sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"))
    image = sa.table("image", *map(sa.column, ("key", "annotations", "revision", "sum")))
    connection = op.get_bind()
    rows = connection.execute(sa.select(image.c.key, image.c.annotations)).all()
    for key, text in rows:
        connection.execute(
            sa.update(image)
            .where(image.c.key == key)
            .values(revision=_revision(text), sum=sha256(text.encode()).hexdigest())
        )
    op.create_index("image_by_age", "image", ["created", "key"])
    op.create_index("image_by_id", "image", ["id"])
    for name in ("namespace", "pod", "workload", "image", "pinned"):
        op.create_index(f"image_by_{name}", "image", [name, "created", "key"])
    op.create_index("label_by_name", "label", ["name", "value", "key"])
    op.create_index("replica_by_image", "replica", ["image", "tier", "node"])
    op.create_index("replica_by_node", "replica", ["node"])
    op.create_index("replica_by_name", "replica", ["name"])


def _revision(text: str) -> int:
    try:
        value = json.loads(text)["revision"]
    except (ValueError, TypeError, KeyError):
        return 0  # a damaged row, which a rebuild repairs
    return value if isinstance(value, int) else 0
