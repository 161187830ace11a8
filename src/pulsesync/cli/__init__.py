"""The `pulse` command: parse, call, print. The work is in the library."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import UNSET, App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.validators import Number

import pulsesync
from pulsesync.errors import PulseError


def _refuse_empty(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse what is given but empty: an unset variable in a script, which must not turn a check off.

    Cyclopts calls this for every command, after the command line and the environment are read.

    Raises:
        UsageError: it names the option or the variable.
    """
    from pulsesync.cli.options import UsageError

    for argument in arguments:
        for token in argument.tokens:
            if token.value.strip() or token.implicit_value is not UNSET:
                continue  # a flag has no value of its own
            if token.source == "env":
                raise UsageError(f"{token.keyword} is set but empty; give it a value, or unset it")
            name = token.keyword or argument.name.removeprefix("--").upper()  # a positional one, as the help writes it
            raise UsageError(f"{name} is empty; give it a value, or leave it out")


app = App(
    name="pulse",
    help="""Move model weights from trainers to inference workers, bit for bit, at a small fraction of the bytes.

A run is a place: a folder, s3://bucket/prefix, gs://…, az://…, or the https:// address of pulse serve.

Exit codes: 0, it is done; 1, it failed, and one line on stderr says why; 2, the command line makes no sense; 3, there
is no such run, or nothing in it yet: try later; 130, interrupted.""",
    version=pulsesync.__version__,
    suppress_keyboard_interrupt=False,
    config=_refuse_empty,
)

Key = Annotated[Path | None, Parameter(env_var="PULSE_KEY")]
Trust = Annotated[str | None, Parameter(env_var="PULSE_TRUST")]
Json = Annotated[bool, Parameter(negative=())]
Flag = Annotated[bool, Parameter(negative=())]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
Natural = Annotated[int, Parameter(validator=Number(gte=1))]
Version = Annotated[int | None, Parameter(validator=Number(gte=0))]
Amount = Annotated[float, Parameter(validator=Number(gte=0))]


demos = App(name="demo")
app.command(demos)


@demos.default
def demo(
    *,
    steps: Natural = 100,
    workers: Natural = 2,
    seed: Count = 0,
    lr: Amount | None = None,
    prompts: Natural = 32,
    group: Natural = 8,
    delay: Count = 1,
    publish_every: Natural = 1,
    sync: Literal["pulse", "full"] = "pulse",
    trainers: Natural = 1,
    sync_every: Natural = 8,
    loco: Literal["pulse", "compact", "dense"] = "pulse",
    store: str | None = None,
    read: str | None = None,
    link: str | None = None,
    model: str = "demo",
    device: str = "cpu",
    out: Path | None = None,
    replay: Flag = False,
    json: Json = False,
) -> int:
    """Train a small policy by reinforcement, with workers in processes of their own that follow its weights.

    A trainer learns to add by GRPO from what workers generate; workers get its weights through a store alone, and prove
    that what they hold is what was published. Every step shows the reward, how many BF16 weights changed, the bytes
    that travelled, and where each worker is. Any process may be killed: it is started again. Ctrl-C stops the run; the
    same command with --out goes on with it. Needs torch: pip install 'pulsesync[torch]'.

    With --trainers 4, four trainers learn on their own, each from its own completions, and meet every few steps: each
    tells the others what would change the next forward pass, and keeps the rest for later (PULSELoCo). After a round
    all have the same weights, which is checked; the first trainer publishes them, and workers follow.

    Args:
        steps: Optimizer steps to take.
        workers: Processes that generate.
        seed: Of prompts and completions.
        lr: AdamW's learning rate, 6e-5 if not given, for several trainers 1e-5, as their outer step goes seven times as
            far. RL on large models uses 1e-6 to 3e-6; this policy is small, and would learn slowly.
        prompts: Prompts in a step, in four pieces of work.
        group: Completions of each.
        delay: Versions that completions may be behind; 0 is lock-step, with the same weights every time it is run.
        publish_every: Steps in a version.
        sync: pulse sends what changed; full sends all weights, to compare with.
        trainers: Processes that learn. Each has as many prompts in a step as one would have alone.
        sync_every: Steps that several trainers take between two meetings; --steps is rounded up to whole rounds.
        loco: What they tell each other: pulse, what the next forward pass sees, exactly; compact, that in a few bits
            each; dense, all of it, which is DiLoCo, to compare with.
        store: Where the trainer publishes: a folder, s3://…, gs://…, az://…; one in the run's folder if not given.
            Several trainers meet beside it.
        read: Where workers read, if it is not there: the address of pulse serve or pulse relay.
        link: Of each worker to the store, such as 50mbit; without limit if not given.
        model: demo; smollm2, which python -m pulsesync.lab.demo.smollm2 .models/smollm2 downloads; or a folder with a
            Hugging Face checkpoint.
        device: Where models other than demo compute.
        out: The run's folder, a new one or one that was interrupted; one in runs/, named by the time, if not given.
        replay: Publish a recorded GRPO run of SmolLM2-135M at 3e-6 instead of training: no torch, half a minute.
        json: Print one JSON object a step and a summary, for machines.
    """
    from pulsesync.cli.demo import find_model, read_link, read_place
    from pulsesync.cli.demo import replay as play
    from pulsesync.cli.demo import run as work
    from pulsesync.lab.demo.settings import DemoSettings

    settings = DemoSettings(
        steps=steps,
        workers=workers,
        seed=seed,
        lr=lr or (6e-5 if trainers == 1 else 1e-5),
        prompts=prompts,
        group=group,
        delay=delay,
        publish_every=publish_every,
        sync=sync,
        trainers=trainers,
        sync_every=sync_every,
        loco=loco,
        store=read_place(store),
        read=read_place(read),
        link=read_link(link),
        model=find_model(model),
        device=device,
    )
    return (play if replay else work)(settings, out, as_json=json)


