"""Submitting by the route that the run names: to the hub, or to its store and then to the hub.

    uploads = "hub"      PUT to the hub ───────────────────────────────────────────────► receipt
    uploads = "store"    ticket from the hub ─► PUT to the store ─► commit at the hub ─► receipt
                                                  │ no way there, or it will not have it
                                                  └─► by way of the hub, which always works; the store later again

The receipt is the same on either route, and only a receipt counts.
"""

from __future__ import annotations

import logging
import threading

import httpx

from shoal.client.http import REACH, open_http
from shoal.client.hub import HubClient
from shoal.errors import HubRefused, ShoalError
from shoal.protocol import Receipt, submission_digest
from shoal.protocol.submission import UploadRequest, UploadTicket
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.exchange import LEAST_BYTES_PER_S, check_plain, limited
from shoal.runtime.targets import check_url

log = logging.getLogger(__name__)

AVOID_S = 300.0  # a store that could not be used is left alone for so long
PUT_S = 60.0
PUT_TIMEOUT = httpx.Timeout(PUT_S, connect=10.0)
# Refusals of the route, not of the submission: by way of the hub it may still be taken.
NOT_THERE = ("upload.missing", "upload.other_bytes", "upload.by_hub")
MAX_SAID = 200
# What a ticket may have a request carry: not whatever a hub would like some server to be told by this machine.
UPLOAD_HEADERS = frozenset({"content-length", "x-amz-checksum-sha256"})


class _NoWay(ShoalError):
    """This submission did not get into the store."""


class Delivery:
    """Shared by threads; to be closed in the end."""

    def __init__(self, client: HubClient, clock: Clock = SystemClock()) -> None:
        self._client = client
        self._clock = clock
        self._by_store = client.run_info().uploads == "store"
        self._avoid_until_s = 0.0
        self._lock = threading.Lock()
        self._http: httpx.Client | None = None

    def close(self) -> None:
        with self._lock:
            if self._http is not None:
                self._http.close()

    def hand_in(self, lease: str, body: bytes) -> Receipt:
        """The hub's verified receipt. Raises what `HubClient.submit` raises, on either route."""
        if self._by_store and self._clock.monotonic_s() >= self._avoid_until_s:
            try:
                return self._through_store(lease, body)
            except _NoWay as reason:
                self._avoid_until_s = self._clock.monotonic_s() + AVOID_S
                log.warning("%s; submissions go by way of the hub for %.0f s", reason, AVOID_S)
        return self._client.submit(lease, body)

    def _through_store(self, lease: str, body: bytes) -> Receipt:
        submission = submission_digest(body)
        try:
            ticket = self._client.upload_ticket(lease, UploadRequest(submission=submission, size_bytes=len(body)))
            if ticket.needed:
                self._put(ticket, body)
            return self._client.commit_upload(lease, submission)
        except HubRefused as refusal:
            if refusal.code in NOT_THERE:
                raise _NoWay(str(refusal)) from refusal
            raise

    def _put(self, ticket: UploadTicket, body: bytes) -> None:
        where = ticket.url.split("?")[0]
        unknown = sorted(set(map(str.lower, ticket.headers)) - UPLOAD_HEADERS)
        if unknown:
            raise _NoWay(f"the hub's ticket for {where} asks for headers that no upload needs: {', '.join(unknown)}")
        reach = {REACH: self._client.trusted_run().reach}
        try:
            check_url(ticket.url)
            with self._lock:
                self._http = self._http or open_http()  # follows no redirects
            asked = self._http.stream(
                "PUT", ticket.url, content=body, headers=ticket.headers, timeout=PUT_TIMEOUT, extensions=reach
            )
            with limited(PUT_S + len(body) / LEAST_BYTES_PER_S), asked as answer:
                check_plain(answer)
                said = next(answer.iter_bytes(MAX_SAID), b"")  # read to its end, a short one keeps the connection
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise _NoWay(f"cannot upload to {where}: {error or type(error).__name__}") from error
        if not httpx.codes.is_success(status):
            answer_text = " ".join(said.decode(errors="replace").split())
            raise _NoWay(f"the store refused the upload to {where}: HTTP {status} {answer_text}")
