"""Varlink interface definitions: parsed, and values held against them, so that the published file is what is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*(->|\[string\]|\[\]|[():,?]|[A-Za-z][A-Za-z0-9_.-]*)?")
_BASIC: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "string": ((str,), "a text"),
    "object": ((dict,), "an object"),
}


@dataclass(frozen=True, slots=True)
class Type:
    """`kind` is a basic type's name, or `name`, `array`, `map`, `maybe`, `struct`, `enum`."""

    kind: str
    of: Type | None = None
    fields: dict[str, Type] = field(default_factory=dict)
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Interface:
    """`methods` are (parameters, answer)."""

    name: str
    text: str
    types: dict[str, Type]
    methods: dict[str, tuple[Type, Type]]
    errors: dict[str, Type]

    def check(self, expected: Type, value: object, where: str) -> None:
        """Raises ValueError(where): what is not as it must be. A field that may be null may be left out, too."""
        while expected.kind == "name":
            expected = self.types[expected.words[0]]
        if expected.kind == "maybe":
            if value is not None and expected.of is not None:
                self.check(expected.of, value, where)
        elif expected.kind in _BASIC:
            if type(value) not in _BASIC[expected.kind][0]:
                raise ValueError(where)
        elif expected.kind == "enum":
            if not isinstance(value, str) or value not in expected.words:
                raise ValueError(where)
        elif expected.kind == "struct":
            self._check_struct(expected, value, where)
        elif not isinstance(value, list if expected.kind == "array" else dict):
            raise ValueError(where)
        elif expected.of is not None:
            for one in value if isinstance(value, list) else value.values():
                self.check(expected.of, one, where)

    def _check_struct(self, expected: Type, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(where)
        for name in value:
            if name not in expected.fields:
                raise ValueError(name)
        for name, one in expected.fields.items():
            if name in value or one.kind != "maybe":
                if name not in value:
                    raise ValueError(name)
                self.check(one, value[name], name)


def parse(text: str) -> Interface:
    """Raises ValueError where it is no interface definition."""
    return _Parser(text).interface()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._words, at = text, list[str](), 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.end() == at:
                raise ValueError(f"what is this: {text[at : at + 20]!r}")
            self._words += [found[1]] if found[1] else []
            at = found.end()
        self._at = 0

    def interface(self) -> Interface:
        self._expect("interface")
        name = self._next()
        types, methods, errors = dict[str, Type](), dict[str, tuple[Type, Type]](), dict[str, Type]()
        while self._at < len(self._words):
            kind, member = self._next(), self._next()
            if member in types or member in methods or member in errors:
                raise ValueError(f"{member} is defined twice")
            if kind == "type":
                types[member] = self._struct()
            elif kind == "method":
                parameters = self._struct()
                self._expect("->")
                methods[member] = parameters, self._struct()
            elif kind == "error":
                errors[member] = self._struct()
            else:
                raise ValueError(f"{kind} is neither type, method nor error")
        made = Interface(name, self._text, types, methods, errors)
        for used in self._words:
            if used[0].isupper() and used not in types and used not in methods and used not in errors:
                raise ValueError(f"{used} is not defined")
        return made

    def _struct(self) -> Type:
        """`(name: type, ...)`, or an enum: `(name, ...)`."""
        self._expect("(")
        found: dict[str, Type] = {}
        words: list[str] = []
        while self._peek() != ")":
            word = self._next()
            if word in found or word in words:
                raise ValueError(f"{word} stands twice")
            if self._peek() == ":":
                self._expect(":")
                found[word] = self._type()
            else:
                words.append(word)
            if self._peek() != ")":
                self._expect(",")
        self._expect(")")
        if found and words:
            raise ValueError("fields and words do not mix")
        return Type("enum", words=tuple(words)) if words else Type("struct", fields=found)

    def _type(self) -> Type:
        if self._peek() == "(":
            return self._struct()
        word = self._next()
        around = {"?": "maybe", "[]": "array", "[string]": "map"}.get(word)
        if around is not None:
            return Type(around, of=self._type())
        if word in _BASIC:
            return Type(word)
        if not word[0].isupper():
            raise ValueError(f"{word} is no type")
        return Type("name", words=(word,))

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self) -> str:
        word = self._peek()
        if not word:
            raise ValueError("it ends too early")
        self._at += 1
        return word

    def _expect(self, word: str) -> None:
        if (found := self._next()) != word:
            raise ValueError(f"expected {word}, found {found}")
