"""What the framework itself costs: the hub's server and framework, one route, the body checked and answered."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel


class Question(BaseModel):
    doing: str = ""
    counters: dict[str, float] = {}


class Answer(BaseModel):
    doing: str
    finished: bool


app = FastAPI()


@app.post("/heartbeat")
async def heartbeat(question: Question) -> Answer:
    return Answer(doing=question.doing, finished=False)
