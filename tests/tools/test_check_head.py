"""Test `jspec info --check`: the measurements of every setting against recordings, the advice, and a warning."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jspec import DraftModel, Eagle, Eagle3, Engine, Medusa, NGram, SamplingParams, Suffix, Tree
from jspec.__main__ import main
from jspec.draft.base import NoDraft
from jspec.engine.request.metrics import LowAcceptanceWarning
from jspec.engine.run.stats_logger import MIN_ROUNDS, LowAcceptanceWarner
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.tools import check_head, testing
from jspec.tools.check_head import OWN, HeadSetting, Measurement
from jspec.tools.replay import Replay, ReplayedTexts, Rounds, continue_greedily, observe
from tests.support import byte_pair, folders, recordings, tiny

pytestmark = pytest.mark.once

IDS = "eagle_aux_hidden_state_layer_ids"
ROUNDED = 6e-4  # rounding error of the recorded means, which have three digits
CUT = check_head.PROMPT + check_head.MAX_TOKENS
TOKENS = 96  # least number of tokens in each recording
RECORDED = {  # jspec's name of each setting: its name in the recordings
    OWN: "correct",
    "rope_theta=500000": "draft rope_theta 500000 (target's)",
    "feature_layers=(1, 3, 4)": "aux states 1,3,4 (ids of outputs read as inputs)",
    "feature_layers=(3, 5, 6)": "aux states 3,5,6 (+1 too many)",
    "feature_layers=(5, 4, 2)": "aux order high,mid,low",
    "norm_output=True": "post-norm state fed back",
    "norm_before_residual=True": "norm_before_residual=True",
}


class Recorded:
    """The recorded prompts with their greedy texts, windows of the built-in text, and replays of settings on both.

    Both groups of texts have equal shapes, so each setting compiles once.
    """

    def __init__(self, golden: Path) -> None:
        self.target = tiny.load_target(byte_pair.TARGET)
        self.golden = golden
        greedy = recordings.recording(golden / "greedy_ar.npz")["greedy"]
        prompts = tiny.recorded_prompts(golden)
        self.start = np.array([len(prompt) for prompt in prompts])
        tokens = np.zeros((2 * len(prompts), max(self.start) + greedy.shape[1]), np.int32)
        for row, prompt, text in zip(tokens, prompts, greedy, strict=False):
            row[: len(prompt) + len(text)] = [*prompt, *text]
        tokens[len(prompts) :, :CUT] = check_head.windows(check_head.TEXT, ByteTokenizer(), CUT)
        texts = observe(self.target, tokens, range(1, 7))
        self.texts, self.cuts = (jax.tree.map(lambda x, own=own: x[own], texts) for own in (slice(16), slice(16, 32)))
        self.settings = {setting.name: setting for setting in self.settings_of(byte_pair.HEAD)}
        self._replays: dict[object, Replay] = {}
        self._seen: dict[object, Rounds] = {}

    def settings_of(self, head: Path) -> list[HeadSetting]:
        return check_head.settings_of(Eagle3(tiny.load_head(head), Tree.chain(5)), self.target)

    def rounds(self, setting: HeadSetting, *, stepwise: bool) -> Rounds:
        """Return the rounds on the recorded texts, up to the last recorded root."""
        return self._rounds(setting, self.texts, self.start, self.start + TOKENS, stepwise)

    def measurement(self, setting: HeadSetting) -> Measurement:
        cuts = self._rounds(setting, self.cuts, np.full(16, check_head.FIRST), CUT - 6, True)
        chains = self.rounds(setting, stepwise=False)
        return Measurement(setting.name, cuts.hits[cuts.is_round], chains.accept_len[chains.is_round] + 1)

    def _rounds(
        self, setting: HeadSetting, texts: ReplayedTexts, start: np.ndarray, last: np.ndarray | int, step: bool
    ) -> Rounds:
        # `feature_layers` and `source_format` do not change the program; `HeadSetting.layers` selects the features.
        config = replace(setting.drafter.head.config, feature_layers=None, source_format="")
        key = (config, setting.layers, texts is self.cuts, step)
        if config not in self._replays:
            self._replays[config] = Replay(setting.drafter, self.target)
        if key not in self._seen:
            options = dict(start=start.tolist(), stepwise=[step] * len(start))
            self._seen[key] = self._replays[config](texts, layers=setting.layers, **options)
        seen = self._seen[key]
        return seen._replace(is_round=seen.is_round & (seen.positions <= last))


@pytest.fixture(scope="module")
def recorded(golden: Path) -> Recorded:
    return Recorded(golden)


@pytest.fixture(scope="module")
def chain(golden: Path) -> dict[str, np.ndarray]:
    return recordings.recording(golden / "chain_d4_k1_t6.npz")


def test_observed_text_of_a_hybrid_target_has_the_recorded_choices(golden: Path) -> None:
    folder = golden / "families" / "qwen3_next"
    data = recordings.recording(folder / "expect.npz")
    prompt, greedy = (data[f"{name}2"].astype(np.int32) for name in ("prompt", "greedy"))
    seen = observe(tiny.load_target(folder), np.concatenate([prompt, greedy])[None], (1, 3))
    np.testing.assert_array_equal(seen.choices[0, len(prompt) - 1 : -1], greedy)


# -- replay against the EAGLE authors' code


def test_replay_of_recorded_texts_has_the_recorded_rounds(recorded: Recorded, chain: dict[str, np.ndarray]) -> None:
    rounds = recorded.rounds(recorded.settings[OWN], stepwise=False)
    for row, (first, last) in enumerate(itertools.pairwise(chain["iter_offset"])):
        own = rounds.is_round[:, row]
        assert rounds.positions[own, row].tolist() == chain["prefix_len"][first:last].tolist()
        assert rounds.accept_len[own, row].tolist() == chain["accept_len"][first:last].tolist()


def test_stepwise_replay_of_recorded_texts_has_the_recorded_first_draft_hits(
    recorded: Recorded, chain: dict[str, np.ndarray]
) -> None:
    rounds = recorded.rounds(recorded.settings[OWN], stepwise=True)
    expected = chain["tree_tokens"][:, 1] == chain["target_argmax"][:, 0]
    for row, (first, last) in enumerate(itertools.pairwise(chain["iter_offset"])):
        places = chain["prefix_len"][first:last] - recorded.start[row]
        assert rounds.positions[places, row].tolist() == chain["prefix_len"][first:last].tolist()
        assert rounds.hits[places, row].tolist() == expected[first:last].tolist()
    assert 0.5 < expected.mean() < 0.9  # the recording has hits and misses


@pytest.mark.long
def test_check_head_settings_have_the_recorded_acceptance_lengths(recorded: Recorded) -> None:
    assert recorded.settings.keys() == RECORDED.keys()
    expected = json.loads((recorded.golden / "sensitivity.json").read_text())
    for name, setting in recorded.settings.items():
        mean, _ = expected[RECORDED[name]]["chain_d4_k1_t6"]
        assert recorded.measurement(setting).mean_acceptance_length == pytest.approx(mean, abs=ROUNDED), name


# -- advice


@pytest.mark.long
def test_check_head_report_of_two_settings_prefers_agreement_over_length(recorded: Recorded) -> None:
    measured = [recorded.measurement(setting) for setting in recorded.settings.values()]
    own, *others = measured
    feedback = [other for other in others if other.name.startswith("norm_output")]
    assert all(
        np.array_equal(one.hits, own.hits) for one in feedback
    )  # this setting matters only after the first draft token
    assert all(one.agreement < own.agreement for one in others if one not in feedback)
    theta = next(one for one in others if one.name.startswith("rope_theta"))
    assert theta.mean_acceptance_length > own.mean_acceptance_length  # advice by acceptance length would be wrong
    assert not any(one.beats(own) for one in others)
    text = check_head.report(measured)
    assert [line.split()[-2:] for line in text.splitlines() if "best" in line] == [["file,", "best"]]
    assert "No other setting is clearly better" in text


@pytest.mark.parametrize(
    ("change", "name", "is_clear"),
    [
        (
            {"eagle_config": {}, IDS: [1, 3, 4]},
            "feature_layers=(2, 4, 5)",
            True,
        ),  # the file's layer ids, read as hidden states
        pytest.param({"eagle_config": {}, IDS: [3, 5, 6]}, "feature_layers=(2, 4, 5)", False, marks=pytest.mark.long),
        pytest.param({"rope_theta": 500000.0}, "rope_theta=10000", True, marks=pytest.mark.long),
    ],
    ids=["layers one too low", "layers one too high", "theta"],
)
def test_check_head_report_of_a_wrong_config_value_names_the_right_setting(
    recorded: Recorded, tmp_path: Path, change: dict, name: str, is_clear: bool
) -> None:
    source = byte_pair.HEAD
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    own, *others = recorded.settings_of(tmp_path)
    right = next(setting for setting in others if setting.name == name)
    measured = [recorded.measurement(own), recorded.measurement(right)]
    text = check_head.report(measured)
    assert [line.strip().startswith(name) for line in text.splitlines() if "best" in line] == [True]
    assert (f"{name} is clearly better than what the file says" in text) == is_clear


def test_check_head_setting_within_three_standard_errors_does_not_beat_another() -> None:
    """Exactly one of the two settings is right at 100 positions, so three standard errors are 30 hits."""
    hits = np.arange(400) < 200
    own = Measurement(OWN, hits, lengths=np.array([1, 2, 3] * 30))

    def other(won: int, lost: int, lengths: np.ndarray = own.lengths) -> Measurement:
        changed = hits.copy()
        changed[200 : 200 + won], changed[:lost] = True, False
        return Measurement("other", changed, lengths)

    assert other(66, 34).beats(own)
    assert not other(65, 35).beats(own)
    assert not other(34, 66, own.lengths + 9).beats(own)  # longer drafts do not make up for wrong first tokens
    # Equal hits: 90 rounds of variance 2/3 each, so the error of the difference is 0.1217.
    assert other(0, 0, np.array([1, 2, 3] * 18 + [2, 3, 4] * 12)).beats(own)
    assert not other(0, 0, np.array([1, 2, 3] * 20 + [2, 3, 4] * 10)).beats(own)


def test_check_head_settings_omit_feature_layers_that_the_target_lacks() -> None:
    target = tiny.model(16, layers=3)

    def names(layers: tuple[int, ...]) -> list[str]:
        head = tiny.eagle_head(target, draft_vocab=8, feature_layers=layers)
        found = [setting.name for setting in check_head.settings_of(Eagle3(head, Tree.chain(2)), target)]
        return [name for name in found if name.startswith("feature")]

    assert names((0, 4)) == ["feature_layers=(4, 0)"]
    assert names((2,)) == ["feature_layers=(1,)", "feature_layers=(3,)"]
    eagle = Eagle(tiny.eagle1_head(target), Tree.chain(2))
    assert [setting.name for setting in check_head.settings_of(eagle, target)] == [OWN, "feature_layers=(3,)"]


# -- texts


def test_greedy_continuation_of_recorded_prompts_emits_the_recorded_tokens(recorded: Recorded) -> None:
    greedy = recordings.recording(recorded.golden / "greedy_ar.npz")["greedy"]
    rows = [row for row, size in enumerate(recorded.start) if size == 64]
    prompts = np.asarray(recorded.texts.tokens)[rows, :64]
    texts = continue_greedily(recorded.target, prompts, 24)
    assert len(rows) > 1
    np.testing.assert_array_equal(texts[:, 64:], greedy[rows, :24])


def test_text_windows_of_a_text_are_consecutive_and_start_with_bos() -> None:
    class WithStart(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1, *super().encode(text)]

    assert check_head.windows("abcdefgh", ByteTokenizer(), 3).tolist() == [[97, 98, 99], [100, 101, 102]]
    assert check_head.windows("abcdefgh", WithStart(), 4).tolist() == [[1, 97, 98, 99], [1, 100, 101, 102]]
    with pytest.raises(ValueError, match="expected at least 3 tokens, got 2"):
        check_head.windows("ab", ByteTokenizer(), 3)
    assert len(check_head.windows(check_head.TEXT, ByteTokenizer(), 112)) == check_head.WINDOWS


# -- the command


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a target of one layer, and a text over its 40 tokens."""
    folder = tmp_path_factory.mktemp("pair")
    config = {**folders.TARGET, "num_hidden_layers": 1}
    folders.write(folder / "target", config, folders.target_tensors(config))
    letters = np.random.default_rng(0).integers(33, 40, 150)
    (folder / "text").write_bytes(bytes(letters.tolist()))
    return folder / "target", folder / "text"


