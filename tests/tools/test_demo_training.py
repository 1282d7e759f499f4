"""Test the training of the embedded target: its text, its tokenizer, its forward pass, its updates, its measures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jspec import Engine, Model, SamplingParams
from jspec.engine.tokenizer import load_tokenizer
from jspec.tools.demo.training import evaluate, fit, functions, model, prepare, sample, text
from jspec.tools.demo.training.__main__ import main
from jspec.tools.demo.training.answers import answer
from jspec.tools.replay import run_texts

pytestmark = pytest.mark.once

SHAPE = model.Shape(vocab=300, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, context=32)
RECIPE = fit.Recipe(rows=4, rate=2e-2, warmup=4, chunk=4, dtype="float32")
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab, (2, 33))


def sharp_weights() -> model.Weights:
    """Return weights whose layers matter, in the precision of the file."""
    weights = model.initial(SHAPE, jax.random.key(1))
    gains = {name: 8.0 if name in model.LINEAR else 1.0 for name in weights} | {"embed_tokens": 20.0}
    return {name: (gains[name] * value).astype(jnp.bfloat16).astype(jnp.float32) for name, value in weights.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target with `sharp_weights`."""
    made = tmp_path_factory.mktemp("target")
    model.write(sharp_weights(), SHAPE, made)
    return made


def own_logits() -> np.ndarray:
    return np.asarray(model.logits(sharp_weights(), jnp.asarray(TOKENS), SHAPE))


def test_trained_function_equals_the_decoder_on_the_written_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Model.from_pretrained(folder, dtype="float32")
    expected = run_texts(target, jnp.asarray(TOKENS)).logits
    np.testing.assert_allclose(own_logits(), expected, atol=1e-4)
    monkeypatch.setattr(model, "THETA", 2 * model.THETA)
    assert np.abs(own_logits() - expected).max() > 1e-2, "another rotation differs"


