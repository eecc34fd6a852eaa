"""`run_trainer`: the real parts put together (model folder, origin, lock, heartbeat), only the hub faked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from trainer_stubs import KEY, RUN, SETTINGS, FakeHub, rows_of, tiny_files, tiny_model
from transformers import AutoModelForCausalLM

from shoal.errors import DeadlineExceeded
from shoal.models.state import policy_state
from shoal.protocol import HeartbeatReply, NodeState, NodeView, RoleCertificate, sign_document
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin
from shoal.trainer import process
from shoal.trainer.process import run_trainer
from shoal.trainer.settings import TrainerConfig


class FakeClient(FakeHub):
    """A hub that is reached like a `HubClient`."""

    def __init__(self) -> None:
        super().__init__(steps=2)
        self.heartbeat = Mock(
            return_value=HeartbeatReply(node=NodeView(node=KEY.node, name="", role="trainer", state=NodeState.ACTIVE))
        )
        self.register, self.close = Mock(), Mock()

    def __call__(self, *_arguments: Any, **_options: Any) -> FakeClient:
        return self

    def patient(self, _patience_s: float) -> FakeClient:
        return self


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr(process, "HubClient", made := FakeClient())
    return made


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    model, folder = tiny_model(), tmp_path / "model"
    folder.mkdir()
    for name, data in tiny_files(model).items():
        (folder / name).write_bytes(data)
    save_file(policy_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    certificate = RoleCertificate(run=RUN, role="trainer", public_key=KEY.public_key, issued_at_ms=0)
    return TrainerConfig(
        folder=tmp_path / "run" / "trainer", settings=SETTINGS, model=str(folder),
        origin_folder=tmp_path / "run" / "origin", hub_url="http://127.0.0.1:1", root_fingerprint=None, key=KEY,
        certificate=sign_document(certificate, KEY),
    )  # fmt: skip


def test_a_whole_run(config: TrainerConfig, client: FakeClient) -> None:
    run_trainer(config, StopToken())
    client.register.assert_called_once_with("trainer", "trainer", config.certificate)
    assert client.heartbeat.called
    assert client.close.called
    rows = rows_of(config.folder.parent)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["held_out"] == 0.25
    head = Origin(config.origin_folder, RUN, KEY).head()
    assert head is not None
    assert head.policy == client.policy
    exported = AutoModelForCausalLM.from_pretrained(config.folder / "export")
    assert not torch.equal(exported.lm_head.weight, tiny_model().lm_head.weight)


def test_stopping_while_the_hub_is_away_is_no_error(config: TrainerConfig, client: FakeClient) -> None:
    stop = StopToken()
    client.register.side_effect = lambda *_: stop.set("SIGTERM") or Mock(side_effect=DeadlineExceeded("stopped"))()
    run_trainer(config, stop)
    assert client.close.called
