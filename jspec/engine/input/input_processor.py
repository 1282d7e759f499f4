"""Makes requests from a caller's prompts and parameters, and checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.prompt_blocks import MAX_STOP_IDS
from jspec.core.shorten import short
from jspec.engine.grammar.cfg_matcher import LarkGrammar, Matcher
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.input import penalty_input
from jspec.engine.input.caller_input import read_params, read_prompt, read_prompts
from jspec.engine.input.grammar_input import GrammarInput
from jspec.engine.input.prediction_input import predicted_ids
from jspec.engine.input.thinking_input import ThinkingInput
from jspec.engine.request.request import Adapter, OutputState, Request
from jspec.engine.request.sampling_params import SamplingParams, sample_seed
from jspec.engine.request.token_logprobs import PromptLogprobs
from jspec.engine.request.too_long import PromptTooLong, check_characters
from jspec.engine.text.detokenizer import TextDecoder
from jspec.engine.text.token_texts import visible_context
from jspec.engine.text.tokenizer import Tokenizer, encode


@dataclass
class InputProcessor:
    """Makes requests from prompts and parameters; wrong input raises an error before any request is queued.

    Attributes:
        tokenizer: the engine's tokenizer; None: prompts are token ids.
        vocab_size: size of the model's vocabulary.
        eos_ids: the model's end-of-sequence tokens.
        config: the engine's options.
        ids: iterator that gives each request its number.
        adapters: the adapters that the engine has loaded, by name; replaced as a whole, because threads read it.
        gathers_logits: function that returns `Request.gathers_logits` for a request's parameters.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    config: EngineConfig
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    gathers_logits: Callable[[SamplingParams], bool] = lambda params: False
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    changing_adapters: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        wrong = [token for token in self.eos_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(f"eos_ids: expected ids in [0, {self.vocab_size}), got {short(wrong[0])}")
        if self.config.thinking_end is not None:
            _ = self.thinking  # raises if the text cannot be used

    def requests(self, prompts: Any, params: Any = None, *, trace: bool = False, **more: Any) -> list[Request]:
        """Make one request per prompt, in the order of the prompts.

        With ``n`` > 1 the returned request makes the first completion; its ``siblings`` make the others.

        Args:
            prompts: one prompt or several (`jspec.engine.input.caller_input.read_prompts`).
            params, more: arguments of `jspec.engine.input.caller_input.read_params`.
            trace: whether to record every round.

        Raises:
            TypeError, ValueError: a prompt or parameter is wrong; the message names it and the expected values.
        """
        each = read_prompts(prompts)
        every = read_params(params, len(each), **more)
        name = "prompt" if len(each) == 1 else "prompts[{}]"
        return [self._request(p, q, trace, name.format(i)) for i, (p, q) in enumerate(zip(each, every, strict=True))]

    def request(self, prompt: Any, params: Any = None, *, trace: bool = False, **more: Any) -> Request:
        """Make a request from exactly one prompt.

        The arguments and errors are those of the method `requests`.
        """
        (params,) = read_params(params, 1, **more)
        return self._request(read_prompt(prompt), params, trace, "prompt")

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, trace: bool, name: str) -> Request:
        ids = self._token_ids(prompt, name)
        stop_ids = self._stop_ids(params)
        room = self.config.max_len - len(ids)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        words = self._bad_words(params, stop_ids, max_new_tokens)
        thinking = self.thinking.of(params, ids)
        prediction = predicted_ids(params.prediction, self.tokenizer, self.vocab_size, self.config.predicted_tokens)
        grammar = self._grammars.of(params, stop_ids, words)
        self._check_output(params)
        adapter = self._adapter(params)
        numbers = [next(self.ids) for _ in range(params.n)]
        seed = self._seed(params, numbers[0])
        decoder = self._text_decoder(ids, params, stop_ids)
        prompt_logprobs = None if params.prompt_logprobs is None else PromptLogprobs(ids, params.prompt_logprobs)

        def sample(index: int, siblings: tuple[Request, ...] = ()) -> Request:
            return Request(
                id=numbers[index],
                prompt_token_ids=ids,
                params=params,
                seed=sample_seed(seed, index),
                stop_ids=stop_ids,
                max_new_tokens=max_new_tokens,
                eos_ids=() if params.ignore_eos else self.eos_ids,
                trace=trace,
                bad_words=words,
                thinking=thinking,
                prediction=prediction,
                grammar=grammar if isinstance(grammar, Grammar) else None,
                matcher=Matcher(grammar, thinking) if isinstance(grammar, LarkGrammar) else None,
                gathers_logits=self.gathers_logits(params),
                index=index,
                siblings=siblings,
                adapter=adapter,
                cache_salt=b"" if adapter is None else adapter.digest,
                owner=self,
                output=OutputState(decoder if index == 0 else decoder.copy(), prompt_logprobs=prompt_logprobs),
            )

        return sample(0, siblings=tuple(sample(index) for index in range(1, params.n)))

    def _token_ids(self, prompt: str | Sequence[int], name: str) -> tuple[int, ...]:
        """Convert a prompt to token ids and check them.

        Args:
            prompt: a text or ints.
            name: name of the prompt, for the errors.

        Raises:
            ValueError: a text is given without a tokenizer, or there are no tokens, too many tokens, or ids outside
                the vocabulary.
        """
        ids = tuple(self._encode(prompt, name) if isinstance(prompt, str) else prompt)
        max_len, vocab_size = self.config.max_len, self.vocab_size
        if not ids:
            raise ValueError(f"{name}: expected at least one token, got none; give a BOS token, for instance")
        if len(ids) >= max_len:
            raise PromptTooLong(name, len(ids), max_len)
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name}: expected ids in [0, {vocab_size}), got {short(wrong)}; check the tokenizer")
        return ids

    def _encode(self, text: str, name: str) -> list[int]:
        check_characters(name, len(text), self.config.max_len)
        return encode(self.tokenizer, text, name)

    def _text_decoder(self, prompt: tuple[int, ...], params: SamplingParams, stop_ids: tuple[int, ...]) -> TextDecoder:
        context: Sequence[int] = prompt
        if self.tokenizer is not None and params.grammar_field is not None:
            has_text = not self.tokenizer.hidden_ids.issuperset(prompt)
            # After a prompt without text the decoder would drop the first blank, but the grammar counts it.
            context = prompt if has_text else visible_context(self.tokenizer)
        return TextDecoder(self._output_tokenizer(params), context, params.stop, stop_ids, params.min_tokens)

    def _output_tokenizer(self, params: SamplingParams) -> Tokenizer | None:
        """Return the tokenizer that decodes the output, which hides the special tokens that the request does not want.

        Raises:
            ValueError: the request wants them, and the tokenizer cannot show them.
        """
        if self.tokenizer is None or not self.tokenizer.hidden_ids:
            return self.tokenizer
        if params.skip_special_tokens and not params.visible_special_tokens:
            return self.tokenizer
        if not hasattr(self.tokenizer, "with_special_tokens"):
            raise ValueError(
                "skip_special_tokens: expected True, and no visible_special_tokens, because this engine's tokenizer "
                f"({type(self.tokenizer).__name__}) cannot show special tokens; give it a method "
                "with_special_tokens"
            )
        if params.skip_special_tokens:
            return self.tokenizer.with_special_tokens(params.visible_special_tokens)
        return self.tokenizer.with_special_tokens()

    def _adapter(self, params: SamplingParams) -> Adapter | None:
        """Return the adapter that a request names."""
        if params.adapter is None:
            return None
        adapters = self.adapters
        if (adapter := adapters.get(params.adapter)) is not None:
            return adapter
        names = ", ".join(map(repr, adapters)) or "none"
        raise ValueError(
            f"adapter: expected one that this engine has loaded ({names}), got {short(params.adapter)}; load it with "
            "Engine.load_adapter"
        )

    def _bad_words(self, params: SamplingParams, stop_ids: tuple[int, ...], max_new_tokens: int) -> penalty_input.Words:
        """Check the parameters that edit logits; return the bad words as token ids."""
        if not params.controls_used:
            return ()
        if not self.config.controls:
            raise ValueError(
                f"{', '.join(params.controls_used)}: this engine was built with controls=False; build it without that"
            )
        words = penalty_input.bad_words(params, self.tokenizer)
        penalty_input.check(params, words, stop_ids, vocab_size=self.vocab_size, max_new_tokens=max_new_tokens)
        return words

    def limit_grammars(self, seconds: float) -> None:
        """Lower the limit of CPU time for compiling one grammar, in seconds, for callers that nobody trusts."""
        self._grammars.limit(seconds)

    def close(self) -> None:
        """End the process that compiles grammars."""
        self._grammars.close()

    @cached_property
    def _grammars(self) -> GrammarInput:
        return GrammarInput(self.tokenizer, self.vocab_size, self.config.grammar_cells)

    @cached_property
    def thinking(self) -> ThinkingInput:
        """What says how each request reasons."""
        return ThinkingInput(self.tokenizer, self.config.thinking_end)

    def _check_output(self, params: SamplingParams) -> None:
        """Check that the engine supports the given processor arguments, stop strings and log-probabilities."""
        args = self.config.processor_args
        if params.processor_args and len(params.processor_args) != args:
            raise ValueError(
                f"processor_args: expected {args} numbers, as this engine was built for, or none, got "
                f"{short(params.processor_args)}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop: expected none, because this engine has no tokenizer, got "
                f"{short(params.stop)}; pass tokenizer= to the engine or use stop_token_ids"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise ValueError(f"{name}: expected at most {self.vocab_size}, the vocabulary, got {count}")

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        requested = params.stop_token_ids + self._stop_texts(params)
        stop_ids = tuple(dict.fromkeys((() if params.ignore_eos else self.eos_ids) + requested))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids: expected at most {MAX_STOP_IDS} with the EOS ids, got {len(stop_ids)}; "
                "name fewer, or set ignore_eos"
            )
        wrong = next((token for token in requested if token >= self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"stop_token_ids: expected ids in [0, {self.vocab_size}), got {wrong}")
        return stop_ids

    def _stop_texts(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ids of the special tokens whose texts are stop strings, because no output shows these texts.

        Raises:
            ValueError: a stop string has the text of a special token and other text beside it, so it can never match.
        """
        texts: Mapping[str, int] = getattr(self.tokenizer, "special_texts", {})
        hidden = [text for text in texts if text not in params.visible_special_tokens]
        for stop in params.stop if params.skip_special_tokens else ():
            inside = next((text for text in hidden if text in stop), None) if stop not in texts else None
            if inside is not None:
                raise ValueError(
                    f"stop: {short(stop)} can never match, because the text leaves out the special token {inside!r}; "
                    "give that token alone, or the text beside it"
                )
        return tuple(texts[stop] for stop in params.stop if stop in texts)

    def _seed(self, params: SamplingParams, number: int) -> int:
        """Return the seed in ``params``, or else a seed drawn from the engine's seed and the request's number."""
        if params.seed is not None:
            return int(params.seed)
        return int(np.random.SeedSequence([self.config.seed, number]).generate_state(1, np.uint64)[0])


def draft_cap(params: SamplingParams, depth: int) -> int:
    """Return the largest number of draft tokens that a request accepts in a round.

    Args:
        depth: depth of the drafter's tree.
    """
    return depth if params.draft is True else min(int(params.draft), depth)
