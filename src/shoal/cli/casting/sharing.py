"""`shoal cast fetch --share`: others may take from here what has arrived. Off unless asked for: it shows this address.

fetched and verified ─► PayloadCatalogue ─► a server in a thread ◄── shoal cast fetch … --peer http://here:PORT
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from shoal.runtime.stop import StopToken
from shoal.shardcast.catalogue import PayloadCatalogue
from shoal.shardcast.server import run_share

READY_S = 10.0


class Sharing:
    """A server of what has been fetched, for as long as the block lasts; the downloader tells the catalogue."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._stop = StopToken()
        self.catalogue = PayloadCatalogue()
        self._url: Future[str] = Future()
        self._thread = threading.Thread(target=self._serve, name="share", daemon=True)

    def __enter__(self) -> Sharing:
        self._thread.start()
        self._url.result(READY_S)  # raises if the port is taken
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set("done")
        self._thread.join(READY_S)

    @property
    def url(self) -> str:
        return self._url.result(READY_S)

    def _serve(self) -> None:
        try:
            run_share(self.catalogue, self._host, self._port, self._stop, self._url.set_result)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the address
            if not self._url.done():
                self._url.set_exception(error)
