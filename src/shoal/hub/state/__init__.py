"""The hub's decisions: rows and events in, commands out. No asyncio, time, random, os or database module is imported,
and no function is given a function: the time is an argument, what is random comes from the run's secret."""

# fmt: off
# isort: off
from shoal.hub.state.commands import AddBatch, AddPolicy, AddVerdict, Command, RaiseAlarm, Record, Refusal, Save, alarm
from shoal.hub.state.rows import (
    UNDECIDED_SUBMISSIONS, EvaluationPlan, EvaluationRow, EvaluationState, Filled, Holding, LeaseRow, LeaseState,
    Moment, NodeRow, Pool, PoolRules, Rules, RunProgress, ShownRow, SubmissionRow, SubmissionState, TaskRow, UnitRow,
    UnitState,
)