@demos.command
def pretrain(*, seed: Count = 0, out: Path = Path("policy.safetensors"), json: Json = False) -> int:
    """Make the checkpoint that the demo begins with: supervised, until one sum in four is right.

    Args:
        seed: Of weights and sums.
        out: File for the BF16 weights.
        json: Print one JSON object at the end, for machines.
    """
    from pulsesync.cli.demo import pretrain as work

    return work(seed, out, as_json=json)


# How many weights change, and why


studies = App(name="study")
app.command(studies)


@studies.default
def study(
    *places: str,
    out: Path | None = None,
    csv: Flag = False,
    parquet: Flag = False,
    html: Path | None = None,
    dtype: Literal["BF16", "F16"] = "BF16",
    lr: Amount | None = None,
    sample: Natural = 1 << 20,
    headers: Flag = False,
    trust: Trust = None,
    limit: Count = 0,
    json: Json = False,
) -> int:
    """Show how many weights change from step to step, where, by how much, and what it costs to send them.

    PLACES are what a Recorder wrote (*.jsonl; the files of a run's ranks are added up, those of several runs shown side
    by side), a run, or safetensors checkpoints: files or folders in order, or one folder of checkpoint-100, step_200, …
    From a run or from checkpoints it is measured now, which reads every version or checkpoint once.

    Args:
        places: What to look at.
        out: Folder for the recording, the report and, where asked for, the tables; not one that PLACES are read from.
        csv: Write three tables of it as CSV: steps, tensors, exponents.
        parquet: The same as Parquet. Needs pyarrow: pip install 'pulsesync[study]'.
        html: File for the report: one page with plots that needs nothing else.
        dtype: What inference uses, if checkpoints are in FP32; others are compared in the dtype that most weights have.
        lr: Learning rate, for the theory's curve of Adam, where the recording does not know it.
        sample: Weights that are looked at for windows of several steps and other dtypes.
        headers: Of a run, count by the headers of its patches alone: quick, and without what only weights can tell.
        trust: Public key of whoever may publish here, or a file of such keys.
        limit: Look at so many of the newest steps; 0 for all.
        json: Print one JSON object a recording, for machines.
    """
    from pulsesync.cli.study import StudyOutputs
    from pulsesync.cli.study import study as work

    wanted = StudyOutputs(out, csv, parquet, html, lr)
    return work(places, wanted, dtype=dtype, sample=sample, headers=headers, trust=trust, limit=limit, as_json=json)