def test_info_check_of_the_target_as_draft_prints_full_agreement(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture
) -> None:
    target, text = map(str, pair)
    options = ["--tokenizer", "bytes", "--text", text, "--max-tokens", "10"]
    assert main(["info", "--check", target, target, *options]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if OWN in line]
    assert row[-4:] == ["5.00", "100.0%", "file,", "best"]


def test_info_check_of_random_heads_prints_low_agreement(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Negative control, with fewer heads than a chain of four needs."""
    target, text = map(str, pair)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "none"}
    heads = folders.write(tmp_path / "heads", config, {})
    (heads / "model.safetensors").unlink()
    folders.save_file(folders.medusa_tensors(2), heads / "medusa_lm_head.safetensors")
    options = ["--tokenizer", "bytes", "--text", text, "--max-tokens", "10"]
    assert main(["info", "--check", str(heads), target, *options]) == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if OWN in line]
    assert float(row[-4]) < 2 and float(row[-3].rstrip("%")) < 40
    assert "It has no other settings" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], 'expected a tokenizer in the folder, got none; pass --tokenizer "bytes"'),
        (["--tokenizer", "bytes"], "expected ids below the target's 40"),
        (["--tokenizer", "bytes", "--max-tokens", "3"], "--max-tokens: expected at least 8"),
        (["--tokenizer", "bytes", "--max-tokens", "300", "--text", "TEXT"], "text: expected at least 364 tokens"),
        (["--text", "nowhere"], "nowhere"),
    ],
)
def test_info_check_with_impossible_arguments_prints_one_line_and_exits_with_2(
    pair: tuple[Path, Path], options: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    target, text = map(str, pair)
    assert main(["info", "--check", target, target, *(text if word == "TEXT" else word for word in options)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# -- the warning


def step_report(accept_len: int, rows: int) -> np.ndarray:
    """Return a step's report with ``rows`` rows.

    The columns are three tokens, the number emitted, ``accept_len``, the number drafted, and whether the row ended.
    """
    return np.tile(np.array([0, 0, 0, 1, accept_len, 2, 0], np.int32), (1, rows, 1))


def watch_of_a_head() -> LowAcceptanceWarner:
    target = tiny.model(16, layers=1)
    head = tiny.eagle_head(target, draft_vocab=8, feature_layers=(0, 1))
    return LowAcceptanceWarner(Eagle3(head, Tree.chain(2)))


def test_low_acceptance_warner_after_64_rounds_below_the_minimum_warns_once() -> None:
    watch = watch_of_a_head()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.count(step_report(0, MIN_ROUNDS - 13))
        watch.count(step_report(1, 12))
        watch.warn()
        watch.count(step_report(0, 1))
    with pytest.warns(LowAcceptanceWarning, match=r"length 1\.19 after 64 rounds.*jspec info --check HEAD TARGET"):
        watch.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.count(step_report(0, 100))
        watch.warn()


def test_low_acceptance_warner_at_the_minimum_does_not_warn() -> None:
    """The warner ignores ended rows."""
    watch = watch_of_a_head()
    ended = step_report(0, 500)
    ended[..., 3] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.count(step_report(1, 13))
        watch.count(ended)
        watch.count(step_report(0, MIN_ROUNDS - 13))
        watch.warn()


def test_engine_with_random_head_warns_once_of_low_acceptance(request: pytest.FixtureRequest) -> None:
    target = tiny.model(64, layers=1)
    head = tiny.eagle_head(target, draft_vocab=60, feature_layers=(0, 1))
    engine = Engine(
        target,
        drafter=Eagle3(head, Tree.chain(1)),
        slots=2,
        max_len=64,
        buckets=(2,),
        prefill_buckets=(8,),
        controls=False,
    )
    prompts = [[1, 2, 3], [4, 5]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # rows with draft=False do not count
            engine.generate(prompts, SamplingParams(max_tokens=40, draft=False))
    with pytest.warns(
        LowAcceptanceWarning, match="prompt template.*feature layers, rope theta and vocabulary"
    ) as caught:
        engine.generate(prompts * 2, SamplingParams(max_tokens=40, temperature=0))
    assert len(caught) == 1
    if not request.config.getoption("--typecheck"):  # runtime type checking adds frames between the calls
        assert caught[0].filename == __file__


def test_engine_with_accepted_drafts_does_not_warn_of_low_acceptance() -> None:
    target = tiny.model(16, layers=1)
    drafter = DraftModel(target, Tree.chain(1))  # the target drafts for itself
    engine = Engine(target, drafter=drafter, slots=2, max_len=64, buckets=(2,), prefill_buckets=(8,), controls=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([[1, 2, 3]] * 6, SamplingParams(max_tokens=40, temperature=0))
    assert engine.metrics.num_drafts > MIN_ROUNDS


def test_drafter_advice_differs_by_method_and_is_none_for_lookup_drafters() -> None:
    target = tiny.model(16, layers=1)
    chain = Tree.chain(2)
    assert "heads were trained for this target" in str(Medusa(tiny.medusa_heads(target, 2), chain).advice)
    assert "has the target's tokenizer" in str(DraftModel(target, chain).advice)
    assert "rope theta" in str(Eagle(tiny.eagle1_head(target), chain).advice)
    for drafter in (NGram(), Suffix(), NoDraft(), testing.Random(chain)):
        assert drafter.advice is None
    silent = LowAcceptanceWarner(NGram())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent.count(step_report(0, 500))
