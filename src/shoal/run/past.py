"""What the folder of a run tells without its hub."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shoal.errors import ConfigError
from shoal.hub.service.stories import Stories
from shoal.hub.state.rows import Rules
from shoal.hub.storage import DATABASE_FILE, open_storage
from shoal.run.folder import RunFolder
from shoal.runtime.clock import SystemClock

RUN_RULES = ("steps", "groups_per_step", "group_size", "max_staleness", "max_new_tokens")


@contextmanager
def past_hub(path: Path) -> Iterator[Stories]:
    folder = RunFolder.open(path)
    recipe, hub = folder.recipe, folder.path / "hub"
    if not recipe.hub.database and not (hub / DATABASE_FILE).is_file():
        raise ConfigError(f"there is no hub database {hub / DATABASE_FILE}: has the run begun?")
    rules = Rules(
        **{name: getattr(recipe.run, name) for name in RUN_RULES}, refill_cap=recipe.hub.refill_cap,
        leases_per_node=recipe.hub.leases_per_node, lease_ms=0, audit_ms=0,
    )  # fmt: skip
    try:
        secret = bytes.fromhex((hub / "secret").read_text().strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{hub / 'secret'} cannot be read ({error}): restore it from a backup") from error
    with closing(open_storage(recipe.hub.database, hub)) as storage:
        yield Stories(storage, folder.run_id, secret, rules, SystemClock().now_ms)
