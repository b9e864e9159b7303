"""Images, their labels and their replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kybernate.registry.migrate import downgrade as downgrade

revision = "r0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "image",
        sa.Column("key", sa.String(80), primary_key=True),
        *_texts("id"),
        sa.Column("created", sa.BigInteger, nullable=False),
        *_texts("namespace", "pod", "container", "name", "image", "image_digest", "node"),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("vram_bytes", sa.BigInteger, nullable=False),
        sa.Column("encrypted", sa.Boolean, nullable=False),
        *_texts("gpus", "annotations"),
        sa.Column("pinned", sa.Boolean, nullable=False),
        *_texts("workload", "parent"),
        sa.Column("generation", sa.BigInteger),
        sa.Column("last_used", sa.BigInteger),
        sa.Column("last_restore_seconds", sa.Float, nullable=False),
    )
    op.create_table(
        "label",
        sa.Column("key", sa.String(80), sa.ForeignKey("image.key", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(253), primary_key=True),
        *_texts("value"),
    )
    op.create_table(
        "replica",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("image", sa.String(80), sa.ForeignKey("image.key"), nullable=False),
        *_texts("node", "place", "tier", "name"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("verified", sa.BigInteger),
        *_texts("findings", "reason"),
    )


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]
