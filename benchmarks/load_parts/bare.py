"""What the framework itself costs: the hub's server and framework, one route, the body checked and answered."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Question(BaseModel):
    doing: str = ""
    counters: dict[str, float] = {}


class Answer(BaseModel):
    doing: str
    finished: bool


async def heartbeat(request: Request) -> Response:
    question = Question.model_validate_json(await request.body())
    answer = Answer(doing=question.doing, finished=False)
    return Response(answer.model_dump_json(), media_type="application/json")


app = Starlette(routes=[Route("/heartbeat", heartbeat, methods=["POST"])])
