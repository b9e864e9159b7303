"""The code, its messages, log events, comments and docstrings keep to the words of the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation import GAP, NOT_OUR_WORDS, ROOT, all_texts, modules, remarks, sources, text_of

EVENT = re.compile(rf"[a-z_]+\.(?P<last>(?:[a-z_]+|{GAP}|[a-z]+_{GAP})+)")
REMARKS = {  # a wrong word that a line break divides, in each language
    "a.py": "# the program goes\n# on\n",
    "b.py": 'def f():\n    """It goes\n    on."""\n',
    "c.c": "/* it goes\n * on */\n",
    "d.proto": "  // it goes\n  // on\n",
}
PARTICIPLES = {"begun", "given", "overridden", "kept", "left", "lost", "sent", "taken", "unsigned"}  # those without -ed
PHRASES = {"sent_through_criu", "file_left_open", "file_kept_open", "taken_over", "given_back", "reloaded_late"}
PHRASES |= {"not_locked_again", "accepted_unsigned"}


def events() -> Iterator[str]:
    """Yield the name of every event that is logged, with a gap where a part is computed."""
    calls = (node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        logs = re.search(r"\b_?log\.(debug|info|warning|error)$", ast.unparse(call.func))
        if logs and call.args and (text := text_of(call.args[0])) is not None:
            yield text


def is_participle(words: str) -> bool:
    last = words.rpartition("_")[2]
    return words in PHRASES or last.endswith("ed") or last in PARTICIPLES or last == GAP


def test_no_message_has_a_word_that_is_not_ours() -> None:
    assert sorted({text for text in all_texts() if re.search(NOT_OUR_WORDS, text)}) == []


def test_no_comment_has_a_word_that_is_not_ours() -> None:
    found = {str(path.relative_to(ROOT)): remarks(path, NOT_OUR_WORDS) for path in sources()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_remarks_of_each_language_are_read(tmp_path: Path) -> None:
    for name, text in REMARKS.items():
        file = tmp_path / name
        file.write_text(text)
        assert len(remarks(file, NOT_OUR_WORDS)) == 1


@pytest.mark.parametrize("text", ["whoever has set it", "starts it anew", "the container goes on", "both go on"])
def test_wrong_word_would_be_found(text: str) -> None:
    assert re.search(NOT_OUR_WORDS, text)


@pytest.mark.parametrize("event", sorted(set(events())))
def test_event_is_a_noun_and_a_participle(event: str) -> None:
    found = EVENT.fullmatch(event)
    assert found is not None
    assert is_participle(found["last"])
