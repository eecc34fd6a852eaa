"""The hub's HTTP edge: `server` (process, connections) ─► `app` ─► `middleware` ─► `routes` ─► `auth`."""
