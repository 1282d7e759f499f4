"""Runs `jspec train`, which trains a draft head for a target."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jspec.core.config import QUANTIZE
from jspec.tools import demo, interrupt
from jspec.train.config import LOSS_KINDS, METHODS, OPTIMIZERS, TrainConfig

OPTIONS = {  # help of the option for each field of `TrainConfig`
    "method": f"method of drafting: {', '.join(METHODS)}",
    "steps": "number of updates; default: as many as --epochs take",
    "epochs": "how often the data is read, without --steps",
    "length": "tokens of a row, a multiple of 16; longer documents are divided",
    "batch": "rows of an update",
    "ttt": "draft tokens that the loss covers: steps of the test, tokens of a block, or Medusa heads",
    "decay": "factor of the loss of each further draft token of EAGLE-3 and Medusa",
    "loss": f"loss of EAGLE-3: {', '.join(LOSS_KINDS)}",
    "optimizer": f"optimiser: {', '.join(OPTIMIZERS)} (matrices; AdamW for all others)",
    "learning_rate": "largest learning rate",
    "warmup": "share of the updates in which the rate rises from 0",
    "final": "part of the rate that is left at the end of a cosine",
    "beta1": "AdamW's decay of the mean of gradients",
    "beta2": "AdamW's decay of the mean of their squares",
    "weight_decay": "weight decay",
    "clip": "largest norm of a gradient",
    "draft_vocab": "number of tokens that the head drafts; default: 32000, or all of a smaller vocabulary",
    "held_out": "share of the documents that are evaluated instead of trained on; 0: none",
    "eval_every": "updates between two evaluations and checkpoints",
    "eval_rows": "most rows of an evaluation",
    "seed": "seed of the weights and of the order of the data",
    "rope_theta": "rotary base of the head",
    "feature_layers": "indices of the target's states that the head reads; default: those of the method's authors",
    "layers": "number of the head's layers; default: 1, for DFlash and DSpark 5",
    "intermediate_size": "channels of each layer's feed-forward; default: as in the target",
    "copy_layers": "begin with the weights of the target's last layers (EAGLE-3)",
    "anchors": "blocks of a row for DFlash and DSpark; default: one for 8 tokens",
    "gamma": "depths over which the weight of a block's loss falls by e; default: half the block, for DSpark all of it",
    "mask_token": "id of the mask token of DFlash and DSpark; default: the last one of the vocabulary",
    "markov_rank": "channels of DSpark's Markov head; default: 256, or those of a hidden state if these are fewer",
    "keep_activations": "keep what EAGLE-3's steps compute for the gradient: faster, and takes more memory",
    "devices": "devices between which the rows of an update are divided",
    "eagle31": "train an EAGLE-3.1 head: the normed output is fed on",
    "regenerate": "let the target write the answers of the data first",
    "max_tokens": "most tokens of such an answer",
    "temperature": "temperature of such an answer",
    "init": "folder of a head to go on with",
}
GROUPS = {  # the fields in the groups of the help; the first ones matter most
    "what to set first": ("method", "steps", "epochs", "length", "batch", "learning_rate", "draft_vocab"),
    "loss": ("ttt", "decay", "loss", "anchors", "gamma"),
    "optimiser": ("optimizer", "warmup", "final", "beta1", "beta2", "weight_decay", "clip"),
    "evaluation": ("held_out", "eval_every", "eval_rows"),
    "head": (
        *("init", "layers", "intermediate_size", "feature_layers", "rope_theta", "copy_layers"),
        *("eagle31", "mask_token", "markov_rank"),
    ),
    "answers of the target": ("regenerate", "max_tokens", "temperature"),
    "run": ("seed", "devices", "keep_activations"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec train` on a parser."""
    parser.add_argument("--target", required=True, metavar="PATH", help='folder, hub id, or "demo": the embedded one')
    lines = "file of JSON lines: text, prompt and completion, messages, or conversations"
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help=lines)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new folder for the head")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run that was begun in --out, or beyond its end"
    )
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models, or a folder; default: the target folder\'s')
    parser.add_argument("--dtype", help="dtype of the target; default: float32 on CPU, bfloat16 elsewhere")
    kinds = ", ".join(QUANTIZE)
    parser.add_argument("--quantize", metavar="KIND", help=f"quantise the target's weights: {kinds}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of loss and acceptance, written at the end")
    by_name = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_field(group, by_name[name])
    parser.set_defaults(run=run)


def _add_field(parser: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> None:
    """Declare the option for a field of `TrainConfig`, of which the parsed arguments have those that are given."""
    text = OPTIONS[field.name]
    is_said = field.default is None or field.default is False or "default" in text
    shown = text if is_said else f"{text}; default: {field.default}"
    settings: dict[str, Any] = {"help": shown, "default": argparse.SUPPRESS}
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        settings["action"] = "store_true"
    elif kind.startswith("tuple"):
        settings |= {"type": int, "nargs": "+", "metavar": "N"}
    elif kind == "str":
        settings["metavar"] = "NAME" if field.default else "PATH"
    else:
        settings |= {"type": int if kind == "int" else float, "metavar": "N" if kind == "int" else "X"}
    parser.add_argument(f"--{field.name.replace('_', '-')}", **settings)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print where the head is and how to use it; return the exit status."""
    from jspec.step.compile_cache import keep_compiled  # here, because they take time
    from jspec.tools.plot import training
    from jspec.train.loop import Interrupted
    from jspec.train.run import fit

    keep_compiled(None)  # a run that goes on after an interrupt does not compile again
    values = vars(arguments)
    options = {field.name: values[field.name] for field in dataclasses.fields(TrainConfig) if field.name in values}
    target = demo.folder(arguments.target, "target")
    options |= {name: getattr(arguments, name) for name in ("resume", "dtype", "quantize", "tokenizer")}
    try:
        result = fit(target, arguments.data, arguments.out, **options)
    except Interrupted as reason:
        print(f"jspec: {reason}", file=sys.stderr)
        return interrupt.STATUS
    vocabulary = f", draft vocabulary {result.coverage:.1%} of the data" if result.coverage < 1 else ""
    print(f"{result.out}: {result.figures}; {result.steps} updates{vocabulary}")
    method, depth = (options.get(name, getattr(TrainConfig, name)) for name in ("method", "ttt"))
    print(f"next: jspec generate --target {arguments.target} --{method} {result.out} --tree chain:{min(depth, 4)} ...")
    if arguments.plot is not None:
        figure: Any = training(result.journal).get_figure(root=True)
        figure.savefig(arguments.plot)
    return 0
