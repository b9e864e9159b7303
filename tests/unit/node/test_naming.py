"""A name means what is called so, whichever kind of name it is, and a place nothing but what is there."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.failure import Ambiguous
from kybernate.node.naming import SHOWN, Names, is_place, meant, names_of, the_only

IDS: Final = ("1111-a", "1111-b", "2222-a", "web")
PLACES: Final = ("/images/web", "/images/team/web", "s3://b/p#-/1111-a", "images/team/1111-a")
COPIES: Final = st.lists(
    st.builds(
        names_of,
        st.sampled_from(PLACES),
        st.sampled_from(IDS),
        st.sampled_from(["web", "db", "1111-a", "team/web", ""]),
        st.sampled_from(["", "team"]),
        st.sampled_from(["", "sha256:1", "sha256:2"]),
    ),
    max_size=6,
)
NAMES: Final = st.sampled_from([*IDS, *PLACES, "/images/web/", "1111", "111", "", "team", "team/web", "db", "sha256:1"])


def same(copy: Names) -> Names:
    return copy


@given(COPIES, NAMES)
def test_name_means_all_that_is_called_so_and_nothing_else(copies: list[Names], name: str) -> None:
    found = meant(name, copies, same)
    assert found == [copy for copy in copies if copy in found], "the order is kept"
    at = [copy for copy in copies if copy.place == name.rstrip("/")]
    called = [copy for copy in copies if name and name in (copy.id, *copy.words)]
    begun = [copy for copy in copies if len(name) >= 4 and copy.id.startswith(name)]
    assert found == (at if at or is_place(name) else called or begun)


def test_no_copy_has_an_empty_name() -> None:
    copy = names_of("/images/web", "1", "", "")
    assert copy.words == frozenset()
    assert meant("", [copy], same) == []


def test_places_of_a_name_are_listed_up_to_a_number() -> None:
    assert the_only("web", ["/images/web"]) == "/images/web"
    with pytest.raises(Ambiguous, match="is the name of") as caught:
        the_only("web", [f"/images/{number}" for number in range(SHOWN + 5)])
    words = str(caught.value)
    assert (words.count("/images/"), "and 5 more" in words, caught.value.state) == (SHOWN, True, "nothing was done")
