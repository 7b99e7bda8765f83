"""Problems about text."""

from __future__ import annotations

from rollgym.envs.code.families.base import Family, letters, text, words

STRINGS = (
    Family(
        name="shift letters",
        level=1,
        signature="shift_letters(text: str) -> str",
        statement=(
            "Move every lower-case letter a to z $shift places on in the alphabet, going round from z to "
            "a. Every $other stays in the text as it is; all other characters become `$mark`."
        ),
        solution="""def shift_letters(text):
    out = []
    for c in text:
        if "a" <= c <= "z":
            out.append(chr((ord(c) - 97 + $shift) % 26 + 97))
        elif c == {"space": " ", "full stop": ".", "hyphen": "-"}[$other]:
            out.append(c)
        else:
            out.append($mark)
    return "".join(out)
""",
        parameters={
            "shift": tuple(range(1, 26)),
            "other": ("space", "full stop", "hyphen"),
            "mark": ("_", "*", "#", "?"),
        },
        inputs=lambda rng, p: (text(rng).replace("a", ".", 1).replace("e", "-", 1),),
        edges=(("",), ("xyz",)),
    ),
    Family(
        name="every nth character",
        level=1,
        signature="pick(text: str) -> str",
        statement=(
            "Return every $step-th character of the text, beginning with the one at index $start (the "
            "first character has index 0), $order."
        ),
        solution="""def pick(text):
    found = text[$start::$step]
    return found[::-1] if $order == "from the last to the first" else found
""",
        parameters={
            "step": tuple(range(2, 8)),
            "start": tuple(range(7)),
            "order": ("in their order", "from the last to the first"),
        },
        inputs=lambda rng, p: (text(rng, 3, 7),),
        edges=(("",), ("ab",)),
    ),
    Family(
        name="count letters of a kind",
        level=1,
        signature="count_kind(text: str) -> int",
        statement=(
            "Count the characters of the text that are among `$kind`. Case $case. Each one counts $weight."
        ),
        solution="""def count_kind(text):
    if $case == "does not matter":
        text = text.lower()
    return $weight * sum(c in $kind for c in text)
""",
        parameters={
            "kind": ("aeiou", "lmnr", "stp", "aert", "bcdk", "eo", "nil", "grove"),
            "case": ("matters", "does not matter"),
            "weight": (1, 2, 3, 5),
        },
        inputs=lambda rng, p: (text(rng),),
        edges=(("",), ("AEIOU LMNR stp",)),
    ),
    Family(
        name="sort words",
        level=2,
        signature="sort_words(text: str) -> str",
        statement=(
            "The text consists of words with single spaces between them. Sort the words by $first; words "
            "that are equal in that go $second. Return them joined by `$joint`, the first $most only."
        ),
        solution="""def sort_words(text):
    keys = {
        "length, the shortest first": len,
        "length, the longest first": lambda w: -len(w),
        "their last letter": lambda w: w[-1],
        "how many times the letter e is in them, the fewest first": lambda w: w.count("e"),
    }
    found = text.split()
    if $second == "in alphabetical order":
        found.sort()
    found.sort(key=keys[$first])
    return $joint.join(found[:$most])
""",
        parameters={
            "first": (
                "length, the shortest first",
                "length, the longest first",
                "their last letter",
                "how many times the letter e is in them, the fewest first",
            ),
            "second": ("in alphabetical order", "in the order of the text"),
            "joint": ("-", "/", "+", "_"),
            "most": (3, 4, 5, 6),
        },
        inputs=lambda rng, p: (" ".join(words(rng, 4, 9)),),
        edges=(("stone",), ("",)),
    ),
    Family(
        name="runs of letters",
        level=2,
        signature="write_runs(text: str) -> str",
        statement=(
            "Write a text of the letters a to d in short: a run of at least $least equal letters in a row"
            " becomes the letter and the length of the run, $order, with `$mark` between the two; shorter"
            " runs stay."
        ),
        solution="""def write_runs(text):
    out, i = [], 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        if j - i < $least:
            out.append(text[i:j])
        elif $order == "the letter first":
            out.append(text[i] + $mark + str(j - i))
        else:
            out.append(str(j - i) + $mark + text[i])
        i = j
    return "".join(out)
""",
        parameters={
            "least": (2, 3, 4),
            "order": ("the letter first", "the length first"),
            "mark": ("", ":", "*", "^"),
        },
        inputs=lambda rng, p: ("".join(c * int(rng.integers(1, 7)) for c in letters(rng, "abcd", 2, 7)),),
        edges=(("",), ("a",), ("aaaaaaaaaaaa",)),
    ),
    Family(
        name="longest common piece",
        level=3,
        signature="common_piece(one: str, two: str) -> str",
        statement=(
            "Return the longest text that is a contiguous part of both texts. If several are of that "
            "length, return the one that $tie. If it is shorter than $least, return `$none`."
        ),
        solution="""def common_piece(one, two):
    found = set()
    for size in range(min(len(one), len(two)), $least - 1, -1):
        pieces = [one[i:i + size] for i in range(len(one) - size + 1)]
        found = [p for p in pieces if p in two]
        if found:
            if $tie == "begins first in the first text":
                return found[0]
            return min(found) if $tie == "is first in alphabetical order" else max(found)
    return $none
""",
        parameters={
            "tie": (
                "begins first in the first text",
                "is first in alphabetical order",
                "is last in alphabetical order",
            ),
            "least": (1, 2, 3),
            "none": ("none", "-", "nothing"),
        },
        inputs=lambda rng, p: (letters(rng, "abc", 4, 14), letters(rng, "abc", 4, 14)),
        edges=(("", "abc"), ("aaa", "bbb")),
    ),
)
