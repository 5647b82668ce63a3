"""The ``marey`` command: one function per command, each imports its room when it is called.

Exit codes: 0 done or stopped on request, 2 the request is wrong (one sentence on stderr), 130 training was stopped at
once, 1 a bug.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from marey import __version__
from marey.core.errors import UserError
from marey.core.stopping import sigterm_is_ctrl_c

Command = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``marey`` script and of ``python -m marey``."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # The first is what a person types; the second is how Lightning starts the other ranks of a Hydra application.
    if words[:1] == ["train"] or words[:1] in (["-cp"], ["--experimental-rerun"]):
        words = words[1:] if words[0] == "train" else words
        train([*words, "--debug"] if debug else words)
        return
    if words[:2] == ["plan", "train"]:  # `marey plan` in front of the command one is about to type
        words.pop(1)
    arguments = _read(words)
    _guarded(lambda: arguments.run(arguments), debug=debug)


def train(words: Sequence[str] | None = None) -> None:
    """``marey train`` and ``python main.py``: the Hydra application. ``--debug`` shows tracebacks.

    ``words`` default to the command line. ``sys.argv`` stays as it was typed: the other ranks are started from it.
    """
    given = list(sys.argv[1:] if words is None else words)
    debug = "--debug" in given

    def run() -> None:
        from marey.training.application import run_application

        run_application([word for word in given if word != "--debug"])

    # A first Ctrl-C ends a run like one that is done; an interrupt that gets here with words lost something.
    _guarded(run, debug=debug, stopped=130)


def _guarded(run: Callable[[], None], *, debug: bool, stopped: int = 0) -> None:
    """Run a command and leave with its exit code; ``stopped`` is that of an interrupt which says what it lost."""
    try:
        run()
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"marey: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"marey: {str(stop) or 'stopped on request; files already complete are kept'}", file=sys.stderr)
        sys.exit(stopped if str(stop) else 0)
    except BrokenPipeError:  # `marey inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


@sigterm_is_ctrl_c()
def _ingest(arguments: argparse.Namespace) -> None:
    from marey.pixels.ingest import ingest

    report = ingest(
        arguments.sources,
        Path(arguments.out),
        rate=arguments.rate,
        short_edge=arguments.short_edge,
        quality=arguments.quality,
        episode_length=arguments.episode_length,
        workers=arguments.workers,
        labels=arguments.labels,
        stall_s=arguments.stall,
    )
    print(report.text())


@sigterm_is_ctrl_c()
def _encode(arguments: argparse.Namespace) -> None:
    from marey.evaluation.encoding import encode_store, parse_options

    print(
        encode_store(
            arguments.source,
            Path(arguments.out),
            codec=arguments.codec,
            options=parse_options(arguments.option),
            dtype=arguments.dtype,
            texts=None if arguments.texts is None else Path(arguments.texts),
            text_column=arguments.text_column,
        )
    )


def _make_config(arguments: argparse.Namespace) -> None:
    from marey.config.compose import compose_container
    from marey.latents.make_config import make_config

    out = Path(arguments.out)
    written = make_config(
        arguments.manifests,
        out,
        defaults=compose_container([], config_name="causal_video"),
        weights=arguments.weights,
    )
    data = written["data"]
    print(
        f"{out}: {len(data['sources'])} sources weighed {data['weights']}, {data['train_batch_size']} samples "
        f"per rank, pools of {data['batching']['bucket_pool_size']}; next\n"
        f"  marey plan --config-dir {out.parent.resolve()} --config-name {out.stem}\n"
        f"  marey train --config-dir {out.parent.resolve()} --config-name {out.stem}"
    )


@sigterm_is_ctrl_c()
def _rollout(arguments: argparse.Namespace) -> None:
    from marey.core.files import refuse_unwritable_folder

    refuse_unwritable_folder(Path(arguments.out), option="--out")  # before what takes minutes
    from marey.evaluation.encoding import parse_options
    from marey.evaluation.latent_sample import CodecChoice
    from marey.evaluation.rollout import roll_out, rollout_text, write_rollouts

    if arguments.option and arguments.codec is None:
        raise UserError(f"--option {arguments.option[0]} belongs to a codec; name it with --codec")
    loaded, rollouts = roll_out(
        Path(arguments.checkpoint),
        data=arguments.data,
        clip=arguments.clip,
        clips=arguments.clips,
        prefix=arguments.prefix,
        horizon=arguments.horizon,
        steps=arguments.steps,
        guidance=arguments.guidance,
        text=arguments.text,
        seed=arguments.seed,
        weights=arguments.weights,
        codec=None if arguments.codec is None else CodecChoice(arguments.codec, parse_options(arguments.option)),
        device=arguments.device,
    )
    files = write_rollouts(Path(arguments.out), loaded, rollouts)
    print(rollout_text(loaded, rollouts, files, asked=None if arguments.clip else arguments.clips))


def _plan(arguments: argparse.Namespace) -> None:
    from marey.training.plan import plan_text

    folder = None if arguments.config_dir is None else Path(arguments.config_dir)
    print(plan_text(arguments.overrides, config_name=arguments.config_name, config_dir=folder))


@sigterm_is_ctrl_c()
def _doctor(arguments: argparse.Namespace) -> None:
    from marey.doctor.examine import doctor

    doctor(
        arguments.data,
        config_name=arguments.config_name,
        config_dir=None if arguments.config_dir is None else Path(arguments.config_dir),
        clips=arguments.clips,
        limit_s=arguments.limit,
    )


def _inspect(arguments: argparse.Namespace) -> None:
    from marey.evaluation.inspect import inspect_text

    print(inspect_text(Path(arguments.path), show_config=arguments.config))


@sigterm_is_ctrl_c()
def _embed(arguments: argparse.Namespace) -> None:
    from marey.evaluation.embed import embed

    print(
        embed(
            Path(arguments.checkpoint),
            arguments.source,
            Path(arguments.out),
            per=arguments.per,
            weights=arguments.weights,
            clips_per_video=arguments.clips_per_video,
            batch_size=arguments.batch,
            device=arguments.device,
            overwrite=arguments.overwrite,
            stream=arguments.stream,
        )
    )


@sigterm_is_ctrl_c()
def _export(arguments: argparse.Namespace) -> None:
    from marey.evaluation.export import export

    print(
        export(
            Path(arguments.checkpoint),
            Path(arguments.out),
            format=arguments.format,
            weights=arguments.weights,
            overwrite=arguments.overwrite,
        )
    )


@sigterm_is_ctrl_c()
def _import(arguments: argparse.Namespace) -> None:
    from marey.evaluation.importing import import_weights

    print(
        import_weights(
            Path(arguments.file),
            Path(arguments.out),
            overrides=arguments.overrides,
            rate=arguments.rate,
            overwrite=arguments.overwrite,
        )
    )


@sigterm_is_ctrl_c()
def _probe(arguments: argparse.Namespace) -> None:
    from marey.core.files import refuse_unwritable, write_json

    if arguments.json is not None:  # before the features, which take minutes
        refuse_unwritable(Path(arguments.json), option="--json")
    from marey.evaluation.probe import probe

    result = probe(
        Path(arguments.checkpoint),
        arguments.data,
        test=arguments.test,
        labels=None if arguments.labels is None else Path(arguments.labels),
        label_column=arguments.label_column,
        weights=arguments.weights,
        clips_per_video=arguments.clips_per_video,
        views=arguments.views,
        attentive=not arguments.no_attentive,
        per_class=arguments.labels_per_class,
        cached=not arguments.no_cache,
        batch_size=arguments.batch,
        device=arguments.device,
        seed=arguments.seed,
    )
    print(result.text())
    if arguments.json is not None:
        try:
            write_json(Path(arguments.json), result.as_dict())
        except OSError as error:
            raise UserError(
                f"--json {arguments.json} cannot be written ({error.strerror or error}); give another place"
            ) from error


@sigterm_is_ctrl_c()
def _report(arguments: argparse.Namespace) -> None:
    from marey.evaluation.report import report

    page = report(
        Path(arguments.run_folder),
        out=None if arguments.out is None else Path(arguments.out),
        data=arguments.data,
        clips=arguments.clips,
    )
    print(page.absolute().as_uri())


def _demo(arguments: argparse.Namespace) -> None:
    from marey.story import demo

    demo(
        out=Path(arguments.out),
        videos=None if arguments.videos is None else Path(arguments.videos),
        steps=arguments.steps,
        seed=arguments.seed,
    )


SOURCES = """sources, each with its command (docs/data.md says more):
  a folder, class folders   marey ingest videos OUT.lance
  files, patterns           marey ingest one.mp4 'more/**/*.mp4' OUT.lance
  CSV (path,label), list    marey ingest list.csv OUT.lance
  animated GIF, WebP        marey ingest animations OUT.lance
  folders of images         marey ingest frames OUT.lance --rate 10
  WebDataset                marey ingest 'shards/clips-{000..009}.tar' OUT.lance
  LeRobot v2, v3            marey ingest pusht OUT.lance, or of several cameras: aloha:observation.images.top
  Hugging Face datasets     marey ingest saved OUT.lance, or 'hub/data/train-*.parquet'