@app.command
def plan(
    *,
    model: Path,
    lr: Amount,
    bandwidth: str,
    step_time: Amount,
    optimizer: Literal["adamw", "lion", "muon", "sgd"] = "adamw",
    betas: str = "",
    dtype: Literal["BF16", "F16", "F8_E4M3", "F8_E5M2", "F32"] = "BF16",
    masters: bool = True,
    warm_up: Count = 0,
    every: Natural = 1,
    cores: Natural | None = None,
    json: Json = False,
) -> int:
    """Predict what a run will send, before any training: bytes a sync, seconds, utilisation, bandwidth needed.

    From how large the weights are, it simulates what the optimizer does to some thousand of them, and what patches of
    that take. The answer says how far such forecasts were off on real runs of this kind, or that this was not measured.

    Args:
        model: A checkpoint (a safetensors file, or a folder with them), or a config.json, or a folder with that.
        lr: Learning rate.
        bandwidth: Of the link to a worker, such as 200mbit or 10gbit.
        step_time: Seconds for an optimizer step with its rollouts, without any sync.
        optimizer: There are forecasts for adamw (Adam, too) and lion; muon and sgd are refused, with the reason.
        betas: Of the optimizer; 0.9,0.999 for adamw and 0.9,0.99 for lion if not given.
        dtype: What inference uses; weights in another are cast.
        masters: Whether the optimizer keeps FP32 master weights; --no-masters if the model is trained in its dtype.
        warm_up: Steps in which the learning rate rises to --lr.
        every: Steps in a sync.
        cores: That encode and decode, at each end; those of this machine if not given.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli.plan import plan as work

    return work(
        model,
        dtype=dtype,
        lr=lr,
        optimizer=optimizer,
        betas=betas,
        warm_up=warm_up,
        masters=masters,
        every=every,
        bandwidth=bandwidth,
        step_time=step_time,
        cores=cores,
        as_json=json,
    )


@studies.command
def experiment(
    *names: str,
    out: Path | None = None,
    steps: Natural | None = None,
    seeds: str = "",
    model: str = "demo",
    device: str = "cpu",
    jobs: Natural = 1,
    quick: Flag = False,
) -> int:
    """Run the sweeps of the papers: learning rate, windows, delay, scale, optimizer, masters, warm-up and others.

    Every arm and seed gives a recording, which pulse study shows; every experiment a page that puts the published
    figures beside these; and results.md is an index of all. What is finished is not run again, and not replaced by
    what has fewer steps. Needs torch: pip install 'pulsesync[torch]'.

    Args:
        names: Of experiments; all; or list, to see them.
        out: Folder for recordings and pages; experiments if not given, with --quick experiments-quick.
        steps: Optimizer steps of every arm, instead of its own number.
        seeds: Such as 0,1,2, which is what is run if not given.
        model: demo; smollm2, which python -m pulsesync.lab.demo.smollm2 .models/smollm2 downloads; or a folder with a
            Hugging Face checkpoint.
        device: Where policies compute: cpu or cuda.
        jobs: Arms at a time, each in a process of its own.
        quick: A few small steps of everything, to see that it works.
    """
    from pulsesync.cli.experiment import experiment as work

    return work(names, out=out, steps=steps, seeds=seeds, model=model, device=device, jobs=jobs, quick=quick)


# Weights in, weights out


@app.command
def publish(
    checkpoint: Path,
    run: str,
    *,
    step: Count = 0,
    cast: Literal["BF16", "F16", "F8_E4M3", "F8_E5M2"] | None = None,
    codec: Literal["auto", "gap", "context", "history", "dense"] = "auto",
    key: Key = None,
    spool: Path | None = None,
    anchor_every: Amount = 1.0,
    json: Json = False,
) -> int:
    """Publish a checkpoint as the next version of a run; the first one begins the run.

    What changed since the last version is sent, and nothing else. The files that a loader needs beside the weights
    (config.json, the tokenizer) travel along. A trainer publishes from memory with `pulsesync.Publisher`; this command
    is for checkpoints that something else has written.

    Args:
        checkpoint: A safetensors file, or a folder as transformers writes it, in shards or not.
        run: Where to publish.
        step: The trainer's count of steps, for people.
        cast: Publish FP32 tensors in this dtype, the one that workers use.
        codec: How changes are coded; auto picks the smallest.
        key: File with the key to sign with, from pulse keygen.
        spool: Folder to keep bodies in, so that the next publish need not fetch the last version.
        anchor_every: Write the whole state again when the patches since add up to so many of it.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli.publish import publish as work

    return work(
        checkpoint,
        run,
        step=step,
        cast=cast,
        codec=codec,
        key=key,
        spool=spool,
        anchor_every=anchor_every,
        as_json=json,
    )


