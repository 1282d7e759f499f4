"""Declares the options that `jspec generate`, `jspec chat` and `jspec serve` share."""

from __future__ import annotations

import argparse
from typing import Any

from jspec.core.config import ACCEPT_RULES, KV_DTYPES, QUANTIZE, EngineConfig
from jspec.core.tree import DEFAULT_TREE, TREE_FORMS
from jspec.engine.request.model_sampling import AUTO, NONE

LOOKUPS, JOINS = ("ngram", "suffix"), ("replace", "beside")
LOOKUP_HELP = "draft what followed the newest tokens earlier too, in the same rounds as a head; default: no"
JOIN_HELP = "which tokens a look-up and a head draft together; default: replace if the head drafts a chain, else beside"
LOOKUP: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--lookup",), dict(choices=LOOKUPS, help=LOOKUP_HELP)),
    (("--join",), dict(choices=JOINS, help=JOIN_HELP)),
)


def add_model_arguments(parser: argparse.ArgumentParser, *, needs_target: bool = True) -> None:
    """Declare the options for target, drafter and engine on a parser.

    Args:
        needs_target: whether the target must be given; else it is the embedded one, with its head.
    """
    target = parser.add_argument_group("target")
    about = 'folder, hub id, or "demo": the embedded one' + ("" if needs_target else ", the default, with its head")
    target.add_argument("--target", required=needs_target, metavar="PATH", help=about)
    target.add_argument("--tokenizer", help='"bytes" for byte-level models, or a folder; default: the target folder\'s')
    about = "jinja template of conversations; default: the tokenizer's"
    target.add_argument("--chat-template", metavar="FILE", help=about)
    about = "text that ends reasoning at the budget of a request; default: the chat template's end marker"
    target.add_argument("--thinking-end", metavar="TEXT", help=about)
    about = (
        "folder of the generation_config.json whose sampling holds unless a request says otherwise; "
        f"{NONE}: none; default: {AUTO}, the target's if it has one"
    )
    target.add_argument("--generation-config", default=AUTO, metavar="PATH", help=about)
    _add_drafter_arguments(parser.add_argument_group("drafter"))
    _add_weight_arguments(parser.add_argument_group("weights and caches"))
    _add_device_arguments(parser.add_argument_group("devices and processes"))


def _add_drafter_arguments(group: argparse._ArgumentGroup) -> None:
    drafters = group.add_mutually_exclusive_group()
    drafters.add_argument("--eagle3", metavar="PATH", help='draft with an EAGLE-3 head; "demo": the embedded one')
    drafters.add_argument("--peagle", metavar="PATH", help="draft with a P-EAGLE head")
    drafters.add_argument("--eagle", metavar="PATH", help="draft with an EAGLE-1 or EAGLE-2 head")
    drafters.add_argument("--medusa", metavar="PATH", help="draft with Medusa heads")
    drafters.add_argument("--dflash", metavar="PATH", help="draft with a DFlash head")
    drafters.add_argument("--dflash2", metavar="PATH", help="draft with a DFlash2 head")
    drafters.add_argument("--dspark", metavar="PATH", help="draft with a DSpark head")
    drafters.add_argument("--mtp", metavar="PATH", help="draft with the target's own layer for this, of its folder")
    drafters.add_argument("--gemma4-assistant", metavar="PATH", help="draft with an assistant of Gemma 4")
    about = "draft with a head, a model or an adapter for drafting (UNO); auto: with what the target's folder has"
    drafters.add_argument("--draft", metavar="auto|PATH", help=about)
    drafters.set_defaults(uno=None)  # has no flag of its own
    drafters.add_argument("--draft-model", metavar="PATH", help="draft with a smaller model")
    drafters.add_argument("--ngram", action="store_true", help="draft what followed the newest tokens earlier")
    drafters.add_argument("--suffix", action="store_true", help="draft what most often followed the newest tokens")
    for flags, settings in LOOKUP:
        group.add_argument(*flags, **settings)
    about = f"draft tree: {TREE_FORMS}; default: {DEFAULT_TREE}, or a shorter chain if the head ends there"
    group.add_argument("--tree", help=about)
    about = f"accept rule: {', '.join(ACCEPT_RULES)}"
    group.add_argument("--accept", default=ACCEPT_RULES[0], metavar="RULE", help=about)
    group.add_argument("--draft-vocab", metavar="N|FILE", help="tokens that a head with the target's head drafts")
    group.add_argument("--draft-window", type=int, metavar="W", help="newest tokens that the drafter attends to")
    about = "device of the draft model, counted from 0; default: the target's devices"
    group.add_argument("--draft-device", type=int, metavar="N", help=about)


def check_join(arguments: argparse.Namespace) -> None:
    """Raise an error if the command line says how a look-up joins a head, and names no look-up."""
    if arguments.join is not None and arguments.lookup is None:
        raise ValueError("--join: expected --lookup, whose tokens join the head's, got none; name it or leave it out")


def _add_weight_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", help="dtype of the weights; default: float32 on CPU, bfloat16 elsewhere")
    kinds, dtypes = ", ".join(QUANTIZE), ", ".join(KV_DTYPES)
    group.add_argument("--quantize", metavar="KIND", help=f"quantise the target's weights: {kinds}")
    about = f"dtype of the target's cache: {dtypes}; default: the weights'"
    group.add_argument("--kv-dtype", metavar="DTYPE", help=about)
    group.add_argument("--draft-quantize", metavar="KIND", help="quantise a head, an MTP layer or a draft model")
    group.add_argument("--draft-kv-dtype", metavar="DTYPE", help="dtype of the drafter's cache")
    about = f"largest number of tokens, prompt included; default: {EngineConfig.max_len}, or the target's if it is less"
    group.add_argument("--max-len", type=int, help=about)


def _add_device_arguments(group: argparse._ArgumentGroup) -> None:
    about = "devices over which weights are divided"
    group.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help=about)
    about = "address of process 0, if several processes run this command"
    group.add_argument("--coordinator", metavar="HOST:PORT", help=about)
    group.add_argument("--num-processes", type=int, metavar="N", help="number of these processes")
    group.add_argument("--process-id", type=int, metavar="I", help="number of this process, from 0")
    about = "where compiled programs are kept; default: the user's cache folder"
    group.add_argument("--compile-cache", metavar="DIR", help=about)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for sampling on a parser."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, help="largest number of tokens to emit")
    model = "default: --generation-config's, else"
    group.add_argument("--temperature", type=float, help=f"sampling temperature; 0 is greedy; {model} 0")
    group.add_argument("--top-k", type=int, help=f"keep the k most likely tokens; {model} all")
    group.add_argument("--top-p", type=float, help=f"keep the likeliest tokens up to this probability; {model} 1")
    group.add_argument("--min-p", type=float, help=f"keep tokens this many times as likely as the first; {model} 0")
    group.add_argument("--repetition-penalty", type=float, help=f"factor for tokens seen before; {model} 1, off")
    group.add_argument("--presence-penalty", type=float, help="taken from logits of tokens that the output has")
    group.add_argument("--frequency-penalty", type=float, help="the same, times how often the output has the token")
    group.add_argument("--thinking-budget", type=int, metavar="N", help="reasoning tokens, of models that reason")
    group.add_argument("--seed", type=int, help="seed of the request; with it the output can be repeated")
