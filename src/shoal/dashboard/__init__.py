"""Pages about a run, read-only, served by its hub at `/`: progress, nodes, rollouts, tasks, policies, ledger, recipe.

    browser ── GET / ──► static/ (no build step; charts by uPlot, bundled)
       │    ── GET /view/… ──► `site` ─► `views`: JSON from the hub's services and from `shoal.records`
       └─── GET /view/events ──► server-sent events: the overview, each time that it has changed

Who sees what: `none` nothing, `overview` no prompt and no completion, `all` the rollouts of units that nobody can get
any more, `owner` (this machine itself) everything. Seeds of undecided units and held-out tasks are shown to no one.
"""

from shoal.dashboard.settings import DashboardSettings

__all__ = ["DashboardSettings"]