@app.command
def follow(
    run: str,
    folder: Path,
    *,
    trust: Trust = None,
    cache: Path | None = None,
    once: Flag = False,
    interval: Amount = 1.0,
    hold: Amount = 10.0,
    version: Version = None,
    follow_replaced: Flag = False,
    json: Json = False,
) -> int:
    """Keep a folder at the newest version of a run, for programs that load weights from disk.

    FOLDER/current is always a whole, verified version. It is a link to one of two copies, a and b; the other is brought
    to the next version, and the link turned in one step. Load what the link leads to when you begin:
    `from_pretrained(os.path.realpath("FOLDER/current"))`. The process may be killed at any moment; started again, it
    goes on from what is there.

    Args:
        run: What to follow.
        folder: Where the weights go: a folder that is empty, not there yet, or was followed into before.
        trust: Public key of whoever may publish here, or a file of such keys; nothing else is then accepted.
        cache: Folder to keep what was fetched in, to share it with other processes; FOLDER/.cache if not given.
        once: Bring it to the newest version and end; exit code 3 if there is none yet.
        interval: Seconds between looks at the run.
        hold: Seconds for which a copy that is no longer current is left as it is: time to finish loading it.
        version: Go to this version, also an older one, and end.
        follow_replaced: If the run was replaced by another one or restored from a backup since the folder was written,
            start over from what is there now; without this, that is an error.
        json: Print one JSON object for every version, for machines.
    """
    from pulsesync.cli.follow import follow as work

    return work(
        run,
        folder,
        trust=trust,
        cache=cache,
        once=once,
        interval_s=interval,
        hold_s=hold,
        version=version,
        follow_replaced=follow_replaced,
        as_json=json,
    )


# Looking at a run


@app.command
def log(run: str, *, trust: Trust = None, limit: Count = 50, json: Json = False) -> int:
    """List the versions of a run, the newest first, with the anchors and squashed patches that lead to them.

    Args:
        run: What to look at.
        trust: Public key of whoever may publish here, or a file of such keys.
        limit: Versions to show; 0 for all.
        json: Print one JSON object a record, for machines.
    """
    from pulsesync.cli.log import log as work

    return work(run, trust=trust, limit=limit, as_json=json)


@app.command
def inspect(place: str, *, version: Version = None, trust: Trust = None, json: Json = False) -> int:
    """Say what a run, a version or a part is made of, after checking every byte of what is shown.

    Args:
        place: A run, or a file in its `parts`.
        version: Show this version of the run.
        trust: Public key of whoever may publish here, or a file of such keys.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli.inspect import show

    return show(place, version=version, trust=trust, as_json=json)


@app.command
def verify(run: str, folder: Path | None = None, *, trust: Trust = None, json: Json = False) -> int:
    """Replay a whole run and check every hash and digest in it; or say which version the weights in a folder are.

    Every version is rebuilt from the one before it, and every anchor and squashed patch held against the version it
    leads to. Exit code 1 if something is bad, or if the folder is no version of the run.

    Args:
        run: What to check.
        folder: A checkpoint, or a folder that pulse follow keeps, to be recounted and compared with the run.
        trust: Public key of whoever may publish here, or a file of such keys.
        json: Print one JSON object a record, and a summary, for machines.
    """
    from pulsesync.cli.verify import verify_folder, verify_run

    if folder is None:
        return verify_run(run, trust=trust, as_json=json)
    return verify_folder(run, folder, trust=trust, as_json=json)


# Upkeep


@app.command
def squash(
    run: str,
    *,
    key: Key = None,
    delegation: Path | None = None,
    trust: Trust = None,
    cache: Path | None = None,
    follow: Flag = False,
    interval: Amount = 10.0,
    json: Json = False,
) -> int:
    """Write squashed patches: many versions as one, so that a worker that was away comes back with fewer bytes.

    Args:
        run: What to squash.
        key: File with the run's signing key, or with one that it delegates to.
        delegation: What pulse delegate wrote for that key.
        trust: Public key of whoever may publish here, or a file of such keys.
        cache: Folder to keep what was fetched in.
        follow: Go on for ever, as the run grows.
        interval: Seconds between looks at the run.
        json: Print one JSON object for each, for machines.
    """
    from pulsesync.cli import upkeep

    return upkeep.squash(
        run, key=key, delegation=delegation, trust=trust, cache=cache, follow=follow, interval_s=interval, as_json=json
    )


@app.command
def prune(
    run: str,
    *,
    keep_versions: Annotated[int, Parameter(validator=Number(gte=1))] = 100,
    keep_hours: Amount = 24.0,
    grace_hours: Amount = 1.0,
    trust: Trust = None,
    json: Json = False,
) -> int:
    """Delete old versions that no worker should need. There is always an anchor left with every version since.

    Records go at once; their bodies in a later run of this command, when the grace period is over.

    Args:
        run: What to prune.
        keep_versions: Keep at least so many of the newest versions,
        keep_hours: and everything younger than this, by the store's clock.
        grace_hours: Time that a worker has to finish what it began, before bodies go.
        trust: Public key of whoever may publish here, or a file of such keys.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli import upkeep

    return upkeep.prune(
        run, keep_versions=keep_versions, keep_hours=keep_hours, grace_hours=grace_hours, trust=trust, as_json=json
    )


