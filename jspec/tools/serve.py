"""Runs `jspec serve`, which serves a model over HTTP with the routes of OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jspec
from jspec.core.config import EngineConfig
from jspec.engine.reading.answers import template_of
from jspec.engine.request.model_sampling import model_sampling
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.http.settings import KEY_VARIABLE, Settings, digest_of, is_loopback, keys_of_environment
from jspec.server.tool_calls.choose import check_formats
from jspec.tools import demo, generate
from jspec.tools.options import add_model_arguments

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    from jspec import Engine, Replicas

NEEDED = ("starlette", "uvicorn", "httptools", "uvloop")  # the extra "serve"
WARM = ("logprobs", "grammar", "rounds")
SLOTS = 8
TREE = "topk:12,4,3"  # of the embedded head, so that the page has trees to show
LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec serve` on a parser."""
    parser.add_argument("named", nargs="?", metavar="MODEL", help="as --target; may be a head that names its target")
    add_model_arguments(parser, needs_target=False)
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_address_arguments(parser.add_argument_group("address, access and log"))
    _add_limit_arguments(parser.add_argument_group("requests and answers"))
    parser.set_defaults(run=run)


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slots", type=int, default=SLOTS, help="requests that an engine runs at once")
    about = "engines in this process, each on --tensor-parallel devices of its own"
    group.add_argument("--replicas", type=int, default=1, metavar="N", help=about)
    group.add_argument("--pages", type=int, help="pages of the KV cache; default: as many as fit")
    about = f"share of the device's memory; default: {EngineConfig.memory_fraction}"
    group.add_argument("--memory-fraction", type=float, help=about)
    group.add_argument("--prefill-budget", type=int, metavar="N", help="prompt tokens between two rounds")
    about = "largest number of tokens of a request's prediction, from which a look-up drafts"
    group.add_argument("--predicted-tokens", type=int, metavar="N", help=about)
    group.add_argument(
        "--adapter",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help="LoRA adapters, which requests name as their model",
    )
    group.add_argument("--adapters", type=int, metavar="N", help="adapters in use at once; default: as many as named")
    group.add_argument(
        "--adapter-rank", type=int, metavar="R", help=f"largest rank; default: {EngineConfig.adapter_rank}"
    )
    group.add_argument("--adapter-routes", action="store_true", help="let requests load and unload adapters")
    group.add_argument("--adaptive", action="store_true", help="choose the draft depth from measured acceptance")
    group.add_argument("--warm", metavar="LIST", help=f"compile before the first request: {','.join(WARM)}")
    group.add_argument("--live", action="store_true", help="let the page show draft trees (jspec.rounds)")


def _add_address_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", metavar="FILE", help="YAML file with these options by name; flags override it")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at")
    group.add_argument("--port", type=int, default=8000, help="port to listen at; 0: any free port")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model; default: what --target names"
    )
    group.add_argument("--api-key-file", metavar="FILE", help=f"file with a key a line; also {KEY_VARIABLE}")
    group.add_argument("--no-auth", action="store_true", help="serve everybody who reaches the address")
    group.add_argument("--allowed-host", nargs="+", metavar="NAME", help="further values of the header Host")
    group.add_argument("--allow-origin", nargs="+", metavar="ORIGIN", help="web pages that may call (CORS)")
    group.add_argument("--log-level", choices=LEVELS, default="info", help="what to log")
    group.add_argument("--log-text", action="store_true", help="log the texts of requests")


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-queue", type=int, metavar="N", help="completions that run or wait; default: 5 a slot")
    group.add_argument("--max-body", type=int, default=8 * 2**20, metavar="BYTES", help="largest body of a request")
    group.add_argument("--request-timeout", type=float, metavar="S", help="seconds for a request; default: no limit")
    group.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="seconds to end after SIGTERM")
    group.add_argument("--unknown-fields", choices=("refuse", "ignore"), default="refuse", help="fields of no meaning")
    group.add_argument("--tool-parser", metavar="NAME", help="format of tool calls; default: by the chat template")
    group.add_argument("--reasoning-parser", metavar="NAME", help="format of reasoning; default: by chat template")
    group.add_argument(
        "--no-reasoning",
        action="store_true",
        help="leave reasoning in the content (not of gpt-oss, and not before schemas and forced calls)",
    )
    group.add_argument(
        "--reasoning-field", default="reasoning_content", metavar="NAME", help="field of the answer with the reasoning"
    )


