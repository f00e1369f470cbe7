"""Calls of a callback that are written to a file and read by another process."""

import pytest

from fedcomp.callbacks import Callback
from fedcomp.deployment.flower.events import EventReader, EventWriter
from fedcomp.errors import UserError


class RecordingCallback(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def on_client_joined(self, client: int) -> None:
        self.calls.append(("on_client_joined", client))

    def on_warning(self, sentence: str) -> None:
        self.calls.append(("on_warning", sentence))


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path):
    path, callback = tmp_path / "events", RecordingCallback()
    reader = EventReader(path, callback)
    reader.read()
    with path.open("w") as file:
        writer = EventWriter(file)
        writer.on_client_joined(3)
        file.write('["on_warning", "half')
        file.flush()
        reader.read()
        assert callback.calls == [("on_client_joined", 3)]
        file.write(' of it"]\n')
        writer.on_client_joined(4)
    reader.read()
    reader.read()
    assert callback.calls == [
        ("on_client_joined", 3),
        ("on_warning", "half of it"),
        ("on_client_joined", 4),
    ]


def test_the_error_that_ended_a_run_is_raised_with_its_exit_status(tmp_path):
    path = tmp_path / "events"
    with path.open("w") as file:
        EventWriter(file).failed(UserError("no room"))
    with pytest.raises(UserError, match="^no room$") as raised:
        EventReader(path, Callback()).read()
    assert raised.value.exit_status == UserError.exit_status