# Keys


@app.command
def keygen(file: Path, *, json: Json = False) -> int:
    """Make a key to sign a run with: the secret goes into FILE, the public key is printed, for workers to --trust.

    Args:
        file: Where the secret goes, readable by you alone. A file that is there is never overwritten.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli import keys

    return keys.keygen(file, as_json=json)


@app.command
def delegate(run: str, public: str, *, key: Key = None, out: Path | None = None) -> int:
    """Let another key write squashed patches of a run, and nothing else; prints what that key's owner needs, as JSON.

    Args:
        run: The run, or its id.
        public: Public key of the squasher, as pulse keygen printed it.
        key: File with the run's own signing key.
        out: Write it there instead: the file that pulse squash --delegation takes.
    """
    from pulsesync.cli import keys

    return keys.delegate(run, public, key=key, out=out)


# Servers


@app.command
def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: Count = 8765,
    token_file: Path | None = None,
    token_in_clear: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    json: Json = False,
) -> int:
    """Serve a folder of runs over http, for workers on other machines to read.

    Symbolic links are followed only as far as they stay inside the folder.

    Args:
        folder: What to serve: a run, or a folder above several.
        host: The address to listen on; 0.0.0.0 for every one of this machine.
        port: The port; 0 for any that is free.
        token_file: File with a token that readers must show; else PULSE_TOKEN, else nobody is asked.
        token_in_clear: Permit that readers on other machines show the token without https.
        certificate: Certificate for https, in PEM.
        private_key: Its private key, in PEM.
        json: Print the address as one JSON object, for machines.
    """
    from pulsesync.cli.serve import serve as work

    return work(
        folder,
        host=host,
        port=port,
        token_file=token_file,
        certificate=certificate,
        private_key=private_key,
        as_json=json,
        token_in_clear=token_in_clear,
    )


@app.command
def relay(
    upstream: str,
    *,
    cache: Path | None = None,
    max_cache: str | None = None,
    cafile: Path | None = None,
    upstream_token_file: Path | None = None,
    upstream_token_in_clear: Flag = False,
    host: str = "127.0.0.1",
    port: Count = 8765,
    token_file: Path | None = None,
    without_token: Flag = False,
    token_in_clear: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    json: Json = False,
) -> int:
    """Serve what another place has, with a cache: many workers of a site fetch each byte from far away once.

    Args:
        upstream: What to serve: a bucket, or the address of another server.
        cache: Folder to keep bodies in; one in your cache folder if not given.
        max_cache: Keep it below this size, such as 500MB or 20GiB; half of the disk space that is free if not given.
            What was not used for longest is removed first.
        cafile: Certificates to trust upstream, instead of the system's.
        upstream_token_file: File with the token that the relay itself shows upstream; else PULSE_UPSTREAM_TOKEN.
        upstream_token_in_clear: Permit that the relay shows its token to another machine without https.
        host: The address to listen on; 0.0.0.0 for every one of this machine.
        port: The port; 0 for any that is free.
        token_file: File with a token that readers must show to the relay; else PULSE_TOKEN, else nobody is asked.
        without_token: Permit that everybody who can reach the relay reads what its upstream protects by a token.
        token_in_clear: Permit that readers on other machines show the token without https.
        certificate: Certificate for https, in PEM.
        private_key: Its private key, in PEM.
        json: Print the address as one JSON object, for machines.
    """
    from pulsesync.cli.serve import relay as work

    return work(
        upstream,
        cache=cache,
        max_cache=max_cache,
        cafile=cafile,
        host=host,
        port=port,
        token_file=token_file,
        certificate=certificate,
        private_key=private_key,
        as_json=json,
        token_in_clear=token_in_clear,
        upstream_token_file=upstream_token_file,
        upstream_token_in_clear=upstream_token_in_clear,
        without_token=without_token,
    )


def main() -> None:
    """Run the command; what goes wrong becomes one line and an exit code, see `pulse --help`."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as e:
        code = _fail(2, f"{str(e).strip()} pulse --help lists what there is")
    except PulseError as e:
        code = _fail(_code(e), str(e))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # whoever read this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _code(error: PulseError) -> int:
    from pulsesync.cli.options import NothingThereError, UsageError

    return 2 if isinstance(error, UsageError) else 3 if isinstance(error, NothingThereError) else 1


def _fail(code: int, text: str) -> int:
    print(f"pulse: {' '.join(text.split())}", file=sys.stderr)
    return code


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