def with_config(words: Sequence[str]) -> list[str]:
    """Return a command line with the options of its --config file written out before its own.

    Raises:
        ValueError: the file is no YAML mapping, or nests values.
        OSError: the file cannot be read.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?")
    path = first.parse_known_args(list(words))[0].config
    if path is None:
        return list(words)
    import yaml

    try:
        options = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML, got an error: {' '.join(str(error).split()):.200}") from None
    if not isinstance(options, dict) or "config" in options:
        raise ValueError(f"{path}: expected options by name, --config excepted, got {options!r:.80}")
    return [word for name, value in options.items() for word in _words(path, str(name), value)] + list(words)


def _words(path: str, name: str, value: Any) -> list[str]:
    """Return the words of one option of a file."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list, bool)) for item in values):
        raise ValueError(f"{path}: {name}: expected a text, a number, true, false or a list, got {value!r:.80}")
    return [flag, *map(str, values)]


def run(arguments: argparse.Namespace) -> int:
    """Run `jspec serve` until a signal or a failure of the engine ends it; of several processes, process 0 serves.

    Returns:
        The exit status of `jspec.server.run.serve`; 0 in a process that has followed process 0.

    Raises:
        ValueError: an option has an impossible value.
        OSError: the address is in use.
        ImportError: the extra "serve" is not installed.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ImportError(
            f"jspec serve: expected {', '.join(missing)}, not installed; pip install -e '.[serve]' in jspec's folder"
        )
    from jspec.server.run import bind, serve

    _take_model(arguments)
    settings, adapters = make_settings(arguments), adapters_of(arguments)
    check_replicas(arguments)
    with _log(arguments.log_level):
        if jspec.distributed.process_id():
            with generate.make_engine(arguments, generate.prepare(arguments), **engine_options(arguments)) as engine:
                engine.follow()
            return 0
        with bind(settings.host, settings.port) as listener:
            address = f"{_host_of_url(settings.host)}:{listener.getsockname()[1]}"
            tokenizer = generate.prepare(arguments)
            check_formats(template_of(tokenizer), settings)
            settings = replace(settings, sampling=model_sampling(arguments.generation_config, arguments.target))
            with make_engine(arguments, tokenizer) as engine:
                for name, path in adapters.items():
                    engine.load_adapter(name, path)
                texts = compiling(address, settings), greeting(address, settings)
                listens, ready = (partial(print, text, end="", flush=True) for text in texts)
                return serve(engine, settings, listener, listens, ready)


def _take_model(arguments: argparse.Namespace) -> None:
    """Let the positional argument be the target, and the embedded pair be it where nothing is named."""
    if arguments.named is not None and arguments.target is not None:
        raise ValueError(
            f"--target: expected none with the model {arguments.named}, got {arguments.target}; leave it out"
        )
    arguments.target = arguments.target if arguments.named is None else arguments.named
    if arguments.target is None:
        _take_demo(arguments)


def _take_demo(arguments: argparse.Namespace) -> None:
    """Serve the embedded target, with its head unless another drafter is given."""
    arguments.target = demo.NAME
    if not any(getattr(arguments, name) for name in (*generate.PRETRAINED, "ngram", "suffix")):
        arguments.eagle3, arguments.tree = demo.NAME, arguments.tree or TREE


def check_replicas(arguments: argparse.Namespace) -> None:
    """Raise ValueError if there are fewer devices than several replicas need."""
    if arguments.replicas == 1:
        return
    from jspec.step.on_mesh import meshes_of

    replicas, size = arguments.replicas, arguments.tensor_parallel
    try:
        meshes_of(replicas * size, size)
    except ValueError as error:
        raise ValueError(f"--replicas {replicas} with --tensor-parallel {size}: {error}") from None


def make_engine(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Engine | Replicas:
    """Load the models of a parsed command line and make an engine, or an engine for each of several replicas."""
    options, size = engine_options(arguments), arguments.tensor_parallel
    if arguments.replicas == 1:
        return generate.make_engine(arguments, tokenizer, **options)
    make = partial(generate.make_engine, arguments, tokenizer, **options)
    return jspec.Replicas(lambda mesh: make(mesh=mesh), arguments.replicas * size, tensor_parallel=size)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine that are given, besides those of `jspec generate`."""
    names = ("slots", "pages", "memory_fraction", "prefill_budget", "predicted_tokens", "adapters", "adapter_rank")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.adapter and arguments.adapters is None:
        options["adapters"] = len(arguments.adapter)
    return options | ({"adaptive": True} if arguments.adaptive else {})


