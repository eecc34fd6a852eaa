"""The settings of the pages about a run."""

from typing import Literal

from pydantic import BaseModel, Field


class DashboardSettings(BaseModel, frozen=True, extra="forbid"):
    """What the pages about the run show to others; this machine sees everything."""

    public: Literal["none", "overview", "all"] = Field(
        "overview", description="pages for others: none; overview: no prompts and completions; all: rollouts that are "
        "decided, too")  # fmt: skip
