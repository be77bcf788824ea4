"""The `beholder` command. Heavy modules are imported by the subcommand that needs them, so `--help` is instant."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from server.options.option import Field, SettingsError, environment_name, flag_name
from server.request_models import DEFAULT_PROMPT
from server.settings import OFFLINE_OPTIONS, OPTIONS, Settings

app: Final = typer.Typer(
    help="Beholder: a computer looks at pictures, clips and cameras and says what it sees.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

CAPTION_OPTIONS: Final = tuple(name for name in OFFLINE_OPTIONS if name != "max_images")
"""What one command has no use for is no option of it: here, each picture is a request of its own."""
WATCH_OPTIONS: Final = tuple(
    name
    for name in OFFLINE_OPTIONS
    if name not in {"presets", "max_image_mb", "max_images", "max_video_frames", "exact_decode"}
)
CALIBRATE_OPTIONS: Final = tuple(name for name in OFFLINE_OPTIONS if name not in {"presets", "max_images"})


def main() -> None:
    """Entry point of the console command."""
    try:
        app()
    except SettingsError as error:
        typer.echo(f"beholder: {error}", err=True)
        sys.exit(2)


def _parameter(field: Field) -> inspect.Parameter:
    """A command-line flag for one option. Values stay text: `Settings.load` parses and checks them for every source."""
    flag = flag_name(field.name)
    default = field.default
    if field.kind is bool:
        default = "on" if default else "off"
    elif default in ("", ()):
        default = "none"
    notes = [field.option.unit, f"default {default}", f"env {environment_name(field.name)}"]
    help_line = f"{field.option.help} [{'; '.join(note for note in notes if note)}]"
    annotation: Any
    if field.kind is bool:
        annotation = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help_line, show_default=False)]
    else:
        metavar = "|".join(field.choices) or {int: "INTEGER", float: "NUMBER", str: "TEXT", tuple: "A,B,…"}[field.kind]
        annotation = Annotated[str | None, typer.Option(flag, help=help_line, metavar=metavar, show_default=False)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each named option; they arrive in its ``**given``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [_parameter(OPTIONS[name]) for name in names]
        command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


@app.command()
@_with_options(*OPTIONS)
def serve(
    named: Annotated[
        str | None,
        typer.Argument(
            help="A model folder or a name on the hub, as with --model; by default the bundled one.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    **given: str | bool | None,
) -> None:
    """Start the server: HTTP on 127.0.0.1:8000 unless told otherwise."""
    from server.launch import launch
    from server.presets import load_presets
    from server.tls import with_certificate

    if named is not None:
        if given["model"] is not None:
            raise SettingsError(f"the model is named twice: {named!r}, and --model {given['model']!r}; leave one out")
        given["model"] = named
    settings = with_certificate(Settings.load(given, os.environ).resolve_model())
    load_presets(settings.presets)  # a broken file is refused now
    raise typer.Exit(launch(settings))


@app.command()
@_with_options(*CAPTION_OPTIONS)
def caption(
    files: Annotated[
        list[Path],
        typer.Argument(help="Pictures and clips; - is standard input.", metavar="FILE…", show_default=False),
    ],
    prompt: Annotated[str | None, typer.Option(help="What to ask about each; by default for a description.")] = (None),
    preset: Annotated[str | None, typer.Option(help="A preset by its name, such as museum_placard.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", min=1, show_default="256, or the preset's")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always gives the likeliest words.", min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a picture: text, usage, timings.")] = False,
    timed: Annotated[
        Literal["srt", "vtt"] | None, typer.Option(help="Describe a clip part by part, as a file of subtitles.")
    ] = None,
    segment_s: Annotated[
        float | None,
        typer.Option(help="Length of those parts in seconds; by default, or 0, by the length of the clip.", min=0),
    ] = None,
    **given: str | bool | None,
) -> None:
    """Describe pictures and clips here and now, without a server. Several are described in the order given."""
    from preprocess.errors import BeholderError
    from server.offline import Beholder
    from server.subtitles import srt, webvtt

    if json and timed:
        raise typer.BadParameter("--json and --timed cannot be had together")
    if segment_s is not None and not timed:
        raise typer.BadParameter("--segment-s is the length of the parts of --timed srt or --timed vtt")
    if given["presets"] is not None and preset is None:
        raise typer.BadParameter("--presets is where --preset NAME is looked for, and no preset is named")

    if max_tokens is None and preset is None:
        max_tokens = 256
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "preset": preset}
    failed = False
    try:
        beholder = Beholder(settings=Settings.load(given, os.environ))
    except BeholderError as error:
        typer.echo(f"beholder: {error}", err=True)
        raise typer.Exit(1) from None
    with beholder:
        for file in files:
            name = os.fsencode(file).decode("utf-8", "replace")
            picture = Path("/dev/stdin") if name == "-" else file
            try:
                if timed:
                    cues = beholder.timed_captions(picture, prompt, segment_s=segment_s or 0.0, **sampling)
                    typer.echo(srt(cues) if timed == "srt" else webvtt(cues), nl=False)
                elif json:
                    answer = msgspec.to_builtins(beholder.caption(picture, prompt, **sampling))
                    typer.echo(msgspec.json.encode({"file": name, **answer}))
                else:
                    pieces = beholder.stream(picture, prompt, **sampling)
                    typer.echo(f"{name}: " if len(files) > 1 else "", nl=False)
                    for text in pieces:
                        typer.echo(text, nl=False)
                    typer.echo("")
            except BeholderError as error:
                typer.echo(f"beholder: {name}: {error}", err=True)
                failed = True
            except OSError as error:  # all that reads is guarded: this is our standard output
                if isinstance(error, BrokenPipeError):
                    raise
                typer.echo(f"beholder: the answer cannot be written: {error.strerror}", err=True)
                raise typer.Exit(1) from None
    raise typer.Exit(1 if failed else 0)


@app.command()
@_with_options(*WATCH_OPTIONS)
def watch(
    source: Annotated[
        str,
        typer.Argument(
            help="A clip (read at its own pace), a camera (/dev/video0), or an address of MJPEG (http) or RTSP video.",
            metavar="SOURCE",
            show_default=False,
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to ask about each frame.")] = DEFAULT_PROMPT,
    every_s: Annotated[float, typer.Option(help="Least time from one description to the next, in seconds.", min=0)] = 0,
    min_change: Annotated[
        float,
        typer.Option(help="Percent by which a frame must differ to be described; 0: all.", min=0, max=100),
    ] = 4.0,
    reconnect_s: Annotated[
        float | None,
        typer.Option(
            help="How long an address that stopped sending is tried again, in seconds.", min=0, show_default="30"
        ),
    ] = None,
    max_captions: Annotated[int | None, typer.Option(help="Stop after so many descriptions.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest description, in tokens.", min=1)] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 always gives the likeliest words.", min=0, max=2)] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a description.")] = False,
    **given: str | bool | None,
) -> None:
    """Say what a camera, a stream or a clip shows, as it shows it. Ctrl-C ends it."""
    from preprocess.errors import BeholderError
    from server.live_source import LiveSource
    from server.offline import Beholder
    from server.watch import Printer, Watch

    if reconnect_s is not None and "://" not in source:
        raise typer.BadParameter("--reconnect-s is for addresses (http, rtsp); a file or a camera is opened once")
    printer = Printer(typer.echo, as_json=json)
    how = Watch(prompt, every_s, min_change, max_captions, {"max_tokens": max_tokens, "temperature": temperature})
    try:
        settings = Settings.load(given, os.environ)
        # Frames are handed over decoded, so how many bytes their files would have is nobody's concern.
        settings = msgspec.structs.replace(settings, max_image_mb=OPTIONS["max_image_mb"].option.high)
        live = LiveSource(
            source, settings.preprocess_config().limits, reconnect_s=30.0 if reconnect_s is None else reconnect_s
        )
        with Beholder(settings=settings) as beholder, live:
            tally = how.run(beholder, live, printer.on_piece, printer.on_sighting)
    except BeholderError as error:
        typer.echo(f"beholder: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("")
        raise typer.Exit(0) from None
    if live.ended_by:
        typer.echo(f"beholder: {live.ended_by}", err=True)
    typer.echo(
        f"beholder: {tally.described} frames described, {tally.unchanged} hardly changed, {tally.dropped} missed",
        err=True,
    )


@app.command()
@_with_options(*CALIBRATE_OPTIONS)
def calibrate(
    questions: Annotated[
        Path, typer.Argument(help="Questions with known answers, one JSON object a line.", show_default=False)
    ],
    **given: str | bool | None,
) -> None:
    """Measure how far the probabilities of decisions can be trusted (docs/decisions.md)."""
    from preprocess.errors import BeholderError
    from server.calibration import calibrate as measure
    from server.offline import Beholder

    try:
        with Beholder(settings=Settings.load(given, os.environ)) as beholder:
            typer.echo(measure(beholder, questions))
    except BeholderError as error:
        typer.echo(f"beholder: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Measure speed: beside plain transformers, of any server, of the engine alone (`beholder bench --help`)."""
    from server.bench.command import main as measure

    raise typer.Exit(measure(list(context.args)))


@app.command()
@_with_options("model", "device", "dtype", "max_running", "max_context", "kv_tokens")
def prebuild(**given: str | bool | None) -> None:
    """Compile a model's GPU kernels ahead of time, so that the first start does not wait for them."""
    from engine.prebuild import prebuild as fill_caches
    from preprocess.errors import BeholderError

    settings = Settings.load(given, os.environ).resolve_model()
    try:
        took_s = fill_caches(settings.engine_config())
    except BeholderError as error:
        typer.echo(f"beholder: {error}", err=True)
        raise typer.Exit(1) from None
    if took_s is None:
        typer.echo("beholder: nothing to compile: this model runs here without kernels of its own")
    else:
        typer.echo(f"beholder: kernels are in the caches ({took_s:.1f} s)")


@app.command()
def version() -> None:
    """Print the version."""
    from server.version import installed_version

    typer.echo(installed_version())


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
