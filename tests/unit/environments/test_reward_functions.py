"""Reward functions as TRL calls them, and chat messages as prompts."""

import json
import re
from pathlib import Path

import pytest

from kit.tables import table
from shoal.engines.asking import Asking
from shoal.environments import Environment, EnvironmentSettings, build, columns_of
from shoal.environments.protocol import SPLITS, Task, reads_tokens, refuse_tokens
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.rewards import DirectScorer, Job, ScoringPool

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
# the examples of TRL's documentation, by what they do: lengths, a format, a reference, several tasks, async
FUNCTIONS = """
import asyncio, re

tasks = [
    {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4", "task": "math"},
    {"prompt": [{"role": "user", "content": "Say def"}], "ground_truth": "def", "task": "code"},
]

def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<answer>.*</answer>$", content) else 0.0 for content in contents]

def math_reward(prompts, completions, ground_truth, task, **kwargs):
    return [
        (2.0 if truth in completion[0]["content"] else -1.0) if kind == "math" else None
        for prompt, completion, truth, kind in zip(prompts, completions, ground_truth, task)
    ]

async def slow_reward(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(prompt)) for prompt in prompts]

def _helper(completions):
    raise ValueError
"""


@pytest.fixture
def load(tmp_path: Path):
    def write_and_build(source: str, **settings: object) -> Environment:
        (tmp_path / "reward.py").write_text(source)
        return build(EnvironmentSettings(file=tmp_path / "reward.py", **settings))

    return write_and_build


def all_tasks(environment: Environment) -> list[Task]:
    return [task for split in SPLITS for task in environment.tasks(split)]


def test_functions_are_parts_of_the_score_and_none_does_not_apply(load):
    made = load(FUNCTIONS)
    math, code = all_tasks(made)
    score = made.score(math, "<answer>4</answer>")
    assert (score.value, dict(score.parts)) == (4.0, {"format_reward": 1.0, "math_reward": 2.0, "slow_reward": 1.0})
    assert dict(made.score(code, "4").parts) == {"format_reward": 0.0, "slow_reward": 1.0}
    assert (math.prompt, math.history) == ("2+2?", ())


def test_listed_functions_are_weighted_and_texts_stay_texts(load):
    made = load("""
tasks = [{"prompt": "a", "n": 3}, {"prompt": "b", "n": 5, "more": "x"}]
def longer(completions, prompts, n):
    assert prompts == ["a"] or prompts == ["b"]
    return [len(text) * many for text, many in zip(completions, n)]
def extra(completions, more, **columns):
    return [None if each is None else True for each in more]
def unused(completions): raise ValueError
reward_funcs = [longer, extra]
reward_weights = [0.5, 10]
""")
    first, second = all_tasks(made)
    assert made.score(first, "xy").value == 3.0
    assert made.score(second, "xy").value == 15.0
    assert made.score(first, "xy").parts == {"longer": 6.0}


def test_a_completion_to_which_no_function_applies_has_the_score_zero(load):
    made = load("tasks = [{'prompt': 'a'}]\ndef maths(completions, **columns): return [None] * len(completions)")
    score = made.score(all_tasks(made)[0], "x")
    assert (score.value, dict(score.parts), score.notes) == (0.0, {}, "no reward function applies")


@pytest.mark.parametrize(("source", "said"), table("own_environments", "reward functions without a number"))
def test_a_function_that_gives_no_number_leaves_the_completion_unscored(load, source, said):
    made = load(f"tasks = [{{'prompt': 'a'}}]\n{source}")
    with pytest.raises(ScoringFailure, match=said):
        made.score(all_tasks(made)[0], "x")


