"""The words for values of the messages' enums, as people, documents, labels and metrics have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def word(enum: EnumTypeWrapper, value: int) -> str:
    """Return the name of a value in lower case; its number where only an agent of a later release knows it."""
    return word_in(enum.DESCRIPTOR, value)


def word_in(enum: EnumDescriptor, value: int) -> str:
    """Do as `word`, where only the enum's descriptor is at hand."""
    known = enum.values_by_number.get(value)
    return known.name.lower() if known is not None else str(value)
