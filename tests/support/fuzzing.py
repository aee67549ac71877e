"""Damage of all kinds, and how much of it to try."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FEDPROTO_FUZZ", "40"))

fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FEDPROTO_FUZZ" not in os.environ,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@st.composite
def damages(draw):
    """Changes to bytes: flipped bits, bytes cut out, doubled, overwritten or put in."""
    place = st.floats(0, 1, exclude_max=True)
    piece = st.binary(max_size=8) | st.sampled_from([b"\x00", b"\xff" * 4, b"NaN", b"[" * 9, b"-1"])
    kind = st.sampled_from(["flip", "cut", "double", "write", "insert", "end"])
    return draw(
        st.lists(st.tuples(kind, place, st.integers(0, 255), piece), min_size=1, max_size=4)
    )


def damaged(content: bytes, changes) -> bytes:
    found = bytearray(content)
    for kind, where, number, piece in changes:
        place = int(where * len(found))
        if kind == "flip" and found:
            found[place] ^= 1 << (number % 8)
        elif kind == "cut":
            del found[place : place + number % 40]
        elif kind == "double":
            found[place:place] = found[place : place + number]
        elif kind == "write":
            found[place : place + len(piece)] = piece
        elif kind == "insert":
            found[place:place] = piece
        elif kind == "end":
            del found[place:]
    return bytes(found)


ODD = st.one_of(
    st.integers(),
    st.sampled_from([10**400, -1, 0, 2**32, 2**63, 2**64]),
    st.floats(),
    st.text(max_size=20),
    st.booleans(),
    st.lists(st.integers(-3, 3) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
