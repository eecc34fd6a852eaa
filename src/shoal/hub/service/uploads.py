"""Submissions that go to the store first: a ticket for the bytes, and taking them in once they are there.

POST …/upload ─► would it be taken? ─► ticket (size and hash are in its signature)         nothing is promised yet
                                          │ the worker puts the bytes into the inbox
POST …/commit ─► same again? ─► read once ─► hash ─► `Work.submit`, as if they had come by the hub ─► receipt

A slow line costs the hub nothing: the bytes come to it from the store, fast and whole. Nothing in the inbox is
believed, and what nobody commits is removed after a while.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from shoal.errors import ResourceError
from shoal.hub.service.context import Context
from shoal.hub.service.work import Work
from shoal.hub.state import submissions
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import NodeRow
from shoal.protocol import SignedDocument, submission_digest
from shoal.protocol.submission import UploadCommit, UploadRequest, UploadTicket
from shoal.runtime.crash import point

if TYPE_CHECKING:
    from shoal.hub.storage.s3 import S3Inbox

log = logging.getLogger("shoal.hub")

ORPHANED_S = 6 * 3600.0
SWEEP_EVERY_MS = 3_600_000


class Uploads:
    def __init__(self, context: Context, work: Work) -> None:
        self._context = context
        self._work = work
        self._limit = context.config.submission_limits.compressed_bytes
        self._swept_ms: int | None = None
        self._sweeping = threading.Lock()

    def ticket(self, node: NodeRow, lease: str, request: UploadRequest) -> SignedDocument:
        """Leave to upload these bytes, or the refusal that submitting them would meet."""
        inbox = self._inbox()
        if request.size_bytes > self._limit:
            sentence = f"the submission is larger than the {self._limit} bytes that are allowed here"
            raise Refusal(413, "body.too_big", sentence)
        arrival = submissions.Arrival(node.node, lease, request.submission, request.size_bytes)
        needed = self._work.consider(node, arrival)[0] != submissions.SAME_AGAIN
        now_ms = self._context.clock.now_ms()
        ticket = UploadTicket(
            run=self._context.config.run_id, node=node.node, lease=lease, submission=request.submission,
            size_bytes=request.size_bytes, needed=needed,
        )  # fmt: skip
        if needed:
            leave = inbox.ticket(lease, request.submission, request.size_bytes, now_ms)
            given = {"url": leave.url, "headers": leave.headers, "expires_at_ms": leave.expires_at_ms}
            ticket = ticket.model_copy(update=given)
        self._sweep_once_in_a_while(inbox, now_ms)
        return SignedDocument.model_validate_json(self._context.sign(ticket))

    def commit(self, node: NodeRow, lease: str, commit: UploadCommit) -> tuple[int, SignedDocument]:
        """(201 or 200, the signed receipt), as `Work.submit` gives it for the bytes that were uploaded."""
        inbox = self._inbox()
        status, row = self._work.consider(node, submissions.Arrival(node.node, lease, commit.submission, 0))
        if status == submissions.SAME_AGAIN:
            return status, self._context.signed_before(row.receipt)
        body = inbox.take(lease, self._limit)
        if body is None:
            sentence = f"nothing was uploaded for lease {lease}, or more than allowed: upload it again"
            raise Refusal(409, "upload.missing", sentence)
        if submission_digest(body) != commit.submission:
            inbox.discard(lease)  # or the same bytes are read again for every commit that names something else
            sentence = f"what was uploaded for lease {lease} does not have the hash that was named"
            raise Refusal(422, "upload.other_bytes", sentence)
        try:
            answer = self._work.submit(node, lease, body)
        except Refusal as refusal:
            if refusal.status < 500:  # what is refused for good is not read again
                inbox.discard(lease)
            raise
        point("hub.upload.after_commit")
        inbox.discard(lease)
        return answer

    def _inbox(self) -> S3Inbox:
        inbox = self._context.blobs.inbox
        if inbox is None:
            sentence = "this run takes submissions at the hub itself: PUT /submissions/{lease}"
            raise Refusal(409, "upload.by_hub", sentence)
        return inbox

    def _sweep_once_in_a_while(self, inbox: S3Inbox, now_ms: int) -> None:
        """Beside the call that happened to come by: without tickets nothing is left lying about."""
        if self._swept_ms is not None and now_ms - self._swept_ms < SWEEP_EVERY_MS:
            return
        if self._sweeping.acquire(blocking=False):
            self._swept_ms = now_ms
            threading.Thread(target=self._sweep, args=(inbox,), name="hub-uploads", daemon=True).start()

    def _sweep(self, inbox: S3Inbox) -> None:
        try:
            if removed := inbox.sweep(ORPHANED_S):
                log.info("removed %d uploads that nobody committed", removed)
        except ResourceError as error:
            log.warning("uploads that nobody committed are not removed this time: %s", error)
        finally:
            self._sweeping.release()