def adapters_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the path of each adapter of a parsed command line, by name.

    Raises:
        ValueError: an option is not NAME=PATH, or a name is the model's or given twice; or the routes that load
            adapters need an engine with adapters.
    """
    adapters: dict[str, str] = {}
    for text in arguments.adapter or ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(f"--adapter: expected NAME=PATH, got {text!r}")
        if name in (*adapters, *(arguments.served_model_name or (arguments.target,))):
            raise ValueError(f"--adapter: expected another name than those of the model and of others, got {name!r}")
        adapters[name] = path
    if arguments.adapter_routes and not (adapters or arguments.adapters):
        raise ValueError("--adapter-routes: expected --adapters N, the number in use at once, got none; add it")
    return adapters


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Return the server's settings of a parsed command line.

    Raises:
        ValueError: an option has an impossible value, or an address that others reach has no key.
        OSError: the file with the keys cannot be read.
    """
    keys = read_keys(arguments.api_key_file)
    _check_access(arguments, keys)
    warm = tuple(arguments.warm.split(",")) if arguments.warm else ()
    if wrong := [name for name in warm if name not in WARM]:
        raise ValueError(f"--warm: expected some of {','.join(WARM)}, got {wrong[0]!r}")
    settings = Settings(
        names=tuple(arguments.served_model_name or (arguments.target,)),
        keys=tuple(map(digest_of, keys)),
        warm=warm,
        allowed_hosts=tuple(arguments.allowed_host or ()),
        allow_origins=tuple(arguments.allow_origin or ()),
        ignore_unknown=arguments.unknown_fields == "ignore",
        drain_seconds=arguments.drain_timeout,
        reasoning=not arguments.no_reasoning,
        **{name: getattr(arguments, name) for name in SAME},
    )
    check_formats(None, settings)
    return settings


def _check_access(arguments: argparse.Namespace, keys: Sequence[str]) -> None:
    """Raise ValueError if an address that others reach has no key, or --no-auth has one."""
    if arguments.no_auth and keys:
        raise ValueError(f"--no-auth: expected no key beside it, got one; leave it out, or the key and {KEY_VARIABLE}")
    if not (is_loopback(arguments.host) or keys or arguments.no_auth):
        raise ValueError(
            f"--host: expected a loopback address without a key, got {arguments.host}; give --api-key-file FILE or "
            f"{KEY_VARIABLE}, or --no-auth to serve everybody"
        )


SAME = (  # options with the name of their setting
    *("host", "port", "max_queue", "max_body", "request_timeout", "live", "adapter_routes", "log_text", "tool_parser"),
    *("reasoning_parser", "reasoning_field"),
)


def read_keys(path: str | None) -> list[str]:
    """Return the keys of a file, one a line, and those of the environment, with commas between them.

    Raises:
        ValueError: the file has no key.
    """
    keys = keys_of_environment()
    if path is not None:
        file_keys = Path(path).read_text("utf-8").split()
        if not file_keys:
            raise ValueError(f"{path}: expected a key a line, got none")
        keys += file_keys
    return keys


def compiling(address: str, settings: Settings) -> str:
    """Return what is printed once the server listens, if it compiles programs before it serves."""
    if not settings.warm:
        return ""
    return f"jspec compiles for {', '.join(settings.warm)}, and then serves {settings.names[0]} at http://{address}\n"


def greeting(address: str, settings: Settings) -> str:
    """Return what is printed once requests are served: address, requests from a shell and from Python, sampling."""
    url, name = f"http://{address}", settings.names[0]
    key = ' -H "Authorization: Bearer $KEY"' if settings.keys else ""
    fields = ", ".join(f"{name} {value:g}" for name, value in settings.sampling.items())
    sampling = f"\n  sampling of requests that leave it out: {fields} (--generation-config)" if fields else ""
    python_key = "KEY" if settings.keys else '"none"'
    page = f"  page: {url}/\n" if settings.live else ""
    return (
        f"jspec serves {name} at {url} (Ctrl-C ends it)\n{page}"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d "
        f'\'{{"prompt": "def main(", "max_tokens": 32}}\'\n'
        f'  openai.OpenAI(base_url="{url}/v1", api_key={python_key}).completions.create(model="{name}", '
        f'prompt="def main("){sampling}\n'
    )


def _host_of_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _log(level: str) -> Iterator[None]:
    """Write the server's log to the standard error while the context is open."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    least = {logging.getLogger("jspec.server"): level, logging.getLogger("uvicorn.error"): "warning"}
    before = [(logger, logger.level, logger.propagate) for logger in least]
    for logger, name in least.items():
        logger.addHandler(handler)
        logger.setLevel(name.upper())
        logger.propagate = False  # the root logger may have a handler, which would write each line again
    try:
        yield
    finally:
        for logger, number, propagates in before:
            logger.removeHandler(handler)
            logger.setLevel(number)
            logger.propagate = propagates