def test_trained_function_equals_transformers_on_the_written_folder(folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: the extra test installs it on Python 3.11")
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(own_logits(), expected.numpy(), atol=1e-4)


def test_losses_are_minus_the_log_probabilities_of_the_next_tokens() -> None:
    scores = own_logits().astype(np.float64)[:, :-1]
    wanted = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, TOKENS[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(model.losses(sharp_weights(), jnp.asarray(TOKENS), SHAPE), wanted, atol=1e-4)


def write_text(folder: Path) -> Path:
    """Write 40 small modules, of which some are held out, and return their folder."""
    folder.mkdir()
    for index in range(40):
        lines = [f"    number_of_item_{index}_{line} = {line * index}\n" for line in range(20)]
        (folder / f"module{index}.py").write_text(f"def compute_{index}():\n{''.join(lines)}\n# block {index}\n" * 9)
    return folder


def test_held_out_files_and_their_copies_are_not_trained_on(tmp_path: Path) -> None:
    source = write_text(tmp_path / "source")
    kept, held = text.split(text.documents([source]))
    assert len(kept) + len(held) == 40 and 1 <= len(held) <= 10
    assert held == [document for document in text.documents([source]) if document.is_held_out]
    for index, document in enumerate((held[0], kept[0])):  # a copy of a held-out file, and of another one
        name = next(f"{index}{n}.py" for n in range(99) if not text.Document(f"{index}{n}.py", "").is_held_out)
        (source / name).write_text(document.text + "# one more line than the other one\n")
    assert text.split(text.documents([source]))[1] == held
    assert len(text.split(text.documents([source]))[0]) == len(kept)
    (source / name).write_text("different_from_all_other_files = True\n")
    assert len(text.split(text.documents([source]))[0]) == len(kept) + 1


def test_text_is_of_files_that_parse_outside_folders_of_packages(tmp_path: Path) -> None:
    for name, content in {
        "a.py": "x = 1\n",
        "wrong.py": "x = = 1\n",
        "latin.py": "x = '\xe9'\n",
        "site-packages/b.py": "y = 1\n",
        "test/test_a.py": "z = 1\n",
        "library.rst": "Title\n=====\n",
        "c.txt": "no source",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="latin-1")
    found = [(document.name, document.group) for document in text.documents([tmp_path])]
    assert found == [("a.py", "modules"), ("library.rst", "documentation"), ("test/test_a.py", "tests")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder of small modules."""
    made = tmp_path_factory.mktemp("data")
    prepare.prepare([write_text(made / "source")], made / "data", SHAPE.vocab)
    return made / "data"


def test_prepared_tokens_are_the_documents_each_behind_an_end(data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    kept, held = text.split(text.documents([data.parent / "source"]))
    end = "<|endoftext|>"
    trained = "".join(end + document.text for document in kept for _ in range(prepare.REPEATS["modules"]))
    assert tokenizer.decode(np.load(data / prepare.TRAIN).tolist(), skip_special_tokens=False) == trained + end
    tokens = np.load(data / prepare.HELD)
    for document, one in zip(held, json.loads((data / prepare.INDEX).read_text()), strict=True):
        own = tokens[one["start"] : one["start"] + one["tokens"]]
        assert tokenizer.decode(own.tolist(), skip_special_tokens=False) == end + document.text
        assert (one["name"], one["bytes"]) == (document.name, len(document.text.encode()))


def test_parts_of_the_training_text_are_prompts_with_what_follows_them(data: Path) -> None:
    tokenizer, tokens = Tokenizer.from_file(str(data / "tokenizer.json")), np.load(data / prepare.TRAIN)
    whole, starts = tokenizer.decode(tokens.tolist()), np.load(data / prepare.STARTS)
    parts = list(prepare.parts_of(tokens, starts, tokenizer, 5))
    assert len({part["prompt"] for part in parts}) == 5
    assert all(part["prompt"].startswith("# block") and part["prompt"] + part["completion"] in whole for part in parts)
    assert list(prepare.parts_of(tokens, starts, tokenizer, 5)) == parts


def test_blocks_start_at_lines_without_indentation_behind_empty_lines() -> None:
    sample = "a = 1\nb = 2\n\nclass C:\n    x = 1\n\n    y = 2\n\n\n\n@d\ndef f():\n\t1\n\n\tz\n"
    tokenizer = prepare.trained([sample], 280)
    tokens = np.array(tokenizer.encode(sample).ids)
    found = prepare.block_starts(tokenizer, tokens)
    assert [tokenizer.decode(tokens[start:].tolist()).splitlines()[0] for start in found] == ["class C:", "@d"]


def test_half_of_the_rows_begin_with_an_end_and_a_block() -> None:
    tokens, blocks = jnp.arange(1, 101), jnp.array([20, 50, 95])
    rows = np.asarray(fit.drawn(jax.random.key(0), tokens, blocks, 40, 11))
    assert set(rows[:20, 0]) == {0} and set(rows[:20, 1]) == {21, 51, 91}, (
        "too few tokens follow the start of the last block"
    )
    assert (np.diff(rows[:, 1:]) == 1).all() and (np.diff(rows[20:]) == 1).all()
    assert len(set(rows[20:, 0])) > 10 and rows.max() <= 100


def test_newlines_and_indentation_are_tokens_of_their_own() -> None:
    sample = "def f(x):\n    if x:\n        return x\n\n    return  1\n"
    ids = prepare.trained([sample] * 9, 300).encode(sample, add_special_tokens=False)
    pieces = [token.replace("Ġ", " ").replace("Ċ", "\n") for token in ids.tokens]
    blank = [piece for piece in pieces if piece.isspace()]
    assert blank == ["\n", "    ", "\n", "        ", "\n", "\n", "    ", "  ", "\n"]
    assert not any("\n" in piece for piece in pieces if piece != "\n")


def test_tokenizer_returns_every_text_unchanged(data: Path) -> None:
    tokenizer = load_tokenizer(data)
    for written in ("def f():\n\n\treturn  'é☃'\n    \n", " leading", "trailing \n", "a" * 50):
        assert tokenizer.decode(tokenizer.encode(written)) == written


def test_learning_rate_rises_then_falls_to_zero() -> None:
    recipe = replace(RECIPE, warmup=10, rate=1.0)
    rates = [float(fit.learning_rate(recipe, jnp.int32(step), jnp.float32(110))) for step in (0, 4, 9, 10, 60, 109)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.01])


def test_training_learns_the_text_and_a_second_run_gives_equal_weights(data: Path) -> None:
    shape = replace(SHAPE, hidden=48)
    first, second = (fit.fit(data, shape, RECIPE, updates=40) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    windows = fit.held_out(data, shape.context)["modules"]
    before = fit.bits_per_byte(model.initial(shape, jax.random.key(0)), windows, shape, RECIPE)
    assert fit.bits_per_byte(first, windows, shape, RECIPE) < before / 2


def test_bits_a_byte_count_every_token_but_the_first_of_a_document_once(data: Path) -> None:
    windows = fit.held_out(data, SHAPE.context)["modules"]
    index = json.loads((data / prepare.INDEX).read_text())
    assert windows.is_text.sum() == sum(one["tokens"] - 1 for one in index)
    assert windows.bytes == sum(one["bytes"] for one in index)
    zero = {name: jnp.zeros_like(value) for name, value in sharp_weights().items()}  # all tokens are equally likely
    expected = windows.is_text.sum() * math.log2(SHAPE.vocab) / windows.bytes
    assert fit.bits_per_byte(zero, windows, SHAPE, RECIPE) == pytest.approx(expected, rel=1e-6)


def test_code_length_by_the_engine_is_that_of_the_function_with_half_a_context(folder: Path) -> None:
    width = 16
    nats = 0.0
    tokens = TOKENS.ravel()
    for start in range(0, len(tokens) - width // 2, width // 2):
        losses = model.losses(sharp_weights(), jnp.asarray(tokens[None, start : start + width]), SHAPE)[0]
        nats += float(losses[0 if start == 0 else width // 2 - 1 :].sum())
    with Engine.from_pretrained(folder, slots=2, max_len=32, dtype="float32") as engine:
        assert evaluate.code_length(engine, tokens, width) == pytest.approx(nats / math.log(2), rel=1e-5)


def test_sampled_tokens_are_those_of_the_whole_forward_pass_and_the_noise() -> None:
    prompts, lengths, heat = jnp.asarray(TOKENS[[0, 1, 0, 0], :20]), np.array([1, 7, 12, 12]), np.array([0, 0, 1, 0.5])
    key = jax.random.key(3)
    done = np.asarray(sample.sample(sharp_weights(), prompts, lengths, jnp.asarray(heat), key, shape=SHAPE))
    scores = np.asarray(model.logits(sharp_weights(), jnp.asarray(done), SHAPE))
    for row, length in enumerate(lengths):
        assert np.array_equal(done[row, :length], prompts[row, :length])
        for place in range(length, 20):
            noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, place - 1), (4, SHAPE.vocab)))[row]
            assert done[row, place] == np.argmax(scores[row, place - 1] + heat[row] * noise)
    assert not np.array_equal(done[2], done[3]), "the temperature matters"


@pytest.fixture(scope="module")
def writer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target with `sharp_weights` and a tokenizer."""
    made = tmp_path_factory.mktemp("writer")
    model.write(sharp_weights(), replace(SHAPE, context=512), made)
    prepare.write_tokenizer(Tokenizer.from_file(str(data / "tokenizer.json")), made)
    return made


PROMPTS = ["def f", "class A:\n    ", "\n", "x = ", "import os\n"]


def test_completions_are_cut_at_the_end_token_as_those_of_the_engine(writer: Path) -> None:
    found = list(sample.samples(writer, PROMPTS, [0.0] * 5, 128, seed=0, rows=3, dtype="float32"))
    with Engine.from_pretrained(writer, slots=5, max_len=128, dtype="float32") as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=127, temperature=0))
    assert [one.text for one in found] == [one.text for one in done]
    assert [one.has_ended for one in found] == [one.finish_reason == "eos" for one in done]
    assert len({one.text for one in found}) == 5


def test_prompt_without_room_for_a_completion_is_refused(writer: Path) -> None:
    with pytest.raises(ValueError, match="prompts of fewer than 8 tokens"):
        next(sample.samples(writer, ["x" * 99], [0.0], 8, seed=0))


def test_answers_are_the_targets_own_some_greedy_and_some_sampled(
    writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "ROWS", 4)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "def f"}\n' * 4)
    answer(prompts, writer, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["def f"] * 4
    texts = [line["completion"] for line in lines]
    greedy, *_ = sample.samples(writer, ["def f"], [0.0], prepare.PROMPT[1] + 1 + prepare.COMPLETION, seed=5, rows=4)
    assert [text == greedy.text for text in texts] == [False, True] * 2 and texts[0] != texts[2]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("def f():\n    return 1\n\n\nx = 1\n", "def f():\n    return 1\n\n\n"),
        ("def f():\n    return 1\n# a comment", "def f():\n    return 1\n"),
        ("def f():\n    return 1\n", None),
        ("class A:\n    def f(self):\n        pass\n\n    x = 1\n", None),
        ('def f():\n    """A text\ngoes on\n    """\nf()\n', 'def f():\n    """A text\ngoes on\n    """\n'),
        ("def f():\n    call(1,\n2\n)\n", None),
        ("def f():\n    call(1,\n2\n)\nf()", "def f():\n    call(1,\n2\n)\n"),
        ("def f():\n    return return\nx = 1\ny = 2\n", "def f():\n    return return\n"),
        ("def f():\nx = 1\ny = 2\n", "def f():\nx = 1\n"),
    ],
)
def test_statement_ends_where_another_begins_in_column_0_outside_of_brackets_and_strings(
    text: str, kept: str | None
) -> None:
    end = evaluate.statement_end(text)
    assert (None if end is None else text[:end]) == kept


