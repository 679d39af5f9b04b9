"""`outrider serve`: an OpenAI-compatible server in front of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import ModelOptions
from outrider.cli.output import err
from outrider.core.errors import InputError, MissingExtra

LIMITS = "Limits"


def _limit(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=LIMITS)


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on.")] = 8000,
    name: Annotated[
        list[str] | None, typer.Option("--served-name", help="What clients call the model; repeatable.")
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option("--api-key-file", metavar="FILE", help="Keys, one a line; without it none is asked for."),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option("--cors", metavar="ORIGIN", help="A site whose pages may ask; repeatable.")
    ] = None,
    unknown_fields: Annotated[
        str, typer.Option("--unknown-fields", help="ignore (a header names them) or refuse (400).")
    ] = "ignore",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="The engine in this process: simpler, and nothing survives its end.")
    ] = False,
    spare: Annotated[
        bool, typer.Option("--spare", help="Keep a second engine process loaded, for when the first one dies.")
    ] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", help="Engines behind this server, kept alive by Ray Serve: needs [ray].")
    ] = 1,
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="STORE", help="Draft from this text: `outrider index build`.")
    ] = None,
    learn: Annotated[
        str | None,
        typer.Option(
            "--learn", metavar="FOLDER", help="Let the EAGLE-3 drafter learn from requests, and keep it here."
        ),
    ] = None,
    save_every: Annotated[
        float, typer.Option("--save-every", help="Seconds after which --memory is saved again.")
    ] = 60.0,
    max_slots: Annotated[int, _limit("--max-slots", help="Texts that run at once.")] = 16,
    max_context: Annotated[int | None, _limit("--max-context", help="Tokens of a text; else the model's.")] = None,
    max_waiting: Annotated[int, _limit("--max-waiting", help="Requests that wait; further ones get 429.")] = 256,
    max_gap_ms: Annotated[
        float | None,
        _limit("--max-gap-ms", help="Longest wait between pieces of a text that prompts may cause."),
    ] = None,
    max_new_tokens: Annotated[int | None, _limit("--max-new-tokens", help="Tokens of an answer at most.")] = None,
    max_body_bytes: Annotated[int, _limit("--max-body-bytes", help="Bytes of a request at most.")] = 8 << 20,
    drain: Annotated[float, _limit("--drain", help="Seconds that running requests may go on at the end.")] = 30.0,
    *,
    model: ModelOptions,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients, with the answers of plain decoding.

    The embedded model on http://127.0.0.1:8000/v1 unless told otherwise. Ctrl-C refuses new requests and lets running
    ones end; a second one ends at once.
    """
    try:
        from outrider.serve.app import make_app
        from outrider.serve.run import serve as listen
        from outrider.serve.settings import Settings, read_keys
        from outrider.serve.start import make_link, text_of
    except ImportError as error:
        raise MissingExtra(f"serving needs {error.name}; install it with: pip install 'outrider[serve]'") from error
    settings = Settings(
        host=host, port=port, names=tuple(name or ()), keys=read_keys(_read(api_key_file)) if api_key_file else (),
        cors=tuple(cors or ()), unknown=unknown_fields, max_waiting=max_waiting, max_new_tokens=max_new_tokens,  # type: ignore[arg-type]
        max_body_bytes=max_body_bytes, drain_s=drain, max_gap_ms=max_gap_ms, learn=learn,
    )  # fmt: skip
    if spare and in_process:
        raise InputError("--spare is a second engine process, and --in-process has none; leave out one of them")
    if replicas < 1 or (replicas > 1 and (spare or in_process or model.memory is not None or learn is not None)):
        raise InputError(
            f"--replicas {replicas}: use at least 1, and with several neither --spare, --in-process, --memory nor "
            "--learn"
        )
    if save_every <= 0:
        raise InputError(f"--save-every {save_every}: use a number of seconds above 0")
    if corpus is not None:
        model = replace(model, option=[*(model.option or ()), f"store={corpus}"])
    arguments = model.arguments(max_slots=max_slots, max_context=max_context)
    link = make_link(arguments, settings, in_process=in_process, spare=spare, save_s=save_every, replicas=replicas)
    app = make_app(link, text_of(model.model, model.trust_remote_code), settings)
    told = partial(err().print, markup=False, highlight=False)
    told(f"loading {model.model} with {model.method}")
    if host not in ("127.0.0.1", "localhost", "::1") and not settings.keys:
        told("warning: others can reach this server and no key is asked for; give --api-key-file")
    listen(app, told)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--api-key-file {path}: {error.strerror}; give a file with a key a line") from error
