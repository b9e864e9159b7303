"""The lineage of images, by which the newest one of a container is found, wherever it lies."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kybernate.registry.migrate import downgrade as downgrade

revision = "r0003"
down_revision = "r0002"


def upgrade() -> None:
    """Add the columns; the next look at each image, or at the object store, fills them."""
    op.add_column("image", sa.Column("origin", sa.Text, nullable=False, server_default=""))
    op.add_column("image", sa.Column("pod_uid", sa.Text, nullable=False, server_default=""))
