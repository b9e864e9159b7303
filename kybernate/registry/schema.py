"""The registry's tables, as statements name them. What makes and changes them is in migrations/.

Texts of manifests are their authors' choice: some are longer than an index of PostgreSQL takes, some have characters
that a database refuses. `Text` keeps them all, and gives back exactly what it was given, or a shortened form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    TypeDecorator,
)
from sqlalchemy import Text as AnyText

HEAD: Final = "r0003"  # the revision of migrations/ that these tables are
UNKNOWN_AGE: Final = -(1 << 63)  # of an image whose manifest cannot be read: it is listed behind the others
LONGEST: Final = 512  # characters of a text that is indexed
ODD: Final = re.compile("[\\\\\0\ud800-\udfff]")
ESCAPED: Final = re.compile(r"\\([0-9a-f]{4})")


class Text(TypeDecorator[str]):
    """A text of any characters. Backslash, NUL and halves of surrogate pairs are stored as a backslash and 4 digits."""

    impl = AnyText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape what a database refuses."""
        if value is None or not ODD.search(value):
            return value
        return ODD.sub(lambda found: f"\\{ord(found[0]):04x}", value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], str | None]:
        """Return what undoes it: called for each text of each row, so nothing of SQLAlchemy's is around it."""
        return _unescaped


def _unescaped(value: str | None) -> str | None:
    if value is None or "\\" not in value:
        return value
    return ESCAPED.sub(lambda found: chr(int(found[1], 16)), value)


def bounded(text: str) -> str:
    """Return the text, or for one that is too long its beginning and a digest of all of it."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 65]}…{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


METADATA: Final = MetaData()

IMAGE: Final = Table(
    "image",
    METADATA,
    Column("key", String(80), primary_key=True),
    Column("id", Text, nullable=False),
    Column("created", BigInteger, nullable=False),  # microseconds since the epoch, as all times; UNKNOWN_AGE
    Column("namespace", Text, nullable=False),
    Column("pod", Text, nullable=False),
    Column("container", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("image", Text, nullable=False),
    Column("image_digest", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("vram_bytes", BigInteger, nullable=False),
    Column("encrypted", Boolean, nullable=False),
    Column("gpus", Text, nullable=False),  # JSON
    Column("origin", Text, nullable=False),  # "" where the image was registered by an older release, as pod_uid
    Column("pod_uid", Text, nullable=False),
    # From here on what the manifest does not say, or not alone: `annotations` is all of it as JSON, the others are for
    # queries.
    Column("annotations", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("sum", String(64), nullable=False),  # of `annotations`: a row that was damaged is found out
    Column("pinned", Boolean, nullable=False),
    Column("workload", Text, nullable=False),
    Column("parent", Text, nullable=False),
    Column("generation", BigInteger),
    Column("last_used", BigInteger),
    Column("last_restore_seconds", Float, nullable=False),
)

LABEL: Final = Table(
    "label",
    METADATA,
    Column("key", ForeignKey("image.key", ondelete="CASCADE"), primary_key=True),
    Column("name", String(253), primary_key=True),
    Column("value", Text, nullable=False),
)

REPLICA: Final = Table(
    "replica",
    METADATA,
    Column("key", String(64), primary_key=True),  # of node and place
    Column("image", ForeignKey("image.key"), nullable=False),
    Column("node", Text, nullable=False),
    Column("place", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("verified", BigInteger),
    Column("findings", Text, nullable=False),  # JSON
    Column("reason", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),  # of the annotations kept with it
)

Index("image_by_age", IMAGE.c.created, IMAGE.c.key)
Index("image_by_id", IMAGE.c.id)
Index("image_by_namespace", IMAGE.c.namespace, IMAGE.c.created, IMAGE.c.key)
Index("image_by_pod", IMAGE.c.pod, IMAGE.c.created, IMAGE.c.key)
Index("image_by_workload", IMAGE.c.workload, IMAGE.c.created, IMAGE.c.key)
Index("image_by_image", IMAGE.c.image, IMAGE.c.created, IMAGE.c.key)
Index("image_by_pinned", IMAGE.c.pinned, IMAGE.c.created, IMAGE.c.key)
Index("label_by_name", LABEL.c.name, LABEL.c.value, LABEL.c.key)
Index("replica_by_image", REPLICA.c.image, REPLICA.c.tier, REPLICA.c.node)
Index("replica_by_node", REPLICA.c.node)
Index("replica_by_name", REPLICA.c.name)