@pytest.mark.parametrize(("source", "said"), table("own_environments", "reward functions that cannot be called"))
def test_functions_that_cannot_be_called_are_refused(load, source, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        load(f"tasks = [{{'prompt': 'a'}}]\n{source}")


def test_a_conversation_is_a_prompt_with_its_history_in_both_forms_of_reward_files(load):
    for form in ("def score(prompt, completion, answer): return prompt == '2+2?'",
                 "def f(completions, prompts, **k): return [prompts == [CHAT]]"):  # fmt: skip
        made = load(f"CHAT = {CHAT}\ntasks = [{{'prompt': CHAT}}]\n{form}")
        [task] = all_tasks(made)
        assert (task.prompt, task.history) == ("2+2?", (("system", "Be brief."),))
        assert made.score(task, "4").value == 1.0
    other = [*CHAT[:1], {"role": "user", "content": "3+3?"}]
    made = load(f"tasks = [{{'prompt': each}} for each in ({CHAT}, {other})] * 5\ndef f(completions): return [1]")
    train, held_out = ({task.prompt for task in made.tasks(split)} for split in ("train", "held_out"))
    assert train.isdisjoint(held_out)


def test_the_models_chat_template_renders_a_conversation(load):
    files = read_files(model_folder("tiny"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    made = load(f"tasks = [{{'prompt': {CHAT}}}]\ndef f(completions): return [1]")
    [task] = all_tasks(made)
    ids = Asking({**files, "chat_template.jinja": template.encode()}, made, 8).ids(task)
    assert TextTokenizer(files).decode(ids) == "<system>Be brief.<user>2+2?<assistant>"


def test_columns_of_tasks_are_those_that_a_message_can_hold(load):
    made = load("tasks = [{'prompt': 'a', 'n': 3, 'big': 'x' * 70000, 'odd': object(), 'huge': 2**70}]\n"
                "def f(completions, **k): return [1]")  # fmt: skip
    assert columns_of(made, all_tasks(made)[0].id) == {"n": 3}


PROMPTS = table("own_environments", "prompts of reward files that are no conversations")


@pytest.mark.parametrize(("prompt", "said"), PROMPTS)
def test_a_prompt_that_is_neither_text_nor_a_conversation_is_refused(load, prompt, said):
    with pytest.raises(EnvironmentSetupError, match=f"task 0 in .*{said}"):
        load(f"tasks = [{{'prompt': {prompt}}}]\ndef f(completions): return [1]")


def test_rows_of_a_data_set_are_the_tasks_of_a_file_without_any(load, tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": CHAT, "solution": n, "split": "test" if n % 2 else "train"} for n in range(4)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = "def exact(completions, solution): return [completions[0][0]['content'] == str(solution[0])]"
    made = load(source, data=data)
    assert [made.score(task, "2").value for task in all_tasks(made)].count(1.0) == 1
    assert made.columns(all_tasks(made)[0].id).keys() == {"solution", "split"}
    digest, data_digest = made.digest, made.data_digest
    data.write_text(data.read_text() + json.dumps(rows[0]) + "\n")
    again = load(source, data=data)
    assert again.digest != digest
    assert again.data_digest != data_digest
    with pytest.raises(EnvironmentSetupError, match=r"defines tasks, and environment.data is set"):
        load(f"tasks = []\n{source}", data=data)


def test_scoring_processes_call_the_same_functions(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    settings = EnvironmentSettings(file=tmp_path / "reward.py")
    environment = build(settings)
    pool = ScoringPool(settings, environment)
    try:
        jobs = [Job(task.id, text) for task in all_tasks(environment) for text in ("<answer>4</answer>", "")]
        found = [score.value for score in pool.scores(jobs)]
    finally:
        pool.close()
    assert found == [4.0, 0.0, 2.0, 1.0]


# as `trl.rewards.get_soft_overlong_punishment(8, 4)` makes one; the second must not get what it does not name
OVERLONG = """
tasks = [{"prompt": "a"}]
def made(longest, cache):
    def soft(completion_ids, **kwargs):
        assert all(type(token) is int for ids in completion_ids for token in ids)
        over = [len(ids) - (longest - cache) for ids in completion_ids]
        return [-1.0 if n > cache else -max(0, n) / cache for n in over]
    return soft
def plain(completions, **kwargs):
    return [float("completion_ids" in kwargs)]
reward_funcs = [made(8, 4), plain]
"""


def test_functions_that_name_the_tokens_get_them_through_every_layer(load, tmp_path):
    file = tmp_path / "reward.py"
    for settings in ({"prompt": {"thinking": "<think>"}}, {}, {"mix": ({"file": file, "label": "x"},), "file": None}):
        made = load(OVERLONG, **settings) if "mix" not in settings else build(EnvironmentSettings(mix=settings["mix"]))
        [task], wanted = all_tasks(made), {4: 0.0, 6: -0.5, 8: -1.0, 9: -1.0}
        assert reads_tokens(made)
        jobs = [Job(task.id, "text", tuple(range(n))) for n in wanted]
        assert [score.value for score in DirectScorer(made).scores(jobs)] == list(wanted.values())
        [failure] = DirectScorer(made).scores([Job(task.id, "text")])
        assert "asks for completion_ids; only the text is known here" in str(failure)
        with pytest.raises(EnvironmentSetupError, match="shoal sft --verify scores texts"):
            refuse_tokens(made, "shoal sft --verify")
    pool = ScoringPool(EnvironmentSettings(file=file), load(OVERLONG))
    try:
        assert [score.value for score in pool.scores([Job("reward/0", "", (7,) * n) for n in wanted])] == [
            *wanted.values()
        ]
    finally:
        pool.close()
    assert not reads_tokens(load(FUNCTIONS))


def test_the_reward_files_of_the_guide_work(load):
    guide = (Path(__file__).parents[3] / "docs/guides/own-reward.md").read_text()
    own, trl = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    made = load(own)
    sort = made.tasks("train")[0]
    assert made.score(sort, "".join(sorted(sort.prompt.rstrip("=")))).value == 1.0
    made = load(trl)
    maths, free = all_tasks(made)
    assert made.score(maths, "<answer>4</answer>").value == pytest.approx(0.2 + 1.0 + 0.5)
    assert made.score(free, "<answer>red</answer>").parts.keys() == {"format_reward", "service_reward"}
