"""Finds fields such as `model` in the first bytes of a request's body, as they arrive, without holding the rest.

The bytes are a client's: nothing here recurses, nothing grows with the body, and what is no JSON or multipart form ends
the search instead of failing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.message import Message
from typing import Final

from kybernate_shim import bounded_json

MOST_TEXT: Final = 512  # bytes of a field's name or value; a longer one is no model's
MOST_PART_HEAD: Final = 8 << 10
MOST_PADDING: Final = 64
END_OF_DELIMITER: Final = rb"(?:--|[ \t]{0,62}\r\n)"  # a line with more behind the boundary is no delimiter
STRUCTURE: Final = re.compile(rb'["{}\[\],:]')
IN_STRING: Final = re.compile(rb'["\\]')
SPACE: Final = b" \t\r\n\xef\xbb\xbf"
Value = str | bool


class JsonFields:
    """Fields of the object that a JSON body is. `found` has those seen so far, `done` says that no more will come.

    Of a key that is given twice, the first one counts.
    """

    def __init__(self, wanted: frozenset[str]) -> None:
        self.found: dict[str, Value] = {}
        self.done = False
        self._wanted = wanted
        self._depth = 0
        self._in_string = self._escaped = False
        self._text: bytearray | None = None  # of the string or word at depth 1; None where it is too long
        self._key: str | None = None  # whose value comes next
        self._is_key = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        position = 0
        if self._depth == 0 and not self.done:
            position = len(data) - len(data.lstrip(SPACE))
            if position == len(data):
                return
            if data[position : position + 1] != b"{":
                self.done = True
            else:
                self._depth, self._is_key, position = 1, True, position + 1
                self._text = bytearray()
        while position < len(data) and not self.done:
            position = self._string(data, position) if self._in_string else self._between(data, position)

    def _string(self, data: bytes, position: int) -> int:
        if self._escaped:
            self._escaped = False
            self._collect(data[position : position + 1])
            return position + 1
        end = IN_STRING.search(data, position)
        if end is None:
            self._collect(data[position:])
            return len(data)
        self._collect(data[position : end.start()])
        if end[0] == b"\\":
            self._collect(b"\\")
            self._escaped = True
        else:
            self._in_string = False
            if self._depth == 1:
                self._string_ended()
        return end.end()

    def _between(self, data: bytes, position: int) -> int:
        mark = STRUCTURE.search(data, position)
        if mark is None:
            self._collect(data[position:].strip(SPACE))
            return len(data)
        if self._depth == 1 and self._key is not None:
            self._collect(data[position : mark.start()].strip(SPACE))
        match mark[0]:
            case b'"':
                self._in_string = True
                self._text = bytearray()
            case b"{" | b"[":
                self._depth += 1
                self._key = None if self._depth == 2 else self._key
            case b"}" | b"]":
                if self._depth == 1:
                    self._word_ended()
                self._depth -= 1
                self.done = self.done or self._depth == 0
            case b",":
                if self._depth == 1:
                    self._word_ended()
                    self._key, self._is_key = None, True
            case b":":
                if self._depth == 1:
                    self._is_key, self._text = False, bytearray()
        return mark.end()

    def _collect(self, piece: bytes) -> None:
        if self._depth == 1 and self._text is not None:
            self._text += piece[: MOST_TEXT + 1]
            if len(self._text) > MOST_TEXT:
                self._text = None

    def _string_ended(self) -> None:
        text = _text_of(self._text)
        if self._is_key:
            self._key = text
        elif text is not None:
            self._take(text)
        self._text = None

    def _word_ended(self) -> None:
        word = bytes(self._text or b"")
        if word in (b"true", b"false"):
            self._take(word == b"true")

    def _take(self, value: Value) -> None:
        if self._key in self._wanted:
            self.found.setdefault(self._key, value)
            self.done = self._wanted <= self.found.keys()
        self._key = None


def _text_of(content: bytearray | None) -> str | None:
    """Return the text of a string's bytes between its quotes, None where it is none."""
    if content is None:
        return None
    try:
        if b"\\" in content:
            value = bounded_json.parse(b'"%b"' % bytes(content))
            return value if isinstance(value, str) else None
        return content.decode()
    except ValueError:
        return None


class FormFields:
    """Fields of a multipart form, such as those of an upload of audio."""

    def __init__(self, boundary: bytes, wanted: frozenset[str]) -> None:
        self.found: dict[str, Value] = {}
        self.done = False
        self._wanted = wanted
        self._delimiter = re.compile(re.escape(b"\r\n--" + boundary) + END_OF_DELIMITER)
        self._longest = len(boundary) + 4 + MOST_PADDING
        self._kept = bytearray(b"\r\n")  # the first delimiter may begin the body
        self._state = "skip"  # a preamble or a part that is not wanted; then "head", "value"
        self._name = ""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._kept += data
        while not self.done and {"skip": self._skip, "head": self._head, "value": self._value}[self._state]():
            pass

    def _skip(self) -> bool:
        found = self._delimiter.search(self._kept)
        if found is None:
            del self._kept[: max(0, len(self._kept) - self._longest)]
            return False
        self._delimited(found)
        return True

    def _delimited(self, found: re.Match[bytes]) -> None:
        """Begin a part, or end the search: two hyphens are behind the last one."""
        self.done = self.done or found[0].endswith(b"--")
        self._state = "head"
        del self._kept[: found.end() - 2]  # a head of no lines begins with the end of this one

    def _head(self) -> bool:
        end = self._kept.find(b"\r\n\r\n")
        if end < 0 and len(self._kept) > MOST_PART_HEAD:
            self.done = True
        if self.done or end < 0:
            return False
        self._name = _part_name(bytes(self._kept[:end]))
        del self._kept[: end + 2]  # the next delimiter may begin with the last CRLF
        self._state = "value" if self._name in self._wanted else "skip"
        return True

    def _value(self) -> bool:
        found = self._delimiter.search(self._kept)
        if found is None:
            if len(self._kept) > MOST_TEXT + self._longest:
                self._state = "skip"
                return True
            return False
        value = _text_of(self._kept[2 : found.start()].replace(b"\\", b"\\\\"))
        if value is not None:
            self.found.setdefault(self._name, {"true": True, "false": False}.get(value.lower(), value))
        self.done = self._wanted <= self.found.keys()
        self._state = "skip"
        return True


def _part_name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            found = _parameter(value.decode("utf-8", "replace"), "name")
            return found or ""
    return ""


def _parameter(header: str, name: str) -> str | None:
    message = Message()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ").strip()
    found = message.get_param(name)
    return found if isinstance(found, str) else None


def model_in(found: Mapping[str, Value]) -> str:
    """Return the model that these fields name, "" for none: what is no text names none."""
    name = found.get("model")
    return name if isinstance(name, str) else ""


def fields_of(content_type: str, wanted: frozenset[str]) -> JsonFields | FormFields | None:
    """Return what finds the fields in a body of this type, None where it has none."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        boundary = _parameter(content_type, "boundary")
        usable = boundary and len(boundary) <= 200 and boundary.isascii()
        return FormFields(boundary.encode(), wanted) if boundary and usable else None
    if kind in ("", "application/json") or kind.endswith("+json") or kind == "text/plain":
        return JsonFields(wanted)  # clients that forget the type send JSON
    return None