"""


def _train_help(arguments: argparse.Namespace) -> None:
    raise AssertionError(f"`marey train` is read by Hydra, not here: {arguments}")


def _add_encoder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", choices=("ema", "online"), help="default: ema where the checkpoint has it")
    parser.add_argument(
        "--clips-per-video", type=_positive, default=1, help="evenly spaced clips of each episode, none twice"
    )
    parser.add_argument("--batch", type=_positive, default=16, help="clips per forward pass (default: 16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _label_counts(text: str) -> tuple[int, ...]:
    """``1,10,all`` -> (1, 10): all labels are always probed."""
    words = [word.strip() for word in text.split(",")]
    if not all(word == "all" or (word.isdecimal() and int(word) >= 1) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,10,all")
    return tuple(sorted({int(word) for word in words if word != "all"}))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return value


def _read(words: list[str]) -> argparse.Namespace:
    parser = _parser()
    if words[:1] not in (["plan"], ["doctor"]):
        return parser.parse_args(words)
    # Options may stand anywhere among these two's words, as for `marey train`; argparse does not pass that on to
    # the parser of a command.
    (commands,) = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    sub: argparse.ArgumentParser = commands[words[0]]
    return sub.parse_intermixed_args(words[1:], argparse.Namespace(command=words[0]))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="marey",
        description="Pretrain video models, and account for exactly what was run.",
        epilog="Start here: `marey demo`. Every command: --debug shows the traceback of a refusal.",
    )
    parser.add_argument("--version", action="version", version=f"marey {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Command, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        return sub

    demo = command("demo", _demo, "the whole story on embedded data in a few CPU minutes, as one HTML page")
    demo.add_argument("--videos", metavar="DIR", help="use your own video files instead (no labels needed)")
    demo.add_argument("--out", default="demo-output", metavar="DIR", help="default: ./demo-output")
    demo.add_argument("--steps", type=_positive, help="optimizer steps (default: the demo recipe's)")
    demo.add_argument("--seed", type=_seed, default=0)

    ingest = command("ingest", _ingest, "video files -> frame store, resumable, with a report of every refused file")
    ingest.formatter_class = argparse.RawDescriptionHelpFormatter
    ingest.epilog = SOURCES
    ingest.add_argument("sources", nargs="+", metavar="SRC", help="one or more of the sources below")
    ingest.add_argument("out", metavar="OUT.lance")
    ingest.add_argument("--rate", type=float, default=15.0, help="stored frames/s, chosen by time stamps (default: 15)")
    ingest.add_argument("--short-edge", type=_positive, default=384, help="pixels; never enlarged (default: 384)")
    ingest.add_argument("--quality", type=_positive, default=90, help="JPEG quality (default: 90)")
    ingest.add_argument("--episode-length", type=_positive, default=128, help="stored frames (default: 128)")
    ingest.add_argument("--workers", type=_positive, help="decoder processes (default: one per core)")
    ingest.add_argument(
        "--labels",
        choices=("auto", "folders", "none"),
        default="auto",
        help="class folders as labels (default: auto)",
    )
    ingest.add_argument("--stall", type=float, default=60.0, help="seconds without a frame before a file is given up")

    encode = command("encode", _encode, "frames -> latents and a manifest, through a codec; resumable")
    encode.add_argument("source", metavar="STORE", help="frame store (or videos, or demo:train)")
    encode.add_argument("out", metavar="OUT", help="folder for latents/ and manifest.csv")
    encode.add_argument("--codec", default="patch", help="patch, encoder or wan (default: patch)")
    encode.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the codec, repeatable: patch=8; path=CKPT (encoder); path=FOLDER (wan)",
    )
    encode.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    encode.add_argument("--texts", metavar="CSV", help="texts by source file (columns `path` and `text`)")
    encode.add_argument("--text-column", default="text", help="column of --texts (default: text)")

    make_config = command("make-config", _make_config, "a complete causal run from manifests of latents")
    make_config.add_argument(
        "manifests", nargs="+", metavar="MANIFEST", help="CSV or Parquet, as `marey encode` writes"
    )
    make_config.add_argument("--out", required=True, metavar="RUN.yaml")
    make_config.add_argument(
        "--weights", choices=("balanced", "hours", "size"), default="hours", help="shares of the sources"
    )

    plan = command("plan", _plan, "before any GPU hour: batches, steps, tokens, FLOPs, memory, and what differs")
    plan.add_argument("--config-name", default="config")
    plan.add_argument("--config-dir", metavar="DIR", help="where that configuration lies, if not in this package")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="as for `marey train`")

    train = command(
        "train", _train_help, "the run (Hydra): marey train key=value ...; --cfg job prints the configuration"
    )
    train.add_argument("overrides", nargs="*", metavar="key=value")

    doctor = command("doctor", _doctor, "what would fail here: this machine, this data, this run; with the remedies")
    doctor.add_argument(
        "data",
        nargs="*",
        metavar="DATA or key=value",
        help="store, folder, CSV, glob, video, manifest or demo:train; key=value as for `marey train`: check that run",
    )
    doctor.add_argument("--config-name", help="of the run, as for `marey train`")
    doctor.add_argument("--config-dir", metavar="DIR", help="where that configuration lies, if not in this package")
    doctor.add_argument("--clips", type=_positive, default=8, help="to read of each DATA, spread over it (default: 8)")
    doctor.add_argument("--limit", type=_seconds, default=60.0, help="seconds of reading for each DATA (default: 60)")

    inspect = command("inspect", _inspect, "any store, manifest, checkpoint or run folder in plain words")
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument("--config", action="store_true", help="print the resolved configuration too")

    embed = command("embed", _embed, "features per clip or per frame, as Parquet or safetensors")
    embed.add_argument("checkpoint", metavar="CKPT")
    embed.add_argument("source", metavar="SRC", help="a store, whatever `marey ingest` reads, or demo:heldout")
    embed.add_argument("out", metavar="OUT", help="a .parquet or .safetensors file")
    embed.add_argument("--per", choices=("clip", "frame"), default="clip")
    embed.add_argument("--overwrite", action="store_true")
    embed.add_argument("--stream", action="store_true", help="a row per frame, from what was seen up to it")
    _add_encoder_options(embed)

    export = command("export", _export, "an encoder for `transformers` or as one program, which runs without Marey")
    export.add_argument("checkpoint", metavar="CKPT")
    export.add_argument("out", metavar="OUT", help="a new folder; for torch-export a .pt2 file")
    export.add_argument("--format", choices=("transformers", "torch-export"), default="transformers")
    export.add_argument("--weights", choices=("ema", "online"), help="default: ema where the checkpoint has it")
    export.add_argument("--overwrite", action="store_true", help="replace an earlier export; nothing else is replaced")

    import_ = command("import", _import, "weights with the published names and shapes -> a checkpoint")
    import_.add_argument("file", metavar="FILE", help="safetensors, or a state dictionary saved by PyTorch")
    import_.add_argument("out", metavar="OUT.ckpt")
    import_.add_argument("overrides", nargs="*", metavar="key=value", help="as for `marey train`: model.img_size=224")
    import_.add_argument("--rate", type=float, help="stored frames/s the weights expect (default: what is known)")
    import_.add_argument("--overwrite", action="store_true")

    rollout = command("rollout", _rollout, "a held-out future beside its prediction, as video, with errors")
    rollout.add_argument("checkpoint", metavar="CKPT", help="of `marey train --config-name causal_video`")
    rollout.add_argument(
        "--data", metavar="DATA", help="manifest, store or demo:heldout (default: what the run held out)"
    )
    rollout.add_argument("--clip", metavar="ID", help="this clip (default: drawn by --seed)")
    rollout.add_argument("--clips", type=_positive, default=1, help="how many clips (default: 1)")
    rollout.add_argument("--out", default="rollout", metavar="DIR", help="default: ./rollout")
    rollout.add_argument("--prefix", type=_positive, help="latent frames given (default: a geometry of training)")
    rollout.add_argument("--horizon", type=_positive, help="latent frames predicted, beyond training's too")
    rollout.add_argument("--steps", type=_positive, default=25, help="Euler steps (default: 25)")
    rollout.add_argument("--guidance", type=float, default=1.0, help="of the text; above 1 needs text dropout")
    rollout.add_argument("--text", help="instead of the clip's own")
    rollout.add_argument("--seed", type=_seed, default=0, help="clips and noise (default: 0)")
    rollout.add_argument("--weights", choices=("ema", "online"), help="default: ema where the checkpoint has it")
    rollout.add_argument("--codec", help="what made the latents, where the data does not say")
    rollout.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of --codec, repeatable")
    rollout.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")

    probe = command("probe", _probe, "frozen kNN, linear and attentive probe, beside random weights and pixels")
    probe.add_argument("checkpoint", metavar="CKPT")
    probe.add_argument("data", metavar="DATA", help="labelled store, class folders or CSV, or demo:train")
    probe.add_argument("--test", metavar="DATA", help="held-out data (default: a split of DATA by source video)")
    probe.add_argument("--labels", metavar="CSV", help="labels by source file (column `path`)")
    probe.add_argument("--label-column", default="label", help="column of --labels (default: label)")
    probe.add_argument("--seed", type=_seed, default=0, help="split and random weights (default: 0)")
    probe.add_argument("--json", "--out", metavar="FILE", help="write protocol and numbers as JSON too")
    probe.add_argument("--no-attentive", action="store_true", help="kNN and linear alone: no patch tokens are kept")
    probe.add_argument("--views", type=_positive, default=1, help="squares along each clip's longer side (default: 1)")
    probe.add_argument(
        "--labels-per-class",
        type=_label_counts,
        default=(),
        metavar="1,10,all",
        help="also learn from so few labelled videos of each class, five draws each",
    )
    probe.add_argument("--no-cache", action="store_true", help="neither read nor keep features under MAREY_CACHE")
    _add_encoder_options(probe)

    report = command("report", _report, "a run folder as one HTML page: curves, exposure, pictures, receipt")
    report.add_argument("run_folder", metavar="RUN", help="folder of a run, ended or not")
    report.add_argument("--out", metavar="FILE", help="default: run-report.html in RUN")
    report.add_argument("--data", metavar="SRC", help="clips for the pictures (default: validation's, else training's)")
    report.add_argument("--clips", type=_positive, default=64, help="clips looked at, drawn by a seed (default: 64)")
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse's own refusals in the house's form: one sentence, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"marey: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