class Script:
    """An engine that writes given texts, whose tokens are bytes and whose end token is 0."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        self.texts, self.asked = texts, list[int]()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        self.asked.append(len(prompts))
        return [self._one(bytes(prompt).decode(), own.max_tokens) for prompt, own in zip(prompts, params, strict=True)]

    def _one(self, prompt: str, limit: int) -> Any:
        whole = next(line + text for line, text in self.texts.items() if prompt.startswith(line))
        new = whole[len(prompt) :][:limit]
        reason = "eos" if new.endswith("$") else "length"
        text = new.removesuffix("$")
        done = SimpleNamespace(text=text, token_ids=list(new.encode()), finish_reason=reason)
        done.raise_for_error = lambda: done
        return done


def test_completions_go_on_until_the_statement_the_document_or_the_context_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "STEP", 20)
    texts = {
        "def a():": "\n    return 'a longer text than a step'\nx = 1\n" + "y" * 99,
        "def b():": "\n    pass\n$",
        "def c():": "\n" + "    c()\n" * 99,
        "def d():": "\n    1 = 2\nx\n" + "y" * 99,
    }
    engine: Any = Script(texts)
    a, b, c, d = evaluate.completions(engine, list(texts), 50)
    assert (a.text, a.has_ended, a.parses) == ("def a():\n    return 'a longer text than a step'\n", True, True)
    assert (b.text, b.has_ended, b.parses) == ("def b():\n    pass\n", True, True)
    assert (len(c.tokens), c.has_ended, c.parses) == (50, False, False)
    assert (d.text, d.has_ended, d.parses) == ("def d():\n    1 = 2\n", True, False)
    assert engine.asked == [4, 2, 2], "what has ended is not continued"
    assert evaluate.shares([a, b, c, d]).endswith("75% end within the context, and 50% parse")


def test_heads_are_different_lines_that_begin_a_function_or_a_class() -> None:
    texts = ["def a():\n    def inner():\nclass B:\n", "def a():\nclass C(\nclass D(B):\n"]
    assert evaluate.heads(texts) == ["def a():", "class B:", "class D(B):"]
    assert evaluate.heads(texts, 1) == ["def a():"]


def test_read_weights_are_the_written_ones(folder: Path) -> None:
    read, written = model.read(folder, SHAPE), sharp_weights()
    assert read.keys() == written.keys()
    assert all(np.array_equal(read[name], written[name]) for name in read)


def test_sharpened_target_has_the_logits_of_the_other_times_the_factor(folder: Path, tmp_path: Path) -> None:
    logits = {}
    for factor in (1, 2):
        model.sharpen(folder, tmp_path / str(factor), factor)
        target = Model.from_pretrained(tmp_path / str(factor), dtype="float32")
        logits[factor] = np.asarray(run_texts(target, jnp.asarray(TOKENS)).logits)
    np.testing.assert_allclose(logits[1], own_logits(), atol=1e-4)
    np.testing.assert_allclose(logits[2], 2 * logits[1], rtol=1e-6)


LOOP = "def g(a):\n" + "    a.append(1)\n" * 12


def test_rows_of_functions_are_learnt_with_their_ends_and_the_repetitions_of_loops_are_not(
    data: Path, tmp_path: Path
) -> None:
    file, texts = tmp_path / "own.jsonl", ["def f():\n    return 1", "class A:\n    pass\n\n", LOOP]
    file.write_text("".join(f"{json.dumps({'text': text, 'is_good': text != LOOP})}\n" for text in texts))
    small = tmp_path / "small.jsonl"
    small.write_text(file.read_text().splitlines()[0])
    own = functions.read_functions([file, small], data)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    assert own.tokens.shape == (6, functions.SIZE + 1) and own.signs.shape == (6, functions.SIZE)
    for tokens, signs, wanted in zip(*own, texts + texts[:1] * 3, strict=True):
        size = len(tokenizer.encode(f"{wanted.rstrip()}\n", add_special_tokens=False).ids)
        assert tokenizer.decode(tokens[1 : size + 1].tolist()) == f"{wanted.rstrip()}\n"
        assert tokens[0] == 0 and (tokens[size + 1 :] == 0).all()
        if wanted == LOOP:
            bad = "".join(tokenizer.decode(tokens[1:].tolist(), skip_special_tokens=False))
            assert set(signs.tolist()) == {0, -1} and (signs[size:] == 0).all() and LOOP in bad
            kept = tokenizer.decode(tokens[1:][signs == 0].tolist())
            assert kept.startswith("def g(a):\n    a.append(1)\n") and kept.count("append") < 4
        else:
            assert (signs == (np.arange(functions.SIZE) <= size)).all(), "the text and one end token"


@pytest.mark.parametrize(("lines", "got"), [("", "none"), ('{"text": "a = 1"}\n', "other ones")])
def test_files_without_functions_are_refused_by_name(lines: str, got: str, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(lines)
    with pytest.raises(ValueError, match=f"expected lines with text and is_good, got {got} in .*own.jsonl"):
        functions.read_functions([file], data)


def test_tokens_repeat_from_where_eight_of_them_stood_before() -> None:
    ids = [*range(9), 99, *range(10), 7]
    assert functions.again(ids).tolist() == [0] * 17 + [1, 1, 0, 0]


def test_loss_of_functions_is_of_tokens_that_follow_and_of_others_that_do_not() -> None:
    chances = np.array([[0.5, 0.2, 0.1], [0.9, 0.8, 0.3]])
    signs = np.array([[1, 1, 0], [0, -1, -1]], np.int8)
    wanted = -(math.log(0.5) + math.log(0.2) + math.log(1 - 0.8) + math.log(1 - 0.3)) / 4
    assert float(fit.own_loss(jnp.asarray(-np.log(chances)), jnp.asarray(signs))) == pytest.approx(wanted, rel=1e-5)
    surest = jax.grad(lambda nats: fit.own_loss(nats, jnp.asarray([[-1]])))(jnp.zeros((1, 1)))
    assert np.isfinite(surest).all()


def test_training_goes_on_with_given_weights_and_functions(data: Path) -> None:
    tokens = np.random.default_rng(1).integers(1, SHAPE.vocab, (3, 17)).astype(np.uint16)
    own = fit.Own(tokens, np.ones((3, 16), np.int8))
    shape, recipe = replace(SHAPE, hidden=48), replace(RECIPE, own_rows=6)
    init = model.initial(shape, jax.random.key(1))
    before = float(model.losses(init, jnp.asarray(tokens, jnp.int32), shape).mean())
    one = fit.fit(data, shape, recipe, updates=60, init=jax.tree.map(jnp.array, init), own=own)
    other = fit.fit(data, shape, recipe, updates=60, init=jax.tree.map(jnp.array, init))
    learnt, unread = (
        float(model.losses(found, jnp.asarray(tokens, jnp.int32), shape).mean()) for found in (one, other)
    )
    assert learnt < before / 2 < unread


def test_training_begins_with_the_given_weights(data: Path) -> None:
    begun, _ = fit.prepared(SHAPE, RECIPE, sharp_weights())
    assert all(np.array_equal(begun.weights[name], value) for name, value in sharp_weights().items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a):\n    return a + 1\n", True),
        ("def f(a): return a + 1", False),
        ("def f(a):\n    return a +\n", False),
        ("def f(a):\n" + "    a.append(1)\n" * 12, False),
        ("def f(a):\n" + "".join(f"    {name} = a.{name[::-1]}\n" for name in ("one", "far", "top", "six")), True),
    ],
)
def test_functions_are_good_if_they_parse_and_do_not_repeat_themselves(text: str, expected: bool) -> None:
    assert functions.good(text) is expected


def test_functions_are_the_shortest_good_samples_and_the_greedy_ones_that_repeat_themselves(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "\n" + "    a.append(1)\n" * 12
    texts = [
        "\n    return 1\nx",
        "\n    return 2\n",
        loop,
        "\n    pass",
        "\n    4\nx",
        "\n    500000000000000\n",
        loop,
        "\n  6\n6",
    ]
    given: list[Any] = []

    def samples(*arguments: Any, **options: Any) -> list[sample.Sample]:
        given.append((*arguments, options))
        return [sample.Sample(text, has_ended=index % 2 == 1) for index, text in enumerate(texts)]

    monkeypatch.setattr(functions, "samples", samples)
    monkeypatch.setattr(functions, "HEATS", (0.0, 0.5))
    lines = ["def f():", "class A:", "def g(a):", "def h():"]
    monkeypatch.setattr(functions, "first_lines", lambda found: [*lines, "def " + "long" * functions.LINE])
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(permutation=range))
    out = tmp_path / "own.jsonl"
    functions.write_functions(data, data, out, seed=7)
    written = [tuple(json.loads(line).values()) for line in out.read_text().splitlines()]
    assert written == [
        ("def f():\n    4\n", True),
        ("class A:\n    return 2\n", True),
        (f"def g(a):{loop}", False),
        ("def h():\n  6\n", True),
    ], "the shortest good one behind each line, and greedy loops"
    assert given == [(data, lines * 2, [0.0] * 4 + [0.5] * 4, functions.SIZE + 1, {"seed": 7})]


def test_statements_are_functions_methods_and_classes_up_to_each_of_their_statements() -> None:
    source = "x = 1\nclass A(B):\n    y = 2\n\n    def f(self):\n        return 3\n\nasync def g():\n    pass\nz = 4\n"
    whole = "class A(B):\n    y = 2\n\n    def f(self):\n        return 3\n"
    assert [list(parts) for parts in functions.statements(source)] == [
        ["class A(B):\n    y = 2\n", whole],
        ["def f(self):\n    return 3\n"],
        ["async def g():\n    pass\n"],
    ]


def test_cut_functions_are_short_ones_and_classes_as_far_as_they_fit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "def g():\n" + "".join(f"    name_{line} = {line}\n" for line in range(99))
    source = "class A:\n    y = 2\n\n" + "".join(f"    name_{line} = {line}\n" for line in range(99))
    monkeypatch.setattr(
        functions, "documents", lambda data: [f"{long}\n{source}\ndef f():\n    return 1\n", "Title\n====="]
    )
    out = tmp_path / "cut.jsonl"
    functions.cut_functions(data, out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    first, second = (one["text"] for one in found)
    size = len(Tokenizer.from_file(str(data / "tokenizer.json")).encode(first).ids)
    assert functions.SIZE - 12 < size <= functions.SIZE and source.startswith(first)
    assert second == "def f():\n    return 1\n" and all(one["is_good"] for one in found)


@pytest.mark.parametrize(
    ("text", "has_ended", "expected"),
    [
        ("def f():\n    return 1\nx = 1", True, "def f():\n    return 1\n"),
        ("def f():\n    return 1\nx = 1", False, "def f():\n    return 1\n"),
        ("def f():\n    return 1\n", True, "def f():\n    return 1\n"),
        ("def f():\n    return 1\n", False, None),
    ],
)
def test_function_is_the_first_statement_if_it_ends(text: str, has_ended: bool, expected: str | None) -> None:
    assert functions.function(text, has_ended=has_ended) == expected


def test_documents_are_the_different_ones_of_the_prepared_text(data: Path) -> None:
    tokens = np.load(data / prepare.TRAIN)
    found = functions.documents(data)
    assert len(found) == len(set(found)) and 0 < len(found) <= (tokens == 0).sum()
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    assert tokenizer.encode(found[0]).ids == tokens[: len(tokenizer.encode(found[0]).ids)].tolist()


def test_command_line_trains_a_folder_that_loads(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = [f"--{name.replace('_', '-')}={getattr(SHAPE, name)}" for name in ("vocab", "layers", "hidden", "context")]
    words = ["--data", str(data), "--out", str(tmp_path / "out"), *sizes, "--warmup=4", "--chunk=2", "--rows=2"]
    assert main([*words, "--minutes=0.001", "--dtype=float32"]) == 0
    assert "held-out modules: " in capsys.readouterr().out
    assert Model.from_pretrained(tmp_path / "out").config.vocab_size == SHAPE.vocab
    assert load_tokenizer(tmp_path / "out").encode("def ") == load_tokenizer(data).encode("def ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data: expected a folder"),
        (["--data", "DATA", "--out", "x", "--vocab", "200"], "vocab: expected at least 300"),
        (["--prepare", "x", "--text", "nowhere"], "--text: expected folders with Python sources"),
    ],
)
def test_command_line_with_wrong_options_says_what_is_expected(
    words: list[str],
    message: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(data) if word == "DATA" else word for word in words]) == 2
    assert message in capsys.readouterr().err
