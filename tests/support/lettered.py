"""A tokenizer of sixteen tokens for the small models: letters, several letters, and halves of a letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jspec import DraftModel, Eagle3, Engine, Tree
from jspec.engine.text.tokenizer import Tokenizer
from tests.support import costs, engines, paper, tiny

END, MARK = 0, 14
CLOSE, OPEN = 10, 14  # the markers of reasoning in `THINKING_TEXTS`
TEXTS: list[bytes | None] = [
    None, b"a", b"b", b"ab", b"ba", b"{", b"}", b"1", b"12", b",", b'"', b"\xc3", b"\xa9", b"c", None, b"aab",
]  # fmt: skip
THINKING_TEXTS: list[bytes | None] = [
    {CLOSE: b"</think>", OPEN: b"<think>"}.get(token, text) for token, text in enumerate(TEXTS)
]
JSON_TEXTS: list[bytes | None] = [  # two tokens have equal texts
    None, b" ", b"{", b"}", b"[", b"]", b'"', b":", b",", b"a",
    b"b", b'{"', b'b"', b'":', b"[{", b"]}", b"ab", b"a", b"1", None,
]  # fmt: skip


class Lettered:
    """A tokenizer that takes the longest piece first.

    Args:
        texts: text of each token; None for hidden tokens.
    """

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, texts: Sequence[bytes | None] = TEXTS) -> None:
        self.vocab_size, self._texts = len(texts), list(texts)
        self.hidden_ids = frozenset(token for token, text in enumerate(texts) if text is None)

    def encode(self, text: str) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            found = [(len(piece), token) for token, piece in enumerate(self._texts) if piece and rest.startswith(piece)]
            size, token = max(found)
            rest = rest[size:]
            ids.append(token)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._texts[token] or b"" for token in ids).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError("no template")

    def token_bytes(self) -> list[bytes | None]:
        return self._texts


def tokenizer() -> Tokenizer:
    return Lettered()


class Thoughtful(Lettered):
    """A tokenizer of a model that reasons between <think> and </think>, which are two of the texts."""

    chat_template = "<think></think>"

    def __init__(self, texts: Sequence[bytes | None] = THINKING_TEXTS) -> None:
        super().__init__(texts)


@cache
@costs.shared()
def chain() -> Engine:
    """Return an engine with an EAGLE-3 head, three rounds per dispatch, and prompts in chunks of six tokens."""
    return small_chain(tokenizer())


@cache
def paper_chain() -> Engine:
    """Return an engine like `chain` on a device of paper."""
    return small_chain(tokenizer(), make=paper.make)


def small_chain(tokens: Tokenizer, *, make: Callable[..., Engine] = engines.make, **options: Any) -> Engine:
    """Make an engine like `chain` with another tokenizer and further options."""
    head = tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1))
    return make(
        engines.target(),
        drafter=Eagle3(head, Tree.chain(3)),
        slots=2,
        max_len=engines.MAX_LEN,
        page_size=1,
        buckets=(2,),
        prefill_buckets=(6,),
        rounds_per_dispatch=3,
        tokenizer=tokens,
        eos_ids=(END,),
        **options,
    )


@cache
@costs.shared()
def tree() -> Engine:
    """Return an engine with a draft model, a dynamic tree, and too few pages for all requests at once."""
    return small_tree(tokenizer())


def small_tree(tokens: Tokenizer, **options: Any) -> Engine:
    """Make an engine like `tree` with another tokenizer and further options."""
    return engines.make(
        engines.target(),
        drafter=DraftModel(tiny.model(engines.VOCAB, layers=1, seed=2), Tree.topk(9, 3, 3)),
        slots=4,
        max_len=engines.MAX_LEN,
        page_size=4,
        pages=26,
        buckets=(4,),
        prefill_buckets=(engines.MAX_LEN,),
        tokenizer=tokens,
        eos_ids=(END,),
        **options,
    )
