"""Routes that say why: what happened to a unit, to a node. For anyone, unsigned."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from shoal.hub.gate import HubDependency, serve
from shoal.hub.openapi import describes
from shoal.protocol import EvidencePage, NodePage, NodeStory, UnitStory
from shoal.protocol.status import MAX_EVIDENCE_PER_PAGE
from shoal.protocol.story import MAX_NODES_PER_PAGE

router = APIRouter()

NODE = "^[0-9a-f]{0,64}$"


@router.get("/units/{unit}", summary="What happened to a unit, and why", **describes("run", (404, 422)))
async def unit_story(
    unit: Annotated[int, Path(ge=0, le=2**62, description="the unit's number")], hub: HubDependency
) -> UnitStory:
    """Every lease and how it ended, every submission with its signed verdict, the rule that decided, and the ledger
    entries about it. Its seeds, and the leases, which hold them, are told once it is decided."""
    return await serve(hub.stories.unit, unit)


@router.get("/ledger/evidence", summary="The signed documents behind ledger rows", **describes("run", (422,)))
async def ledger_evidence(
    hub: HubDependency,
    after: Annotated[int, Query(ge=-1, le=2**62, description="index of the last row you have; -1 for none")] = -1,
    limit: Annotated[int, Query(ge=1, le=MAX_EVIDENCE_PER_PAGE, description="ledger rows to look at")] = 100,
) -> EvidencePage:
    """For each row among them that gives or refuses credit: the receipt that the hub signed and the verdict that the
    validator signed, whose hashes the row holds."""
    return await serve(hub.stories.evidence, after, limit)


@router.get("/nodes/{node}", summary="What is held of a node, and why", **describes("run", (404, 422)))
async def node_story(
    node: Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="the node's id")], hub: HubDependency
) -> NodeStory:
    """Its standing, its last leases and submissions, what was refused with the signed verdicts, and its sanctions:
    what one needs to appeal."""
    return await serve(hub.stories.node, node)


@router.get("/nodes", summary="All nodes, a page at a time", **describes("run", (422,)))
async def nodes(
    hub: HubDependency,
    after: Annotated[str, Query(pattern=NODE, description="the last node you have; empty for none")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_NODES_PER_PAGE, description="nodes at most")] = 200,
) -> NodePage:
    """In order of their ids. `/status` shows those that matter most."""
    return await serve(hub.stories.nodes, after, limit)
