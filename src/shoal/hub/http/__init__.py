"""The hub's HTTP edge: `server` (process) ─► `runtime.http` (connections) ─► `app` ─► `auth`, `limits`, `polling`."""
