"""Test that lm-eval's scores of the completions route are those of transformers and of the engine's own texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jspec import SamplingParams
from tests.support import byte_pair, clients, serving

pytestmark = pytest.mark.clients
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICES = """output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
STORIES = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
NUMBERS = """output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: answer
generation_kwargs: {until: ["Question:"], do_sample: false, max_gen_toks: 24}
filter_list:
- name: last
  filter: [{function: regex, regex_pattern: '(-?\\d[\\d,]*(?:\\.\\d+)?)', group_select: -1}, {function: take_first}]
metric_list: [{metric: exact_match, regexes_to_ignore: [","]}]
"""
PEOPLE = ("She was a girl named Lily.", "He was a dog named Max.", "It was a very big and red car named Tom.")
WORDS = ("girl", "boy", "dog", "cat", "bird", "car", "tree", "fish", "bear", "ball")
TEXTS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside. One day, she saw a big dog.",
    'Tom and Sam were friends. "Look, I have a red car!" said Tom.',
    "The cat sat on the mat.",
)


def write_task(folder: Path, name: str, text: str, documents: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in documents))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + text)


def evaluate(home: Path, model: str, tasks: Sequence[str], /, **arguments: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Run lm-eval on tasks of the folder "tasks"; return the scores by task, and each task's results by document."""
    out, given = home / model, ",".join(f"{name}={value}" for name, value in arguments.items())
    options = ("--model", model, "--model_args", given, "--include_path", str(home / "tasks"), "--device", "cpu")
    clients.run("lm_eval", "run", *options, "--tasks", *tasks, "--output_path", str(out), "--log_samples", home=home)
    (results,) = out.rglob("results_*.json")
    samples = {}
    for task in tasks:
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        found = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
        samples[task] = [one["resps"] for one in found]
    scores = json.loads(results.read_text())["results"]
    print(model, json.dumps(scores, indent=1))
    return scores, samples


def test_loglikelihoods_are_those_of_transformers(data: Path, tmp_path: Path) -> None:
    folder = clients.story_folder(data, tmp_path / "model")
    documents = [
        {"prompt": f"Once upon a time, there was a little {word}.", "choices": PEOPLE, "answer": i % len(PEOPLE)}
        for i, word in enumerate(WORDS)
    ]
    write_task(tmp_path / "tasks", "people", CHOICES, documents)
    write_task(tmp_path / "tasks", "stories", STORIES, [{"text": text} for text in TEXTS])
    tasks, shared = ("people", "stories"), dict(add_bos_token=True, max_length=clients.MAX_LEN - 1)
    with serving.running(clients.story_engine(folder)) as server:
        url = f"{server.url}/v1/completions"
        options = dict(model=serving.NAME, base_url=url, tokenizer=folder, num_concurrent=2, max_retries=1, **shared)
        served, samples = evaluate(tmp_path, "local-completions", tasks, **options)
    expected, other = evaluate(tmp_path, "hf", tasks, pretrained=folder, dtype="float32", **shared)
    assert values(samples["people"]) == pytest.approx(values(other["people"]), abs=1e-3)
    assert greedy(samples["people"]) == greedy(other["people"])
    assert len(values(samples["people"])) == len(WORDS) * len(PEOPLE)
    assert values(samples["stories"]) == pytest.approx(values(other["stories"]), abs=1e-3)
    for task, metric in (("people", "acc"), ("people", "acc_norm"), ("stories", "bits_per_byte")):
        assert served[task][f"{metric},none"] == pytest.approx(expected[task][f"{metric},none"], abs=1e-5)


def values(samples: Any) -> list[float]:
    """Return the log-likelihoods among the results of documents."""
    if isinstance(samples, list):
        return [value for one in samples for value in values(one)]
    try:
        return [float(samples)]
    except ValueError:
        return []


def greedy(samples: Any) -> list[bool]:
    """Return whether each text is what greedy decoding gives."""
    return [str(answer[0][1]) == "True" for one in samples for answer in one]


def is_correct(text: str) -> bool:
    """Return whether the last number before a further question is 1, which is the answer to each problem."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.split("Question:")[0])
    return bool(numbers) and numbers[-1].replace(",", "") == "1"


def test_score_of_answers_is_that_of_the_engines_texts(tmp_path: Path) -> None:
    asked = [f"Question: axis={a}, shape=({a}, {b},\nAnswer:" for a in range(2, 6) for b in range(3, 9)]
    examples = "".join(f"{question} #### 1\n\n" for question in asked[:2])
    prompts = [examples + question for question in asked[2:]]
    write_task(tmp_path / "tasks", "numbers", NUMBERS, [{"prompt": prompt, "answer": "1"} for prompt in prompts])
    engine = byte_pair.engine(drafted=True)
    params = SamplingParams(max_tokens=24, temperature=0)
    texts = [done.text or "" for done in engine.generate(prompts, params)]
    with serving.running(engine) as server:
        url = f"{server.url}/v1/completions"
        given = dict(model=serving.NAME, base_url=url, tokenizer_backend="None", tokenized_requests=False)
        scores, samples = evaluate(tmp_path, "local-completions", ["numbers"], **given)
    plain = [done.text for done in byte_pair.engine(drafted=False).generate(prompts, params)]
    assert samples["numbers"] == [[[text]] for text in texts] == [[[text]] for text in plain]
    share = sum(map(is_correct, texts)) / len(texts)
    assert scores["numbers"]["exact_match,last"] == pytest.approx(share)
    assert 0 < share < 1  # so that a wrong answer would change it
