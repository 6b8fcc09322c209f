"""Stop strings: found at the token that completes them, never in the prompt, across any token boundary."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.rollout.request import StopText


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level vocabulary at its extreme: every token is one byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A vocabulary whose text depends on the left neighbour: words are joined by spaces, except at the beginning."""
    return " ".join("abcdefgh"[token] for token in tokens)


def first_stop(
    stop: Sequence[str], prompt: Sequence[int], sampled: Sequence[int], decode: object = decode_bytes, passed: int = 0
) -> int:
    watch = StopText(stop, decode=decode, prompt=prompt, passed=passed)  # type: ignore[arg-type]
    tokens = list(prompt)
    for n, token in enumerate(sampled):
        tokens.append(token)
        if watch.found(tokens):
            return n
    return -1


def test_a_stop_string_over_several_tokens() -> None:
    assert first_stop(["END"], b"hello ", b"so ENDs it") == 5


def test_the_first_of_several() -> None:
    assert first_stop(["zzz", "\n\n"], b"x", b"ab\n\ncd") == 3


def test_the_prompt_does_not_count() -> None:
    assert first_stop(["END"], b"END", b"x") == -1
    assert first_stop(["END"], b"EN", b"D and EN") == -1
    assert first_stop(["END"], b"EN", b"D END") == 4


def test_a_character_of_four_bytes() -> None:
    smile = "\N{GRINNING FACE}".encode()
    assert first_stop(["\N{GRINNING FACE}"], b"", b"ab" + smile) == 5
    assert first_stop(["b"], smile[:2], smile[2:] + b"ab") == 3


def test_a_stop_string_before_an_unfinished_character() -> None:
    # Tokens of several bytes: the stop is complete, the character after it is not.
    pieces = [b"a", b"END\xf0\x9f"]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[t] for t in tokens).decode("utf-8", errors="replace")

    assert first_stop(["END"], [0], [0, 1], decode) == 1


def test_bytes_that_never_become_a_character_hide_nothing() -> None:
    assert first_stop(["END"], b"", b"\xff" * 9 + b"END") == 11


def test_a_space_between_words_is_text() -> None:
    assert first_stop(["b c"], [0], [1, 2], decode_words) == 1
    assert first_stop([" b"], [0], [1, 2], decode_words) == 0
    assert first_stop([" c"], [0], [1, 2], decode_words, passed=1) == 1


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.text(alphabet="ab\u00e9\u20ac\U0001f600", max_size=6),
    sampled=st.text(alphabet="ab\u00e9\u20ac\U0001f600", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u00e9\u20ac\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_it_stops_where_the_whole_text_first_contains_one(prompt: str, sampled: str, stop: list[str]) -> None:
    data = sampled.encode()
    expected = -1
    for n in range(len(data)):
        text = data[: n + 1].decode("utf-8", errors="ignore")
        if any(s in text for s in stop):
            expected = n
            break
    assert first_stop(stop, prompt.encode(), data) == expected
