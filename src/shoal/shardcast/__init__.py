"""Broadcast of large payloads over plain HTTP: signed, verified chunk by chunk, resumable. Works alone, without torch.

The folder could as well be served by nginx, a bucket or `python -m http.server` (whose log then shows requests for
`/have/…`, which only relays answer).

    from pathlib import Path
    from threading import Thread
    from shoal.protocol import load_or_create_key
    from shoal.runtime.stop import StopToken
    from shoal.shardcast import Downloader, Origin, run_origin

    key, stop = load_or_create_key(Path("publisher.key")), StopToken()
    origin = Origin("www", "my-files", key)
    origin.publish(1, "data.bin")                       # or a folder
    server = Thread(target=run_origin, args=(Path("www"), "127.0.0.1", 8471, stop, print))
    server.start()

    # elsewhere: only the public key is needed, and no source has to be trusted
    downloader = Downloader(["http://127.0.0.1:8471"], "my-files", key.public_key, "cache", StopToken())
    payload = downloader.fetch(downloader.newest(deadline_s=30), deadline_s=600)
    payload.export(Path("here"))                        # files; arrays: np.frombuffer(payload.tensors[0].data, …)
    stop.set("done")
"""

from shoal.protocol.codec import TensorView
from shoal.shardcast.content import Content, digest_of
from shoal.shardcast.download import Downloader, DownloadSettings, Prefetch, Progress
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.shardcast.payload import ChangedValues, Payload
from shoal.shardcast.relay import RelayConfig, run_relay
from shoal.shardcast.scheduler import SourceScores
from shoal.shardcast.server import run_origin

__all__ = [
    "ChangedValues", "Content", "DownloadSettings", "Downloader", "Origin", "OriginSettings", "Payload", "Prefetch",
    "Progress", "RelayConfig", "SourceScores", "TensorView", "digest_of", "run_origin", "run_relay",
]  # fmt: skip
