"""JSON text read piece by piece: the keys of an object, and the items of a list in batches, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

PIECE_CHARS = 1 << 20
MAX_VALUE_CHARS = 1 << 26  # one event or one other value; a longer one is a broken file, not a trace
BOUNDARY_CHARS = 256  # white space between two items of a list that is looked through
WHOLE_BATCH_TRIES = 3
SPACE = " \t\n\r"


class NotJson(Exception):  # noqa: N818 - a verdict on the file
    """The text is no JSON or ends too early; the message continues a sentence that starts with the file's name."""


class JsonPieces:
    """A place in a stream of JSON text. Raises NotJson; OverflowError if more than max_chars come."""

    def __init__(self, stream: IO[str], max_chars: int | None = None) -> None:
        self._stream, self._max_chars = stream, max_chars
        self._text, self._at, self._read = "", 0, 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more(PIECE_CHARS):
                return ""

    def value(self) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            found = self._whole_value()
            # a number that ends where the text at hand ends may go on in the next piece, even after "." or "e+"
            if found and (found[1] + len("e+") < len(self._text) or not self._more(PIECE_CHARS)):
                self._at = found[1]
                return found[0]

    def _whole_value(self) -> tuple[Any, int] | None:
        """The value at hand and where it ends; None if it needed more text, which is then at hand."""
        try:
            return self._decoder.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            pending = len(self._text) - self._at
            if pending <= MAX_VALUE_CHARS and self._more(max(PIECE_CHARS, pending)):
                return None
            ended = pending <= MAX_VALUE_CHARS and _cut_short(error, len(self._text))
            where = f"{error.msg} at character {self._consumed + error.pos - self._at}"
            raise NotJson("ends too early: it is cut off" if ended else f"is not JSON ({where})") from error
        except RecursionError as error:
            raise NotJson("is nested too deeply for a trace") from error
        except ValueError as error:
            raise NotJson("has a number too long to be read") from error

    def object_keys(self) -> Iterator[str]:
        """The keys of an object; after each the caller takes its value. Reads up to the closing brace."""
        self._take("{")
        while self.peek() != "}":
            key = self.value()
            self._take(":")
            yield str(key)
            self._separator("}")
        self._take("}")

    def batches(self) -> Iterator[list[Any]]:
        """The items of a list, about PIECE_CHARS of text at a time. Reads up to the closing bracket."""
        self._take("[")
        while self.peek() != "]":
            yield self._batch()
            self._separator("]")
        self._take("]")

    def _batch(self) -> list[Any]:
        """All whole items that are at hand in one decoder call: one call an item takes twice the time."""
        while len(self._text) - self._at < PIECE_CHARS and self._more(PIECE_CHARS):
            pass
        cut, tries = len(self._text), 0
        while tries < WHOLE_BATCH_TRIES:
            cut = self._text.rfind("{", self._at + 1, cut)
            if cut < 0:
                return [self.value()]
            before = self._text[max(self._at, cut - BOUNDARY_CHARS) : cut].rstrip(SPACE)
            if not before.endswith(",") or not before[:-1].rstrip(SPACE).endswith("}"):
                continue
            end = self._text.rindex(",", self._at, cut)
            try:
                # a cut inside an item leaves a bracket or a quote open, so what decodes is whole items
                items: list[Any] = json.loads(f"[{self._text[self._at : end]}]")
            except (ValueError, RecursionError):
                tries += 1
                continue
            self._at = end
            return items
        return self._one_by_one(len(self._text) - self._at)

    def _one_by_one(self, chars: int) -> list[Any]:
        """For text in which no boundary was found, or which is broken: finds the item that is."""
        items: list[Any] = []
        consumed = self._consumed
        while self._consumed - consumed < chars // 2:
            items.append(self.value())
            if self.peek() != ",":
                break
            self._at += 1
        else:
            self._at -= 1  # the comma is the caller's
        return items

    @property
    def _consumed(self) -> int:
        return self._read - (len(self._text) - self._at)

    def _separator(self, closing: str) -> None:
        following = self.peek()
        if following == ",":
            self._at += 1
        elif following != closing:
            self._fail(f"expected , or {closing}")

    def _take(self, character: str) -> None:
        if self.peek() != character:
            self._fail(f"expected {character}")
        self._at += 1

    def _fail(self, message: str) -> None:
        following = self.peek()
        raise NotJson(f"is not JSON ({message}, found {following!r})" if following else "ends too early: it is cut off")

    def _more(self, chars: int) -> bool:
        piece = self._stream.read(chars)
        if not piece:
            return False
        self._text, self._at = self._text[self._at :] + piece, 0
        self._read += len(piece)
        if self._max_chars is not None and self._read > self._max_chars:
            raise OverflowError(f"more than {self._max_chars / 1e6:.0f} MB of JSON")
        return True


def _cut_short(error: json.JSONDecodeError, length: int) -> bool:
    """Whether the decoder ran out of text, rather than met something wrong. It names where a string starts."""
    return error.pos >= length - len("-Infinity") or error.msg.startswith("Unterminated string")
