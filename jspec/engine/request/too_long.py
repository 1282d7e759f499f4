"""The errors of requests that do not fit into an engine."""

from __future__ import annotations

CHARACTERS_PER_TOKEN = 128  # a text prompt with more is refused before it is tokenised; ordinary tokens are shorter


class PromptTooLong(ValueError):
    """A prompt of more tokens than an engine has room for, or of more characters than so many tokens can have.

    Args:
        name: the prompt's name.
        size: number of its tokens, or of its characters.
        max_len: the engine's `max_len`.
        unit: "tokens" or "characters".

    Attributes:
        most: largest size of a prompt.
    """

    def __init__(self, name: str, size: int, max_len: int, unit: str = "tokens") -> None:
        self.size, self.max_len, self.unit = size, max_len, unit
        self.most = max_len - 1 if unit == "tokens" else max_len * CHARACTERS_PER_TOKEN
        expected = f"at most {self.most} characters ({CHARACTERS_PER_TOKEN} for each of max_len={max_len} tokens)"
        if unit == "tokens":
            expected = f"fewer tokens than max_len={max_len}, which counts prompt and answer"
        super().__init__(f"{name}: expected {expected}, got {size}; shorten it or raise max_len")


def check_characters(name: str, size: int, max_len: int) -> None:
    """Raise PromptTooLong if a text has so many characters that its tokens cannot fit, before it is tokenised."""
    if size > max_len * CHARACTERS_PER_TOKEN:
        raise PromptTooLong(name, size, max_len, "characters")


class RequestTooLong(ValueError):
    """A request whose prompt and answer need more pages than an engine has.

    Args:
        prompt, answer: number of tokens of its prompt, and the most of its answer.
        scratch: number of rows that a round needs beside them.
        pages: number of pages of the engine.
        page_size: rows of a page.

    Attributes:
        most: largest number of tokens of prompt and answer together.
    """

    def __init__(self, prompt: int, answer: int, *, scratch: int, pages: int, page_size: int) -> None:
        self.prompt, self.answer, self.most = prompt, answer, pages * page_size - scratch
        rows = prompt + answer + scratch
        super().__init__(
            f"the request needs {-(-rows // page_size)} pages ({rows} rows), the pool has {pages}; lower max_tokens or "
            "raise pages"
        )
