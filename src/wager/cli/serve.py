"""`wager serve`: OpenAI's API over one model, with metrics and a dashboard."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import click

from wager.config import EngineConfig
from wager.errors import UsageError
from wager.terminal import console, flags

_LOG = logging.getLogger("wager.serve")

_SWITCH_S = 0.0002
"""Seconds after which a thread that waits for the interpreter gets it. After every pass the engine's thread waits for
it while chunks are written: with Python's own 5 ms 64 streams got 5 % fewer tokens a second."""


@click.command(
    "serve",
    cls=flags.Verb,
    main="host port served_names api_key_file model drafter depth max_sequences max_context memory learn "
    "strict_fields log_format",
)
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in."
)
@click.option("--port", type=flags.Count(0, 65535), default=8000, help="0 takes a free one, and says which.")
@click.option(
    "--served-model-name",
    "--served-name",
    "served_names",
    metavar="NAME[,NAME]",
    help="How clients call the model, by one name or several. Without it as --model is written.",
)
@click.option("--api-key-file", type=flags.InputPath(), help="Keys, one a line, of which callers must send one.")
@click.option(
    "--operator-key-file",
    type=flags.InputPath(),
    help="Keys that may also read /metrics and /live, which tell of the requests of all keys.",
)
@click.option(
    "--share-between-keys",
    is_flag=True,
    help="Learn and cache across keys: faster, and keys can find out others' texts.",
)
@click.option(
    "--tenant-by",
    default="",
    metavar="FIELD",
    help="Tell the users of one key apart by a field of the body, too: user, safety_identifier or metadata.NAME. "
    "What is learned and cached serves each alone.",
)
@click.option(
    "--show-rejected",
    is_flag=True,
    help="Answers with statistics show rejected guesses that may stem from other requests.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Web pages that may call, such as https://example.org; * for all. May be repeated.",
)
@click.option(
    "--max-waiting",
    type=flags.Count(0, 1_000_000),
    default=256,
    help="Requests that may wait; more are refused with 429.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0.001, 86400),
    default=600.0,
    metavar="SECONDS",
    help="Longest time from arrival to the end of an answer.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(1, 86400),
    default=30.0,
    metavar="SECONDS",
    help="Time that running requests get after SIGTERM or Ctrl-C.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=1.0, metavar="T", help="Of requests that name none."
)
@click.option(
    "--strict-fields", is_flag=True, help="Refuse fields that are not known, instead of leaving them out by name."
)
@flags.receipt_key_flag
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Of the lines on stderr.")
@flags.engine_flags(learning=True)
def command(
    *,
    config: EngineConfig,
    served_names: str | None,
    api_key_file: Path | None,
    operator_key_file: Path | None,
    key_path: Path | None,
    temperature: float,
    log_format: str,
    **limits: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's API under /v1, /health, /metrics, and a dashboard at /.

    It ends on SIGTERM or Ctrl-C, after the requests that run.
    """
    from wager.cli.loading import loaded_lines, open_async_llm
    from wager.receipts import SigningKey, check_rule
    from wager.serve.app import Server
    from wager.serve.limits import ServeOptions, read_api_keys
    from wager.serve.run import bind, configure_logging, serving

    if not (api_key_file or operator_key_file):
        flags.refuse(["share_between_keys"], "without keys", "Leave it out, or give --api-key-file.")
    if unused := flags.options_of_file(["sampling"]).keys() - {"temperature"}:
        names = ", ".join(sorted(unused)).replace("_", "-")
        console.warn(f"{names} of the --config file have no effect here: requests say it.")
    if key_path:
        check_rule(config.speculation.verify)
    options = ServeOptions(
        model_names=_names(served_names) if served_names else (config.model.model,),
        api_keys=read_api_keys(api_key_file) if api_key_file else (),
        operator_keys=read_api_keys(operator_key_file) if operator_key_file else (),
        default_temperature=temperature,
        receipt_key=SigningKey.read(key_path) if key_path else None,
        **limits,
    )
    listener = bind(options)
    configure_logging(json_lines=log_format == "json")
    as_json = log_format == "json"  # whose reader finds nothing else
    say, warn = (_LOG.info, _LOG.warning) if as_json else (console.say, console.warn)
    if not options.is_loopback and not (options.api_keys or options.operator_keys):
        warn(f"everybody who reaches {options.host} may use the model: there is no --api-key-file.")
    llm = open_async_llm(config)
    for line in loaded_lines(llm.engine):
        say(line)
    sys.setswitchinterval(_SWITCH_S)
    server = Server(llm, options)
    gc.freeze()  # what a start made stays: the collector need not look at it again
    serving(server, ready=lambda url: say(f"serving {options.model_name} at {url}")).run([listener])


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"--served-model-name {text!r} has no name.", "Give names with commas between them.")
    return names
