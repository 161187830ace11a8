"""`pulse point`: show the pointers of a run, and move them."""

from dataclasses import asdict

from pulsesync.cli import options
from pulsesync.cli.log import utc
from pulsesync.errors import NothingPublishedError
from pulsesync.format.pointer import Pointer, check_name
from pulsesync.maintain.point import move_pointer
from pulsesync.run.pointers import list_moves
from pulsesync.run.reader import RunReader


def point(
    run: str,
    name: str | None = None,
    version: options.Version = None,
    *,
    key: options.Key = None,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    as_json: options.Json = False,
) -> int:
    """Show the pointers of a run, or move one: all workers that follow it go to the version that it names.

    Workers follow a pointer with pulse follow --pointer stable or Subscriber(follow="stable"). This way, a few workers
    can try a version before all of them get it:

        pulse point RUN canary 120    the workers that follow canary go to version 120

        pulse point RUN stable 120    and if it is good, the others too

        pulse point RUN stable        every version that stable has named, the newest first

        pulse point RUN stable 118    roll the whole fleet back: all that follow stable go to version 118

    Nothing is overwritten: each move is a record of its own. If another process moves the pointer at the same time, one
    of the two fails, and its message says where the pointer is now. Prune keeps what pointers name.

    Args:
        run: The run.
        name: The pointer to show or to move; all are shown if it is not given.
        version: The version that the pointer shall name; the pointer is created if it does not exist.
        key: File with the run's signing key; needed to move a pointer of a run that is signed.
        trust: Public key of a publisher to trust, or a file of such keys; if not given, that of the signing key.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs
            --trust. That of the signing key need not be given.
        as_json: Print one JSON object a line, for machines.

    Raises:
        UsageError: NAME is not a valid name of a pointer.
        NothingThereError: there is no run, no version in it yet, or no pointer NAME.
        PulseError: the run cannot be read, or the pointer cannot be moved.
    """
    store, printer, signing_key, trusted = (
        options.open_place(run),
        options.Printer(as_json),
        options.read_key(key),
        options.read_trust(trust),
    )
    own = frozenset({signing_key.public}) if signing_key else frozenset[str]()
    if trusted is None and own.isdisjoint(options.read_trust(trust_pointers, "--trust-pointers") or ()):
        trusted = own or None
    given = options.read_movers(trust_pointers, trusted)
    movers = (given or frozenset()) | own
    records = RunReader(store, trusted, trust_pointers=movers)
    if records.newest() is None:
        raise options.NothingThereError(options.no_run(run))
    try:
        if name is not None and version is not None:
            before = records.pointer(check_name(name))
            moved = move_pointer(store, name, version, signing_key=signing_key, trust=trusted, trust_pointers=given)
            _report_move(before, moved, printer)
            return 0
        found = _find(records, name and check_name(name))
    except ValueError as e:
        raise options.UsageError(str(e)) from e
    except NothingPublishedError as e:
        raise options.NothingThereError(str(e)) from e
    if not found:
        text = f"there is no pointer{'' if name is None else f' {name}'} in {run}"
        text += f"; create one with: pulse point {run} {name or 'stable'} VERSION"
        if name is not None:
            raise options.NothingThereError(text)
        printer.note("none", text)
    _show(found, "signed by" if trusted else "signed by (not checked)", printer)
    return 0


def _show(found: list[tuple[Pointer, int | None]], signer: str, printer: options.Printer) -> None:
    if printer.as_json:
        for pointer, step in found:
            printer.tell("pointer", "", **asdict(pointer), step=step)
        return
    printer.table(
        {
            "pointer": pointer.name,
            "move": pointer.number,
            "version": pointer.version,
            "step": step,
            "time (UTC)": utc(pointer.created),
            signer: pointer.signed_by and pointer.signed_by[:16],
        }
        for pointer, step in found
    )


def _find(records: RunReader, name: str | None) -> list[tuple[Pointer, int | None]]:
    """Return the newest move of every pointer, or all moves of one, newest first; each with its version's step."""
    moves = list_moves(records.store)
    if name is None:
        found = [records.pointer(one) for one in moves]
    else:
        found = [records.move(name, number) for number in reversed(moves.get(name, []))]
    targets = {one.version: records.version(one.version) for one in found if one}
    return [(one, target.step if (target := targets[one.version]) else None) for one in found if one]


def _report_move(before: Pointer | None, moved: Pointer, printer: options.Printer) -> None:
    if before is None:
        text = f"{moved.name} was created and names version {moved.version}"
    elif before == moved:
        text = f"{moved.name} names version {moved.version} already"
    else:
        text = f"{moved.name} was moved from version {before.version} to version {moved.version}"
    printer.tell("moved", text, **asdict(moved), before=before and before.version)
