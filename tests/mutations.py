"""Wrong files made of right ones: bytes, lines and values replaced by what files really get, from a seed."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import yaml

NASTY_BYTES = (
    b"\x00",
    b"\xff",
    b"\xe9",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r",
    b"\n\n",
    b"\t",
    b'"',
    b"'",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"#",
    b"=",
    b"-",
    b"&a",
    b"*a",
    b"!!timestamp x",
    b"!!python/object:os.system x",
    b"2001-99-99",
    b"NaN",
    b"1e400",
    b"-1",
    b"0",
    b"null",
    b"true",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 3000,
    "\u2028\u0663\ud7ff\U0001f600".encode(),
    b"%s%n",
    b"../../x",
)
NASTY_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    10**30,
    "",
    "auto",
    "x",
    "-1",
    "1e5",
    "9" * 300,
    "../../x",
    "a\x00b",
    "\u0663",
    [],
    [[]],
    [1, "x", None],
    {},
    {"": {}},
    {"a": {"b": [1]}},
)


def mutated_bytes(content: bytes, source: random.Random) -> bytes:
    """One to three places changed: flipped, cut out, doubled, or something nasty put in; sometimes only the beginning is left."""
    for _ in range(source.randint(1, 3)):
        begin = source.randint(0, len(content))
        end = min(len(content), begin + source.choice([0, 1, 2, 8, 64]))
        kind = source.randrange(6)
        if kind == 0:
            content = content[:begin]
        elif kind == 1:
            content = content[:begin] + content[end:]
        elif kind == 2:
            content = content[:end] + content[begin:end] * source.choice([1, 2, 50]) + content[end:]
        elif kind == 3 and begin < len(content):
            content = content[:begin] + bytes([content[begin] ^ (1 << source.randrange(8))]) + content[begin + 1 :]
        else:
            content = content[:begin] + source.choice(NASTY_BYTES) + content[end:]
    return content


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()):
        yield node, key
        yield from _places(child)


def mutated_value(value: Any, source: random.Random) -> Any:
    """One or two values anywhere in a tree replaced, taken away, or moved under another name."""
    value = copy.deepcopy(value)
    for _ in range(source.randint(1, 2)):
        places = list(_places(value))
        if not places or source.random() < 0.03:
            return source.choice(NASTY_VALUES)
        container, key = source.choice(places)
        kind = source.random()
        if kind < 0.15:
            del container[key]
        elif kind < 0.25 and isinstance(container, dict):
            container[source.choice(["x", "", "0", str(key).upper(), str(key)[:-1], f"{key} "])] = container.pop(key)
        else:
            container[key] = copy.deepcopy(source.choice(NASTY_VALUES))
    return value


def variants(value: Any, number: int, seed: int, dump: Callable[[Any], str] | None) -> Iterator[bytes]:
    """`number` wrong files.

    Args:
        value: the right one, as bytes, or as a tree that `dump` writes.
    """
    content = value if isinstance(value, bytes) else (dump or json.dumps)(value).encode("utf-8", "surrogatepass")
    for index in range(number):
        source = random.Random(f"{seed}-{index}")
        if not isinstance(value, bytes) and dump is not None and source.random() < 0.6:
            yield dump(mutated_value(value, source)).encode("utf-8", "surrogatepass")
        else:
            yield mutated_bytes(content, source)


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, sort_keys=False)


def as_json_lines(rows: Any) -> str:
    return "\n".join(json.dumps(row) for row in rows) if isinstance(rows, list) else json.dumps(rows)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """An input that keeps the reader busy for longer is a failure, as a crash is."""

    def too_long(number: int, frame: Any) -> None:
        raise AssertionError(f"still reading after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
