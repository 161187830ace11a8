"""What a publisher has from its first publish on, in the process that made it: its threads, and the run's writer."""

import weakref
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from pulsesync.core.scratch import ScratchFolder
from pulsesync.core.threads import if_cancelled, start, submit
from pulsesync.errors import AnotherPublisherError
from pulsesync.format.manifest import Manifest
from pulsesync.group.collective import Team
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.cadence import Cadence
from pulsesync.publish.costs import AnchorCosts, LinkSpeed, PatchCosts
from pulsesync.publish.failures import Caller
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.records import RunRecords, WriterOptions
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.team import TeamRounds
from pulsesync.publish.writer import RunWriter
from pulsesync.run.spool import Outbox
from pulsesync.store.base import is_local


class VersionSender:
    """Sends queued versions until there are none: on a thread of its own, or on that of a caller who waits for it.

    spool: a folder for anchors that are not uploaded yet; None: a temporary one.
    executor: encodes and sends; None: one thread for versions and one for anchors. It is not shut down.
    """

    def __init__(
        self,
        queue: SendQueue,
        records: RunRecords,
        options: WriterOptions,
        team: Team,
        cadence: Cadence,
        events: PublishEvents,
        spool: Path | None,
        executor: Executor | None,
    ) -> None:
        self._queue, self._records = queue, records
        self._lease = lease = PublisherLease(records.store, options.take_over)
        threads = [executor or ThreadPoolExecutor(1, name) for name in ("pulse-send", "pulse-anchor")]
        self._executor, anchor_executor = threads
        self._own = threads if executor is None else []
        weakref.finalize(self, lease.close)
        self._scratch = ScratchFolder() if spool is None else None
        folder = self._scratch.path if self._scratch else spool
        assert folder is not None
        link = LinkSpeed(options.link, is_local(records.store))
        outbox = Outbox(folder / ("outbox" if queue.is_alone else f"outbox-{team.rank}"))
        self.anchor_writer = AnchorWriter(
            records.store,
            outbox,
            self._sign,
            anchor_executor,
            queue.wait_until_quiet,
            costs=AnchorCosts(options.anchor_codec, link),
            ranks=team.size,
            created=events.anchored,
        )
        costs, rounds = PatchCosts(options.codec, link), TeamRounds(team)
        self.writer = RunWriter(records, rounds, queue, cadence, self.anchor_writer, costs, options, events, lease)
        self.committed = self.writer.committed

    def _sign(self, record: Manifest) -> bytes:
        """Sign a record of an anchor. As a bound method, it keeps the lease and the temporary folder alive."""
        return self._records.sign(record)

    def start(self, inline: bool) -> None:
        """Have queued versions sent: in the background, or in this thread if it has to wait for them anyway."""
        if inline:
            self.send()
            return
        try:
            if_cancelled(submit(self._executor, self.send), self._revive)
        except RuntimeError:  # no thread can be started: the caller sends, and waits for it
            self.send()

    def send(self) -> None:
        """Send queued versions until there are none. Raises nothing: an exception of this thread would be lost."""
        while (version := self._queue.take()) is not None:
            try:
                report = self.writer.write(version)
            except BaseException as e:  # noqa: BLE001 - raised by the futures and by the next call
                writer = self.writer
                if isinstance(e, AnotherPublisherError):
                    self._lease.close()
                self._queue.failed(version, e, writer.settler.resolve_at_once, is_lost=writer.rounds.is_lost)
            else:
                self._queue.completed(report)
            del version  # an exception's traceback refers to this frame, for as long as the future is kept

    def _revive(self) -> None:
        """Send in a new thread: an executor was shut down with cancel_futures=True before it ran `send`.

        If no thread can be started, what is queued fails, and the next publish tries again.
        """
        try:
            start(self.send)  # not with submit: the thread that shuts an executor down has its lock
        except RuntimeError as e:
            self._queue.start_failed(e)

    def finish(self, caller: Caller) -> None:
        """Wait until everything is in the store, anchors too. Raises: what the caller has not read of failures."""
        self.send()  # what an interrupted publish has queued, and started no sender for
        self._queue.wait()
        try:
            self.finish_anchor()
        except Exception:
            self._queue.raise_failure(caller)  # the failure of a version is raised first, then that of an anchor
            raise
        self._queue.raise_failure(caller)

    def finish_anchor(self) -> int:
        """Wait for an anchor that is being written, unless the team has lost a rank; return the bytes of all ranks."""
        return 0 if self.writer.rounds.is_lost else self.writer.anchors.finish(lambda: self.committed.base)

    def wait_until_compared(self) -> None:
        if (baseline := self.committed.baseline) is not None:
            baseline.wait()

    def close(self) -> None:
        for executor in self._own:
            executor.shutdown()
        if self._scratch:
            self._scratch.close()
        self._lease.close()
        self._lease.join()
